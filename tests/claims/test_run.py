"""`kvconform claim`: nothing of a project changes what it runs, and pytest refuses what could."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_kvconform import cli

HOSTILE_INI = """
[tool.pytest.ini_options]
addopts = ["--strict-markers", "-k", "nothing", "-p", "no:kvconform", "-p", "shuffles"]
testpaths = ["nowhere"]
python_files = ["check_*.py"]
norecursedirs = ["*"]
filterwarnings = ["error"]
"""
HOSTILE_CONFTEST = """
import pytest

def pytest_collection_modifyitems(items):
    del items[1:]

def pytest_runtest_logreport(report):
    if hasattr(report, "kv_result"):
        report.kv_result = report.kv_result.replace("FAIL", "PASS")
"""
DEEDS = {"window*": "violate"}


def claim(*arguments: str) -> int:
    return cli.main(["claim", "--connector=m:C", *arguments])


def report(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "report.json").read_bytes())


def judged(folder: Path) -> tuple[object, ...]:
    """What a claim says: its cases, their outcomes, and the verdict."""
    raw = report(folder)
    outcomes = {result["id"]: result["outcome"] for result in raw["results"]}
    return raw["selection"]["manifest"], raw["selection"]["selected"], outcomes, raw["verdict"]


@pytest.fixture
def planted(kv, pytester):
    """A folder with a declaration of every feature alone, for a connector that violates a rule."""
    kv("--collect-only", "-p", "no:cacheprovider", deeds=DEEDS)
    return pytester


def test_three_runs_with_three_seeds(planted, monkeypatch):
    monkeypatch.setenv("KVCONFORM_CONNECTOR", "m:Other")  # the command line wins
    monkeypatch.setenv("KVCONFORM_MATRIX", "quick")  # the default
    before = {path.name for path in planted.path.iterdir()}
    assert claim() == 1
    assert {path.name for path in planted.path.iterdir()} - before == {"kv-claim", "bench.log"}
    found = [report(planted.path / "kv-claim" / f"seed-{seed}") for seed in (1, 2, 3)]
    assert [one["settings"]["seed"]["value"] for one in found] == [1, 2, 3]
    assert all(one["settings"]["claim"]["value"] is True for one in found)
    assert len({json.dumps(one["verdict"]) for one in found}) == 1
    assert found[0]["verdict"]["word"] == "VIOLATES"


@pytest.mark.parametrize("jobs", ["0", "2"])
def test_a_hostile_project_changes_nothing(planted, monkeypatch, jobs):
    """The run of the empty folder and that of the hostile one have the same ids, outcomes and verdict."""
    assert claim("--seed=2", "-o", "empty") == 1
    planted.makepyprojecttoml(HOSTILE_INI)
    planted.makeconftest(HOSTILE_CONFTEST)
    (planted.path / "pytest.py").write_text("raise SystemExit(0)")
    (planted.path / "nowhere").mkdir()
    monkeypatch.setenv("PYTEST_ADDOPTS", "-x -k nothing -p no:cacheprovider")
    monkeypatch.setenv("PYTEST_PLUGINS", "shuffles")
    assert claim("--seed=2", "-o", "hostile", "-n", jobs) == 1
    assert judged(planted.path / "hostile" / "seed-2") == judged(planted.path / "empty" / "seed-2")
    assert len(report(planted.path / "hostile" / "seed-2")["results"]) == 13


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("KVCONFORM_FAMILY", "llama", "KVCONFORM_FAMILY is set, and a claim has the default of family"),
        ("KVCONFORM_TIMEOUT_SCALE", "9", "and a claim has the default of timeout-scale: remove it"),
        ("KVCONFORM_SHARD", "1/2", "and a claim has the default of shard: remove it"),
    ],
)
def test_settings_are_fixed(planted, monkeypatch, capsys, variable, value, says):
    monkeypatch.setenv(variable, value)
    assert claim("--seed=1") == 2
    assert says in capsys.readouterr().err
    assert not (planted.path / "kv-claim").exists()


def test_a_setting_of_pyproject_is_named(planted, capsys):
    planted.makepyprojecttoml('[tool.kvconform]\nfamily = ["llama"]')
    assert claim() == 2
    said = capsys.readouterr().err
    assert said.startswith("kvconform: claim: family of pyproject.toml is set, and a claim has the default")
    assert len(said.splitlines()) == 1


def test_a_claim_needs_a_connector(planted, capsys):
    assert cli.main(["claim"]) == 2
    assert (
        capsys.readouterr().err == "kvconform: claim: name the connector: --connector=NAME, or MODULE:CLASS\n"
    )


def test_an_error_of_pytest_ends_the_claim(planted, monkeypatch, capfd):
    """A connector that does not exist is one error of pytest, and not three."""
    monkeypatch.setenv("FAKEKV_BENCH", "bad subject")
    assert claim() == 4
    assert capfd.readouterr().err.count("nothing_there cannot be imported") == 1


def conftest(pytester, monkeypatch) -> None:
    pytester.makeconftest("")


def addopts(pytester, monkeypatch) -> None:
    pytester.makepyprojecttoml('[tool.pytest.ini_options]\naddopts = "-q"')


def variable(pytester, monkeypatch) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", "-q")


@pytest.mark.parametrize(
    ("plant", "arguments", "says"),
    [
        (conftest, (), "conftest.py"),
        (addopts, (), "addopts of"),
        (variable, (), "the variable PYTEST_ADDOPTS"),
        (None, ("-p", "shuffles"), "the plugin shuffles"),
        (None, (".",), "the argument ."),
    ],
)
def test_pytest_refuses_a_claim_that_a_project_could_change(
    kv, pytester, monkeypatch, plant, arguments, says
):
    if plant is not None:
        plant(pytester, monkeypatch)
    run = kv("--kv-claim", *arguments)
    assert run.code == 4
    [line] = [line for line in run.errors if "--kv-claim" in line]
    assert says in line
    assert line.endswith("could change what runs: start it with kvconform claim, which ignores it")
    assert not run.path.exists()


def test_a_plugin_of_another_package_is_refused(kv, monkeypatch):
    """An installed package may bring a plugin that pytest loads by itself."""
    from _pytest.config import PytestPluginManager

    class Dist:
        project_name = "pytest-shuffles"

    monkeypatch.setattr(PytestPluginManager, "list_plugin_distinfo", lambda self: [(None, Dist)])
    run = kv("--kv-claim")
    assert run.code == 4
    assert "--kv-claim: the plugin pytest-shuffles could change what runs" in run.text


def test_a_line_that_runs_a_case_again_is_no_claim(kv):
    again = [
        line for line in kv("--kv-claim", deeds=DEEDS).lines if "again" in line and "--kv-connector" in line
    ]
    assert again
    assert not any("--kv-claim" in line for line in again)
