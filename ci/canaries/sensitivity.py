"""What canaries notice: a table with one row for each family, with the default number of questions.

    python ci/canaries/sensitivity.py [FAMILY...] [--questions N] [--gsm8k FOLDER] [--plain]

The hand-over is the oracle's: P computes a prompt, and the script copies its KV to D, corrupted on the way.
A corruption hits every n-th request, counted over all looks, or each request of the first question, as a
wrong connector's would.
`--plain`: with a read-out that is fitted to the right answers and no more.

A cell: how many answers differ from what D answers if it computes the whole prompt itself, of how many that
were hit, in the first look; the change of the score there; what a gate decides that compares the two scores
within 0.05, and what the accuracy tier decides from the answers; of a family with a draft model, how many of
its tokens are accepted, of how many that are if D computes the whole prompt itself.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
from random import Random

from corruptions import NAMES, OLDER, RIGHT, Corruption, Source, corruptions_of

from model_matrix import load_accuracy_matrices, load_families
from model_matrix.canary import Exam, ensure_exam
from model_matrix.canary.readout import MOST_GAIN
from pytest_kvconform.rigs.bench import launch_zygote, wait_for_zygote
from pytest_kvconform.rigs.canary.oracle import Answer, Oracle
from pytest_kvconform.rigs.canary.school import School, ensure_canary, read_reports
from pytest_kvconform.rigs.context import Deadlines
from pytest_kvconform.rigs.engine.messages import Snapshot
from pytest_kvconform.rigs.serving import gate
from pytest_kvconform.rigs.serving.messages import AGAIN

IMPORT_S = 180.0
DEADLINES = Deadlines.scaled(5.0)
STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")  # lm-eval's, of its filter strict-match
FIXED = 0.05


class Pair:
    """P and D of one canary, and P's KV of each question, which is computed once."""

    def __init__(self, oracle: Oracle):
        self.oracle, self.exam = oracle, oracle.exam
        self.handed_over = functools.cache(oracle.handed_over)

    def source(self, question: int) -> Source:
        """What P computes for a question, and what a wrong hand-over takes instead."""
        right = self.handed_over(question)
        return Source(
            tokens=len(self.exam.tokens[question][0]) - 1,
            right=right,
            older=self.handed_over(question, OLDER) if right.state else None,
            other=self.handed_over((question + 1) % len(self.exam.tokens)),
            random=Random(f"corruption {question}"),
        )

    def answer(self, question: int, handed_over: Snapshot | None) -> Answer:
        """What D generates. None: it computes the whole prompt."""
        [answer] = self.oracle.answers(question, handed_over)
        return answer


class Asked:
    """D's answers through a connector that makes one kind of mistake. What is hit twice is computed once."""

    def __init__(self, pair: Pair, kind: Corruption, right: list[Answer]):
        """`right`: the answers after a hand-over that this kind does not hit."""
        self.kind, self.right, self.requests, self.hits = kind, right, 0, 0
        self._hit = functools.cache(lambda question: pair.answer(question, kind(pair.source(question))))

    def ask(self, question: int) -> Answer:
        """D's answer to one more request."""
        hit = question == 0 if self.kind.every is None else self.requests % self.kind.every == 0
        self.requests, self.hits = self.requests + 1, self.hits + hit
        return self._hit(question) if hit else self.right[question]

    def look(self) -> list[Answer]:
        """D's answers to all questions."""
        return [self.ask(question) for question in range(len(self.right))]


def row_of(pair: Pair, questions: int) -> list[str]:
    """The cells of one family, in the order of NAMES."""
    alone = [pair.answer(question, None) for question in range(questions)]
    handed = [pair.answer(question, pair.handed_over(question)) for question in range(questions)]
    cells = {name: list[str]() for name in NAMES}
    for kind in corruptions_of(pair.handed_over(0), pair.oracle.layers):
        cells[kind.name].append(cell(pair.exam, alone, Asked(pair, kind, handed)))
    return ["; ".join(of_kinds) or "-" for of_kinds in cells.values()]


def cell(exam: Exam, alone: list[Answer], asked: Asked) -> str:
    """How many answers changed, the change of the score, and what both gates decide."""
    after, kind = asked.look(), asked.kind
    changed = sum(one.tokens != other.tokens for one, other in zip(after, alone, strict=True))
    of = f" of {asked.hits}" if kind.name != RIGHT else ""
    change = score(exam, after) - score(exam, alone)
    fixed = "passes" if abs(change) <= FIXED else "fails"
    accepted, before = (sum(answer.accepted for answer in answers) for answers in (after, alone))
    drafts = f", drafts {accepted} of {before}" if before else ""
    verdict = f"{fixed}/{paired(alone, after, asked)}"
    return f"{kind.kind} {changed}{of}, {change:+.2f}, {verdict}{drafts}".strip()


def score(exam: Exam, answers: list[Answer]) -> float:
    """The part of the answers that lm-eval's strict match takes for right."""
    texts = [exam.text(answer.tokens) for answer in answers]
    numbers = zip(*([STRICT.findall(text)[:1] for text in of] for of in (texts, exam.answers)), strict=False)
    return sum(one == other for one, other in numbers) / len(answers)


def paired(alone: list[Answer], after: list[Answer], asked: Asked) -> str:
    """What the accuracy tier decides. `after`: the answers of the first look.

    It asks odd questions again alone, and all questions while the answers tell too little.
    """
    subject, baseline = keyed(after, 0), keyed(alone, 0)
    result, look = gate.compare_generations(subject, baseline, baseline), 0
    if gate.wants_more(result):
        for question in gate.odd_questions(subject, baseline, baseline):
            again = [asked.ask(question) for _ in range(gate.AGAIN_ALONE)]
            got = [str(one.tokens) for one in (after[question], *again)]
            p = gate.compare_one_question(got, [baseline[question]] * 2 * len(got), len(after))
            if p <= gate.alpha() and asked.right[question].tokens == alone[question].tokens:
                return f"fails when asked {len(got)} times alone"
    while gate.wants_more(result) and look < gate.LOOKS - 1:
        look += 1
        subject |= keyed(asked.look(), look)
        baseline |= keyed(alone, look)
        result = gate.compare_generations(subject, baseline, baseline)
    word = {gate.Outcome.PASS: "passes", gate.Outcome.FAIL: "fails"}.get(result.outcome, "cannot tell")
    return word if look == 0 else f"{word} when asked {look + 1} times"


def keyed(answers: list[Answer], look: int) -> dict[int, str]:
    """The answers of a look as the gate takes them."""
    return {number + AGAIN * look: str(one.tokens) for number, one in enumerate(answers)}


def main() -> int:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("family", nargs="*")
    parser.add_argument("--questions", type=int, default=load_accuracy_matrices().questions["quick"])
    parser.add_argument("--gsm8k")
    parser.add_argument("--plain", action="store_true")
    given = parser.parse_args()
    families = [load_families()[name] for name in given.family or load_accuracy_matrices().quick]
    exam = ensure_exam(given.questions, gsm8k=given.gsm8k)
    zygote = launch_zygote([name for family in families for name in family.architectures])
    try:
        school = School(zygote.address, wait_for_zygote(zygote.address, IMPORT_S)["kernels"], DEADLINES)
        print(f"| family | {' | '.join(NAMES)} |\n|{'---|' * (1 + len(NAMES))}")
        for family in families:
            canary = ensure_canary(school, family, exam, most_gain=0.0 if given.plain else MOST_GAIN)
            with Oracle(school, family, canary, exam) as oracle:
                print(f"| `{family.id}` | {' | '.join(row_of(Pair(oracle), given.questions))} |", flush=True)
            print(f"{family.id}: {read_reports(canary)}", file=sys.stderr)
    finally:
        zygote.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
