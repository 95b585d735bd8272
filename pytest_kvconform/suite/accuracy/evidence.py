"""Evidence that the KV of each question was handed over, and not computed by D."""

from __future__ import annotations

from pytest_kvconform.case import case
from pytest_kvconform.result import Blocked, Evidence, Finding, HarnessError, NotApplicable, Violation
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.serving.observation import Runs
from pytest_kvconform.suite.accuracy._observations import answered, loads


@case("KV-ACC-002")
def each_question_is_loaded(bench: Bench, _: None) -> Evidence:
    """D loads KV for each question, by D's own count, and nothing when it is asked alone."""
    runs, counted = (found := answered(bench)), found.counted
    count = len(runs.subject.answers)
    if any(alone.external for alone in runs.counted_alone) and bench.subject.profile != "store":
        raise HarnessError("D loaded KV while it was asked alone, so that the baseline is none")
    if not counted.external:
        raise _not_loaded(
            f"D computed all {counted.computed} prompt tokens of {count} questions, and loaded none"
        )
    if runs.prompts:
        _require_agreement(runs)
        without = [prompt for prompt in runs.prompts if not prompt.external]
        if without:
            raise _not_loaded(
                f"D computed the whole prompt of {len(without)} of {len(runs.prompts)} requests"
            )
    else:
        _require_loads_by_totals(runs)
    return Evidence(
        looked_at=len(runs.prompts) or count,
        unit="questions",
        bytes_moved=sum(counted.moved.values()),
        external_tokens=counted.external,
        computed_tokens=counted.computed,
    )


@case("KV-ACC-003")
def moved_bytes_are_counted(bench: Bench, _: None) -> Evidence:
    """The connector's own metric of moved bytes grows, if it has one."""
    runs = loads(bench)
    if not runs.counted.moved:
        raise NotApplicable("the connector has no metric of bytes in D's /metrics")
    moved = sum(runs.counted.moved.values())
    if not moved:
        raise Violation(
            Finding(
                rule="KV-ACC-003",
                happened=f"{', '.join(runs.counted.moved)} did not grow while D loaded "
                f"{runs.counted.external} tokens",
                diagnosis="the connector's metric of bytes does not count what it moves",
            )
        )
    return Evidence(
        looked_at=len(runs.counted.moved),
        unit="metrics",
        bytes_moved=moved,
        external_tokens=runs.counted.external,
        notes=dict(runs.counted.moved),
    )


def _not_loaded(happened: str) -> Violation:
    return Violation(
        Finding(
            rule="KV-ACC-002",
            happened=f"{happened}: there is no evidence of a hand-over",
            diagnosis="D computes prompts whose KV P has",
        )
    )


def _require_loads_by_totals(runs: Runs) -> None:
    """Raise Blocked unless sums over all questions show that D loaded something for each of them.

    A server of the user counts sums alone. A question that was not loaded would have cost D its whole prompt.
    So each of them was loaded if D computed fewer tokens than the shortest prompt has.
    """
    counted, prompts = runs.counted, runs.subject.prompts
    own, asked = counted.computed + counted.local, sum(prompts)
    if not all(prompts) or counted.external + own != asked:
        raise Blocked(
            f"D counted {counted.external + own} tokens of prompts, and the questions have {asked}: "
            "let nobody else ask it meanwhile"
        )
    if own >= min(prompts):
        raise Blocked(
            f"D loaded {counted.external} tokens and had {own} itself, as many as "
            f"{own // min(prompts)} of the {len(prompts)} prompts have: the sums cannot show that each "
            "question was loaded"
        )


def _require_agreement(runs: Runs) -> None:
    """Raise HarnessError unless vLLM's counters are the sums of what vLLM counts for each request."""
    external = sum(prompt.external for prompt in runs.prompts)
    if external != runs.counted.external or len(runs.prompts) != len(runs.subject.answers):
        raise HarnessError(
            f"D's requests loaded {external} tokens in {len(runs.prompts)} prompts, but its counter grew by "
            f"{runs.counted.external} while {len(runs.subject.answers)} questions were asked"
        )
