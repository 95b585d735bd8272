"""The answers of a cell as a file of the report, so that others can check them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pytest_kvconform.result import Cell
from pytest_kvconform.rigs.serving.messages import AGAIN, Answer
from pytest_kvconform.rigs.serving.observation import Runs


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One question, asked three times."""

    question: int  # its place in the data
    look: int  # 1 and more: the question was asked again
    subject: Answer
    baselines: tuple[Answer, Answer]


def write_answers(runs: Runs, folder: Path, cell: Cell) -> Path:
    """Write a line of JSON for each question. Returns the file. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"answers-{cell}.jsonl"
    answers = zip(runs.subject.answers, *(run.answers for run in runs.baselines), strict=True)
    lines = [
        Line(
            question=subject.question % AGAIN,
            look=subject.question // AGAIN,
            subject=subject,
            baselines=(first, second),
        )
        for subject, first, second in answers
    ]
    file.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    return file
