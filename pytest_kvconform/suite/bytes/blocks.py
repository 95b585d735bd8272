"""Blocks after a transfer has ended: both engines have freed everything."""

from __future__ import annotations

from functools import partial

from pytest_kvconform.case import case
from pytest_kvconform.result import Evidence
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.scenario import Transfer
from pytest_kvconform.suite._released_blocks import check_all_freed, why_d_keeps
from pytest_kvconform.suite.bytes._observations import completed, moved
from pytest_kvconform.suite.bytes._transfers import transfers


@case("KV-BLOCKS-001", variants=transfers)
def all_blocks_are_freed(bench: Bench, transfer: Transfer) -> Evidence:
    """Blocks of every KV cache group, and requests, are freed within seconds, without waiting for a lease.

    D frees them also after a load that was refused. P may keep those of such a load until its lease ends.
    """
    observed = completed(bench, transfer, refused=True)
    assert observed.usage is not None
    usage = dict(zip("PD", observed.usage, strict=True))
    if observed.refused:
        del usage["P"]
    store, d_keeps = bench.subject.is_store, partial(why_d_keeps, bench)
    return check_all_freed(usage, observed.released, moved(observed), store, d_keeps=d_keeps)
