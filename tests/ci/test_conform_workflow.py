"""The reusable workflow: its commands are run here, by bash and with what GitHub would set."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from pytest_kvconform.settings import OPTIONS
from tests.docs.pages import PAGES, blocks
from tests.helpers.fixtures import ROOT
from tests.shards.test_refused_shards import write

from .shell import Shell

WORKFLOW = ROOT / ".github" / "workflows" / "conform.yml"
JOBS = yaml.safe_load(WORKFLOW.read_text())["jobs"]
# In YAML 1.1 the key `on` is true.
INPUTS = yaml.safe_load(WORKFLOW.read_text())[True]["workflow_call"]["inputs"]


def commands(job: str) -> list[str]:
    return [step["run"] for step in JOBS[job]["steps"] if "run" in step]


@pytest.fixture
def bash(tmp_path: Path) -> Shell:
    """bash(command, **variables): run a step in an empty folder, with the commands of this checkout."""
    return Shell(
        tmp_path,
        KVCONFORM_CONNECTOR="NixlConnector",
        KVCONFORM_MATRIX="quick",
        KVCONFORM_TIER="interface,protocol,bytes",
        KVCONFORM_HIDE_CPU=INPUTS["hide-cpu"]["default"],
    )


def test_the_plan_gives_the_list_of_shards(bash, tmp_path):
    _, table, output = commands("plan")
    shown = bash(table, SHARDS="4").stdout.splitlines()
    assert [line.split()[0] for line in shown[-4:]] == ["1/4", "2/4", "3/4", "4/4"]
    done = bash(output, SHARDS="4", GITHUB_OUTPUT=str(tmp_path / "output"))
    assert (done.returncode, done.stderr) == (0, "")
    name, _, value = (tmp_path / "output").read_text().rstrip("\n").partition("=")
    assert (name, json.loads(value)["shards"]) == ("matrix", ["1/4", "2/4", "3/4", "4/4"])
    assert {cell["shard"] for cell in json.loads(value)["cells"]} == {"1/4", "2/4", "3/4", "4/4"}


def test_too_many_shards_end_the_plan(bash):
    done = bash(commands("plan")[1], SHARDS="400")
    assert done.returncode == 2
    assert done.stderr.startswith("kvconform: --shards=400: the selection can be divided into ")


def test_a_shard_runs_its_part_alone(bash):
    """The plan says how many cases a shard has, and pytest collects as many."""
    plan = json.loads(bash("kvconform matrix --shards 3 --json").stdout)
    cases = sum(cell["cases"] for cell in plan["cells"] if cell["shard"] == "2/3")
    _, command = commands("shard")
    one_process = command.replace('-n "$SIDE_BY_SIDE"', "--collect-only -q")
    done = bash(one_process, SHARD="2/3", PYTEST_ADDOPTS="-p no:cacheprovider")
    assert done.returncode == 0, done.stdout + done.stderr
    assert sum(line.startswith("kv::") for line in done.stdout.splitlines()) == cases > 0


@pytest.mark.parametrize(("numbers", "code"), [((1, 2, 3), 10), ((1, 3), 2)], ids=["all", "one is missing"])
def test_the_verdict_is_that_of_the_merged_report(bash, tmp_path, monkeypatch, numbers, code):
    """These shards declare nothing, so that the whole run is INCOMPLETE."""
    monkeypatch.chdir(tmp_path)
    for number in numbers:
        write(f"shards/kv-shard-{number - 1}", f"{number}/3")
    done = bash(commands("verdict")[-1], GITHUB_STEP_SUMMARY=str(tmp_path / "summary"))
    assert done.returncode == code
    assert (tmp_path / "kv-report" / "report.json").exists() == (code == 10)
    assert done.stderr == ("" if code == 10 else "kvconform: shard 2/3 is missing: give all 3\n")


def test_names_of_the_workflow_are_names_of_the_suite() -> None:
    text = WORKFLOW.read_text()
    assert set(re.findall(r"\bKVCONFORM_\w+", text)) <= {option.variable for option in OPTIONS}
    assert set(re.findall(r"--kv-[a-z-]+", text)) <= {option.flag for option in OPTIONS}
    used = set(re.findall(r"inputs\.([a-z-]+)", text))
    assert used == set(INPUTS)


def test_no_input_becomes_part_of_a_command() -> None:
    """A shell reads inputs from variables: text of a caller is no program."""
    runs: list[Any] = [command for job in JOBS for command in commands(job)]
    assert len(runs) == 7
    assert not any("${{" in command for command in runs)


def test_the_caller_that_operators_read_gives_inputs_of_the_workflow() -> None:
    [example] = blocks(PAGES["docs/operators.md"], "yaml")
    [job] = yaml.safe_load(example)["jobs"].values()
    assert job["uses"].partition("@")[0].endswith(str(WORKFLOW.relative_to(ROOT)))
    assert {name for name, one in INPUTS.items() if one.get("required")} <= set(job["with"]) <= set(INPUTS)
