"""Odd questions, asked again alone, and the control that tells wrong KV from rounding."""

from __future__ import annotations

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
from pytest_kvconform.rigs.serving.observation import Look, Repeated, some_of


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
    again = ask(context, chain, chain.subject.url, of_subject, Progress(context, 0, 0), "the subject")
    alone = ask(context, chain, chain.baseline.url, of_baseline, Progress(context, 0, 0), "the baseline")
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
