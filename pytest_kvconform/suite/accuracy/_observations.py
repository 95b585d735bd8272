"""Observations with which the cases begin: every question was asked and answered."""

from __future__ import annotations

from pytest_kvconform.result import Blocked, blocked_by
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.serving.gate import Outcome, Result
from pytest_kvconform.rigs.serving.observation import Runs, ServingObservation


def answered(bench: Bench) -> Runs:
    """Return all runs. Raises Blocked if the connector kept one from its end."""
    observed = bench.serving.observe(bench.cell)
    if observed.runs is None:
        case = f"kv::accuracy/answers::every_question_is_answered[{bench.cell}]"
        raise blocked_by(case, how_it_failed(observed), bool(observed.refusal))
    return observed.runs


def how_it_failed(observed: ServingObservation) -> str:
    """How the connector kept a run from its end, in one sentence."""
    return f"{observed.failed}; without the connector the same servers answer"


def loads(bench: Bench) -> Runs:
    """Return all runs, in which D loaded something. Raises Blocked otherwise.

    Answers of a D that computes everything itself show nothing about the connector.
    """
    runs = answered(bench)
    if not runs.counted.external:
        case = f"kv::accuracy/evidence::each_question_is_loaded[{bench.cell}]"
        raise blocked_by(case, "D loaded no token, so its answers show nothing")
    return runs


def require_enough(result: Result, what: str) -> None:
    """Raise Blocked if a test cannot tell with so few questions. `what`: is compared, in words."""
    if result.outcome is not Outcome.UNSURE:
        return
    needed = (
        f"about {result.needed} are needed"
        if result.needed
        else "no number of such answers of D alone can tell"
    )
    raise Blocked(
        f"too few questions to tell whether {what}: {result.worse} of {result.questions} tell against the "
        f"connector and {result.better} against the baseline (p = {result.p:.2g}); {needed}"
    )
