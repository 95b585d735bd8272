"""ci/loaded_runs.py finds a run whose outcomes differ under load, and ends what it started."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("loaded_runs", ROOT / "ci" / "loaded_runs.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(folder: Path, **outcomes: str) -> None:
    results = [{"id": id, "outcome": outcome} for id, outcome in outcomes.items()]
    word = "VIOLATES" if "FAIL" in outcomes.values() else "CONFORMS"
    (folder / "report.json").write_text(json.dumps({"results": results, "verdict": {"word": word}}))


@pytest.mark.parametrize(("loaded", "code", "says"), [("PASS", 0, "0 of 2 runs"), ("FAIL", 1, "2 of 2 runs")])
def test_outcomes_beside_busy_processes(
    tool: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    loaded: str,
    code: int,
    says: str,
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    make = subprocess.Popen

    def popen(*arguments: Any, **more: Any) -> subprocess.Popen[bytes]:
        started.append(make(*arguments, **more))
        return started[-1]

    def run(command: list[str], **_: Any) -> None:
        running = [one for one in started if one.poll() is None]
        assert all(Path(f"/proc/{one.pid}").exists() and os.getsid(one.pid) == one.pid for one in running)
        outcome = loaded if len(running) == 3 else "PASS"
        write(Path(command[-1].removeprefix("--kv-report=")), fast="PASS", slow=outcome)

    fake = SimpleNamespace(Popen=popen, run=run, STDOUT=subprocess.STDOUT)
    monkeypatch.setattr(tool, "subprocess", fake)
    arguments = ["-n", "2", "--busy", "3", "--keep", str(tmp_path), "--kv-connector=m:C", "-n2"]
    assert tool.main(arguments) == code
    printed = capsys.readouterr().out
    assert "idle: CONFORMS, 2 cases" in printed and says in printed
    assert ("  slow: PASS -> FAIL" in printed) is bool(code)
    assert len(started) == 3 and all(one.poll() is not None for one in started)
