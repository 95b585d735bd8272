"""Which reports are wrong: those that are missing, come twice, or name a request that did not wait."""

from __future__ import annotations

from collections import Counter

from pytest_kvconform.result import Violation, blocked_by
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.bytes.faulty.messages import EngineObservation
from pytest_kvconform.rigs.cluster.peers.rank_scenarios import RANKS
from pytest_kvconform.rigs.cluster.peers.scenario_engines import ScenarioObservation
from pytest_kvconform.rigs.history import History
from pytest_kvconform.rigs.vllm_setup.hooks import RECVING, RESULTS, SENDING, UPDATE
from pytest_kvconform.suite._peer_observations import completed, observe, violation

ENGINES = dict(zip("PD", RANKS, strict=True))


def why_unread(found: EngineObservation, role: str, where: str, request: str) -> str:
    """Return why vLLM's scheduler has never read a request in reports of its workers, as a sentence."""
    ranks, named = found.ranks, f"request {request} in {where}"
    silent = [watched.rank for watched in ranks if not watched.naming(RESULTS, where, request)]
    if found.times_taken(where, request):
        return f"the ranks of {role} named {named}, and update_connector_output took it out of the report"
    if (count := found.finished_count) == len(ranks) and silent:
        return f"rank {silent[0]} of {role} never named {named}, nor did update_connector_output"
    return (
        f"{len(ranks) - len(silent)} of {len(ranks)} ranks of {role} named {named}, and get_finished_count "
        f"returned {count}"
    )


def check_reported_once(bench: Bench, scenario: str, rule: str) -> None:
    """Raise Violation if a rank has reported a request twice in any scenario, and update_connector_output has
    not taken it out of one of these reports.

    This holds, too, if the second report or something else has ended the engine.
    """
    try:
        observed = completed(bench, scenario, rule)
        failed: Violation | None = None
    except Violation as error:
        observed, failed = observe(bench, scenario), error
    for role, name in ENGINES.items():
        found = observed.engines.get(name)
        for watched in found.ranks if found else ():
            for where in (SENDING, RECVING):
                for request, times in counts(watched, where).items():
                    if found and times - found.times_taken(where, request) > 1:
                        raise violation(
                            rule,
                            f"rank {watched.rank} of {role} named request {request} {times} times in "
                            f"{where}" + (f"; {failed.finding.happened}" if failed else ""),
                            observed,
                            diagnosis="vLLM counts reports by request and not by rank, so it takes the "
                            "second report for another rank's",
                        )
    if failed and any(not_waiting(observed, role) for role in "PD"):
        raise blocked_by("kv::protocol/peers/rank_reports::only_waiting_requests_are_reported")
    if failed:
        raise failed


def counts(watched: History, where: str) -> Counter[str]:
    return Counter(request for call in watched.of(RESULTS) for request in call.result[where])


def not_waiting(observed: ScenarioObservation, role: str) -> list[tuple[str, str]]:
    """Return (who, request) for requests that a rank has reported although they did not wait, unless
    update_connector_output has taken them out, and for those that this hook has put into a report.

    All scenarios count.
    """
    if ENGINES[role] not in observed.engines:
        return []
    found, where = observed.engines[ENGINES[role]], {"P": SENDING, "D": RECVING}[role]
    waited = {
        name
        for name, trace in found.traces.items()
        if (trace.delayed_free if role == "P" else trace.external_tokens)
    }
    named = [
        (f"rank {watched.rank}", request)
        for watched in found.ranks
        for request in counts(watched, where)
        if not found.times_taken(where, request)
    ]
    named += [(UPDATE, request) for call in found.scheduler.of(UPDATE) for request in call.result[where]]
    return [(who, request) for who, request in named if request not in waited]
