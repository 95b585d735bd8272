"""Observations with which most byte cases begin: completed transfers, in which D loaded KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from model_matrix.geometries import SlidingWindow, expand_layers, load_geometries
from pytest_kvconform.kvspace.kinds import COLLATERAL, SAME, UNWRITTEN
from pytest_kvconform.kvspace.pools.compare import PoolComparison
from pytest_kvconform.kvspace.pools.diagnose import count_pool, diagnose_pool
from pytest_kvconform.kvspace.pools.draw import draw_pool
from pytest_kvconform.result import Blocked, Finding, HarnessError, NotApplicable, Violation, blocked_by
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.bytes.messages import Check
from pytest_kvconform.rigs.bytes.specs import alike, block_size, dropped_tokens, side_of, zygotes
from pytest_kvconform.rigs.cluster.transfer import Received, TransferObservation
from pytest_kvconform.rigs.scenario import Transfer, lengthened
from pytest_kvconform.suite._load_amount import loads as loads_kv
from pytest_kvconform.suite._load_amount import observe_long_enough, tokens_to_add
from pytest_kvconform.suite._recomputed_tokens import Loads
from pytest_kvconform.suite.bytes._stores import check_store_may_miss, is_store
from pytest_kvconform.suite.bytes._transfers import (
    frees_windows,
    has_state,
    longest,
    longest_length,
    windows,
)

AT_ONCE = 2  # prompts of a transfer at most
TWO_ZYGOTES = (
    "P and D come from two Python interpreters here, in which hash() of a text differs unless "
    "PYTHONHASHSEED is set"
)


def observe(bench: Bench, transfer: Transfer) -> TransferObservation:
    """Observe a transfer, whatever its outcome. Its prompts are long enough for the connector's loads."""
    block = block_size(bench.cell, "D")

    def to_add(found: TransferObservation) -> int:
        if found.refused or (is_store(bench) and not alike(bench.cell)):
            return 0
        return tokens_to_add(bench.subject, block, found, lambda by: _longest(bench, by))

    return observe_long_enough(bench.subject, block, lambda by: _observe(bench, transfer, by), to_add)[0]


def _observe(bench: Bench, transfer: Transfer, by: int) -> TransferObservation:
    room = longest(bench.cell, bench.settings.matrix) + by * AT_ONCE
    return bench.bytes.observe(bench.cell, lengthened(transfer, by), room, by)


def _longest(bench: Bench, by: int) -> TransferObservation:
    """Observe the cell's longest prompt, with more tokens."""
    return _observe(bench, longest_length(bench.cell, bench.settings.matrix), by)


def loads_of(bench: Bench, observed: TransferObservation, requests: Sequence[Received]) -> Loads:
    """Return what D loaded for these requests of a transfer."""
    return Loads(
        bench.subject,
        requests,
        (observed.prefiller, observed.decoder),
        lambda: loads_kv(_longest(bench, 0)),
        TWO_ZYGOTES if zygotes(bench.cell) == 2 else "",
        drafts=bool(dropped_tokens(bench.cell, "D")),
    )


def completed(bench: Bench, transfer: Transfer, refused: bool = False) -> TransferObservation:
    """Observe a transfer in which every request came to its end. Otherwise raises Blocked.

    `refused`: a request may have ended with an error.
    """
    observed = observe(bench, transfer)
    if observed.excuse:
        raise Blocked(observed.excuse)
    if observed.failed or observed.stuck or (observed.refused and not refused):
        raise blocked_by(f"kv::bytes/handover::completes[{bench.cell}-{transfer}]", refused=observed.declined)
    return observed


def with_loaded_kv(bench: Bench, transfer: Transfer) -> TransferObservation:
    """Observe a completed transfer: the requests for which D loaded KV. What D computed itself proves nothing
    about the connector. Raises Blocked if D should have loaded more, NotApplicable if it is right that D
    loaded nothing.
    """
    observed = completed(bench, transfer)
    owed = requests_owed_kv(bench, observed)
    for r, prompt in zip(observed.requests, transfer.prompts, strict=True):
        if (
            prompt.warm > observed.decoder.block_size
            and not has_state(bench.cell)
            and not r.decode.local_tokens
        ):
            raise HarnessError(
                f"{transfer}: D computed a prefix itself, and did not find it in its own prefix cache"
            )
        if r.checks and {check.rank for check in r.checks} != set(range(len(observed.audits[1]))):
            raise HarnessError(
                f"{transfer}: not every rank of D compared its pool before the first forward of {r.name}"
            )
    if is_store(bench) and not all(r.decode.external_tokens for r in observed.requests):
        check_store_may_miss(bench, observed)
    loads = loads_of(bench, observed, owed)
    missing = [r for r in owed if not _loaded(r)]
    try:
        loads.check()
    except Violation as broken:
        if missing:
            case = f"kv::bytes/handover::d_computes_only_missing_tokens[{bench.cell}-{transfer}]"
            why = f"D loaded nothing for {missing[0].name}"
            raise blocked_by(case, why, bool(broken.finding.declined)) from None
    loads.require_some()
    if not (loaded := tuple(r for r in owed if _loaded(r))):
        raise Blocked(f"D loaded nothing for {missing[0].name} of {transfer}", refused=True)
    return replace(observed, requests=loaded)


def _loaded(r: Received) -> bool:
    """Whether D loaded something for a request, and kept it."""
    return bool(r.decode.external_tokens and sum(check.rows_due for check in r.checks))


def requests_owed_kv(bench: Bench, observed: TransferObservation) -> tuple[Received, ...]:
    """Return the requests without those for which D loaded nothing because no load could have been right.
    Raises NotApplicable if none is left.
    """
    freed = {r.name: _tokens_freed_by_p(bench, r) for r in observed.requests if not r.decode.external_tokens}
    left = tuple(r for r in observed.requests if not freed.get(r.name))
    if not left:
        raise NotApplicable(f"{next(iter(freed.values()))}, so it is right that D computes the prompt")
    return left


@dataclass(frozen=True)
class _FreedTokens:
    """Tokens [first, end) of layers with a window that only D's prefix cache has after a load.

    P does not have them any more.
    """

    window: int
    first: int
    end: int

    def __str__(self) -> str:
        return (
            f"of layers with a window of {self.window} P has the tokens from {self.end} on, but D's block in "
            "which the window begins, which vLLM puts into its prefix cache as a whole, has those from "
            f"{self.first} on"
        )


def _tokens_freed_by_p(bench: Bench, r: Received) -> _FreedTokens | None:
    """Return the tokens that P has freed of the block in which D's window begins.

    There are such tokens if D's blocks are larger than P's.

    vLLM takes the blocks before a window from a request that has ended, and then calls P's connector
    (v1/core/sched/scheduler.py, _connector_finished). It caches D's block as soon as the block is full, at
    the latest with tokens that D generates.
    """
    p, d = (block_size(bench.cell, role) for role in "PD")
    frees = bench.facts.supports_hma and frees_windows(bench.cell) and not is_store(bench)
    for window in windows(bench.cell) if frees and side_of(bench.cell, "D").prefix_caching else ():
        begins = max(0, r.length - window)  # the first token that D reads when it computes the last one
        end, first = begins // p * p, max(begins // d * d, r.decode.local_tokens)
        if end > first:
            return _FreedTokens(window, first, end)
    return None


def _explains(bench: Bench, freed: _FreedTokens, pool: PoolComparison) -> bool:
    """Whether these tokens are all that is wrong: never written, in layers with a window."""
    layers = {
        layer.name
        for layer in expand_layers(load_geometries()[bench.cell.family])
        if isinstance(layer.kind, SlidingWindow)
    }
    runs = pool.runs[pool.runs["kind"] != SAME]
    inside = (runs["expected"]["token"] >= freed.first) & (runs["expected"]["token"] < freed.end)
    of_them = np.array([region.layer in layers for region in pool.regions])[runs["region"]]
    return pool.words.keys() == {UNWRITTEN} and bool((inside & of_them).all())


def moved(observed: TransferObservation) -> int:
    """Return how many bytes are in D's pools as P computed them."""
    return sum(check.bytes_due for r in observed.requests for check in r.checks if not check.pool.wrong)


def wrong_words(check: Check, kind: str) -> int:
    """Return how many words of regions of a kind ("attention", "state") were due and are not right.

    Words from the first block on whose load within the step was reported as failed are not counted: vLLM ends
    the request, or D computes them (v1/core/sched/scheduler.py, _update_requests_with_invalid_blocks).
    """
    runs = check.pool.runs
    bad = runs[(runs["kind"] != SAME) & (runs["kind"] != COLLATERAL)]
    if (failed := bad[np.isin(bad["block"], check.failed)]).size:
        bad = bad[bad["expected"]["token"] < failed["expected"]["token"].min()]
    of_kind = np.array([region.kind == kind for region in check.pool.regions])
    words = int(bad["words"][of_kind[bad["region"]]].sum()) if len(bad) else 0
    # if there are very many runs, only some are kept; the cells of the picture count all
    if not words and check.pool.truncated and not check.failed:
        cells = [cell for cell in check.pool.cells if of_kind[cell.region]]
        words = sum(int(((cell.kinds != SAME) & (cell.kinds != COLLATERAL)).sum()) for cell in cells)
    return words


def finding(bench: Bench, observed: TransferObservation, r: Received, check: Check, rule: str) -> Finding:
    """Describe for a person what is wrong in one rank's pool."""
    drafts = [layer.name for layer in expand_layers(load_geometries()[bench.cell.family]) if layer.draft]
    audits = observed.audits[1]
    later_right = any(check.request in audit.late for audit in audits if audit.rank == check.rank)
    freed = _tokens_freed_by_p(bench, r)
    if freed is not None and not later_right and _explains(bench, freed, check.pool):
        diagnosis = str(freed)
    else:
        diagnosis = diagnose_pool(check.pool, source=observed.source, later_right=later_right, drafts=drafts)
    late = f"; blocks {', '.join(map(str, check.failed))} were reported as failed" if check.failed else ""
    return Finding(
        rule=rule,
        happened=f"{r.name} of {r.length} tokens: rank {check.rank} of D should have the KV of tokens "
        f"{check.local} to {check.computed - 1} in its pool; the connector had announced "
        f"{r.decode.external_tokens} tokens{late}",
        differs=f"{count_pool(check.pool)}"
        + (f" (of {len(audits)} ranks; see the report for the others)" if len(audits) > 1 else ""),
        picture=draw_pool(check.pool),
        diagnosis=diagnosis,
    )
