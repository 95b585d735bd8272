"""What each rank reports, counted before vLLM combines the reports of all ranks, and what vLLM's scheduler
reads: update_connector_output may put a request into a report, or take it out
(v1/core/sched/scheduler.py: _update_from_kv_xfer_finished).
"""

from __future__ import annotations

from collections import Counter

from pytest_kvconform.case import case
from pytest_kvconform.result import Blocked, Evidence, NotApplicable
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.bytes.faulty.messages import COMPUTED, FAILED, KNOWN, REPORTED
from pytest_kvconform.rigs.cluster.peers.rank_scenarios import SCENARIOS, moments
from pytest_kvconform.rigs.cluster.peers.scenario_engines import ScenarioObservation, loaded_within_step
from pytest_kvconform.rigs.context import RELEASE_S
from pytest_kvconform.rigs.vllm_setup.hooks import ERRORS, FAILED_RECVING, RECVING, RESULTS, SENDING
from pytest_kvconform.suite._peer_observations import (
    REFUSED,
    RIGHT,
    check_right,
    completed,
    engine,
    evidence,
    observe,
    one_rank_of_d,
    outcome_of,
    require_some_load,
    violation,
)
from pytest_kvconform.suite.protocol.peers._reports import (
    ENGINES,
    check_reported_once,
    counts,
    not_waiting,
    why_unread,
)

EVERY = tuple(sorted({name for scenarios in SCENARIOS.values() for name in scenarios}))
ABORTED = {
    REPORTED: "when the ranks of D had reported its load, before update_from_output",
    KNOWN: "when the scheduler of D knew that its load had ended",
    COMPUTED: "in the step that computed it for the first time after its load",
    FAILED: "since a worker of D failed in the step in which a rank reported its load",
}


@case("KV-RANK-001", rig="peers", scenarios=EVERY)
def each_rank_reports_once(bench: Bench, variant: None) -> Evidence:
    """vLLM's scheduler reads every request once, whichever rank was slow. Every rank has reported it once, or
    as many as get_finished_count says, or update_connector_output has put it into the report.

    P reports requests whose blocks it keeps after their ends: vLLM knows no other one any more.
    """
    check_reported_once(bench, "hand_overs", "KV-RANK-001")
    observed = completed(bench, "hand_overs", "KV-RANK-001")
    require_some_load(observed)
    looked_at = 0
    for name, handed in observed.prefills.items():
        decode = observed.decodes[name]
        wanted = [("P", SENDING, handed.id)] if handed.trace.delayed_free else []
        if not loaded_within_step(decode.trace):
            wanted.append(("D", RECVING, decode.id))
        for role, where, request in wanted:
            found = engine(observed, ENGINES[role])
            looked_at += len(found.ranks)
            if not found.times_read(where, request):
                raise violation("KV-RANK-001", why_unread(found, role, where, request), observed)
    check_right(
        "KV-RANK-001",
        observed,
        bench.peers.lease_s,
        {name: f"request {ended.id} of D" for name, ended in observed.decodes.items()},
    )
    return evidence(looked_at, "reports", observed)


@case("KV-RANK-002", rig="peers", variants=lambda cell, matrix: ("P", "D"), scenarios=EVERY)
def only_waiting_requests_are_reported(bench: Bench, role: str) -> Evidence:
    """vLLM's scheduler reads only requests that wait for a load, or whose blocks P keeps: ranks report no
    other one, or update_connector_output takes it out.
    """
    scenario, where = {"P": ("hand_overs", SENDING), "D": ("aborted_before_load", RECVING)}[role]
    observed = observe(bench, scenario)
    for who, request in not_waiting(observed, role):
        reason = (
            "request_finished did not ask to keep its blocks" if role == "P" else "it never waited for a load"
        )
        raise violation(
            "KV-RANK-002", f"{who} of {role} named request {request} in {where}: {reason}", observed
        )
    observed = completed(bench, scenario, "KV-RANK-002")
    check_right("KV-RANK-002", observed, bench.peers.lease_s, {"last": "the next request of D"})
    named = sum(len(counts(watched, where)) for watched in engine(observed, ENGINES[role]).ranks)
    return evidence(named + len(observed.request_ids), "requests", observed)


@case("KV-RANK-003", rig="peers", scenarios=("failed_load",))
def failed_load_is_reported_once(bench: Bench, variant: None) -> Evidence:
    """A request that one rank cannot load, and its blocks, are in one report of that rank. A load of another
    request may have failed with the same blocks.
    """
    observed = completed(bench, "failed_load", "KV-RANK-003")
    request, looked_at, reports = observed.decodes["failed"], 0, 0
    for watched in observed.ranks:
        of_blocks, of_request = watched.of(ERRORS), watched.naming(RESULTS, FAILED_RECVING, request.id)
        looked_at += watched.counts.get(ERRORS, 0)
        reports += len({call.step for call in (*of_blocks, *of_request)})
        blocks = Counter(block for call in of_blocks for block in call.result)
        again = [block for block, times in blocks.items() if times > 1]
        if again or len(of_request) > 1:
            what = (
                f"block {again[0]} {blocks[again[0]]} times"
                if again
                else f"request {request.id} more than once in failed_recving"
            )
            raise violation(
                "KV-RANK-003",
                f"one load failed on the last rank of D, and rank {watched.rank} reported {what}",
                observed,
                diagnosis="the rank does not forget what it has reported, and by the next step the blocks "
                "may be another request's",
            )
    # what D has fetched in vain, and then announced nothing of, is no load that fails
    if not reports and outcome_of(request) != RIGHT and request.trace.external_tokens:
        raise violation(
            "KV-RANK-003",
            "a load failed on the last rank of D, and no rank reported it as failed",
            observed,
            request,
        )
    last, after_failure = {"last": "the next request of D"}, outcome_of(request) == REFUSED
    check_right("KV-RANK-003", observed, bench.peers.lease_s, last, after_failure)
    return evidence(looked_at, "calls", observed, reports=reports)


@case("KV-RANK-004", rig="peers", scenarios=("load_on_idle_engine",))
def load_ends_in_idle_steps(bench: Bench, variant: None) -> Evidence:
    """A load ends while D computes nothing."""
    observed = completed(bench, "load_on_idle_engine", "KV-RANK-004")
    ended = observed.decodes["quiet"]
    if loaded_within_step(ended.trace):
        raise NotApplicable("D loads within the step that reads the KV, so that this step is not idle")
    if not observed.numbers["by_itself"]:
        then = f"it {'ended' if ended.finish else 'did not end either'} when D had something to compute"
        raise violation(
            "KV-RANK-004",
            "D had nothing to compute, and a load did not end within "
            f"{RELEASE_S * bench.settings.timeout_scale:.0f} s; {then}",
            observed,
            diagnosis="loads start or are polled in hooks that vLLM does not call in steps without tokens: "
            "wait_for_layer_load, save_kv_layer",
        )
    check_right(
        "KV-RANK-004",
        observed,
        bench.peers.lease_s,
        {"quiet": "a request of a D that had nothing to compute"},
    )
    return evidence(sum(watched.idle_steps for watched in observed.ranks), "steps", observed)


@case("KV-RANK-005", rig="peers", scenarios=("aborted_during_load",))
def aborted_load_is_reported_at_its_end(bench: Bench, variant: None) -> Evidence:
    """The load of an aborted request is reported when its last transfer has ended.

    Its blocks are free then.
    """
    return _abort_waits(bench, "aborted_during_load", 0)


@case(
    "KV-RANK-005",
    rig="peers",
    applies=lambda cell: not one_rank_of_d(cell),
    scenarios=("aborted_after_one_rank",),
)
def aborted_load_waits_for_the_last_rank(bench: Bench, variant: None) -> Evidence:
    """A load that all ranks but the last have reported when its request is aborted: its blocks are free when
    the last rank has reported it, too.
    """
    return _abort_waits(bench, "aborted_after_one_rank", 1)


def _abort_waits(bench: Bench, scenario: str, first_held: int) -> Evidence:
    """`first_held`: the first rank whose transfers were held while the request was aborted.

    A connector may drop transfers that it has not begun, and report the load before: nothing is written then.
    """
    observed = completed(bench, scenario, "KV-RANK-005")
    request, found = observed.request_ids["aborted"], engine(observed, ENGINES["D"])
    reported = [
        watched.rank
        for watched in observed.ranks
        if watched.rank >= first_held
        and watched.naming(RESULTS, RECVING, request)
        and not found.times_taken(RECVING, request)
    ]
    early = bool(reported) or request not in observed.usage["before"].requests
    dropped = early and bool(observed.numbers["not_begun"])
    if early and not dropped:
        raise violation(
            "KV-RANK-005",
            f"a request was aborted while it loaded, and {_ranks(reported)} reported it before its transfers "
            "had ended",
            observed,
            diagnosis="the blocks are free, and the transfer still writes into them",
        )
    if request in observed.usage["after"].requests:
        silent = [watched.rank for watched in found.ranks if not watched.naming(RESULTS, RECVING, request)]
        raise violation(
            "KV-RANK-005",
            f"a request was aborted while it loaded, and {RELEASE_S * bench.settings.timeout_scale:.0f} s "
            f"after its transfers D still holds its blocks: {_ranks(silent)} did not report it",
            observed,
            diagnosis="loads of aborted requests are forgotten instead of reported in finished_recving",
        )
    _check_audits(observed)
    check_right("KV-RANK-005", observed, bench.peers.lease_s, {"last": "the next request of D"})
    if dropped:
        raise NotApplicable(
            "D drops transfers of an aborted load that have not begun, and nothing is written"
        )
    return evidence(observed.usage["after"].total_blocks, "blocks", observed)


@case(
    "KV-FAIL-008",
    rig="peers",
    variants=lambda cell, matrix: moments(matrix),
    scenarios=("aborted_at_end_of_load",),
)
def abort_at_the_end_of_a_load_frees_blocks(bench: Bench, moment: str) -> Evidence:
    """A request that is aborted in the step in which its load ends gives its blocks back."""
    return _gives_back(
        bench,
        "aborted_at_end_of_load",
        "KV-FAIL-008",
        moment,
        "the connector waits for a report of a load that the ranks have reported already",
    )


@case(
    "KV-FAIL-009",
    rig="peers",
    applies=lambda cell: not one_rank_of_d(cell),
    scenarios=("worker_fails_at_end_of_load",),
)
def reports_of_a_failed_step_may_come_later(bench: Bench, variant: None) -> Evidence:
    """The reports of a step in which a worker failed come with those of the next step."""
    return _gives_back(
        bench,
        "worker_fails_at_end_of_load",
        "KV-FAIL-009",
        FAILED,
        "a report of the failed step was lost, or the connector does not expect two of one rank at once",
    )


def _gives_back(bench: Bench, scenario: str, rule: str, moment: str, diagnosis: str) -> Evidence:
    """Check that a request that is aborted at this moment of the end of its load gives its blocks back."""
    observed = completed(bench, scenario, rule)
    held = observed.numbers.get(moment)
    if held is None:
        raise Blocked("a request that was aborted at an earlier moment of this step still holds its blocks")
    if held < 0:
        raise NotApplicable("the connector loads within the step that reads, and no step waits for a load")
    if held:
        raise violation(
            rule,
            f"a request was aborted {ABORTED[moment]}, and {RELEASE_S * bench.settings.timeout_scale:.0f} s "
            f"later D still holds {held:.0f} blocks",
            observed,
            diagnosis=diagnosis,
        )
    check_right(rule, observed, bench.peers.lease_s, {"last": "the next request of D"})
    return evidence(1, "requests", observed)


def _check_audits(observed: ScenarioObservation) -> None:
    """Raise Violation if an aborted load has changed blocks that are not its own any more."""
    for check in observed.audits:
        if check.pool.wrong:
            raise violation(
                "KV-RANK-005",
                f"rank {check.rank} of D: {check.pool.wrong} words changed that no request may change",
                observed,
            )


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} of D" if ranks else "D"
