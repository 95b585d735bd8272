"""Odd questions that are asked again alone: what the control says of them, and when it is asked."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from model_matrix.canary import Exam as CanaryExam
from pytest_kvconform.result import Blocked, Cell
from pytest_kvconform.rigs.canary.oracle import Compared
from pytest_kvconform.rigs.engine.handle import EngineFailed
from pytest_kvconform.rigs.serving import again, bench
from pytest_kvconform.rigs.serving.chain import Chain
from pytest_kvconform.rigs.serving.data import Exam
from pytest_kvconform.rigs.serving.gate import AGAIN_ALONE, Outcome, wants_more
from pytest_kvconform.rigs.serving.messages import Answer, Answers, Questions
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
        return self.control


def runs_of(
    questioned: Questioned, monkeypatch: pytest.MonkeyPatch, odd: str = "82", taught: bool = True
) -> Runs:
    """A first look at questions, of which ODD has this answer of the subject, and what is asked then."""
    monkeypatch.setattr(again, "ask", questioned.ask)
    monkeypatch.setattr(again, "Oracle", questioned.Oracle)
    monkeypatch.setattr(again, "school_of", lambda context: None)
    monkeypatch.setattr(CanaryExam, "tokens", (((0,) * 255, (1,)),) * COUNT, raising=False)
    answers = Answers(answers=tuple(Answer(n, "4", True, True) for n in range(COUNT)))
    subject = Answers(answers=tuple(Answer(n, odd if n == ODD else "4", True, True) for n in range(COUNT)))
    look = Look(subject, (answers, answers), NOTHING, (NOTHING, NOTHING))
    canary = CanaryExam(Path(), ("",) * COUNT, ("",) * COUNT) if taught else None
    exam = Exam(Path(), 0, Questions(task="", data="", count=COUNT, longest_answer=3), canary=canary)
    context: Any = SimpleNamespace(progress=lambda sentence: None)
    return Runs((look,), repeated=again.ask_again(context, CELL, CHAIN, exam, look))


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
