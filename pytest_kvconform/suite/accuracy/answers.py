"""Answers of P and D behind a router, compared with those of D alone."""

from __future__ import annotations

from model_matrix import load_families
from pytest_kvconform.case import case
from pytest_kvconform.result import Blocked, Cell, Evidence, Finding, Violation
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.serving.bench import generations
from pytest_kvconform.rigs.serving.gate import (
    Outcome,
    compare_acceptance,
    compare_correctness,
    right,
    same_rate,
    texts,
)
from pytest_kvconform.rigs.serving.observation import Runs
from pytest_kvconform.suite.accuracy._observations import loads, require_enough

SHOWN = 60  # characters of an answer


@case("KV-ACC-001")
def every_question_is_answered(bench: Bench, _: None) -> Evidence:
    """The servers start with the connector, and answer every question that goes through the router."""
    observed = bench.serving.observe(bench.cell)
    if observed.runs is None:
        raise Violation(
            Finding(
                rule="KV-ACC-001",
                happened=f"{observed.failed}; without the connector the same servers answer",
                diagnosis=observed.failed,
                log=observed.log,
            )
        )
    runs = observed.runs
    return _evidence(
        runs,
        {
            "questions from": observed.data,
            "answers": observed.file,
            "seconds": round(runs.subject.seconds, 1),
            "seconds of D alone": round(runs.baselines[0].seconds, 1),
        },
    )


@case("KV-ACC-004")
def answers_equal_those_of_d_alone(bench: Bench, _: None) -> Evidence:
    """As many answers equal those of D alone as do in a second run of D alone."""
    runs = loads(bench)
    subject, first, second = (texts(run.answers) for run in (runs.subject, *runs.baselines))
    result = generations(runs)
    rates = f"{same_rate(subject, first):.1%} of the answers equal those of D alone"
    noise = f"{same_rate(first, second):.1%} in a second run of D alone"
    if result.outcome is Outcome.FAIL:
        wrong = [q for q in subject if first[q] == second[q] != subject[q]]
        raise Violation(
            Finding(
                rule="KV-ACC-004",
                happened=f"{rates}, and {noise}: chance gives this with a probability of {result.p:.1g}",
                differs=f"{len(wrong)} of {result.questions} answers: questions {_some(wrong)}",
                picture=tuple(_pair(q, first[q], subject[q]) for q in wrong[:4]),
                diagnosis="D's KV is not what D itself computes, in some requests",
                signature="answers differ from those of D alone",
            )
        )
    require_enough(result, "answers change")
    return _evidence(
        runs,
        {
            "equal answers": round(same_rate(subject, first), 4),
            "equal answers of D alone": round(same_rate(first, second), 4),
            "p": result.p,
        },
    )


@case("KV-ACC-005", variants=lambda cell, matrix: ("strict-match", "flexible-extract"))
def as_many_answers_are_right(bench: Bench, rule: str) -> Evidence:
    """As many answers are right as those of D alone, question by question."""
    runs = loads(bench)
    strict = rule == "strict-match"
    subject, baseline = (right(run.answers, strict) for run in (runs.subject, runs.baselines[0]))
    result = compare_correctness(subject, baseline)
    scores = (
        f"{sum(subject.values())} of {len(subject)} answers are right, {sum(baseline.values())} of D alone"
    )
    if result.outcome is Outcome.FAIL:
        lost = [q for q in subject if baseline[q] and not subject[q]]
        raise Violation(
            Finding(
                rule="KV-ACC-005",
                happened=f"{scores}: {result.worse} answers are lost and {result.better} won, which chance "
                f"gives with a probability of {result.p:.1g}",
                differs=f"questions {_some(lost)}",
                diagnosis="D's KV is not P's, in so many requests that answers become wrong",
                signature="fewer answers are right than those of D alone",
            )
        )
    require_enough(result, "fewer answers are right")
    return _evidence(
        runs, {"right": sum(subject.values()), "right of D alone": sum(baseline.values()), "p": result.p}
    )


def has_draft(cell: Cell) -> bool:
    """Whether the family of a cell speculates with a draft model."""
    return load_families()[cell.family].draft is not None


@case("KV-ACC-006", applies=has_draft)
def as_many_drafts_are_accepted(bench: Bench, _: None) -> Evidence:
    """As many draft tokens are accepted as of D alone. Wrong KV of a draft changes no token."""
    runs = loads(bench)
    alone = runs.counted_alone[0] + runs.counted_alone[1]
    if not (runs.counted.drafted and alone.drafted):
        raise Blocked("D counts no draft tokens, so that nothing shows whether they are accepted")
    result = compare_acceptance(
        (runs.counted.accepted, runs.counted.drafted), (alone.accepted, alone.drafted)
    )
    lengths = (
        f"{runs.counted.acceptance_length:.3f} tokens a step, and {alone.acceptance_length:.3f} of D alone"
    )
    if result.outcome is Outcome.FAIL:
        raise Violation(
            Finding(
                rule="KV-ACC-006",
                happened=f"{runs.counted.accepted} of {runs.counted.drafted} draft tokens are accepted: "
                f"{lengths}, which chance gives with a probability of {result.p:.1g}",
                diagnosis="the KV of the draft model is not P's",
            )
        )
    require_enough(result, "fewer drafts are accepted")
    notes = {"tokens a step": runs.counted.acceptance_length, "of D alone": alone.acceptance_length}
    return _evidence(runs, {**notes, "p": result.p})


def _evidence(runs: Runs, notes: dict[str, float | int | str]) -> Evidence:
    return Evidence(
        looked_at=len(runs.subject.answers),
        unit="answers",
        bytes_moved=sum(runs.counted.moved.values()),
        external_tokens=runs.counted.external,
        computed_tokens=runs.counted.computed,
        notes=notes,
    )


def _some(questions: list[int]) -> str:
    shown = ", ".join(map(str, questions[:10]))
    return shown + (f" and {len(questions) - 10} more" if len(questions) > 10 else "")


def _pair(question: int, alone: str, handed_over: str) -> str:
    return f"question {question}: D alone {alone[:SHOWN]!r}, handed over {handed_over[:SHOWN]!r}"
