"""One zygote for all tests of this folder that start servers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec
import pytest

import model_matrix.cells
from pytest_kvconform import extras
from pytest_kvconform.rigs.serving import data
from tests.helpers.case_runner import CaseRunner
from tests.helpers.fixtures import fixtures

case_runner, run_cases = fixtures(
    lambda: CaseRunner(
        "tests.wrong_connectors.accuracy.servers", "accuracy", families=("llama", "kimi_k2_5_eagle3")
    ),
    lambda case_runner: partial(case_runner.run, family="llama"),
)


@pytest.fixture(scope="package", autouse=True)
def _installed() -> None:
    """These tests need the extra `accuracy`: a skipped test would prove nothing."""
    if extras.not_installed():
        pytest.fail(f"these tests ask questions: pip install '{extras.EXTRA}'", pytrace=False)


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """questions(16, 1): so many questions, asked so often, in this test."""

    def choose(count: int, looks: int = 1) -> None:
        found = model_matrix.cells.load_accuracy_matrices()
        fewer = msgspec.structs.replace(found, questions=dict.fromkeys(found.questions, count))
        monkeypatch.setattr(data, "load_accuracy_matrices", lambda: fewer)
        monkeypatch.setattr(data, "LOOKS", looks)

    return choose
