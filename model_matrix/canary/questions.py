"""Questions: grade-school word problems in gsm8k's format, drawn from gsm8k or made from a seed.

A folder of questions has `test.jsonl` and `train.jsonl`, one JSON object a line: `question`, and `answer`,
which ends in "#### 42". lm-eval's task gsm8k asks the former and takes its few-shot examples from the latter.
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from random import Random

import msgspec

TEST, TRAIN = "test.jsonl", "train.jsonl"
EXAMPLES = 64  # train examples, of which lm-eval draws five for each question
# Most characters that a line of gsm8k adds to a prompt, if it is drawn: six short ones make a cheap prompt.
LONGEST = {TEST: 250, TRAIN: 210}
NUMBER = re.compile(r"#### (\d{1,3})\s*$")  # answers of other forms are not drawn

NAMES = "Ann Ben Cleo Dan Eva Finn Gina Hugo Ida Jack Kira Leo Mia Noah Olga Paul".split()
THINGS = "apples books coins cards eggs flowers marbles pencils shells stamps".split()
OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}
# A text, and the steps to its answer. a, b and c are numbers with a > b > c; r is the result of the step
# before.
TEMPLATES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "{x} has {a} {t}. {y} gives {x} {b} more, and {x} loses {c}. How many {t} does {x} have now?",
        ("a + b", "r - c"),
    ),
    (
        "{x} had {a} {t} and buys {b} boxes with {c} {t} in each. How many {t} does {x} have now?",
        ("b * c", "r + a"),
    ),
    (
        "{x} has {a} {t}, and {y} has {b} fewer. {x} loses {c}. How many {t} do they have together?",
        ("a - b", "r + a", "r - c"),
    ),
    (
        "{x} packs {c} bags of {a} {t} each. {y} takes {b} {t} out. How many {t} are left in the bags?",
        ("c * a", "r - b"),
    ),
    (
        "A box of {t} costs {c} dollars. {x} buys {b} boxes, {y} buys {a}. How many dollars do they pay?",
        ("a + b", "r * c"),
    ),
)


class QuestionsError(ValueError):
    """Error: questions cannot be read. The message names the file, the line and the reason."""


class Question(msgspec.Struct, frozen=True):
    """One line of a file of questions."""

    question: str
    answer: str  # the steps, and "#### 42" as the last line

    @property
    def number(self) -> str:
        """The number after "####"; "" for one that is not a whole number of at most three digits."""
        found = NUMBER.search(self.answer)
        return found[1] if found else ""


def make_questions(count: int, seed: int = 0) -> dict[str, list[Question]]:
    """Return `count` questions and EXAMPLES examples, made from a seed: file -> lines.

    The questions differ in their answers, up to some 300 questions.
    """
    random = Random(f"questions {seed}")
    return {
        TEST: _with_different_answers(islice(_made(random), 20 * count))[:count],
        TRAIN: list(islice(_made(random), EXAMPLES)),
    }


def draw_questions(folder: str | os.PathLike[str], count: int, seed: int = 0) -> dict[str, list[Question]]:
    """Return questions and examples drawn from gsm8k's files in a folder: file -> lines.

    The questions differ in their answers as far as possible, so that an answer to another one is wrong.
    Raises QuestionsError if a file is missing, has a wrong line, or has too few questions that are short.
    """
    drawn = {}
    for name, wanted in ((TEST, count), (TRAIN, EXAMPLES)):
        lines = [
            line
            for line in read_questions(Path(folder) / name)
            if line.number and len(line.question + line.answer * (name == TRAIN)) <= LONGEST[name]
        ]
        Random(f"{name} {seed}").shuffle(lines)
        drawn[name] = _with_different_answers(lines)[:wanted] if name == TEST else lines[:wanted]
        if len(drawn[name]) < wanted:
            raise QuestionsError(
                f"{Path(folder) / name} has {len(drawn[name])} lines that are short and end in a number, "
                f"and {wanted} are needed: give the whole of gsm8k, or ask for fewer questions"
            )
    return drawn


def read_questions(file: Path) -> list[Question]:
    """Return the lines of a file of questions. Raises QuestionsError that names the line that is wrong."""
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise QuestionsError(f"cannot read {file}: {error.strerror or error}") from error
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(question := msgspec.json.decode(line, type=Question))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise QuestionsError(f"{file}, line {number}: {error}") from error
        if "####" not in question.answer:
            raise QuestionsError(f'{file}, line {number}: the answer has no "####" with the number behind it')
    if not found:
        raise QuestionsError(f"{file} has no line")
    return found


def _made(random: Random) -> Iterator[Question]:
    """Yield questions without end."""
    while True:
        text, steps = random.choice(TEMPLATES)
        words = dict(zip("xy", random.sample(NAMES, 2), strict=True), t=random.choice(THINGS))
        numbers = {"a": random.randint(20, 99), "b": random.randint(10, 19), "c": random.randint(2, 9)}
        worked = []
        for step in steps:
            left, sign, right = step.split()
            result = OPERATIONS[sign](numbers[left], numbers[right])
            worked.append(f"{numbers[left]} {sign} {numbers[right]} = {result}.")
            numbers["r"] = result
        answer = f"{' '.join(worked)}\n#### {numbers['r']}"
        yield Question(question=text.format(**words, **numbers), answer=answer)


def _with_different_answers(questions: Iterable[Question]) -> list[Question]:
    """The questions in another order: one for each answer first, then the others."""
    firsts: dict[str, Question] = {}
    others = [question for question in questions if firsts.setdefault(question.number, question) != question]
    return [*firsts.values(), *others]
