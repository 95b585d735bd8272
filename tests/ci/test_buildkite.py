"""The pipeline for Buildkite: its schema, and its commands, run by bash with what an agent would set."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pytest_kvconform.settings import OPTIONS
from tests.docs.pages import PAGES
from tests.helpers.fixtures import ROOT
from tests.shards.test_refused_shards import write

from .shell import Shell

PIPELINE = ROOT / ".buildkite" / "conform.yml"
READ = yaml.safe_load(PIPELINE.read_text())
GATE, PLAN, WAIT, VERDICT = READ["steps"]
# Programs that would need a network, an agent, or the whole suite, note their words.
NOTES = '#!/bin/sh\necho "$(basename "$0") $*" >> calls\n'
VENV = f"""#!/bin/sh
[ "$1 $2" = "-m venv" ] || exec {sys.executable} "$@"
echo "python3 $*" >> calls; mkdir -p "$3/bin"; : > "$3/bin/activate"
"""
AGENT = NOTES + '[ "$1" != annotate ] || cat >> annotations\n'
PROGRAMS = {"python3": VENV, "pip": NOTES, "uv": NOTES, "buildkite-agent": AGENT}
INSTALLED = ["python3 -m venv .kv", "pip install --quiet uv"]


def job(step: dict[str, Any], uploaded: bool = False) -> str:
    """The commands of a step as one script. Before an agent runs them, Buildkite makes `$$` a `$`."""
    text = "\n".join(step["command"])
    return text if uploaded else text.replace("$$", "$")


def agent(folder: Path, programs: dict[str, str] = PROGRAMS) -> Shell:
    """An agent with the variables of the pipeline, and another connector."""
    variables = {name: str(value) for name, value in READ["env"].items()}
    return Shell(folder, programs, **variables | {"KVCONFORM_CONNECTOR": "NixlConnector"})


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


def validate(path: Path) -> subprocess.CompletedProcess[str]:
    """Compare a pipeline with the JSON schema that Buildkite publishes, which check-jsonschema has."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.buildkite", str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.fixture
def planned(tmp_path: Path) -> list[dict[str, Any]]:
    """The steps that the step of the plan uploads."""
    done = agent(tmp_path)(job(PLAN))
    assert (done.returncode, done.stderr) == (0, "")
    assert calls(tmp_path)[-1] == "buildkite-agent pipeline upload --no-interpolation kv-steps.json"
    return json.loads((tmp_path / "kv-steps.json").read_text())["steps"]


def test_the_pipeline_and_what_it_uploads_are_of_the_schema(tmp_path: Path, planned: list[Any]) -> None:
    for path in (PIPELINE, tmp_path / "kv-steps.json"):
        done = validate(path)
        assert done.returncode == 0, done.stdout + done.stderr
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(PIPELINE.read_text().replace("timeout_in_minutes: 350", "timeout_in_minutes: soon"))
    assert validate(wrong).returncode == 1


def test_each_build_has_the_gate_or_the_night() -> None:
    assert GATE["if"] == 'build.source != "schedule"'
    assert PLAN["if"] == VERDICT["if"] == 'build.source == "schedule"'
    assert WAIT == {"wait": None, "continue_on_failure": True}  # `shards` upload between plan and verdict


def test_the_gate_installs_and_runs_the_suite(tmp_path: Path) -> None:
    done = agent(tmp_path, PROGRAMS | {"pytest": NOTES})(job(GATE))
    assert (done.returncode, done.stderr) == (0, "")
    assert calls(tmp_path) == [
        *INSTALLED,
        "uv pip install --torch-backend=cpu pytest-kvconform[cpu,accuracy] -e .",
        "pytest -n 2 --kv-report=kv-report --kv-html",
    ]


@pytest.mark.parametrize("program", ["pip", "uv", "pytest"])
def test_a_command_that_fails_ends_the_step(tmp_path: Path, program: str) -> None:
    done = agent(tmp_path, PROGRAMS | {"pytest": NOTES, program: NOTES + "exit 7\n"})(job(GATE))
    assert done.returncode in (7, 123)  # 123: of xargs
    assert calls(tmp_path)[-1].split()[0] == program


def test_the_plan_makes_a_step_of_each_shard(tmp_path: Path, planned: list[dict[str, Any]]) -> None:
    plan = json.loads((tmp_path / "kv-matrix.json").read_text())
    gpus = [
        max(cell["gpus"] for cell in plan["cells"] if cell["shard"] == f"{number}/4")
        for number in (1, 2, 3, 4)
    ]
    assert [step["label"] for step in planned] == [
        f"KV conformance, shard {number}/4, {count} GPUs" for number, count in enumerate(gpus, 1)
    ]
    assert max(gpus) == 16
    for number, step in enumerate(planned, 1):
        assert (step["agents"], step["soft_fail"]) == ({"queue": "gpu"}, True)
        assert step["artifact_paths"] == f"kv-shard-{number}/*"


def test_too_many_shards_end_the_plan(tmp_path: Path) -> None:
    done = agent(tmp_path)(job(PLAN), SHARDS="400")
    assert done.returncode == 2
    assert done.stderr.startswith("kvconform: --shards=400: the selection can be divided into ")


def test_a_shard_runs_its_part_alone(tmp_path: Path, planned: list[dict[str, Any]]) -> None:
    """The plan says how many cases a shard has, and pytest collects as many."""
    plan = json.loads((tmp_path / "kv-matrix.json").read_text())
    cases = sum(cell["cases"] for cell in plan["cells"] if cell["shard"] == "2/4")
    variables = json.loads((tmp_path / "kv-steps.json").read_text())["env"]
    place = tmp_path / "agent"
    place.mkdir()
    command = job(planned[1], uploaded=True).replace('-n "$SIDE_BY_SIDE"', "--collect-only -q")
    done = Shell(place, PROGRAMS, **variables)(command, PYTEST_ADDOPTS="-p no:cacheprovider")
    assert done.returncode == 0, done.stdout + done.stderr
    assert sum(line.startswith("kv::") for line in done.stdout.splitlines()) == cases > 0
    assert calls(place) == [*INSTALLED, "uv pip install pytest-kvconform[cuda,accuracy] -e ."]


@pytest.mark.parametrize(("numbers", "code"), [((1, 2, 3), 10), ((1, 3), 2)], ids=["all", "one is missing"])
def test_the_verdict_is_that_of_the_merged_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numbers: tuple[int, ...], code: int
) -> None:
    """These shards declare nothing, so that the whole run is INCOMPLETE. The summary is an annotation."""
    monkeypatch.chdir(tmp_path)
    for number in numbers:
        write(f"kv-shard-{number}", f"{number}/3")
    done = agent(tmp_path)(job(VERDICT))
    assert done.returncode == code
    assert calls(tmp_path)[3] == "buildkite-agent artifact download kv-shard-*/* ."
    assert (tmp_path / "kv-report" / "report.json").exists() == (code == 10)
    assert (
        ("INCOMPLETE" in (tmp_path / "annotations").read_text()) if code == 10 else len(calls(tmp_path)) == 4
    )
    assert done.stderr == ("" if code == 10 else "kvconform: shard 2/3 is missing: give all 3\n")


def test_names_of_the_pipeline_are_names_of_the_suite() -> None:
    text = PIPELINE.read_text()
    assert set(re.findall(r"\bKVCONFORM_\w+", text)) <= {option.variable for option in OPTIONS}
    assert set(re.findall(r"--kv-[a-z-]+", text)) <= {option.flag for option in OPTIONS}
    extras = {
        extra for words in re.findall(r"pytest-kvconform\[([\w,]+)\]", text) for extra in words.split(",")
    }
    assert extras == {"cpu", "cuda", "accuracy"}
    assert all(shlex.split(READ["env"][name])[1:] == ["-e", "."] for name in ("CPU", "GPU"))


def test_operators_read_of_it() -> None:
    assert "`.buildkite/conform.yml`" in PAGES["docs/operators.md"]
