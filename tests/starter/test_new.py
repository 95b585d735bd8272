"""`kvconform new NAME`: what it writes, and what it refuses."""

from __future__ import annotations

import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pytest_kvconform import cli, features, starter
from pytest_kvconform.settings import Settings, load
from pytest_kvconform.subject import resolve
from tests.docs.pages import PAGES, blocks

FILES = [".github/workflows/kvconform.yml", "my_connector.py", "pyproject.toml"]
EVERY_FILE = [FILES[0], ".gitignore", *FILES[1:]]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    # another test's connector of this name is no installed module
    monkeypatch.setattr(sys, "path", [p for p in sys.path if not (Path(p) / "my_connector.py").exists()])
    return tmp_path


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def test_what_it_prints_is_on_the_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["new", "my_connector"]) == 0
    assert capsys.readouterr().out in blocks(PAGES["docs/start.md"], "text")
    assert files(folder) == EVERY_FILE
    assert not [name for name in FILES if re.search("starter", (folder / name).read_text(), re.IGNORECASE)]


def test_the_declaration_has_every_feature(folder: Path) -> None:
    cli.main(["new", "my_connector"])
    subject = resolve(load({}, {}, folder))
    assert (subject.module, subject.connector) == ("my_connector", "MyConnector")
    assert (subject.profile, subject.handover) == ("p2p", "handoff")
    assert subject.features.keys() == features.load().keys()


def test_the_connector_is_formatted_and_has_no_unused_name(folder: Path) -> None:
    cli.main(["new", "my_connector"])
    for command in (["check", "--select=E,F,I,B,UP"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--isolated", "--line-length=110", "my_connector.py"]
        done = subprocess.run(ruff, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout


def test_the_mistake_of_the_page_is_one_line_of_the_connector(folder: Path) -> None:
    cli.main(["new", "my_connector"])
    [diff] = blocks(PAGES["docs/start.md"], "diff")
    right, wrong = diff.splitlines()
    assert (right[0], wrong[0]) == ("-", "+")
    assert (folder / "my_connector.py").read_text().splitlines().count(right[1:]) == 1


def test_the_steps_of_the_ci_job(folder: Path) -> None:
    cli.main(["new", "my_connector"])
    job = yaml.safe_load((folder / FILES[0]).read_text())["jobs"]["conformance"]
    commands = [shlex.split(step["run"]) for step in job["steps"] if "run" in step]
    assert commands == [
        ["pip", "install", "uv"],
        ["uv", "pip", "install", "--system", "--torch-backend=cpu", "pytest-kvconform[cpu]"],
        ["pytest", "--kv-connector=my_connector:MyConnector", "-n", "4"],
    ]
    [report] = [step["with"] for step in job["steps"] if "upload-artifact" in step.get("uses", "")]
    assert report["path"] == "kv-report"


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("my_connector", "MyConnector"),
        ("files", "FilesConnector"),
        ("kv2_disk", "Kv2DiskConnector"),
        ("connector", "Connector"),
    ],
)
def test_the_name_of_the_class(module: str, name: str) -> None:
    assert starter.class_name(module) == name


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("MyConnector", "(did you mean my_connector?)"),
        ("my-connector", "(did you mean my_connector?)"),
        ("../elsewhere", "(did you mean elsewhere?)"),
        ("my_connector\n", "(did you mean my_connector?)"),
        ("2fast", "(did you mean fast?)"),
        ("", "'' is no name for a connector"),
        ("class", "'class' is no name for a connector"),
        ("json", "a module json is installed here already"),
        ("numpy", "a module numpy is installed here already"),
        ("my_connector.py", "(did you mean my_connector?)"),
        ("conftest", "pytest itself would load conftest.py"),
        ("a" * 300, "a name has at most 100 letters, and this one has 300"),
        ("test_mine", "pytest itself would load test_mine.py"),
    ],
)
def test_a_bad_name(folder: Path, capsys: pytest.CaptureFixture[str], name: str, says: str) -> None:
    assert cli.main(["new", name]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("kvconform: ") and says in line
    assert files(folder) == []


@pytest.mark.parametrize("there", FILES)
def test_a_file_that_exists_stays(folder: Path, capsys: pytest.CaptureFixture[str], there: str) -> None:
    (folder / there).parent.mkdir(parents=True, exist_ok=True)
    (folder / there).write_text("mine")
    assert cli.main(["new", "my_connector"]) == 2
    assert f"{there} exists already, and nothing was written" in capsys.readouterr().err
    assert files(folder) == [there]
    assert (folder / there).read_text() == "mine"


def test_rules_of_git_that_exist_stay(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / ".gitignore").write_text("mine")
    assert cli.main(["new", "my_connector"]) == 0
    assert ".gitignore" not in capsys.readouterr().out
    assert (folder / ".gitignore").read_text() == "mine"


def test_git_ignores_what_runs_write(folder: Path) -> None:
    cli.main(["new", "my_connector"])
    assert f"{Settings.report}/" in (folder / ".gitignore").read_text().splitlines()


def test_a_link_to_nowhere_stays(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "pyproject.toml").symlink_to("elsewhere.toml")
    assert cli.main(["new", "my_connector"]) == 2
    assert "pyproject.toml exists already" in capsys.readouterr().err
    assert files(folder) == ["pyproject.toml"]


def test_two_files_that_exist_are_both_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["new", "my_connector"])
    assert cli.main(["new", "another"]) == 2
    assert f"pyproject.toml and {FILES[0]} exist already" in capsys.readouterr().err
    assert files(folder) == EVERY_FILE


def test_nothing_is_left_if_a_file_cannot_be_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / ".github").write_text("a file where a folder must be")
    assert cli.main(["new", "my_connector"]) == 2
    assert "the files could not be written" in capsys.readouterr().err
    assert files(folder) == [".github"]
    assert stat.S_ISREG((folder / ".github").stat().st_mode)
