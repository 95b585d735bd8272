"""Odd questions that are asked again alone: what the control says of them, and when it is asked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from model_matrix.canary import Exam as CanaryExam
from pytest_kvconform.result import Blocked, Cell
from pytest_kvconform.rigs.canary.oracle import Compared
from pytest_kvconform.rigs.engine.handle import EngineFailed
from pytest_kvconform.rigs.serving import again, bench, gate
from pytest_kvconform.rigs.serving.chain import Chain
from pytest_kvconform.rigs.serving.data import Exam
from pytest_kvconform.rigs.serving.gate import AGAIN_ALONE, Outcome, wants_more
from pytest_kvconform.rigs.serving.messages import AGAIN, Answer, Answers, Questions
from pytest_kvconform.rigs.serving.metrics import Counters
from pytest_kvconform.rigs.serving.observation import Look, Runs
from pytest_kvconform.rigs.serving.server import Endpoint

CELL, COUNT, ODD = Cell("gemma3", "P1D2"), 64, 5
RIGHT = Compared(("4",) * 10, ("4",) * 10)
ROUNDED = Compared(("4",) * 10, ("4",) * 9 + ("82",))
CHAIN = Chain(Endpoint("router", "subject"), Endpoint("D", "baseline"), Endpoint("D", "baseline"))
NOTHING = Counters(external=0, local=0, computed=0)


class Questioned:
    """Servers and an oracle that answer as they are told, and note what they are asked."""

    def __init__(self, subject: str = "82", control: Compared | EngineFailed = RIGHT):
        """`subject`: its answers to the odd question when that is asked alone."""
        self.subject, self.control = subject, control
        self.asked, self.sizes = list[tuple[str, tuple[int, ...], int]](), list[Any]()
        self.compared = list[int]()

    def ask(self, context: Any, chain: Any, url: str, exam: Exam, progress: Any, what: str) -> Answers:
        questions = exam.questions
        self.asked.append((url, questions.alone, questions.times))
        text = self.subject if url == "subject" else "4"
        return Answers(answers=(), texts=dict.fromkeys(questions.alone, (text,) * questions.times))

    def Oracle(self, school: Any, family: Any, canary: Any, exam: Any, sizes: tuple[int, int]) -> Any:
        self.sizes.append(sizes)
        return self

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def compare(self, question: int) -> Compared:
        if isinstance(self.control, EngineFailed):
            raise self.control
        self.compared.append(question)
        return self.control


def runs_of(
    questioned: Questioned, monkeypatch: pytest.MonkeyPatch, odd: str = "82", taught: bool = True
) -> Runs:
    """A first look at questions, of which ODD has this answer of the subject, and what is asked then."""
    runs, exam, context = first_look(questioned, monkeypatch, {ODD: odd}, taught)
    [look] = runs.looks
    return replace(runs, repeated=again.ask_again(context, CELL, CHAIN, exam, look))


def first_look(
    questioned: Questioned, monkeypatch: pytest.MonkeyPatch, odd: dict[int, str], taught: bool = True
) -> tuple[Runs, Exam, Any]:
    """A first look at questions, some of which have other answers of the subject."""
    monkeypatch.setattr(again, "ask", questioned.ask)
    monkeypatch.setattr(again, "Oracle", questioned.Oracle)
    monkeypatch.setattr(again, "school_of", lambda context: None)
    monkeypatch.setattr(CanaryExam, "tokens", (((0,) * 255, (1,)),) * COUNT, raising=False)
    answers = Answers(answers=tuple(Answer(n, "4", True, True) for n in range(COUNT)))
    subject = Answers(answers=tuple(Answer(n, odd.get(n, "4"), True, True) for n in range(COUNT)))
    look = Look(subject, (answers, answers), NOTHING, (NOTHING, NOTHING))
    canary = CanaryExam(Path(), ("",) * COUNT, ("",) * COUNT) if taught else None
    exam = Exam(Path(), 0, Questions(task="", data="", count=COUNT, longest_answer=3), canary=canary)
    return Runs((look,), 16), exam, SimpleNamespace(progress=lambda sentence: None)


def test_a_question_that_stays_odd_is_wrong_if_a_right_hand_over_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    questioned = Questioned()
    runs = runs_of(questioned, monkeypatch)
    assert [(one.question, one.tokens) for one in runs.wrong] == [(ODD, 255)]
    assert not runs.rounded
    assert questioned.asked == [
        ("subject", (ODD,), AGAIN_ALONE),
        ("baseline", (ODD,), 2 * AGAIN_ALONE),
    ]
    assert questioned.sizes == [(1, 2)]  # of P1D2


def test_a_question_that_stays_odd_is_left_out_if_a_right_hand_over_changes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = runs_of(Questioned(control=ROUNDED), monkeypatch)
    assert (runs.wrong, runs.rounded) == ((), {ODD})
    result = bench.generations(runs)
    assert (result.outcome, result.worse, result.questions) == (Outcome.PASS, 0, COUNT - 1)
    assert not wants_more(result)


MANY = tuple(range(0, COUNT, 2))


@pytest.mark.parametrize(("control", "left_out"), [(RIGHT, 0), (ROUNDED, len(MANY))])
def test_so_many_odd_questions_that_chance_does_not_give_them_need_the_control_too(
    monkeypatch: pytest.MonkeyPatch, control: Compared, left_out: int
) -> None:
    """D may round otherwise in every answer after a hand-over, such as at another tensor parallel size."""
    questioned = Questioned(control=control)
    runs, exam, context = first_look(questioned, monkeypatch, dict.fromkeys(MANY, "82"))
    assert bench.generations(runs).outcome is Outcome.FAIL
    found = again.rounded_answers(context, CELL, exam, runs)
    assert (len(found), len(questioned.compared)) == (left_out, left_out or gate.least_differences())
    runs = replace(runs, repeated=found)
    assert (runs.wrong, runs.rounded) == ((), set(MANY[:left_out]))
    assert bench.generations(runs).outcome is (Outcome.UNSURE if left_out else Outcome.FAIL)


@pytest.mark.parametrize("control", [RIGHT, ROUNDED])
def test_a_question_that_is_odd_in_every_look_is_wrong_though_it_is_right_alone(
    monkeypatch: pytest.MonkeyPatch, control: Compared
) -> None:
    questioned = Questioned(subject="4", control=control)
    runs, exam, context = first_look(questioned, monkeypatch, {ODD: "82"})
    looks = tuple(
        replace(look, subject=_of(look.subject, n), baselines=tuple(_of(one, n) for one in look.baselines))
        for n, look in enumerate(runs.looks * gate.LOOKS)
    )
    runs = replace(runs, looks=looks)
    assert bench.generations(runs).outcome is Outcome.PASS  # it counts once
    runs = replace(runs, repeated=again.odd_among_others(context, CELL, exam, runs))
    assert [one.question for one in runs.wrong] == [ODD] * (control is RIGHT)
    assert runs.rounded == ({ODD} if control is ROUNDED else set())


def _of(answers: Answers, look: int) -> Answers:
    """The same answers in a later look."""
    later = (msgspec.structs.replace(one, question=one.question + look * AGAIN) for one in answers.answers)
    return msgspec.structs.replace(answers, answers=tuple(later))


def test_engines_that_do_not_answer_as_the_servers_are_no_control(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = runs_of(Questioned(control=Compared(("7",) * 10, ("7",) * 10)), monkeypatch)
    assert (runs.wrong, runs.rounded) == ((), {ODD})


def test_an_odd_answer_that_does_not_come_again_needs_no_control(monkeypatch: pytest.MonkeyPatch) -> None:
    questioned = Questioned(subject="4")
    runs = runs_of(questioned, monkeypatch)
    assert (runs.wrong, runs.rounded, questioned.sizes) == ((), set(), [])
    assert wants_more(bench.generations(runs))  # all questions are asked again


@pytest.mark.parametrize(("odd", "taught"), [("4", True), ("82", False)])
def test_a_right_run_and_a_real_checkpoint_pay_nothing(
    monkeypatch: pytest.MonkeyPatch, odd: str, taught: bool
) -> None:
    questioned = Questioned()
    assert runs_of(questioned, monkeypatch, odd, taught).repeated == ()
    assert (questioned.asked, questioned.sizes) == ([], [])


def test_a_control_that_fails_is_no_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = Questioned(control=EngineFailed("D", "died", "D was killed by SIGSEGV"))
    with pytest.raises(Blocked, match=r"answers are odd each time \(questions 5\).*D was killed by SIGSEGV$"):
        runs_of(failed, monkeypatch)
