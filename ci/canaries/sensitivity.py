"""What canaries notice: a table with one row for each family, with the default number of questions.

    python ci/canaries/sensitivity.py [FAMILY...] [--questions N] [--gsm8k FOLDER] [--plain]

The hand-over is the oracle's: P computes a prompt, and the script copies its KV to D, corrupted on the way.
A corruption hits every n-th request, counted over all looks, as a wrong connector's would.
`--plain`: with a read-out that is fitted to the right answers and no more.

A cell: how many answers differ from what D answers if it computes the whole prompt itself, of how many that
were hit, in the first look; the change of the score there; what a gate decides that compares the two scores
within 0.05, and what the accuracy tier decides from the answers; of a family with a draft model, how many of
its tokens are accepted, of how many that are if D computes the whole prompt itself.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import NamedTuple

from corruptions import NAMES, OLDER, RIGHT, Corruption, Source, corruptions_of
from tokenizers import Tokenizer

from model_matrix import Family, load_accuracy_matrices, load_families
from model_matrix.canary import Exam, ensure_exam
from model_matrix.canary.readout import MOST_GAIN
from model_matrix.canary.tokenizer import END_ID
from pytest_kvconform.rigs.bench import launch_zygote, wait_for_zygote
from pytest_kvconform.rigs.canary.school import School, engine_for, ensure_canary, read_reports
from pytest_kvconform.rigs.context import Deadlines
from pytest_kvconform.rigs.engine.handle import ModelEngineHandle
from pytest_kvconform.rigs.engine.messages import Request, Snapshot
from pytest_kvconform.rigs.serving import gate
from pytest_kvconform.rigs.serving.messages import AGAIN

IMPORT_S = 180.0
DEADLINES = Deadlines.scaled(5.0)
STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")  # lm-eval's, of its filter strict-match
FIXED = 0.05


class Answer(NamedTuple):
    """What D generated."""

    tokens: tuple[int, ...]  # up to the end token
    accepted: int  # tokens of the draft model among them


class Pair:
    """P and D of one canary."""

    def __init__(self, address: str, family: Family, checkpoint: Path, exam: Exam):
        self.exam, self.asked, self.has_state = exam, 0, family.has_state
        self.layers = family.config["num_hidden_layers"]
        spec = engine_for(family, checkpoint, exam.longest)
        self.p, self.d = (
            ModelEngineHandle(address, f"{family.id}-{role}", spec, DEADLINES.call, DEADLINES.start)
            for role in "PD"
        )
        for engine in (self.p, self.d):
            engine.wait_ready()

    def end(self) -> None:
        """End both engines."""
        for engine in (self.p, self.d):
            engine.end()

    def source(self, question: int) -> Source:
        """What P computes for a question, and what a wrong hand-over takes instead."""
        less = int(self.has_state)  # D computes the last token, and needs the state before it
        return Source(
            tokens=len(self.exam.tokens[question][0]) - 1,
            right=self._snapshot(question, less),
            older=self._snapshot(question, less + OLDER) if self.has_state else None,
            other=self._snapshot((question + 1) % len(self.exam.tokens), less),
            random=Random(f"corruption {question}"),
        )

    def answer(self, question: int, handed: Snapshot | None) -> Answer:
        """What D generates after a hand-over. None: D computes the prompt itself."""
        prompt, answer = self.exam.tokens[question]
        name, tokens = self._ask(self.d, prompt, len(answer), handed)
        end = tokens.index(END_ID) + 1 if END_ID in tokens else None
        return Answer(tokens[:end], self.d.trace(name).accepted)

    def _snapshot(self, question: int, less: int) -> Snapshot:
        """P's KV of a prompt without its last tokens."""
        prompt = self.exam.tokens[question][0]
        name, _ = self._ask(self.p, prompt[: len(prompt) - less], 1, None)
        found = self.p.pop_snapshot(name)
        assert found is not None
        return found

    def _ask(
        self, engine: ModelEngineHandle, prompt: tuple[int, ...], most: int, handed: Snapshot | None
    ) -> tuple[str, tuple[int, ...]]:
        """Run one request. Returns its id and what was generated."""
        self.asked += 1
        name, tokens, ended = f"question-{self.asked}", list[int](), False
        watch = engine is self.p
        if self.has_state:
            engine.poison()  # states of earlier requests in free blocks could be read as NaN
        engine.add(Request(id=name, tokens=prompt, max_tokens=most, oracle=handed, watch=watch))
        while not ended:
            for output in engine.step().outputs:
                tokens += output.tokens
                ended = ended or output.finish is not None
        return name, tuple(tokens)


class Asked:
    """D's answers after one kind of hand-over, in any look. What is asked twice is computed once."""

    def __init__(self, pair: Pair, kind: Corruption, right: list[Answer]):
        """`right`: the answers after a hand-over that this kind does not hit."""
        self._pair, self._kind, self._right, self._hit = pair, kind, right, dict[int, Answer]()

    def look(self, number: int) -> list[Answer]:
        """The answers to all questions in one look, the first of which is 0."""
        first = number * len(self._right)
        return [
            self._answer(question) if (first + question) % self._kind.every == 0 else right
            for question, right in enumerate(self._right)
        ]

    def _answer(self, question: int) -> Answer:
        if question not in self._hit:
            handed = self._kind(self._pair.source(question))
            self._hit[question] = self._pair.answer(question, handed)
        return self._hit[question]


def row_of(pair: Pair, questions: int) -> list[str]:
    """The cells of one family, in the order of NAMES."""
    right, *kinds = corruptions_of(pair.source(0).right, pair.layers)
    alone = [pair.answer(question, None) for question in range(questions)]
    handed = [pair.answer(question, right(pair.source(question))) for question in range(questions)]
    after = {right: Asked(pair, replace(right, every=questions * gate.LOOKS + 1), handed)}
    after |= {kind: Asked(pair, kind, handed) for kind in kinds}
    cells = []
    for name in NAMES:
        of_kinds = [cell(pair, kind, alone, asked) for kind, asked in after.items() if kind.name == name]
        cells.append("; ".join(of_kinds) or "-")
    return cells


def cell(pair: Pair, kind: Corruption, alone: list[Answer], asked: Asked) -> str:
    """How many answers changed, the change of the score, and what both gates decide."""
    after = asked.look(0)
    changed = sum(one.tokens != other.tokens for one, other in zip(after, alone, strict=True))
    hits = sum(question % kind.every == 0 for question in range(len(after))) * (kind.name != RIGHT)
    change = score(pair.exam, after) - score(pair.exam, alone)
    fixed = "passes" if abs(change) <= FIXED else "fails"
    of = f" of {hits}" if hits else ""
    accepted, before = (sum(answer.accepted for answer in answers) for answers in (after, alone))
    drafts = f", drafts {accepted} of {before}" if before else ""
    return f"{kind.kind} {changed}{of}, {change:+.2f}, {fixed}/{paired(alone, asked)}{drafts}".strip()


def score(exam: Exam, answers: list[Answer]) -> float:
    """The part of the answers that lm-eval's strict match takes for right."""
    coder = Tokenizer.from_file(str(exam.folder / "tokenizer.json"))
    texts = [coder.decode(list(answer.tokens)) for answer in answers]
    numbers = zip(*([STRICT.findall(text)[:1] for text in of] for of in (texts, exam.answers)), strict=False)
    return sum(one == other for one, other in numbers) / len(answers)


def paired(alone: list[Answer], asked: Asked) -> str:
    """What the accuracy tier decides. It asks the questions again while the answers tell too little."""
    subject, baseline = dict[int, str](), dict[int, str]()
    for look in range(gate.LOOKS):
        for answers, into in ((asked.look(look), subject), (alone, baseline)):
            into |= {number + AGAIN * look: str(one.tokens) for number, one in enumerate(answers)}
        result = gate.compare_generations(subject, baseline, baseline)
        if not gate.wants_more(result):
            break
    word = {gate.Outcome.PASS: "passes", gate.Outcome.FAIL: "fails"}.get(result.outcome, "cannot tell")
    return word if look == 0 else f"{word} when asked {look + 1} times"


def main() -> int:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("family", nargs="*")
    parser.add_argument("--questions", type=int, default=load_accuracy_matrices().questions["quick"])
    parser.add_argument("--gsm8k")
    parser.add_argument("--plain", action="store_true")
    given = parser.parse_args()
    families = [load_families()[name] for name in given.family or load_families()]
    exam = ensure_exam(given.questions, gsm8k=given.gsm8k)
    zygote = launch_zygote([name for family in families for name in family.architectures])
    try:
        school = School(zygote.address, wait_for_zygote(zygote.address, IMPORT_S)["kernels"], DEADLINES)
        print(f"| family | {' | '.join(NAMES)} |\n|{'---|' * (1 + len(NAMES))}")
        for family in families:
            canary = ensure_canary(school, family, exam, most_gain=0.0 if given.plain else MOST_GAIN)
            pair = Pair(zygote.address, family, canary, exam)
            try:
                print(f"| `{family.id}` | {' | '.join(row_of(pair, given.questions))} |", flush=True)
            finally:
                pair.end()
            print(f"{family.id}: {read_reports(canary)}", file=sys.stderr)
    finally:
        zygote.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
