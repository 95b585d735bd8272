"""What most cases of the byte rig begin with: a transfer that reached its end, and in which D was given something."""

from __future__ import annotations

import numpy as np

from model_matrix.geometries import expand_layers, load_geometries
from pytest_kvconform.kvspace.classify import COLLATERAL
from pytest_kvconform.kvspace.compare import SAME, UNWRITTEN
from pytest_kvconform.kvspace.diagnose import count_pool, explain_pool
from pytest_kvconform.kvspace.picture import draw_pool
from pytest_kvconform.result import Blocked, Finding, HarnessError, NotApplicable
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.pattern_bench import block_size, side_of
from pytest_kvconform.rigs.pattern_handover import Received, TransferSeen
from pytest_kvconform.rigs.pattern_messages import Check
from pytest_kvconform.rigs.scenario import Transfer
from pytest_kvconform.suite.bytes._store import is_store, nothing_given
from pytest_kvconform.suite.bytes._transfers import has_state, longest, windows


def look(bench: Bench, transfer: Transfer) -> TransferSeen:
    """The observation, whatever became of it."""
    return bench.pattern.observe(transfer, longest(bench.cell, bench.settings.matrix))


def settled(bench: Bench, transfer: Transfer) -> TransferSeen:
    """The observation, if every request came to its end; otherwise Blocked, in one line."""
    seen = look(bench, transfer)
    if seen.failed or seen.stuck or seen.refused:
        raise Blocked(f"stands on kv::bytes/handover::completes[{bench.cell}-{transfer}]", refused=seen.declined)
    return seen


def given(bench: Bench, transfer: Transfer) -> TransferSeen:
    """A settled observation in which D was given KV for every request. What D computed itself proves nothing about the connector."""
    seen = settled(bench, transfer)
    for r, prompt in zip(seen.requests, transfer.prompts, strict=True):
        if prompt.warm > seen.decoder.block_size and not has_state(bench.cell) and not r.decode.local_tokens:
            raise HarnessError(f"{transfer}: D computed a prefix by itself and found nothing of it in its own prefix cache")
        if r.checks and {check.rank for check in r.checks} != set(range(len(seen.audits[1]))):
            raise HarnessError(f"{transfer}: not every rank of D looked at its pool before the first forward of {r.name}")
        if is_store(bench) and not r.decode.external_tokens:
            nothing_given(bench, seen, transfer)
        may_decline(bench, r)
        if not r.decode.external_tokens or not sum(check.rows_due for check in r.checks):
            raise Blocked(f"stands on kv::bytes/handover::spares_computing: D was given nothing for {r.name} of {transfer}", refused=True)
    return seen


def may_decline(bench: Bench, r: Received) -> None:
    """Raises NotApplicable for a request of which D was given nothing, if no load could have been right."""
    if not r.decode.external_tokens and (gone := _gone(bench, r)):
        raise NotApplicable(f"{gone}: it is right to let D compute the prompt")


def _gone(bench: Bench, r: Received) -> str:
    """What D's prefix cache would hold after a load although P has it no more, in one sentence; "": nothing.

    vLLM takes the blocks before a window from a request that has ended, and then asks P's connector (v1/core/sched/scheduler.py,
    _connector_finished). Where D's blocks are larger, these may be a part of the one in which D's window begins.
    """
    p, d = (block_size(bench.cell, role) for role in "PD")
    for window in windows(bench.cell) if side_of(bench.cell, "D").prefix_caching else ():
        begins = max(0, r.length - window)  # the first token that D looks at when it computes the last one
        has, needs = begins // p * p, max(begins // d * d, r.decode.local_tokens)
        if has > needs:
            return (
                f"of layers with a window of {window} P has the tokens from {has} on, and D's block in which the window begins, which vLLM "
                f"puts into its prefix cache as a whole, those from {needs} on"
            )
    return ""


def moved(seen: TransferSeen) -> int:
    """Bytes that stand in D's pools as P computed them."""
    return sum(check.bytes_due for r in seen.requests for check in r.checks if not check.pool.wrong)


def wrong_words(check: Check, kind: str) -> int:
    """Words of regions of a kind ("attention", "state") that were due and are not right."""
    runs = check.pool.runs
    bad = runs[(runs["kind"] != SAME) & (runs["kind"] != COLLATERAL)]
    of_kind = np.array([region.kind == kind for region in check.pool.regions])
    words = int(bad["words"][of_kind[bad["region"]]].sum()) if len(bad) else 0
    if not words and check.pool.truncated:  # of very many runs some blocks are kept; the cells of the picture know all
        cells = [cell for cell in check.pool.cells if of_kind[cell.region]]
        words = sum(int(((cell.kinds != SAME) & (cell.kinds != COLLATERAL)).sum()) for cell in cells)
    return words


def finding(bench: Bench, seen: TransferSeen, r: Received, check: Check, rule: str) -> Finding:
    """What stands wrong in one rank's pool, said for a person."""
    drafts = [layer.name for layer in expand_layers(load_geometries()[bench.cell.family]) if layer.draft]
    audits = seen.audits[1]
    later_right = any(check.request in audit.late for audit in audits if audit.rank == check.rank)
    gone = _gone(bench, r) if check.pool.words.keys() == {UNWRITTEN} else ""
    diagnosis = gone or explain_pool(check.pool, source=seen.source, later_right=later_right, drafts=drafts)
    late = f"; blocks {', '.join(map(str, check.failed))} were reported as failed" if check.failed else ""
    return Finding(
        rule=rule,
        happened=f"{r.name} of {r.length} tokens: rank {check.rank} of D was to find the KV of tokens {check.local} to "
        f"{check.computed - 1} in its pool; the connector had announced {r.decode.external_tokens} tokens{late}",
        differs=f"{count_pool(check.pool)}" + (f" (of {len(audits)} ranks; see the report for the others)" if len(audits) > 1 else ""),
        picture=draw_pool(check.pool),
        diagnosis=diagnosis,
    )
