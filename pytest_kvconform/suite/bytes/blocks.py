"""When a transfer has ended, nothing of it is left in either engine."""

from __future__ import annotations

from pytest_kvconform.case import case
from pytest_kvconform.result import Evidence
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.scenario import Transfer
from pytest_kvconform.suite._released_blocks import nothing_held
from pytest_kvconform.suite.bytes._observations import moved, settled
from pytest_kvconform.suite.bytes._transfers import transfers


@case("KV-BLOCKS-001", variants=transfers)
def all_blocks_are_freed(bench: Bench, transfer: Transfer) -> Evidence:
    """Blocks of every group and requests are free again within seconds, not when a lease runs out."""
    seen = settled(bench, transfer)
    assert seen.usage is not None
    return nothing_held(seen.usage, bench.settings.timeout_scale, moved(seen))
