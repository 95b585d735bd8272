"""Odd questions, asked again alone, and the control that tells wrong KV from rounding."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from model_matrix import load_families, parse_topology
from model_matrix.canary import Exam as CanaryExam
from pytest_kvconform.result import Blocked, Cell
from pytest_kvconform.rigs.canary.oracle import Compared, Oracle
from pytest_kvconform.rigs.context import RunContext
from pytest_kvconform.rigs.engine.handle import EngineFailed
from pytest_kvconform.rigs.serving import gate
from pytest_kvconform.rigs.serving.chain import Chain
from pytest_kvconform.rigs.serving.data import Exam, school_of
from pytest_kvconform.rigs.serving.evaluator import Progress, ask
from pytest_kvconform.rigs.serving.messages import AGAIN
from pytest_kvconform.rigs.serving.observation import Look, Repeated, Runs, some_of


def ask_again(context: RunContext, cell: Cell, chain: Chain, exam: Exam, look: Look) -> tuple[Repeated, ...]:
    """Ask the odd questions of a look again, and compare those that stay odd with a right hand-over.

    Only a canary's questions: what its answers are after a right hand-over can be found out here.
    Raises EngineFailed, Unanswered and Unreachable as the look, and Blocked if the control fails.
    """
    first, second = (gate.texts(one.answers) for one in look.baselines)
    subject = gate.texts(look.subject.answers)
    odd = gate.odd_questions(subject, first, second)
    if exam.canary is None or not odd:
        return ()
    context.progress(f"asking questions with odd answers again: {some_of(odd)}")
    of_subject, of_baseline = (exam.alone(odd, times * gate.AGAIN_ALONE) for times in (1, 2))
    progress, more = Progress(context, 1), Progress(context, 1)
    again = ask(context, chain, chain.subject.url, of_subject, progress, "the subject")
    alone = ask(context, chain, chain.baseline.url, of_baseline, more, "the baseline")
    found = []
    for question in odd:
        got = (subject[question], *again.texts[question])
        want = (first[question], second[question], *alone.texts[question])
        p = gate.compare_one_question(got, want, exam.questions.count)
        found.append(Repeated(question, len(exam.canary.tokens[question][0]), got, want, p))
    if stay := [one.question for one in found if one.is_odd]:
        controls = _after_a_right_hand_over(context, cell, exam, exam.canary, stay)
        return tuple(replace(one, control=controls.get(one.question)) for one in found)
    return tuple(found)


def rounded_answers(context: RunContext, cell: Cell, exam: Exam, runs: Runs) -> tuple[Repeated, ...]:
    """The odd questions of all looks whose answers a right hand-over changes, too.

    For runs with more odd questions than chance gives: D may round otherwise in this cell. First as many
    questions are compared as a failure needs, the others only if a right hand-over changes one of these.
    Raises Blocked if the control fails.
    """
    if exam.canary is None:
        return ()
    odd = _odd(runs)
    found = list[Repeated]()
    for part in (odd[: gate.least_differences()], odd[gate.least_differences() :]):
        controls = _after_a_right_hand_over(context, cell, exam, exam.canary, part) if part else {}
        compared = (_in_all_looks(exam, exam.canary, runs, one, controls[one]) for one in controls)
        found += [one for one in compared if not one.is_wrong]
        if not found:
            break
    return tuple(found)


def odd_among_others(context: RunContext, cell: Cell, exam: Exam, runs: Runs) -> tuple[Repeated, ...]:
    """The questions that are odd in so many looks that chance does not give it, with the control.

    Asked alone they may be right: a connector may mix up requests that are on their way at the same time.
    Raises Blocked if the control fails.
    """
    if exam.canary is None:
        return ()
    every = (_in_all_looks(exam, exam.canary, runs, question) for question in _odd(runs))
    odd = {one.question: one for one in every if one.is_odd}
    controls = _after_a_right_hand_over(context, cell, exam, exam.canary, tuple(odd)) if odd else {}
    return tuple(replace(odd[question], control=controls[question]) for question in odd)


def _odd(runs: Runs) -> tuple[int, ...]:
    """The odd questions of all looks, without those that show nothing."""
    return gate.odd_questions(
        *(gate.without(gate.texts(answers), runs.rounded) for answers in (runs.subject, *runs.baselines))
    )


def _in_all_looks(
    exam: Exam, canary: CanaryExam, runs: Runs, question: int, control: Compared | None = None
) -> Repeated:
    """The answers to one question in all looks."""
    of_subject, *of_baseline = (
        tuple(one.text for one in answers if one.question % AGAIN == question)
        for answers in (runs.subject, *runs.baselines)
    )
    baseline = tuple(itertools.chain(*of_baseline))
    p = gate.compare_one_question(of_subject, baseline, exam.questions.count)
    return Repeated(question, len(canary.tokens[question][0]), of_subject, baseline, p, control)


def _after_a_right_hand_over(
    context: RunContext, cell: Cell, exam: Exam, canary: CanaryExam, questions: Sequence[int]
) -> dict[int, Compared]:
    """The answers to questions on engines without the connector. Raises Blocked if these fail."""
    context.progress(f"comparing answers that stay odd with a right hand-over: {some_of(questions)}")
    family, sizes = load_families()[cell.family], parse_topology(cell.topology)
    try:
        with Oracle(school_of(context), family, exam.checkpoint, canary, sizes) as oracle:
            return {question: oracle.compare(question) for question in questions}
    except EngineFailed as failed:
        raise Blocked(
            f"answers are odd each time (questions {some_of(questions)}), and what a right hand-over changes "
            f"cannot be told: vLLM fails here without the connector, too: {failed.sentence}"
        ) from None
