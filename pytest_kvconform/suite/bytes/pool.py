"""Every byte of every rank's pool: all KV that is due has arrived, and nothing else has changed."""

from __future__ import annotations

from pytest_kvconform.case import case
from pytest_kvconform.kvspace.kinds import COLLATERAL, intervals
from pytest_kvconform.kvspace.pools.diagnose import count_pool, diagnose_pool, diagnose_source
from pytest_kvconform.kvspace.pools.draw import draw_pool
from pytest_kvconform.kvspace.window import describe_gap
from pytest_kvconform.result import Evidence, Finding, Violation, blocked_by
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.bytes.messages import Check
from pytest_kvconform.rigs.cluster.transfer import Received, TransferObservation
from pytest_kvconform.rigs.scenario import Transfer
from pytest_kvconform.suite._freed_windows import require_freed_windows
from pytest_kvconform.suite.bytes._observations import completed, finding, moved, with_loaded_kv, wrong_words
from pytest_kvconform.suite.bytes._stores import check_nothing_invented, is_store
from pytest_kvconform.suite.bytes._transfers import has_state, has_window, transfers


@case("KV-BYTES-001", variants=transfers)
def attention_kv_arrives(bench: Bench, transfer: Transfer) -> Evidence:
    """Rows of attention layers that D's next forward reads and that have a block equal P's, on every rank."""
    if is_store(bench):
        check_nothing_invented(completed(bench, transfer))
    observed = with_loaded_kv(bench, transfer)
    for r in observed.requests:
        for check in r.checks:
            if gone := [m for m in check.missing if not m.window and "attention" in _kinds(check, m.layers)]:
                raise Violation(
                    Finding(
                        rule="KV-BYTES-001",
                        happened=f"{r.name} of {r.length} tokens: tokens {intervals(gone[0].tokens)} of "
                        f"{gone[0].layers[0]} and {len(gone[0].layers) - 1} more layers have no block on "
                        f"rank {check.rank} of D, which should find them loaded",
                        diagnosis="the block table of a group without a window has null blocks for tokens "
                        "that the connector announced",
                    )
                )
            if wrong_words(check, "attention"):
                raise Violation(finding(bench, observed, r, check, "KV-BYTES-001"))
    return _evidence(observed)


@case("KV-STATE-001", applies=has_state, variants=transfers)
def recurrent_state_arrives(bench: Bench, transfer: Transfer) -> Evidence:
    """On every rank, D continues with P's state after exactly the tokens that D does not compute."""
    observed = with_loaded_kv(bench, transfer)
    for r in observed.requests:
        for check in r.checks:
            if gone := [m for m in check.missing if not m.window and "state" in _kinds(check, m.layers)]:
                raise Violation(
                    Finding(
                        rule="KV-STATE-001",
                        happened=f"{r.name}: D continues after {gone[0].tokens[0]} tokens, and "
                        f"{len(gone[0].layers)} layers of group {gone[0].group} have no block with a state "
                        f"on rank {check.rank}",
                    )
                )
            if wrong_words(check, "state"):
                raise Violation(finding(bench, observed, r, check, "KV-STATE-001"))
    return _evidence(observed)


@case("KV-WINDOW-001", applies=has_window, variants=transfers)
def sliding_window_is_complete(bench: Bench, transfer: Transfer) -> Evidence:
    """Every token of every window that D's next forward reads has a block on D."""
    require_freed_windows(bench)
    observed = with_loaded_kv(bench, transfer)
    for r in observed.requests:
        for check in r.checks:
            if gone := [m for m in check.missing if m.window]:
                layers = [layer for m in gone for layer in m.layers]
                missing = {token for m in gone for token in m.tokens}
                gap = describe_gap(layers, missing, gone[0].window, check.computed, gone[0].block_size)
                raise Violation(
                    Finding(
                        rule="KV-WINDOW-001",
                        happened=f"{r.name} of {r.length} tokens: {gap.sentence}",
                        diagnosis=gap.cause,
                        signature=gap.cause,
                    )
                )
    return _evidence(observed)


@case("KV-BYTES-002", variants=transfers)
def rest_of_d_pool_is_unchanged(bench: Bench, transfer: Transfer) -> Evidence:
    """Nothing in D's pool changes but what is due, until the end of the transfer."""
    observed = completed(bench, transfer, refused=True)
    for check in [check for r in observed.requests for check in r.checks] + list(observed.audits[1]):
        if check.pool.words.get(COLLATERAL) or (not check.request and check.pool.wrong):
            raise Violation(_collateral(bench, "D", check, "KV-BYTES-002"))
    return Evidence(
        looked_at=observed.decoder.num_blocks * len(observed.audits[1]),
        unit="blocks",
        bytes_moved=moved(observed),
    )


@case("KV-ZERO-001", applies=has_state, variants=transfers)
def rest_of_new_blocks_is_not_stale(bench: Bench, transfer: Transfer) -> Evidence:
    """Rows of D's new blocks around the loaded tokens hold no poison, where vLLM would zero them.

    If the load leaves out rows that are due, stale rows around them are no evidence of a second mistake.
    """
    observed = with_loaded_kv(bench, transfer)
    checks = [(r, check) for r in observed.requests for check in r.checks]
    if any(check.stale and wrong_words(check, "attention") for _, check in checks):
        raise blocked_by(f"kv::bytes/pool::attention_kv_arrives[{bench.cell}-{transfer}]")
    for r, check in checks:
        if check.stale:
            raise Violation(_stale(r, check))
    return _evidence(observed)


@case("KV-BYTES-003", variants=transfers)
def p_pool_is_unchanged(bench: Bench, transfer: Transfer) -> Evidence:
    """Nothing in P's pool changes but what P computed."""
    observed = completed(bench, transfer, refused=True)
    for check in observed.audits[0]:
        if check.pool.wrong:
            raise Violation(_collateral(bench, "P", check, "KV-BYTES-003"))
    return Evidence(
        looked_at=observed.prefiller.num_blocks * len(observed.audits[0]),
        unit="blocks",
        bytes_moved=moved(observed),
    )


def _collateral(bench: Bench, role: str, check: Check, rule: str) -> Finding:
    """Describe what changed in a pool although nothing was due there."""
    when = (
        f"when tokens {check.local} to {check.computed - 1} of a request were loaded,"
        if check.request
        else "at the end"
    )
    return Finding(
        rule=rule,
        happened=f"{when} rank {check.rank} of {role} holds bytes that {role} did not compute and that no "
        "load should write",
        differs=count_pool(check.pool),
        picture=draw_pool(check.pool),
        diagnosis=diagnose_pool(check.pool) if role == "D" else diagnose_source(check.pool),
    )


def _stale(r: Received, check: Check) -> Finding:
    """Describe rows that the load left as they were."""
    stale, more = check.stale[0], len(check.stale) - 1
    behind = stale.tokens[-1] > stale.loaded[1]
    which, what = ("last", "reach its end") if behind else ("first", "begin with its first token")
    return Finding(
        rule="KV-ZERO-001",
        happened=f"{r.name} of {r.length} tokens: on rank {check.rank} of D the rows of tokens "
        f"{intervals(stale.tokens)} of {stale.layer}{f' and {more} more layers' if more else ''} hold what "
        f"was there before the load of tokens {stale.loaded[0]} to {stale.loaded[1]}",
        diagnosis=f"the {which} block of a load is new, and the load does not {what}; vLLM did not zero it, "
        "since get_loaded_kv_cache_group_ids names its group",
    )


def _kinds(check: Check, layers: tuple[str, ...]) -> set[str]:
    return {region.kind for region in check.pool.regions if region.layer in layers}


def _evidence(observed: TransferObservation) -> Evidence:
    return Evidence(
        looked_at=sum(check.rows_due for r in observed.requests for check in r.checks),
        unit="rows",
        bytes_moved=moved(observed),
        external_tokens=sum(r.decode.external_tokens for r in observed.requests),
        notes={"seconds": round(observed.seconds, 3)},
    )
