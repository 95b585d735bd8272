"""The next turn of a conversation: P loads what D has, the tokens that D has generated included.

A router gives P the kv_transfer_params that D returned at the end of the turn before.
"""

from __future__ import annotations

from pytest_kvconform.case import case
from pytest_kvconform.kv_config.turn_lease import declare_turn_lease
from pytest_kvconform.kvspace.kinds import COLLATERAL
from pytest_kvconform.result import Blocked, Evidence, Finding, NotApplicable, Violation, blocked_by
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.cluster.transfer import Received
from pytest_kvconform.rigs.cluster.two_turns import TurnObservation
from pytest_kvconform.rigs.engine.messages import Usage
from pytest_kvconform.rigs.scenario import Transfer
from pytest_kvconform.suite._outcomes import check_all_ended, last_logged_exception
from pytest_kvconform.suite._released_blocks import NOT_NOTIFIED, turn_lease_s
from pytest_kvconform.suite.bytes._observations import completed, finding, wrong_words
from pytest_kvconform.suite.bytes._transfers import longest_length
from pytest_kvconform.suite.bytes.turns._observed_turns import (
    ABORTED_ON_D,
    ALL,
    ENDS,
    LATE,
    MAY_FAIL,
    NEXT,
    NO_PARAMS,
    NO_TURN,
    OVERWRITTEN,
    SAME_P,
    SHORTER,
    ended,
    named,
    observe_turns,
    require_a_keeper,
    require_first_turn,
    whole_blocks_of_d,
    with_both_turns,
    wrong_on_p,
)

LOADS = "kv::bytes/turns/next_turn::p_loads_what_d_has"
NOT_TOLD = "P never notifies D that it has read the blocks, so D waits for its lease to end"
NOBODY = "D keeps blocks of a request with which it has returned nothing, so nobody will read them"


@case("KV-TURN-005", variants=named(*ALL))
def both_turns_end(bench: Bench, transfer: Transfer) -> Evidence:
    """Every request ends, whatever happens to P's request, or to D's blocks before it. P frees its blocks."""
    observed = observe_turns(bench, transfer)
    require_first_turn(bench, observed)
    try:
        check_all_ended(observed)
    except Violation as violation:
        raise Violation(_of_turns(violation.finding)) from None
    if transfer.abort == "D":
        return Evidence(looked_at=1, unit="turns")
    loaded = observed.on_p
    if loaded is None:
        raise _not_asked(bench, observed)
    if transfer.preempt and not observed.preempted:
        raise NotApplicable("P's request ended before it could be preempted between two chunks")
    if loaded.finish == "error" and transfer.name not in MAY_FAIL:
        raise Violation(
            Finding(
                rule="KV-TURN-005",
                happened=f"P ended {loaded.name} with an error: the connector gave up its load from D",
                diagnosis=last_logged_exception(observed),
                log=observed.logged,
                declined="" if _is_wrong(observed, loaded) else "P gave up the load, and no word is wrong",
            )
        )
    if transfer.abort and observed.left and (kept := _kept(observed.left[0])):
        raise Violation(
            Finding(
                rule="KV-TURN-005",
                happened="P's request of the next turn was aborted while it loaded, and "
                f"{observed.left_s:.3g} s later P still holds {kept}",
                diagnosis="the load of an aborted request of P is never reported as finished",
            )
        )
    if observed.after and (kept := _kept(observed.after)):
        raise Violation(
            Finding(
                rule="KV-TURN-005",
                happened="D has loaded the prompt of the next turn from P, and "
                f"{observed.left_s:.3g} s later P still holds {kept}",
                diagnosis=NOT_NOTIFIED,
            )
        )
    return Evidence(looked_at=2, unit="turns", bytes_moved=_moved(loaded))


@case("KV-TURN-002", variants=named(NEXT, SAME_P))
def p_computes_only_missing_tokens(bench: Bench, transfer: Transfer) -> Evidence:
    """P loads tokens that D has generated, and computes each token that it does not load once."""
    observed = ended(bench, transfer)
    if not observed.answered:
        raise Violation(Finding(rule="KV-TURN-002", happened=NO_PARAMS, declined=NO_PARAMS))
    loaded = observed.on_p
    assert loaded is not None
    if loaded.finish == "error":
        raise blocked_by(f"{ENDS}[{bench.cell}-{transfer}]", refused=True)
    trace = loaded.decode
    if not trace.external_tokens:
        raise Violation(_computed(loaded, "P loaded nothing of what D has", declined=True))
    if trace.computed_tokens > loaded.length - trace.first_computed:  # P may leave the last one to D
        raise Violation(_computed(loaded, "P computed some tokens of the prompt twice"))
    due = whole_blocks_of_d(bench, observed)
    first = loaded.prefill.prompt_tokens
    if due > first and trace.first_computed <= first:
        generated = "P loaded tokens of the prompt of the first turn alone, and none that D has generated"
        raise Violation(_computed(loaded, generated))
    return Evidence(
        looked_at=loaded.length,
        unit="tokens",
        bytes_moved=_moved(loaded),
        external_tokens=trace.external_tokens,
        computed_tokens=trace.computed_tokens,
    )


@case("KV-TURN-001", variants=named(NEXT, SAME_P))
def p_loads_what_d_has(bench: Bench, transfer: Transfer) -> Evidence:
    """Every row that P's next forward reads is D's, on every rank, and nothing else in P's pool changes."""
    return _p_is_right(bench, transfer, "KV-TURN-001")


@case("KV-BYTES-001", variants=named(NEXT, SAME_P))
def d_is_right_in_both_turns(bench: Bench, transfer: Transfer) -> Evidence:
    """D loads what P has computed in the first turn, and in the second one what P has loaded or computed.
    D's pool does not change when P reads it.
    """
    observed, loaded = with_both_turns(bench, transfer)
    if any(check.pool.wrong or check.missing for check in loaded.checks):  # P hands over what it has
        raise blocked_by(f"{LOADS}[{bench.cell}-{transfer}]", "P has loaded something else than D has")
    checks = [(r, check) for r in observed.requests for check in r.checks]
    for r, check in checks:
        if wrong_words(check, "attention") or wrong_words(check, "state"):
            raise Violation(finding(bench, observed, r, check, "KV-BYTES-001"))
    for check in [*(check for _, check in checks), *observed.audits[1]]:
        if check.pool.words.get(COLLATERAL) or (not check.request and check.pool.wrong):
            when = "P loads from D" if not check.request else "D loads"
            raise Violation(
                Finding(rule="KV-BYTES-002", happened=f"rank {check.rank} of D: bytes changed while {when}")
            )
    rows = sum(check.rows_due for _, check in checks)
    return Evidence(looked_at=rows, unit="rows", bytes_moved=sum(map(_moved, observed.requests)))


@case("KV-TURN-003", variants=named(OVERWRITTEN))
def blocks_stay_until_p_has_read_them(bench: Bench, transfer: Transfer) -> Evidence:
    """Other requests get D's blocks the moment they are free, and P loads what D had all the same."""
    return _p_is_right(bench, transfer, "KV-TURN-003")


@case("KV-TURN-003", variants=named(*LATE))
def read_after_the_lease_is_detected(bench: Bench, transfer: Transfer) -> Evidence:
    """D has freed its blocks, and others have them, when P gets its request. P computes the prompt, or ends
    the request with an error, or loads a copy.
    """
    observed = ended(bench, transfer)
    if not observed.gone:
        raise _still_held(bench, observed)
    loaded = observed.on_p
    if loaded is None:
        raise _not_asked(bench, observed)
    _check_pools(observed, loaded, "KV-TURN-003")
    return Evidence(looked_at=1, unit="requests", bytes_moved=_moved(loaded))


@case("KV-TURN-004", variants=named(NEXT, SAME_P))
def d_frees_what_p_has_read(bench: Bench, transfer: Transfer) -> Evidence:
    """D's blocks are free soon after P has loaded what it wanted, long before their lease ends."""
    observed, loaded = with_both_turns(bench, transfer)
    assert observed.left is not None
    if kept := _kept(d := observed.left[1]):
        raise Violation(
            Finding(
                rule="KV-TURN-004",
                happened=f"{observed.left_s:.3g} s after P had loaded what it wanted D still holds {kept}",
                diagnosis=NOT_TOLD,
            )
        )
    return Evidence(looked_at=d.total_blocks, unit="blocks", bytes_moved=_moved(loaded))


@case("KV-TURN-004", variants=named(NO_TURN))
def d_frees_what_nobody_reads(bench: Bench, transfer: Transfer) -> Evidence:
    """No next turn comes. D's blocks are free when their lease is over, which the suite makes short."""
    require_a_keeper(bench)
    observed = completed(bench, longest_length(bench.cell, bench.settings.matrix), refused=True)
    if not any(r.decode.keeps_for_others for r in observed.requests):
        raise NotApplicable("D kept no blocks at the end of its request, and returned how others find its KV")
    assert observed.usage is not None
    assert observed.released is not None
    if kept := _kept(d := observed.usage[1]):
        waited, lease = observed.released.waited_s, turn_lease_s(bench)
        if lease > waited:
            raise Blocked(declare_turn_lease(lease))
        raise Violation(
            Finding(
                rule="KV-TURN-004",
                happened=f"no next turn came, and {waited:.3g} s after the last token D still holds {kept}, "
                f"of which the lease is {lease:.3g} s",
                diagnosis="D waits for a reader without a deadline",
            )
        )
    return Evidence(looked_at=d.total_blocks, unit="blocks", notes={"lease_s": turn_lease_s(bench)})


@case("KV-TURN-006", variants=named(NEXT, ABORTED_ON_D, everywhere=()))
def d_keeps_only_what_it_has_named(bench: Bench, transfer: Transfer) -> Evidence:
    """D keeps no blocks of a request without kv_transfer_params, nor of one that was aborted."""
    observed = ended(bench, transfer)
    if observed.kept is None:
        raise Blocked("D's request has not come to its end")
    if observed.answered and not transfer.abort:
        return Evidence(looked_at=1, unit="requests")
    usage = observed.usage[1] if observed.usage else observed.kept
    if kept := _kept(usage):
        why = "was aborted while it generated" if transfer.abort else "ended without kv_transfer_params"
        raise Violation(
            Finding(
                rule="KV-TURN-006",
                happened=f"a request of D {why}, and {observed.left_s:.3g} s later D still holds {kept}",
                diagnosis=NOBODY,
            )
        )
    if not transfer.abort:
        raise NotApplicable(NO_PARAMS, refused=True)
    return Evidence(looked_at=usage.total_blocks, unit="blocks")


@case("KV-TURN-007", variants=named(SHORTER))
def shorter_prompt_is_noticed(bench: Bench, transfer: Transfer) -> Evidence:
    """The next prompt ends before the KV that D has: an answer is asked for again, or was shortened. P loads
    the KV of its own tokens, or computes them.
    """
    observed = ended(bench, transfer)
    loaded = observed.on_p
    if loaded is None:
        raise _not_asked(bench, observed)
    _check_pools(observed, loaded, "KV-TURN-007")
    return Evidence(looked_at=loaded.length, unit="tokens", bytes_moved=_moved(loaded))


# ---- what they have in common ------------------------------------------------------------------------------


def _p_is_right(bench: Bench, transfer: Transfer, rule: str) -> Evidence:
    observed, loaded = with_both_turns(bench, transfer)
    _check_pools(observed, loaded, rule)
    rows = sum(check.rows_due for check in loaded.checks)
    return Evidence(
        looked_at=rows,
        unit="rows",
        bytes_moved=_moved(loaded),
        external_tokens=loaded.decode.external_tokens,
        notes={"seconds": round(observed.seconds, 3)},
    )


def _check_pools(observed: TurnObservation, loaded: Received, rule: str) -> None:
    """Raise Violation if a rank of P has loaded anything wrong, or anything else in its pool has changed."""
    for check in (*loaded.checks, *observed.audits[0]):
        if check.pool.wrong or check.missing:
            raise Violation(wrong_on_p(observed, loaded, check, rule))


def _is_wrong(observed: TurnObservation, loaded: Received) -> bool:
    return any(check.pool.wrong for check in (*loaded.checks, *observed.audits[0]))


def _of_turns(found: Finding) -> Finding:
    return Finding(
        rule="KV-TURN-005",
        happened=found.happened,
        differs=found.differs,
        diagnosis=found.diagnosis,
        log=found.log,
    )


def _computed(loaded: Received, what: str, declined: bool = False) -> Finding:
    trace = loaded.decode
    return Finding(
        rule="KV-TURN-002",
        happened=f"{what}: it computed {trace.computed_tokens} of {loaded.length} prompt tokens of "
        f"{loaded.name}, from token {trace.first_computed} on; {trace.external_tokens} tokens came from D, "
        f"and {trace.local_tokens} from P's own cache. The first {loaded.prefill.prompt_tokens} tokens are "
        "the prompt of the first turn, and D's answer follows",
        declined="P loaded nothing, and computed the prompt" if declined else "",
    )


def _not_asked(bench: Bench, observed: TurnObservation) -> Exception:
    if not observed.answered:
        return blocked_by("KV-TURN-002", NO_PARAMS, refused=True)
    return _still_held(bench, observed)


def _still_held(bench: Bench, observed: TurnObservation) -> Exception:
    if (lease := turn_lease_s(bench)) > bench.context.deadlines.release:
        return Blocked(declare_turn_lease(lease))
    case = f"kv::bytes/turns/next_turn::d_frees_what_nobody_reads[{bench.cell}-{NO_TURN}]"
    return blocked_by(case, "D has not freed its blocks")


def _kept(usage: Usage) -> str:
    """What an engine holds, in words; "": nothing."""
    blocks = usage.total_blocks - usage.free_blocks
    if not (blocks or usage.requests):
        return ""
    return f"{blocks} of {usage.total_blocks} blocks and {len(usage.requests)} requests"


def _moved(r: Received) -> int:
    return sum(check.bytes_due for check in r.checks if not check.pool.wrong)
