"""The second turn of a conversation: D has the first turn in its own cache, and pulls what is new.

    python ci/second_turn.py [CONNECTOR] [GEOMETRY] [TOPOLOGY]

Default: ReferenceConnector, qwen3_5_35b_a3b, P2D2. Each turn 2 runs with that cache and without it.

P hands turn 1 over to D. Turn 2 is turn 1 with as many tokens behind it. Of a model with states D has whole
blocks of turn 1's attention, but no state at their end: the connector brings the state at the end of turn 2.
The script compares D's pool byte by byte (pytest_kvconform/rigs/bytes/checks.py). Bytes and descriptors are
NIXL's count. Exit 1: a wrong word, or no hit.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
from counting_engine import BLOCK, CountingEngine, background, start

from model_matrix import load_geometries, parse_topology
from pytest_kvconform.rigs.bytes.messages import ByteRequest
from pytest_kvconform.rigs.bytes.specs import ROOM, blocks_for
from pytest_kvconform.rigs.engine.messages import ON_D, ON_P, PREFILL, Trace
from pytest_kvconform.rigs.processes.ports import free_port
from pytest_kvconform.rigs.scenario import tokens
from pytest_kvconform.rigs.vllm_setup.kv_cache_specs import block_size_of

PATIENCE_S = 60.0


def hand_over(
    p: CountingEngine, d: CountingEngine, name: str, prompt: tuple[int, ...]
) -> tuple[Trace, np.ndarray, int]:
    """What D did, [bytes, descriptors], and the words of D's pool that are wrong or missing.

    Raises SystemExit if it does not end well.
    """
    before, over = np.array(d.moved()), time.monotonic() + PATIENCE_S
    params: dict[str, Any] | None = PREFILL
    for engine, peer, side in ((p, d, ON_P), (d, p, ON_D)):
        id, owners = f"{name}-{side}", np.zeros(len(prompt), dtype=int)
        request = ByteRequest(
            id=id,
            tokens=prompt,
            max_tokens=1,
            kv_transfer_params=params,
            watch=engine is d,
            owners=owners,
            number=0,
        )
        engine.add(request)
        while not (ends := [output for output in engine.step().outputs if output.id == id and output.finish]):
            peer.step()
            if time.monotonic() > over:
                raise SystemExit(
                    f"{name} did not end on {engine.role}, where it is {engine.trace(id).status}"
                )
        if ends[0].finish == "error":
            raise SystemExit(f"{engine.role} ended {name} with an error: {engine.process.last_lines()[-1:]}")
        params = ends[0].kv_transfer_params
    checks, moved = d.pop_checks(id), d.moved() - before
    if not any(check.rows_due for check in checks):
        raise SystemExit(f"D was given nothing for {name}")
    if not moved.all():
        raise SystemExit(
            f"D was given something for {name}, "
            f"and NIXL has counted {moved[0]} bytes in {moved[1]} descriptors"
        )
    return d.trace(id), moved, sum(check.pool.wrong + len(check.missing) for check in checks)


def main(
    connector: str = "reference_connector:ReferenceConnector",
    model: str = "qwen3_5_35b_a3b",
    topology: str = "P2D2",
) -> int:
    geometry, sizes = load_geometries()[model], dict(zip("PD", parse_topology(topology), strict=True))
    blocks = {role: block_size_of(geometry, tp, BLOCK, kernel_block=BLOCK) for role, tp in sizes.items()}
    first = 2 * blocks["D"] + blocks["D"] // 3
    longest, fine, engines = 2 * first + BLOCK, True, list[CountingEngine]()
    with background(geometry) as address:
        try:
            for role, tp in sizes.items():
                pool = blocks_for(geometry, blocks[role], longest) + ROOM[role]
                engines.append(
                    start(address, f"turns-{role}", role, connector, model, tp, pool, longest, free_port())
                )
            p, d = engines
            p.wait_ready()
            d.wait_ready()
            print(
                f"{connector}, {model}, {topology}, blocks of {blocks['D']} tokens: "
                f"{first} tokens, then {2 * first}\n"
            )
            print(
                "| turn 2 | hit on D | pulled | computed on D | bytes moved | descriptors | wrong |\n"
                "|---|---|---|---|---|---|---|"
            )
            for turn in ("with turn 1 in D's cache", "without"):
                hand_over(p, d, f"first {turn}", tokens(first))
                if turn == "without":
                    d.poison()  # which empties the prefix cache
                trace, moved, wrong = hand_over(p, d, f"second {turn}", tokens(2 * first))
                hit = trace.local_tokens
                cells = f"{hit} tokens, {hit / (2 * first):.0%} | {trace.external_tokens}"
                print(
                    f"| {turn} | {cells} | {trace.computed_tokens} | {moved[0]:,} | {moved[1]} | {wrong} |",
                    flush=True,
                )
                fine = fine and not wrong and bool(hit) == (turn != "without")
        finally:
            for engine in engines:
                engine.end()
    return int(not fine)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
