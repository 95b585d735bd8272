"""The answers of a cell as a file of the report, so that others can check them."""

from __future__ import annotations

import os
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
    """Write a line of JSON for each question of each look, and a `Repeated` for each that was asked alone.

    A reader sees the whole file or none. Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = _file(folder, cell)
    looks = [
        Line(
            question=subject.question % AGAIN,
            look=subject.question // AGAIN,
            subject=subject,
            baselines=(first, second),
        )
        for subject, first, second in zip(runs.subject, *runs.baselines, strict=True)
    ]
    lines = [msgspec.json.encode(line) + b"\n" for line in (*looks, *runs.repeated)]
    unfinished = file.with_suffix(f".{os.getpid()}")
    try:
        unfinished.write_bytes(b"".join(lines))
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)
    return file


def remove_answers(folder: Path, cell: Cell) -> None:
    """Remove the answers of an earlier run. Raises OSError."""
    _file(folder, cell).unlink(missing_ok=True)


def _file(folder: Path, cell: Cell) -> Path:
    return folder / f"answers-{cell}.jsonl"
