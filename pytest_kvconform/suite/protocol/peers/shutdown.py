"""D shuts down while it loads, and P does not answer: on the real transport."""

from __future__ import annotations

from pytest_kvconform.case import case
from pytest_kvconform.result import Blocked, Evidence, NotApplicable
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.cluster.peers.scenario_engines import ScenarioObservation
from pytest_kvconform.rigs.context import REQUEST_S
from pytest_kvconform.suite._peer_observations import (
    RIGHT,
    completed,
    engines_of,
    evidence,
    one_rank,
    outcome_of,
    require_some_load,
    violation,
)

RULE = "KV-SHUTDOWN-004"


@case(RULE, rig="peers", applies=one_rank, scenarios=("shutdown_during_load",))
def nothing_is_written_after_shutdown(bench: Bench, variant: None) -> Evidence:
    """P's process is stopped during a load, and D shuts down. That ends, and nothing is written later."""
    observed = completed(bench, "shutdown_during_load", RULE, engines_of(bench, "shutdown_during_load", "D"))
    _require_load(observed)
    numbers, when = observed.numbers, "D shut down during a load, and P's process stood still"
    if not numbers["returned"]:
        raise violation(
            RULE,
            f"{when}: shutdown() had not returned after {REQUEST_S * bench.settings.timeout_scale:.0f} s",
            observed,
            diagnosis="shutdown() waits without a deadline for a transfer that does not end",
        )
    if observed.raised:
        raise violation(RULE, f"{when}: shutdown() raised {observed.raised}", observed)
    if numbers["written"]:
        raise violation(
            RULE,
            f"{when}: {numbers['written']:.0f} bytes of D's KV cache changed after shutdown() had returned, "
            f"{numbers['early']:.0f} of them before P went on",
            observed,
            diagnosis="shutdown() leaves a transfer or a thread that goes on writing, and vLLM releases this "
            "memory next",
        )
    return evidence(
        1, "shutdowns", observed, loading=int(numbers["loading"]), p_ended=int(numbers["p_ended"])
    )


def _require_load(observed: ScenarioObservation) -> None:
    """Raise Blocked if D loads nothing right from a P that answers, and NotApplicable if no load is under way
    while P stands still: then there is nothing that shutdown() has to end.
    """
    require_some_load(observed)
    if (what := outcome_of(observed.decodes["met"])) != RIGHT:
        raise Blocked(
            f"before P's process was stopped, a request of D ended as {what}: see KV-HANDOVER-001 and "
            "KV-BYTES-001"
        )
    if observed.numbers["loading"]:
        return
    if observed.numbers["ended"]:
        raise NotApplicable("D's request ended although P stood still: D cannot shut down during its load")
    raise NotApplicable("D begins no load from a P that stands still: D cannot shut down during one")
