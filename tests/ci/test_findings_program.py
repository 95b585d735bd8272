"""ci/findings.py: which commands a finding has, and what their outcomes show."""

from __future__ import annotations

import importlib.util
import tomllib
from types import ModuleType

import pytest

from pytest_kvconform.rigs.vllm_setup.compat import SUPPORTED
from tests.helpers.fixtures import ROOT

PAGE = """# Findings
## A: the first
```console
pytest --kv-connector=A --kv-matrix=full \\
    'kv::bytes/pool::arrives[x-P1D1-n1]' kv::engine/handover
pytest --kv-connector=A --kv-rule=KV-A-001
pytest --kv-connector=reference_connector:ReferenceConnector kv::bytes/pool
```
## B: the second
```python
print("one")
print("two")
```
```text
one
```
## C: the third
"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("findings", ROOT / "ci" / "findings.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_finding_has_the_cases_of_its_commands(script: ModuleType) -> None:
    sections = script.sections(PAGE)
    assert list(sections) == ["A: the first", "B: the second", "C: the third"]
    options = ("--kv-connector=A", "--kv-matrix=full")
    assert script.cases(sections["A: the first"]) == [
        (options, "kv::bytes/pool::arrives[x-P1D1-n1]"),
        (options, "kv::engine/handover"),
    ]
    assert [script.needs_model(id) for _, id in script.cases(sections["A: the first"])] == [False, True]


@pytest.mark.parametrize(
    ("outcome", "notes", "answer"),
    [
        ("FAIL", {}, "seen"),
        ("WARNING", {}, "seen"),
        ("PASS", {}, "not seen"),
        ("PASS", {"refused": 2}, "seen"),
        ("PASS", {"refused": 0}, "not seen"),
        ("BLOCKED", {}, "blocked"),
        ("NOT-APPLICABLE", {}, "blocked"),
        ("HARNESS", {}, "blocked"),
    ],
)
def test_what_a_case_shows(script: ModuleType, outcome: str, notes: dict[str, float], answer: str) -> None:
    outcomes = {"kv::bytes/pool::arrives[x]": (outcome, notes), "kv::bytes/pool::other[x]": ("FAIL", {})}
    assert script.judge_case(outcomes, "kv::bytes/pool::arrives[x]", "refused") == answer
    assert script.judge_case(outcomes, "kv::bytes/pool", "refused") == "seen"


@pytest.mark.parametrize(
    ("parts", "answer"),
    [
        (["seen", "needs kernels"], "seen"),
        (["not seen", "not seen", "blocked"], "not seen"),
        (["seen", "not seen", "seen"], "seen in 2 of 3"),
        (["needs kernels"], "needs kernels"),
        (["blocked", "blocked"], "blocked"),
        ([], "no such command"),
    ],
)
def test_one_answer_for_several_commands(script: ModuleType, parts: list[str], answer: str) -> None:
    assert script.together(parts) == answer


@pytest.mark.parametrize(
    ("shown", "answer"), [("two\n", "seen"), ("three\n", "not seen"), ("one\ntwo\n", "seen")]
)
def test_a_program_prints_what_the_page_shows(
    script: ModuleType, shown: str, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "PREAMBLE", "")
    assert script.run_program("print('one'); print('two')", shown) == answer
    assert script.run_program("raise ImportError", shown) == "blocked"


def test_what_needs_kernels_is_not_run_without(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def run(options: tuple[str, ...], ids: list[str]) -> dict[str, tuple[str, dict[str, float]]]:
        ran.append(ids)
        return {id: ("FAIL" if "bytes" in id else "PASS", {}) for id in ids}

    monkeypatch.setattr(script, "run_cases", run)
    monkeypatch.setattr(script, "run_program", lambda code, shown: "blocked")
    sections = script.sections(PAGE)
    without, with_kernels = (list(script.look(sections, kernels).values()) for kernels in (False, True))
    assert without == ["seen", "needs kernels", "no such command"]
    assert with_kernels == ["seen in 1 of 2", "blocked", "no such command"]
    assert [len(ids) for ids in ran] == [1, 2]


def test_the_record_keeps_other_minors(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    (tmp_path / "findings.md").write_text(PAGE)
    monkeypatch.setattr(script, "PAGE", tmp_path / "findings.md")
    monkeypatch.setattr(script, "RECORD", tmp_path / "findings.toml")
    script.record("0.33", {"A: the first": "seen"})
    script.record("0.32", {"A: the first": "not seen", "B: the second": "seen"})
    assert tomllib.loads((tmp_path / "findings.toml").read_text()) == {
        "A: the first": {"0.32": "not seen", "0.33": "seen"},
        "B: the second": {"0.32": "seen"},
        "C: the third": {},
    }


def test_the_record_has_every_finding_of_the_page_and_supported_minors(script: ModuleType) -> None:
    seen = tomllib.loads(script.RECORD.read_text(encoding="utf-8"))
    assert list(seen) == list(script.sections(script.PAGE.read_text(encoding="utf-8")))
    assert {minor for row in seen.values() for minor in row} <= {minor.rstrip(".") for minor in SUPPORTED}
    assert [name for name, row in seen.items() if "0.33" not in row] == []
