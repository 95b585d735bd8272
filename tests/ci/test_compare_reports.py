"""ci/compare_reports.py finds a planted difference, and none where only names and durations differ."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NAMES = {"features": "needs", "case_outcome": "said", "declaration_rule": "against"}


@pytest.fixture(scope="module")
def compare() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare_reports", ROOT / "ci" / "compare_reports.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def result(id: str, **more: Any) -> dict[str, Any]:
    evidence = {
        "looked_at": 29,
        "unit": "blocks",
        "bytes_moved": 8,
        "external_tokens": 3,
        "computed_tokens": 1,
        "notes": {"seconds": 0.1, "late_s": 3.5, "ports": 2},
    }
    plain = {"id": id, "rule": "KV-BLOCKS-001", "outcome": "PASS", "refused": False, "seconds": 0.5}
    named = {"features": ["mla"], "case_outcome": None, "declaration_rule": ""}
    return plain | named | {"evidence": evidence | more.pop("evidence", {})} | more


def write(path: Path, *results: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"results": results}))
    return path


Outcome = tuple[int, list[str]]  # exit code, printed lines


@pytest.fixture
def run(compare: ModuleType, capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    def run_main(*arguments: Path | str) -> Outcome:
        code = compare.main([str(argument) for argument in arguments])
        return code, capsys.readouterr().out.splitlines()

    return run_main


def older(one: dict[str, Any]) -> dict[str, Any]:
    """A result with the names of keys that older reports have."""
    return {NAMES.get(key, key): value for key, value in one.items()}


def test_reports_before_and_after_a_renaming_are_equal(run: Callable[..., Outcome], tmp_path: Path) -> None:
    notes = {"seconds": 9.0, "late_s": 9.0, "ports": 2}
    before = write(tmp_path / "before", older(result("kv::a/old::one[llama-P1D1]")))
    after = write(tmp_path / "after", result("kv::a/new::first[llama-P1D1]", evidence={"notes": notes}))
    renamed = tmp_path / "renamed.tsv"
    renamed.write_text("kv::a/old::one[\tkv::a/old::first[\nkv::a/old::\tkv::a/new::\n")
    assert run(before, after, "--renamed", renamed) == (0, ["1 cases before, 1 after, 0 of them differ"])


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"outcome": "FAIL"}, "outcome: PASS -> FAIL"),
        ({"case_outcome": "FAIL"}, "case_outcome: None -> FAIL"),
        ({"declaration_rule": "KV-DECLARE-001"}, "declaration_rule:  -> KV-DECLARE-001"),
        ({"features": []}, "features: ['mla'] -> []"),
        ({"evidence": {"bytes_moved": 9}}, "bytes_moved: 8 -> 9"),
        ({"evidence": {"looked_at": 0}}, "looked_at: 29 -> 0"),
        ({"evidence": {"notes": {"ports": 3}}}, "note 'ports': 2 -> 3"),
        ({"evidence": {"notes": {}}}, "note 'ports': 2 -> (not there)"),
    ],
)
def test_a_planted_difference_is_printed_and_counted(
    run: Callable[..., Outcome], tmp_path: Path, change: dict[str, Any], line: str
) -> None:
    name = "kv::a/b::c[llama-P1D1]"
    before = write(tmp_path / "before", older(result(name)))
    code, lines = run(before, write(tmp_path / "after", result(name, **change)))
    assert code == 1
    assert lines == [
        f"{name}  {line}",
        "1 cases before, 1 after, 1 of them differ",
        f"  1 x {line.partition(':')[0]}",
    ]


def test_a_case_that_lost_its_evidence_differs(run: Callable[..., Outcome], tmp_path: Path) -> None:
    name = "kv::a/b::c[llama-P1D1]"
    before = write(tmp_path / "before", result(name))
    without = {**result(name), "evidence": None}
    code, lines = run(before, write(tmp_path / "after", without))
    assert code == 1
    assert f"{name}  bytes_moved: 8 -> (not there)" in lines


def test_a_case_of_one_report_alone_differs(run: Callable[..., Outcome], tmp_path: Path) -> None:
    both, gone = result("kv::a/b::both[llama-P1D1]"), result("kv::a/b::gone[llama-P1D1]")
    code, lines = run(write(tmp_path / "before", both, gone), write(tmp_path / "after", both))
    assert code == 1
    assert lines[0] == "kv::a/b::gone[llama-P1D1]  case: (there) -> (not there)"


@pytest.mark.parametrize("text", ["{", "{}", '{"results": [{"id": "x"}]}'])
def test_a_file_that_is_no_report_is_an_error(run: Callable[..., Outcome], tmp_path: Path, text: str) -> None:
    (tmp_path / "bad").write_text(text)
    assert run(tmp_path / "bad", tmp_path / "bad") == (2, [])


def test_a_file_of_renamed_ids_that_is_none_is_an_error(run: Callable[..., Outcome], tmp_path: Path) -> None:
    good = write(tmp_path / "good", result("kv::a/b::c[llama-P1D1]"))
    (tmp_path / "renamed.tsv").write_text("no tab here\n")
    assert run(good, good, "--renamed", tmp_path / "renamed.tsv") == (2, [])
