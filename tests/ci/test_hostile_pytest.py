"""ci/release/hostile_pytest.py on the small suite: the wheel, in an empty folder and in a hostile project."""

from __future__ import annotations

import importlib.util
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from tests.small_suite.runs import HERE, declare

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with an environment of the pytest that is installed here: others would need a network."""
    script = ROOT / "ci" / "release" / "hostile_pytest.py"
    spec = importlib.util.spec_from_file_location("hostile_pytest", script)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def make_environment(folder: Path, pytest: str, wheel: Path) -> Path:
        zipfile.ZipFile(wheel).extractall(folder / "site")
        python = folder / "python"
        path = f"PYTHONPATH='{folder / 'site'}:{HERE}'"
        plugins = "-p pytest_kvconform.plugin -p xdist.plugin"
        python.write_text(f'#!/bin/sh\nshift 2\n{path} exec "{sys.executable}" -m pytest {plugins} "$@"\n')
        python.chmod(0o755)
        return python

    monkeypatch.setattr(module, "make_environment", make_environment)
    monkeypatch.setenv("_KVCONFORM_TEST_PACKAGE", "fakekv")
    monkeypatch.setenv("FAKEKV", '{"window(gemma3-P1D2*": "violate"}')
    monkeypatch.setenv("KVCONFORM_DECLARE", str(declare(tmp_path / "declared.toml", {})))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    for name in ("PYTEST_ADDOPTS", "GITHUB_STEP_SUMMARY", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_TESTRUNUID"):
        monkeypatch.delenv(name, raising=False)
    return module


def test_the_wheel_judges_alike_in_every_folder(tool, tmp_path, monkeypatch, capfd) -> None:
    command = ["hostile_pytest.py", "--pytest", "9", "--keep", str(tmp_path / "kept"), "--kv-connector=m:C"]
    monkeypatch.setattr(sys, "argv", command)
    assert tool.main() == 0
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("pytest 9")]
    assert [line.partition(": ")[2] for line in lines] == 4 * ["exit code 1, VIOLATES, 13 results"]
    output = (tmp_path / "kept" / "hostile-9-0" / "output").read_text()
    assert "left 12 cases out, which run nevertheless" in output


def test_what_differs_is_named(tool) -> None:
    whole = 1, ["a", "b"], ["a", "b"], {"a": "PASS", "b": "FAIL"}, "VIOLATES"
    part = 0, ["a", "b"], ["a"], {"a": "PASS"}, "CONFORMS"
    assert tool.differences(whole, whole) == []
    named = ["exit code", "selection", "outcomes", "verdict", "b is FAIL in one of them"]
    assert tool.differences(whole, part) == named
