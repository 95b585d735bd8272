"""From the end of P's last step to D's first token, with the reference connector and with NixlConnector.

The script tests nothing: docs/benchmarks.md has the numbers.

    python ci/reference/bench_first_token.py [cpu|cuda] [ROUNDS] [CONNECTOR] [CONNECTOR]
                                    default: cpu      5        NixlConnector, and the reference connector

Both connectors run in vLLM's own scheduler and worker hooks, as in the byte tier, over real NIXL with the
same settings. P and D step as vLLM's EngineCoreProc does (v1/engine/core.py, `_process_engine_step`): one
step after the other while the scheduler has requests, with a pause of 1 ms after a step that ran no model. P
steps so as long as it keeps blocks for D. There is no model: D's first token is the end of the step that
would compute it, and D writes nothing in that step. What the script measures is the hand-over alone: the
answer of P that reaches D, D's scheduler, the transfer, and how many steps of D it takes.

A round starts a pair of engines of each connector, and lets the pairs hand over in turn, one prompt each, so
that what else the machine does disturbs both. The first hand-over of a pair does not count, since the peers
meet in it. Blocks are in ascending order on both sides, or shuffled on each, which is what a server has after
its first minutes. Ratios are of medians, in time and in CPU time of D's first rank. Brackets are quartiles.
Steps are those of D until the first token: their mean. The same connector given twice shows the noise.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from bench_transfer import NIXL, OURS, PATIENCE_S, REPEAT, Arranged, engines

from model_matrix import load_geometries
from pytest_kvconform.rigs.bench import launch_zygote, wait_for_zygote
from pytest_kvconform.rigs.bytes.handle import ByteEngineHandle
from pytest_kvconform.rigs.bytes.messages import ByteEngineSpec, ByteRequest, StepWork
from pytest_kvconform.rigs.engine import process as engine_process
from pytest_kvconform.rigs.engine.messages import ON_D, ON_P, PREFILL
from pytest_kvconform.rigs.scenario import tokens

MODEL, LENGTHS, TOPOLOGIES = "llama3_1_8b", (64, 512, 2048, 8192), ("P1D1", "P2D1")
PAIR_COLUMNS = ("{}: ms", "CPU ms", "steps")


class Stepping(Arranged):
    """An engine that steps as vLLM's own loop does, and compares no bytes. D writes none either."""

    def _work(self, scheduler_output: Any) -> StepWork:
        work = replace(super()._work(scheduler_output), load_checks=())
        if self.spec.role == "P":
            return work
        nowhere = [tuple(np.zeros_like(table) for table in part.tables) for part in work.parts]
        parts = [replace(part, tables=tables) for part, tables in zip(work.parts, nowhere, strict=True)]
        return replace(work, parts=tuple(parts))

    def finish(self, request: ByteRequest) -> tuple[float, float, int, Any]:
        """Step until a request ends.

        Returns when the last step had ended, CPU seconds of this process until then, how many steps there
        were, and P's params. Raises RuntimeError for a request that ends with an error, or not in time.
        """
        begun = time.process_time()
        self.add(request)
        for number in range(1, sys.maxsize):
            outputs = self._step()
            now, spent = time.monotonic(), time.process_time() - begun
            for output in outputs:
                if output.id == request.id and output.finish:
                    if output.finish == "error":
                        raise RuntimeError(f"{request.id} ended with an error")
                    return now, spent, number, output.kv_transfer_params
            if now > self.deadline:
                raise RuntimeError(f"{request.id} is {self.trace(request.id).status}")
        raise AssertionError

    def serve(self) -> bool:
        """Step as long as the scheduler has requests. Returns whether it has none in the end."""
        while self.scheduler.has_requests() and time.monotonic() < self.deadline:
            self._step()
        return not self.scheduler.has_requests()

    def until(self, deadline: float) -> None:
        """Step no longer than until this moment of `time.monotonic`."""
        self.deadline = deadline

    def _step(self) -> list[Any]:
        outputs, executed = self.core.step_fn()
        self.core.post_step(executed)
        found = [self._output(o) for batch in (outputs or {}).values() for o in batch.outputs]
        if not executed and not found and self.scheduler.has_requests():
            time.sleep(0.001)  # as vLLM's loop
        return found


def serve(connection: Any, spec: ByteEngineSpec) -> None:
    """Serve one engine in a child of the zygote: see `serve` of pytest_kvconform/rigs/engine/process.py."""
    engine_process.serve(connection, spec, Stepping)


class Engine(ByteEngineHandle):
    target = "bench_first_token:serve"


def hand_over(p: Engine, d: Engine, name: str, length: int) -> tuple[float, float, int]:
    """Hand one prompt over.

    Returns milliseconds from P's last step to D's first token, D's milliseconds of CPU time, and its steps.
    """
    deadline = time.monotonic() + PATIENCE_S
    p.call("until", deadline), d.call("until", deadline)
    request = {"tokens": tokens(length), "max_tokens": 1, "salt": name, "number": 0}
    request["owners"] = np.zeros(length, dtype=int)
    begun, _, _, params = p.call(
        "finish", ByteRequest(id=f"{name}-{ON_P}", kv_transfer_params=PREFILL, **request)
    )
    p.send("serve")
    ended, spent, steps, _ = d.call(
        "finish", ByteRequest(id=f"{name}-{ON_D}", kv_transfer_params=params, **request)
    )
    if not (d.call("serve") and p.answer("serve")):
        raise SystemExit(f"{name}: an engine keeps a request")
    if (loaded := d.trace(f"{name}-{ON_D}").external_tokens) < length - 1:
        raise SystemExit(f"{name}: D has loaded {loaded} of {length} tokens")
    return 1e3 * (ended - begun), 1e3 * spent, steps


def compare(
    address: str, connectors: tuple[str, str], topology: str, length: int, device: str, rounds: int
) -> None:
    """Print two lines of the table: blocks in order, and shuffled."""
    # [which of the connectors, shuffled] -> hand-overs
    took: dict[tuple[int, bool], list[tuple[float, float, int]]] = defaultdict(list)
    for number in range(rounds):
        pairs = [engines(address, who, (MODEL, topology, length), device, Engine) for who in connectors]
        for p, d in pairs:
            hand_over(p, d, f"{number}-first", length)
        for turn in range(2 * REPEAT):
            shuffled = turn % 2 == 1
            for which, (p, d) in enumerate(pairs):
                p.call("arrange", shuffled), d.call("arrange", shuffled)
                took[which, shuffled].append(hand_over(p, d, f"{number}-{turn}", length))
        for engine in itertools.chain(*pairs):
            engine.end()
    for shuffled in (False, True):
        cells = [topology, str(length), "shuffled" if shuffled else "in order"]
        middles = []
        for which in range(len(connectors)):
            times, spent, steps = np.array(took[which, shuffled]).T
            low, middle, high = np.percentile(times, (25, 50, 75))
            middles.append(np.array([middle, np.median(spent)]))
            cells += [f"{middle:.1f} [{low:.1f}, {high:.1f}]", f"{middles[-1][1]:.1f}", f"{steps.mean():.1f}"]
        ratios = " / ".join(f"{ratio:.2f}" for ratio in middles[1] / middles[0])
        print(f"| {' | '.join([*cells, ratios])} |", flush=True)


def main(device: str = "cpu", rounds: str = "5", first: str = NIXL, second: str = OURS) -> None:
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    columns = ["topology", "tokens", "blocks"]
    for name in (first, second):
        columns += [column.format(name.rpartition(":")[2]) for column in PAIR_COLUMNS]
    zygote = launch_zygote([], load_geometries()[MODEL].architectures)
    try:
        wait_for_zygote(zygote.address, PATIENCE_S)
        print(f"| {' | '.join([*columns, 'ratio'])} |\n{'|---' * (len(columns) + 1)}|", flush=True)
        for topology in TOPOLOGIES:
            for length in LENGTHS:
                compare(zygote.address, (first, second), topology, length, device, int(rounds))
    finally:
        zygote.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
