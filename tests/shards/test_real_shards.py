"""Shards of a run with vLLM, merged, equal that run."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from pytest_kvconform import cli
from tests.engine.command import Command
from tests.helpers.case_runner import CONFIG
from tests.helpers.fixtures import ROOT, must_be_installed

SHARDS = 2
SELECTION = [
    "--kv-connector=reference_connector:ReferenceConnector",
    f"--kv-declare={ROOT / 'reference_connector' / 'declaration.toml'}",
    f"--kv-config={CONFIG}",
    "--kv-tier=interface,bytes",
    "--kv-family=gemma3",
    "--kv-topology=P1D1",
    "--kv-rule=KV-START-*,KV-GROUPS-*,KV-CAPS-*,KV-BYTES-001",
]


def run(folder: Path, *more: str) -> Path:
    """Run the selection, and return the folder of its report."""
    folder.mkdir()
    command = Command(folder, *SELECTION, *more)
    try:
        assert command.wait().code == 0, command.text
    finally:
        for pid in command.processes():
            os.kill(pid, signal.SIGKILL)
    return folder / "kv-report"


def without_measurements(folder: Path) -> dict[str, Any]:
    """The report without the folder of the report, and without what two runs measure differently."""
    report = json.loads((folder / "report.json").read_bytes())
    for result in report["results"]:
        del result["seconds"]
        result["evidence"] = result["evidence"] and result["evidence"]["bytes_moved"]
    del report["settings"]["report"], report["day"], report["digest"]
    return report


def test_two_shards_merged_equal_the_whole_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    must_be_installed()
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    whole = run(tmp_path / "whole")
    shards = [run(tmp_path / f"{n}", f"--kv-shard={n}/{SHARDS}") for n in range(1, SHARDS + 1)]
    merged = tmp_path / "merged"
    assert cli.main(["merge", *map(str, shards), f"--report={merged}"]) == 0
    assert without_measurements(merged) == without_measurements(whole)
    assert cli.main(["verify", str(merged)]) == 0
    assert "CONFORMS: " in capsys.readouterr().out
