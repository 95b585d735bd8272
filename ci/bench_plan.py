"""Speed of the reference connector's planning on one core.

It tests nothing: docs/benchmarks.md has the numbers.

    python ci/bench_plan.py [tokens, default 131072]

One rank of D plans to read a prompt in blocks of 16 tokens from P: 61 layers, TP 8 to 4. Blocks are in
shuffled order, in which no two can be joined, and in ascending order. The script prints the time to pair
(once per peer) and to plan (once per request), also as multiples of the time to copy the arrays of the plan;
and the number of pieces (one a layer, block and rank of P) beside the number of runs that they are joined to.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from reference_connector.boxes import Axis, Box
from reference_connector.plan import Runs, Table, pair, runs

LAYERS, BLOCK, P, D = 61, 16, 8, 4
# heads, bytes of a cell, held by every rank
CASES = {
    "MLA": (1, 576 * 2, True),
    "GQA, 8 heads of 128": (8, 2 * 128 * 2, False),
}


def main() -> None:
    tokens = int(sys.argv[1]) if sys.argv[1:] else 1 << 17
    for name, case in CASES.items():
        for layout in ("LBHNC", "BLHNC"):
            p, d = (
                [boxes(case, P, rank, layout, tokens) for rank in range(P)],
                boxes(case, D, 1, layout, tokens),
            )
            took = best(partial(pair, d, p, 1, D))
            print(f"{name}, {layout}: pair in {took * 1e3:.1f} ms")
            pairing = pair(d, p, 1, D)
            for order in ("shuffled", "ascending"):
                for part in (tokens // 4, tokens):
                    say(order, part, partial(runs, pairing, [(0, part)], *tables(order, part)))


def say(order: str, tokens: int, plan: Callable[[], dict[int, Runs]]) -> None:
    took, found = best(plan), plan()
    copy = best(
        lambda: [np.array(column) for of in found.values() for column in (of.local, of.remote, of.length)]
    )
    number, size = sum(len(of.length) for of in found.values()), sum(of.nbytes for of in found.values())
    pieces = LAYERS * tokens // BLOCK * max(1, len(found))
    print(
        f"  {order}, {tokens} tokens: {took * 1e3:.2f} ms, "
        f"{took / tokens * BLOCK * 1e6:.2f} us a block, {took / copy:.1f} copies; "
        f"{pieces} pieces in {number} runs of {size / number:.0f} bytes"
    )


def best(work: Callable[[], object], times: int = 7) -> float:
    """Seconds of the fastest of some runs."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found)


def boxes(case: tuple[int, int, bool], tp: int, rank: int, layout: str, tokens: int) -> tuple[Box, ...]:
    heads, width, replicated = case
    here = heads if replicated else heads // tp
    first = 0 if replicated else rank * here
    page, blocks = here * BLOCK * width, tokens // BLOCK + 1
    block, layer = (page, page * blocks) if layout[0] == "L" else (page * LAYERS, page)
    axis = Axis("head", first, first + here, heads, BLOCK * width)
    common = (blocks, block, 1, BLOCK, 1, width, (axis,), width)
    return tuple(
        Box(f"layers.{n}", "kv", "bfloat16", 0, (1 << 40) + n * layer, *common) for n in range(LAYERS)
    )


def tables(order: str, tokens: int) -> tuple[list[Table], list[Table]]:
    ids = np.arange(1, tokens // BLOCK + 1)
    if order == "ascending":
        return [Table(ids)], [Table(ids)]
    rng = np.random.default_rng(0)
    return [Table(rng.permutation(ids))], [Table(rng.permutation(ids))]


if __name__ == "__main__":
    main()
