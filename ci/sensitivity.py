"""What canaries notice: one row a family and corruption, with the default number of questions.

    python ci/sensitivity.py [FAMILY...] [--questions N] [--gsm8k FOLDER] [--plain]

The hand-over is the oracle's: P computes a prompt, and the script copies its KV to D, corrupted on the way.
`--plain`: with a read-out that is fitted to the right answers and no more.

"baseline differs": questions that D answers otherwise if it computes the whole prompt itself. "±0.05": what a
gate decides that compares the two scores. "paired": what the accuracy tier decides from the generations.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

from corruptions import OLDER, Source, corruptions_of
from tokenizers import Tokenizer

from model_matrix import Family, load_families
from model_matrix.canary import Exam, ensure_exam
from model_matrix.canary.exam import QUESTIONS
from model_matrix.canary.questions import NUMBER
from model_matrix.canary.readout import MOST_GAIN
from model_matrix.canary.tokenizer import END_ID
from pytest_kvconform.rigs.bench import launch_zygote, wait_for_zygote
from pytest_kvconform.rigs.canary.school import School, ensure_canary, read_report, teacher_spec
from pytest_kvconform.rigs.context import Deadlines
from pytest_kvconform.rigs.engine.handle import ModelEngineHandle
from pytest_kvconform.rigs.engine.messages import Request, Snapshot

IMPORT_S = 180.0
DEADLINES = Deadlines.scaled(5.0)
STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")  # lm-eval's, of its filter strict-match
FIXED = 0.05
ODD, ALPHA = 1 / 3, 0.005


class Pair:
    """P and D of one canary."""

    def __init__(self, address: str, family: Family, checkpoint: Path, exam: Exam):
        self.exam, self.asked, self.has_state = exam, 0, family.has_state
        spec = teacher_spec(family, checkpoint, exam.longest)
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
        return Source(
            right=self._snapshot(question, 1),
            older=self._snapshot(question, 1 + OLDER) if self.has_state else None,
            other=self._snapshot((question + 1) % len(self.exam.tokens), 1),
            random=Random(f"corruption {question}"),
        )

    def answer(self, question: int, handed: Snapshot | None) -> tuple[int, ...]:
        """What D generates after a hand-over, up to the end token. None: D computes the prompt itself."""
        prompt, answer = self.exam.tokens[question]
        _, tokens = self._ask(self.d, prompt, len(answer), handed)
        return tokens[: tokens.index(END_ID) + 1] if END_ID in tokens else tokens

    def _snapshot(self, question: int, less: int) -> Snapshot:
        """P's KV of a prompt without its last tokens."""
        name, _ = self._ask(self.p, self.exam.tokens[question][0][:-less], 1, None)
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
        engine.poison()  # states of earlier requests in the free blocks could be read as NaN
        engine.add(Request(id=name, tokens=prompt, max_tokens=most, oracle=handed, watch=watch))
        while not ended:
            for output in engine.step().outputs:
                tokens += [] if output.token is None else [output.token]
                ended = ended or output.finish is not None
        return name, tuple(tokens)


def table_of(pair: Pair, questions: int) -> Iterator[str]:
    """Yield the rows of the table, each a corruption's."""
    coder = Tokenizer.from_file(str(pair.exam.folder / "tokenizer.json"))

    def score(answers: list[tuple[int, ...]]) -> float:
        """The part of the answers that lm-eval's strict match takes for right."""
        found = [STRICT.search(coder.decode(list(answer))) for answer in answers]
        numbers = [NUMBER.search(answer)[1] for answer in pair.exam.answers]  # type: ignore[index]
        return (
            sum(one is not None and one[1] == n for one, n in zip(found, numbers, strict=False)) / questions
        )

    alone = [pair.answer(question, None) for question in range(questions)]
    kinds = list(corruptions_of(pair.source(0).right))
    after: dict[str, list[tuple[int, ...]]] = {kind.name: [] for kind in kinds}
    for question in range(questions):
        source = pair.source(question)
        for kind in kinds:
            hit = question % kind.every == 0
            after[kind.name].append(
                pair.answer(question, kind(source)) if hit else after[kinds[0].name][question]
            )
    for kind in kinds:
        hits = len(range(0, questions, kind.every)) if kind is not kinds[0] else 0
        changed = sum(one != other for one, other in zip(after[kind.name], alone, strict=True))
        before, now = score(alone), score(after[kind.name])
        fixed = "passes" if abs(now - before) <= FIXED + 1e-9 else "fails"
        yield f"{kind.name} | {hits} | {changed} | {before:.3f} | {now:.3f} | {fixed} | {paired(changed)}"


def paired(changed: int) -> str:
    return (
        "passes"
        if not changed
        else f"fails (p = {ODD**changed:.0e})"
        if ODD**changed < ALPHA
        else "asks more"
    )


def main() -> int:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("family", nargs="*")
    parser.add_argument("--questions", type=int, default=QUESTIONS)
    parser.add_argument("--gsm8k")
    parser.add_argument("--plain", action="store_true")
    given = parser.parse_args()
    families = [load_families()[name] for name in given.family or load_families()]
    exam = ensure_exam(given.questions, gsm8k=given.gsm8k)
    zygote = launch_zygote([name for family in families for name in family.config["architectures"]])
    try:
        school = School(zygote.address, wait_for_zygote(zygote.address, IMPORT_S)["kernels"], DEADLINES)
        print("| family | corruption | hit | changed | score before | score | ±0.05 | paired |")
        print("|---|---|---|---|---|---|---|---|")
        for family in families:
            canary = ensure_canary(school, family, exam, most_gain=0.0 if given.plain else MOST_GAIN)
            pair = Pair(zygote.address, family, canary, exam)
            try:
                for row in table_of(pair, given.questions):
                    print(f"| {family.id} | {row} |", flush=True)
            finally:
                pair.end()
            print(f"{family.id}: {read_report(canary)}", file=sys.stderr)
    finally:
        zygote.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
