"""docs/connectors.md says what the runs of ci/connectors/run.py gave, for every connector that there is."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from pytest_kvconform.declarations import bundled_declarations

ROOT = Path(__file__).parents[2]


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "ci" / "connectors")
    return importlib.import_module("page")


@pytest.fixture
def runs(page: ModuleType) -> ModuleType:
    return importlib.import_module("run")


def test_the_page_is_of_the_last_runs(page: ModuleType) -> None:
    _, now, _ = page.split(page.PAGE.read_text(encoding="utf-8"))
    assert now == page.part(), "docs/connectors.md is out of date: python ci/connectors/page.py"


def test_every_connector_is_on_the_page(page: ModuleType) -> None:
    """NixlConnector is another name of NixlPullConnector."""
    ours = {name for name, one in bundled_declarations().items() if not one.exempt} - {"NixlConnector"}
    listed = page.listed()
    assert ours <= set(listed)
    assert set(json.loads(page.ROWS.read_bytes())) <= set(listed)


def test_commands_are_those_of_make(page: ModuleType) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for name, entry in page.listed().items():
        words = page.command(name, entry)
        assert all(f"{word.partition('=')[0]} ?=" in makefile for word in words[2:])
        if extra := entry.get("with"):
            assert f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_a_row_counts_a_report(runs: ModuleType) -> None:
    def result(name: str, outcome: str, reason: str = "", **more: object) -> dict[str, object]:
        one = {"id": f"kv::bytes/pool::{name}[a-P1D1]", "outcome": outcome, "rule": "R", "reason": reason}
        one["depends_on"] = reason.removeprefix("depends on ")
        return one | {"declaration_rule": "", "finding": None} | more

    results = [
        result("a", "PASS"),
        result("b", "FAIL", finding={"rule": "S"}),
        result("e", "WARNING", declaration_rule="D", finding={"rule": "S"}),
        result("c", "BLOCKED", "depends on kv::bytes/handover::completes[a-P1D1-n2]"),
        result("d", "BLOCKED", "depends on kv::bytes/handover::completes[a-P1D1-n15]"),
    ]
    report = {"results": results, "environment": {"vllm": "0.32.0"}, "verdict": {"word": "VIOLATES"}}
    assert runs.row(report, 12.4) == {
        "vllm": "0.32.0",
        "seconds": 12,
        "verdict": "VIOLATES",
        "cores": len(os.sched_getaffinity(0)),
        "tiers": {"bytes": {"BLOCKED": 2, "FAIL": 1, "PASS": 1, "WARNING": 1}},
        "rules": {"D": 1, "S": 1},
        "blocked": {"depends on another case": 2},
    }


def test_an_unknown_connector_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "ci" / "connectors" / "run.py", "NixlConector"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("NixlConector is none of those that can be run: NixlPullConnector, ")


@pytest.mark.parametrize(("outcome", "code"), [("PASS", 0), ("BLOCKED", 1)])
def test_a_run_without_its_package_leaves_the_row(
    runs: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    outcome: str,
    code: int,
) -> None:
    rows, name = tmp_path / "rows.json", "MooncakeConnector"
    rows.write_text(json.dumps({name: "kept"}))
    monkeypatch.setattr(runs, "ROWS", rows)
    found = {"verdict": "V", "seconds": 1, "tiers": {"bytes": {outcome: 9}}, "blocked": {"no library": 9}}
    monkeypatch.setattr(runs, "run", lambda *_: found)
    assert runs.main([name, "--out", str(tmp_path)]) == code
    assert json.loads(rows.read_text())[name] == ("kept" if code else found)
    assert ("no case could run: no library" in capsys.readouterr().out) == bool(code)
