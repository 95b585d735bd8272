"""Speed of kvspace/pools on one core, for docs/benchmarks.md. It prints numbers and checks none of them.

    python ci/bench_kvspace.py [MiB, default 1024]

A pool of 32 layers with 8 heads of 128 bf16 elements, blocks of 16 tokens: poison, fill, compare when equal,
when one block is wrong, and when everything is wrong (a thirty-second of the pool, since that is the slow
path).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np

from pytest_kvconform.kvspace.pools.compare import compare_pool
from pytest_kvconform.kvspace.pools.poison import poison
from pytest_kvconform.kvspace.pools.regions import Region, write_tokens

LAYERS, HEADS, BLOCK, WIDTH = 32, 8, 16, 256


def main() -> None:
    size = int(sys.argv[1] if sys.argv[1:] else 1024) << 20
    page = HEADS * BLOCK * 2 * WIDTH
    blocks = size // page // LAYERS
    storage = np.zeros(blocks * page * LAYERS, dtype=np.uint8)
    regions = [
        Region(
            f"layers.{number}",
            number,
            "attention",
            0,
            number * page * blocks,
            (blocks, BLOCK, HEADS, 2, WIDTH),
            (page, 2 * WIDTH, BLOCK * 2 * WIDTH, WIDTH, 1),
            0,
            BLOCK,
        )
        for number in range(LAYERS)
    ]
    tokens = np.arange((blocks - 1) * BLOCK) % 16384
    table = 1 + np.arange(len(tokens)) // BLOCK
    storage[:] = 1  # touched here, so that page faults are not measured
    measure("poison", storage.nbytes, lambda: poison(storage, 0, 0))
    measure(
        "fill",
        storage.nbytes,
        lambda: [write_tokens(storage, region, table, tokens, 0, 0, 0) for region in regions],
    )
    shadow = storage.copy()
    held = {region.layer: np.arange(1, blocks) for region in regions}
    measure("compare, equal", storage.nbytes, lambda: compare_pool(storage, shadow, regions, held))
    regions[3].of(storage)[7] = regions[3].of(shadow)[8]
    measure("compare, one block wrong", storage.nbytes, lambda: compare_pool(storage, shadow, regions, held))
    regions[0].of(storage)[2:] = regions[0].of(shadow)[1:-1]
    measure("compare, one layer wrong", storage.nbytes, lambda: compare_pool(storage, shadow, regions, held))


def measure(what: str, size: int, work: Callable[[], object]) -> None:
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    print(
        f"{what:<26} {size / 2**30:6.2f} GiB in {seconds:6.2f} s = {size / 1e9 / seconds:6.2f} GB/s",
        flush=True,
    )


if __name__ == "__main__":
    main()
