"""Zygotes that are forks are what zygotes that import vLLM are, and end as they do."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_kvconform.rigs import launch
from pytest_kvconform.rigs.launch import PRELOAD, STAND_IN, launch_zygote, wait_for_zygote
from tests.helpers import warm_zygotes
from tests.helpers.case_runner import HIDDEN
from tests.helpers.fixtures import must_be_installed
from tests.helpers.imported_vllm import AT_START, why_not

IMPORT_S = 240.0
LLAMA = "LlamaForCausalLM"


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    must_be_installed()


@pytest.mark.night
def test_a_fork_knows_what_a_zygote_knows_that_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    forked = launch_zygote([LLAMA], [LLAMA], HIDDEN)
    monkeypatch.setattr(launch, "_begin", warm_zygotes._begin_cold)
    cold = launch_zygote([LLAMA], [LLAMA], HIDDEN)
    try:
        assert isinstance(forked.process, warm_zygotes.Forked)
        assert isinstance(cold.process, subprocess.Popen)
        assert wait_for_zygote(forked.address, IMPORT_S) == wait_for_zygote(cold.address, IMPORT_S)
    finally:
        assert [forked.close(), cold.close()] == [[], []]
    assert (forked.process.returncode, cold.process.returncode) == (0, 0)
    assert not forked.run_dir.exists()


@pytest.mark.parametrize(
    ("suite", "address", "warm"), [(False, "", True), (True, "", False), (True, "/x", True)]
)
def test_only_runs_of_tests_are_lent_forks(
    monkeypatch: pytest.MonkeyPatch, suite: bool, address: str, warm: bool
) -> None:
    monkeypatch.setattr(launch, "_begin", warm_zygotes._begin_cold)
    monkeypatch.setattr(warm_zygotes, "_at_start", {})
    monkeypatch.delenv(warm_zygotes.ADDRESS, raising=False)
    if address:
        monkeypatch.setenv(warm_zygotes.ADDRESS, address)
    plugins = {"kvconform-runner"} if suite else set()
    config: Any = SimpleNamespace(pluginmanager=SimpleNamespace(has_plugin=plugins.__contains__))
    warm_zygotes.pytest_configure(config)
    assert (launch._begin is warm_zygotes.begin) == warm


def test_an_early_end_of_a_fork_is_reported() -> None:
    zygote = launch_zygote([LLAMA], hidden=HIDDEN)
    assert isinstance(zygote.process, warm_zygotes.Forked)
    wait_for_zygote(zygote.address, IMPORT_S)
    zygote.process.kill()
    assert [said.partition(" had ")[2] for said in zygote.close()] == ["ended before, with exit code -9"]


def test_a_fork_ends_with_its_standard_input() -> None:
    zygote = launch_zygote([LLAMA], hidden=HIDDEN)
    assert isinstance(zygote.process, warm_zygotes.Forked)
    wait_for_zygote(zygote.address, IMPORT_S)
    assert zygote.process.stdin
    zygote.process.stdin.close()
    assert zygote.process.wait(20) == 0
    assert not zygote.run_dir.exists()


def _command(hidden: tuple[str, ...] = ()) -> list[str]:
    return ["run_dir", PRELOAD, json.dumps({"hidden": hidden, "functions": ()})]


def _hides_json(folder: str) -> dict[str, str]:
    Path(folder, "json.py").touch()
    return {"PYTHONPATH": folder}


def _hides_nothing(folder: str) -> dict[str, str]:
    Path(folder, "json").mkdir()  # Python prefers a package of a later folder to a folder without __init__.py
    return {"PYTHONPATH": folder}


@pytest.mark.parametrize(
    ("command", "variables", "why"),
    [
        (_command(), {}, ""),
        (_command(), {"TMPDIR": "/elsewhere", "KVCONFORM_LEASE": "3"}, ""),
        (_command(), {"PYTHONPATH": os.fspath(Path(__file__).parent)}, ""),
        (_command(), _hides_nothing, ""),
        (_command(("avx512",)), {}, "other features of the CPU"),
        (_command(), {"UCX_TLS": "self"}, "other variables: UCX_TLS"),
        (_command(), _hides_json, "path hides json"),
    ],
)
def test_what_could_differ_is_no_fork(
    tmp_path: Path,
    command: list[str],
    variables: dict[str, str] | Callable[[str], dict[str, str]],
    why: str,
) -> None:
    (tmp_path / "path").mkdir()
    more = variables(str(tmp_path / "path")) if callable(variables) else variables
    said = why_not(command, AT_START | more, str(tmp_path), ())
    assert why in said and bool(why) == bool(said)


def test_what_imports_set_does_not_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_SET_BY_AN_IMPORT", "1")
    assert why_not(_command(), AT_START | {"UCX_SET_BY_AN_IMPORT": "1"}, str(tmp_path), ()) == ""


def test_what_hides_a_module_in_the_working_folder_is_no_fork(tmp_path: Path) -> None:
    _hides_json(str(tmp_path))
    assert why_not(_command(), AT_START, str(tmp_path), ()) == "a folder of its path hides json"


@pytest.mark.parametrize(
    ("preload", "more"), [(launch.LIGHT_PRELOAD, ()), (PRELOAD, (STAND_IN,))], ids=["light", "stand-in"]
)
def test_a_zygote_that_imports_something_else_is_no_fork(preload: str, more: tuple[str, ...]) -> None:
    zygote = launch_zygote((), more=more, preload=preload)
    assert zygote.close() == []
    assert isinstance(zygote.process, subprocess.Popen)
