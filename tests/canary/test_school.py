"""A canary is taught on a real engine: it answers right, and otherwise if one block of its KV is missing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from model_matrix import load_families
from model_matrix.canary import Exam, ensure_exam
from pytest_kvconform.rigs.bench import launch_zygote, wait_for_zygote
from pytest_kvconform.rigs.canary.school import School, engine_for, ensure_canary, read_reports
from pytest_kvconform.rigs.context import Deadlines
from pytest_kvconform.rigs.engine.handle import ModelEngineHandle
from pytest_kvconform.rigs.engine.messages import Request, Snapshot

LLAMA = load_families()["llama"]


@pytest.fixture(scope="module")
def school() -> Iterator[School]:
    zygote = launch_zygote(LLAMA.architectures)
    try:
        kernels = wait_for_zygote(zygote.address, 180)["kernels"]
        yield School(zygote.address, kernels, Deadlines.scaled(5))
    finally:
        zygote.close()


@pytest.fixture(scope="module")
def exam(tmp_path_factory: pytest.TempPathFactory) -> Exam:
    return ensure_exam(8, cache_dir=tmp_path_factory.mktemp("exam"))


@pytest.fixture(scope="module")
def canary(school: School, exam: Exam, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_canary(school, LLAMA, exam, cache_dir=tmp_path_factory.mktemp("canary"))


@pytest.fixture(scope="module")
def engine(school: School, exam: Exam, canary: Path) -> Iterator[ModelEngineHandle]:
    spec = engine_for(LLAMA, canary, exam.longest)
    engine = ModelEngineHandle(school.address, "asked", spec, school.deadlines.call, school.deadlines.start)
    try:
        engine.wait_ready()
        yield engine
    finally:
        engine.end()


def ask(
    engine: ModelEngineHandle, name: str, prompt: tuple[int, ...], most: int, handed: Snapshot | None = None
) -> tuple[int, ...]:
    engine.poison()
    engine.add(Request(id=name, tokens=prompt, max_tokens=most, watch=True, oracle=handed))
    tokens, ended = list[int](), False
    while not ended:
        for output in engine.step().outputs:
            tokens += output.tokens
            ended = ended or output.finish is not None
    return tuple(tokens)


def test_the_folder_is_a_model_with_its_questions(canary: Path, exam: Exam) -> None:
    config = json.loads((canary / "config.json").read_bytes())
    assert (config["vocab_size"], config["tie_word_embeddings"]) == (exam.vocabulary, False)
    for name in ("tokenizer.json", "tokenizer_config.json", "test.jsonl", "train.jsonl"):
        assert (canary / name).read_bytes() == (exam.folder / name).read_bytes()
    report = read_reports(canary)["model"]
    assert report.states == sum(len(answer) for _, answer in exam.tokens)
    assert report.noise <= 1e-5 * report.length  # float32


def test_it_is_taught_once(school: School, exam: Exam, canary: Path) -> None:
    closed = School("/nowhere", school.kernels, school.deadlines)  # it could not start a teacher
    assert ensure_canary(closed, LLAMA, exam, cache_dir=canary.parents[2]) == canary


def test_it_answers_right(engine: ModelEngineHandle, exam: Exam) -> None:
    for number, (prompt, answer) in enumerate(exam.tokens):
        assert ask(engine, f"alone-{number}", prompt, len(answer)) == answer


def test_it_notices_one_block_of_one_layer(engine: ModelEngineHandle, exam: Exam) -> None:
    noticed, block = 0, LLAMA.block_size
    for number, (prompt, answer) in enumerate(exam.tokens):
        ask(engine, f"P-{number}", prompt[:-1], 1)
        right = engine.pop_snapshot(f"P-{number}")
        assert right is not None
        assert ask(engine, f"right-{number}", prompt, len(answer), right) == answer
        layer = sorted(right.rows)[number % len(right.rows)]
        rows = np.array(right.rows[layer])
        rows[2 * block : 3 * block] = 0
        wrong = msgspec.structs.replace(right, rows=right.rows | {layer: rows})
        noticed += ask(engine, f"wrong-{number}", prompt, len(answer), wrong) != answer
    assert noticed == len(exam.tokens)
