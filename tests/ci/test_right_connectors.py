"""right.toml lists every right connector. ci/right_connectors.py runs the suite on each."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from pytest_kvconform.declaration import read
from tests.helpers.fixtures import ROOT, must_be_installed

SCRIPT = ROOT / "ci" / "right_connectors.py"
HERE = ROOT / "tests" / "right_connectors"
# Classes that no run needs: bases, the wrong connectors beside the right ones, and those that know one rank
# or one kind of layers, of which scripted workers cannot report all, or wait for what these cannot say, or
# that load too little beside a fault, or for an answer to show something, or are wrong inside MultiConnector,
# or slow. tests/wrong_connectors, test_reuse.py and test_bookkeeping.py run the cases for which they are
# there.
BASES = {"Right", "StopsElsewhere", "LessOfSome", "OtherHalf", "CarefulPull"}
WRONG = {
    "MovesNothing",
    "OneContextAndAThread",
    "ReplacesOnce",
    "ThreadOfEachEngine",
    "ThreadEndsLate",
    "TrackedAndAProcess",
    "LeavesAFork",
    "LongerMemory",
    "HoldsBlocksForEver",
    "FindsNothing",
    "KeepsWhatTheLastStepLacks",
    "HearsNothing",
    "HearsOfEndsOfP",
    "MeetsNobody",
    "LosesALookup",
    "SaysNothing",
    "CopiesNothing",
    "ThreadForStates",
    "SaysThatItLoaded",
    "SaysNothingOfIt",
    "KeepsWhatItTold",
    "KeepsBaseIds",
    "KeepsRecomputed",
    "EndsWhatIsOrdered",
    "ForgetsSends",
    "TakesOutLoads",
    "BatchesWhileIdle",
    "LosesFailures",
    "AnswersTooSoon",
    "NeverSaysSo",
    "KeepsItsOrders",
}
OTHERS = (
    {"TcpPull", "SavesBeforeReuse", "HoldsBlocks", "NoEvents", "SavesInBackground", "TakesItsTime"}
    | {"FindsMuchLater", "MeetsFirst", "WantsAReceipt", "HearsOfEndsOfD"}
    | BASES
    | WRONG
)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("right_connectors", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def connectors_of(file: Path) -> set[str]:
    """Classes of a file that derive from a class whose name ends with Connector, directly or not."""
    found: set[str] = set()
    known: set[str] = set()  # of the files beside it, and of the folder above
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.level and node.module:
            known |= connectors_of(file.parents[node.level - 1] / f"{node.module}.py")
        elif isinstance(node, ast.ClassDef):
            bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
            if bases & (found | known) or any(
                re.search(r"Connector(Base)?(_V1|V1)?$", base) for base in bases
            ):
                found.add(node.name)
    return found


def test_every_right_connector_is_listed(script: ModuleType) -> None:
    files = [file for file in HERE.rglob("[!_]*.py") if not file.stem.startswith(("test_", "conftest"))]
    modules = {".".join(file.relative_to(HERE).with_suffix("").parts): file for file in files}
    found = {f"{module}.{name}" for module, file in modules.items() for name in connectors_of(file) - OTHERS}
    assert set(script.selected([])) == found


def test_their_declarations_can_be_read(script: ModuleType) -> None:
    for entry in script.selected([]).values():
        declared = read(tomllib.loads(script.declaration(entry.get("declare", ""))), "right.toml")
        assert declared.features["full-attention"] == ""


def test_the_suite_runs_on_one(tmp_path: Path) -> None:
    must_be_installed()
    cases = "kv::protocol/prefix_cache_hits::load_starts_after_the_local_hit[llama3_1_8b-P1D1.b16-3b_b]"
    command = [sys.executable, str(SCRIPT), "Threshold", "--out", str(tmp_path), "--", cases]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert re.search(r"^amount.Threshold +exit 0 .* CONFORMS: 1 case passed$", run.stdout, re.M), run
    assert (run.returncode, run.stdout.splitlines()[-1]) == (0, "1 of 1 conform")
    assert "1 passed" in (tmp_path / "amount.Threshold" / "output").read_text()


def test_an_unknown_name(script: ModuleType) -> None:
    run = subprocess.run(
        [sys.executable, str(SCRIPT), "Treshold"], capture_output=True, text=True, timeout=60
    )
    assert (run.returncode, run.stderr.startswith("no right connector is called 'Treshold'")) == (2, True)


def test_a_run_is_kept_for_the_page(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "RUNS", tmp_path / "runs.json")
    script.RUNS.write_text('{"amount.Threshold": {"quick": {"verdict": "VIOLATES"}, "full": {}}}')
    report = {
        "settings": {"matrix": {"value": "quick"}},
        "verdict": {"word": "CONFORMS", "counts": {"PASS": 3}, "exit_code": 0},
        "environment": {"vllm": "0.32.0", "python": "3.11.7"},
        "day": "2026-11-26",
    }
    script.keep("amount.Threshold", report)
    report["verdict"] = {"word": "HARNESS", "counts": {"HARNESS": 4}}  # nothing about the connector
    script.keep("amount.Threshold", report)
    kept = {"verdict": "CONFORMS", "counts": {"PASS": 3}, "vllm": "0.32.0", "day": "2026-11-26"}
    assert json.loads(script.RUNS.read_text()) == {"amount.Threshold": {"quick": kept, "full": {}}}


def test_the_page_has_runs_of_right_connectors_alone(script: ModuleType) -> None:
    runs = json.loads(script.RUNS.read_text())
    assert set(runs) <= set(script.selected([]))
    assert {one["verdict"] for matrices in runs.values() for one in matrices.values()} == {"CONFORMS"}


@pytest.mark.parametrize(
    ("arguments", "whole"),
    [([], True), (["-n", "2", "--kv-matrix=full"], True), (["-n2"], True), (["--kv-tier=bytes"], False)],
)
def test_only_whole_runs_are_kept(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, arguments: list[str], whole: bool
) -> None:
    monkeypatch.setattr(sys, "argv", ["", "Threshold", "--keep", "--", *arguments])
    monkeypatch.setattr(script, "run", lambda *_: (0, 1.0, "CONFORMS"))
    with contextlib.nullcontext() if whole else pytest.raises(SystemExit, match=r"^2$"):
        assert script.main() == 0
