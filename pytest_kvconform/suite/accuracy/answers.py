"""Answers of P and D behind a router, compared with those of D alone."""

from __future__ import annotations

from model_matrix import load_families, load_real_checkpoints
from pytest_kvconform.case import case
from pytest_kvconform.result import QUESTIONS, Blocked, Cell, Evidence, Finding, NotApplicable, Violation
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.serving.bench import generations, judged
from pytest_kvconform.rigs.serving.gate import (
    Outcome,
    compare_acceptance,
    compare_correctness,
    odd_questions,
    questions_of,
    same_rate,
    texts,
)
from pytest_kvconform.rigs.serving.messages import AGAIN
from pytest_kvconform.rigs.serving.metrics import ACCEPTED, DRAFTED, GENERATED, Counters
from pytest_kvconform.rigs.serving.observation import Runs, some_of
from pytest_kvconform.suite.accuracy._observations import how_it_failed, loads, require_enough

SHOWN = 60  # characters of an answer
# of a question: whether the answer after the hand-over is right, and whether that of D alone is
SIGNS = {(True, True): ".", (False, True): "-", (True, False): "+", (False, False): "x"}


@case("KV-ACC-001")
def every_question_is_answered(bench: Bench, _: None) -> Evidence:
    """The servers start with the connector, and answer every question that goes through the router."""
    observed = bench.serving.observe(bench.cell)
    if observed.runs is None:
        raise Violation(
            Finding(
                rule="KV-ACC-001",
                happened=how_it_failed(observed),
                diagnosis=observed.failed,
                log=observed.log,
                declined=observed.refusal,
            )
        )
    runs = observed.runs
    return _evidence(
        runs,
        {
            "questions from": observed.data,
            **({"answered by": observed.model} if observed.model else {}),
            "answers": observed.file,
            "looks": len(runs.looks),
            "seconds": round(sum(look.subject.seconds for look in runs.looks), 1),
            "seconds of D alone": round(sum(look.baselines[0].seconds for look in runs.looks), 1),
        },
    )


@case("KV-ACC-004")
def answers_equal_those_of_d_alone(bench: Bench, _: None) -> Evidence:
    """As many answers of a canary equal those of D alone as do in a second run of D alone."""
    if bench.settings.real:
        raise NotApplicable("the answers of a real checkpoint are compared for KV-ACC-007")
    return _equal(bench, "KV-ACC-004")


@case("KV-ACC-007")
def answers_of_a_deployment_equal_those_of_d_alone(bench: Bench, _: None) -> Evidence:
    """As many answers of a real checkpoint equal those of D alone as do in a second run of D alone."""
    if not bench.settings.real:
        raise NotApplicable("the answers of a canary are compared for KV-ACC-004")
    return _equal(bench, "KV-ACC-007")


def _equal(bench: Bench, rule: str) -> Evidence:
    """The comparison of texts. Raises Violation of `rule`."""
    runs = loads(bench)
    subject, first, second = map(texts, (runs.subject, *runs.baselines))
    if runs.wrong:
        raise _wrong_each_time(rule, runs)
    result = generations(runs)
    rates = f"{same_rate(subject, first):.1%} of the answers equal those of D alone"
    noise = f"{same_rate(first, second):.1%} in a second run of D alone"
    if result.outcome is Outcome.FAIL:
        odd = set(odd_questions(subject, first, second)) - runs.rounded
        wrong = {  # question -> key of the first answer that is odd
            key % AGAIN: key
            for key in sorted(subject, reverse=True)
            if subject[key] != first[key] and key % AGAIN in odd
        }
        raise Violation(
            Finding(
                rule=rule,
                happened=f"{rates}, and {noise}: chance gives this with a probability of {result.p:.1g}",
                differs=f"answers to {len(wrong)} of {result.questions} questions: {some_of(wrong)}",
                picture=tuple(_pair(q, first[wrong[q]], subject[wrong[q]]) for q in sorted(wrong)[:4]),
                diagnosis="D's KV is not what D itself computes, in some requests",
                signature="answers differ from those of D alone",
            )
        )
    require_enough(result, "answers change")
    notes: dict[str, float | int | str] = {
        "equal answers": round(same_rate(subject, first), 4),
        "equal answers of D alone": round(same_rate(first, second), 4),
        "p": result.p,
    }
    if runs.rounded:
        notes["left out, a right hand-over changes these answers, too"] = some_of(runs.rounded)
    return _evidence(runs, notes)


def _wrong_each_time(rule: str, runs: Runs) -> Violation:
    """The violation of a connector that changes the answers to some questions each time."""
    one = runs.wrong[0]
    assert one.control is not None
    times, odd = len(one.subject), sum(text != one.baseline[0] for text in one.subject)
    return Violation(
        Finding(
            rule=rule,
            happened=f"the answers to {len(runs.wrong)} of {runs.questions} questions differ from those of D "
            f"alone again and again: question {one.question} {odd} of {times} times, while all "
            f"{len(one.baseline)} answers of D alone are equal. Chance gives this with a probability of "
            f"{one.p:.1g}",
            differs="; ".join(f"question {each.question}, {each.tokens} tokens" for each in runs.wrong[:10]),
            picture=tuple(_pair(each.question, each.baseline[0], each.odd) for each in runs.wrong[:4]),
            diagnosis="D's KV is not P's, for these prompts. It is not rounding: after a right hand-over, KV "
            f"copied between engines without the connector, all {len(one.control.handed_over)} answers are "
            "those of D alone",
            signature="answers to the same questions differ from those of D alone",
        )
    )


@case("KV-ACC-005", variants=lambda cell, matrix: ("strict-match", "flexible-extract"))
def as_many_answers_are_right(bench: Bench, rule: str) -> Evidence:
    """As many answers are right as those of D alone, question by question."""
    runs = loads(bench)
    subject, baseline = judged(runs, rule == "strict-match")
    result = compare_correctness(subject, baseline)
    signs = "".join(SIGNS[subject[key], baseline[key]] for key in sorted(subject))
    scores = (
        f"{sum(subject.values())} of {len(subject)} answers are right, {sum(baseline.values())} of D alone"
    )
    if result.outcome is Outcome.FAIL:
        lost = questions_of(key for key in subject if baseline[key] and not subject[key])
        raise Violation(
            Finding(
                rule="KV-ACC-005",
                happened=f"{scores}: {result.worse} questions are lost and {result.better} won, which chance "
                f"gives with a probability of {result.p:.1g}",
                differs=f"questions {some_of(lost)}",
                picture=(*_rows(signs), "  . right  - lost  + won  x wrong, also of D alone"),
                diagnosis="D's KV is not P's, in so many requests that answers become wrong",
                signature="fewer answers are right than those of D alone",
            )
        )
    require_enough(result, "fewer answers are right")
    notes: dict[str, float | int | str] = {
        "right": sum(subject.values()),
        "right of D alone": sum(baseline.values()),
        "p": result.p,
        QUESTIONS: signs,
    }
    return _evidence(runs, notes | (_published(bench.cell) if bench.settings.nightly else {}))


def _rows(signs: str) -> tuple[str, ...]:
    """A line for each 64 questions, with the number of its first."""
    return tuple(f"  question {n:>4}  {signs[n : n + 64]}" for n in range(0, len(signs), 64))


def _published(cell: Cell) -> dict[str, float | int | str]:
    """The published score of the real checkpoint of a cell, to be compared by people."""
    real = load_real_checkpoints()[cell.family]
    return {} if real.score is None else {"published score": real.score, "published by": real.score_source}


def has_draft(cell: Cell) -> bool:
    """Whether the family of a cell speculates with a draft model."""
    return load_families()[cell.family].draft is not None


@case("KV-ACC-006", applies=has_draft)
def as_many_drafts_are_accepted(bench: Bench, _: None) -> Evidence:
    """As many draft tokens are accepted as of D alone. Wrong KV of a draft changes no token."""
    runs = loads(bench)
    (accepted, generated), (before, of) = map(_drafts, (runs.counted, runs.counted_alone))
    result = compare_acceptance((accepted, generated), (before, of))
    if result.outcome is Outcome.FAIL:
        raise Violation(
            Finding(
                rule="KV-ACC-006",
                happened=f"{accepted} of {generated} generated tokens are accepted drafts, "
                f"and {before} of {of} of D alone. Chance gives this with a probability "
                f"of {result.p:.1g}",
                diagnosis="the KV of the draft model is not P's",
            )
        )
    if result.outcome is Outcome.UNSURE:
        raise Blocked(
            f"D alone accepts {before} drafts in {of} generated tokens: so few that none at all after a "
            "hand-over would be chance"
        )
    return _evidence(
        runs,
        {
            "accepted drafts": round(accepted / generated, 4),
            "accepted drafts of D alone": round(before / of, 4),
            "p": result.p,
        },
    )


def _drafts(counted: Counters) -> tuple[int, int]:
    """Accepted drafts and generated tokens. Raises Blocked unless a server counts them and has drafted."""
    named = {DRAFTED: counted.drafted, ACCEPTED: counted.accepted, GENERATED: counted.generated}
    if lacks := [name for name, count in named.items() if count is None]:
        raise Blocked(
            f"the /metrics of D, or of the baseline, have no {lacks[0]}, and nothing else tells which drafts "
            "are accepted: start both with the draft model (--speculative-config), and without "
            "--disable-log-stats"
        )
    if not (counted.drafted and counted.generated):
        raise Blocked("D has drafted no tokens, so that nothing shows whether drafts are accepted")
    return counted.accepted or 0, counted.generated


def _evidence(runs: Runs, notes: dict[str, float | int | str]) -> Evidence:
    return Evidence(
        looked_at=len(runs.subject),
        unit="answers",
        bytes_moved=sum(runs.moved.values()),
        external_tokens=runs.counted.external,
        computed_tokens=runs.counted.computed,
        notes=notes,
    )


def _pair(question: int, alone: str, handed_over: str) -> str:
    return f"question {question}: D alone {alone[:SHOWN]!r}, handed over {handed_over[:SHOWN]!r}"
