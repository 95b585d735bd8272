"""Commands of the pages: each goes to the parser that would read it, and runs where it starts no engine."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pytest_kvconform import cli, doctor, starter
from pytest_kvconform.claims import run
from pytest_kvconform.features import load, required_features
from pytest_kvconform.plan import PlannedCase, make_plan
from pytest_kvconform.report import document
from pytest_kvconform.report.origin import commits, manifest
from pytest_kvconform.result import CaseResult, Evidence, Outcome
from pytest_kvconform.settings import Settings
from pytest_kvconform.subject import Subject
from tests.small_suite.runs import COMMIT

from .pages import PAGES, ROOT, blocks, commands, prose

ALL = {" ".join(command): command for text in PAGES.values() for command in commands(text)}


def starting_with(*words: str) -> list[object]:
    return [
        pytest.param(command, id=line)
        for line, command in ALL.items()
        if tuple(command[: len(words)]) == words
    ]


def test_every_command_is_of_a_kind_that_is_checked() -> None:
    assert {command[0] for command in ALL.values()} == {"make", "pytest", "kvconform", "pip", "uv", "python"}
    assert {command[1] for command in ALL.values() if command[0] == "kvconform"} == {
        "doctor",
        "list",
        "explain",
        "verify",
        "diff",
        "html",
        "new",
        "matrix",
        "merge",
        "claim",
        "badge",
        "register",
    }


def test_the_first_two_commands_of_the_readme() -> None:
    assert commands(PAGES["README.md"])[:2] == [["make", "conform"], ["make", "test"]]


@pytest.mark.parametrize("command", starting_with("make"))
def test_make(command: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = [word for word in command[1:] if "=" not in word]
    assert set(targets) <= set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    assert {word.partition("=")[0] for word in command[1:] if "=" in word} <= set(
        re.findall(r"^([A-Z_]+) \?=", makefile, re.MULTILINE)
    )


@pytest.mark.parametrize("command", starting_with("pytest"))
def test_pytest(command: list[str], pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest parses the command and collects the suite: an unknown option, id, family or rule is an error."""
    arguments = command[1:]
    if "-n" in arguments:  # xdist would start its workers even to collect
        at = arguments.index("-n")
        assert arguments[at + 1].isdigit()
        del arguments[at : at + 2]
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    for name in ("PYTEST_ADDOPTS", "KVCONFORM_CONNECTOR"):
        monkeypatch.delenv(name, raising=False)
    (pytester.path / "kv.json").write_text("{}")
    (pytester.path / "reference_connector").symlink_to(ROOT / "reference_connector")
    if "--collect-only" not in arguments:
        arguments = [*arguments, "--collect-only", "-q"]
    done = pytester.runpytest_inprocess("-p", "pytest_kvconform.plugin", *arguments)
    assert done.ret == 0
    assert [line for line in done.outlines if line.startswith("kv::")]


@pytest.fixture(scope="module")
def made_reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every report that a page names."""
    folder = tmp_path_factory.mktemp("reports")
    for name in ("before", "after", "kv-report", "whole"):
        document.write(report(Outcome.PASS), folder / name)
    for number in (1, 2, 3, 4):
        document.write(shard(f"{number}/4"), folder / f"shard-{number}")
    return folder


@pytest.fixture(scope="module")
def made_claim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reports of a claim."""
    folder, facts = tmp_path_factory.mktemp("claim"), {"vllm": "0.32.0", "device": "cpu"}
    for seed in (1, 2, 3):
        one = settings_of_all(claim=True, seed=seed)
        made = report_of(one, make_plan(one, ()).selected, Outcome.PASS)
        made = msgspec.structs.replace(made, facts=facts, commits={"suite": COMMIT})
        document.write(made, folder / f"seed-{seed}")
    return folder


@pytest.fixture
def reports(made_reports: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go to a folder with every report that a page names."""
    shutil.copytree(made_reports, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)


@pytest.fixture
def claim(made_claim: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reports of a claim. pytest would run for hours: a run of it writes nothing here."""
    done = subprocess.CompletedProcess[str]([], 0)
    monkeypatch.setattr(commits, "of_suite", lambda: COMMIT)  # files of a tree may differ from its commit
    monkeypatch.setattr(run, "subprocess", SimpleNamespace(run=lambda command, **_: print(*command) or done))
    shutil.copytree(made_claim, tmp_path / "kv-claim")


NAME = "kv::engine/bytes::attention_kv_arrives[llama-P1D1-n63]"


def report(outcome: Outcome) -> document.Report:
    plan = make_plan(Settings(), ())
    return report_of(Settings(connector="m:C"), [one for one in plan.selected if one.id == NAME], outcome)


def shard(number: str) -> document.Report:
    settings = settings_of_all(shard=number)
    return report_of(settings, make_plan(settings, ()).selected, Outcome.PASS)


def settings_of_all(**more: Any) -> Settings:
    """Settings with a declaration of every feature."""
    return Settings(connector="m:C", features=json.dumps(dict.fromkeys(load(), True)), **more)


def report_of(settings: Settings, cases: Sequence[PlannedCase], outcome: Outcome) -> document.Report:
    """The report of a run in which all these cases end in the same way."""
    evidence = Evidence(looked_at=1, unit="bytes", bytes_moved=1) if outcome is Outcome.PASS else None
    plan = make_plan(settings, ())
    results = [
        CaseResult(
            id=planned.id,
            rule=planned.case.rule,
            cell=planned.cell,
            features=required_features(planned),
            level=planned.level,
            outcome=outcome,
            evidence=evidence,
        )
        for planned in cases
    ]
    return document.make_report(
        settings,
        Subject(
            spec="m:C",
            connector="C",
            module="m",
            features=dict.fromkeys(json.loads(settings.features or "{}"), ""),
        ),
        None,
        results,
        [one.id for one in cases],
        plan.manifest,
        (),
        plan.limited,
        plan.not_installed,
        plan.elsewhere,
        manifest.of_suite(settings.matrix),
    )


@pytest.mark.usefixtures("reports")
@pytest.mark.parametrize("command", starting_with("kvconform"))
def test_kvconform(
    command: list[str],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "claim" in command or "kv-claim" in command:
        request.getfixturevalue("claim")
    monkeypatch.setattr(doctor, "main", lambda: print("doctor") or 0)  # it imports vLLM: 10 s
    assert cli.main(command[1:]) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize("word", ["verify", "diff"])
@pytest.mark.usefixtures("reports")
def test_the_exit_codes_that_operators_read(word: str, tmp_path: Path) -> None:
    arguments = {"verify": ["after"], "diff": ["before", "after"]}[word]
    assert cli.main([word, *arguments]) == 0
    failed = report(Outcome.FAIL)
    edited = (
        document.encode(failed).replace(b'"word": "VIOLATES"', b'"word": "CONFORMS"')
        if word == "verify"
        else document.encode(failed)
    )
    (tmp_path / "after" / "report.json").write_bytes(edited)
    assert cli.main([word, *arguments]) == 1
    (tmp_path / "after" / "report.json").write_text("{}")
    assert cli.main([word, *arguments]) == 2


@pytest.mark.parametrize("command", starting_with("pip"))
def test_pip_and_the_extras(command: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert command[1] == "install"
    extras = re.findall(r"pytest-kvconform\[(\w+)\]", prose(PAGES["README.md"]) + " ".join(command))
    assert set(extras) == set(project["optional-dependencies"])


@pytest.mark.parametrize("command", starting_with("uv"))
def test_uv(command: list[str]) -> None:
    """The CI job of `kvconform new` installs in the same way, but into no virtual environment."""
    job = (starter.FILES / "workflow.yml").read_text()
    assert shlex.join(command).replace("pip install", "pip install --system") in job


def test_the_torch_that_pip_does_not_find_is_the_pinned_one() -> None:
    [shown] = [text for text in blocks(PAGES["docs/start.md"], "text") if "No matching distribution" in text]
    [pin] = re.findall(r"^torch_pin=(\S+)", (ROOT / "ci" / "setup.sh").read_text(), re.MULTILINE)
    assert re.findall(r"torch==(\S+)", shown) == [f"{pin}+cpu"] * 2


def test_the_start_page_has_one_title() -> None:
    title = PAGES["docs/start.md"].splitlines()[0].removeprefix("# ")
    assert f"  - {title}: docs/start.md\n" in (ROOT / "mkdocs.yml").read_text()


@pytest.mark.parametrize("command", starting_with("python"))
def test_python(command: list[str]) -> None:
    if command[1] == "-c":
        compile(command[2], "page", "exec")
    else:
        assert (ROOT / command[1]).is_file()


def test_the_line_that_lists_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [code] = [
        command[2]
        for command in ALL.values()
        if command[:2] == ["python", "-c"] and "report.json" in command[2]
    ]
    monkeypatch.chdir(tmp_path)
    document.write(report(Outcome.FAIL), tmp_path / "kv-report")
    exec(compile(code, "page", "exec"), {})
    assert capsys.readouterr().out == "kv::engine/bytes::attention_kv_arrives[llama-P1D1-n63]\n"
