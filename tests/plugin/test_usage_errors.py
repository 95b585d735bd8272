"""A mistake in what people write ends the command with exit code 4 and one sentence."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pytest_kvconform import cli, doctor

COMMANDS = [
    (["--kv-config={" + '"a": ' * 3], {}, "", "--kv-config: line 1 column"),
    (["--kv-config=\udcff"], {}, "", "--kv-config: expected a text"),
    (["--kv-report=\udcff"], {}, "", "--kv-report: expected a text"),
    (
        ["--kv-claim", "--kv-feature=aborted"],
        {},
        "",
        "--kv-feature: there is no feature 'aborted' (did you mean abort?)",
    ),
    ([], {"KVCONFORM_CLAIM": "maybe"}, "", "KVCONFORM_CLAIM: expected true or false, got 'maybe'"),
    (
        [],
        {"KVCONFORM_FETURE": "mla"},
        "",
        "environment: there is no variable KVCONFORM_FETURE (did you mean KVCONFORM_FEATURE?)",
    ),
    ([], {}, "[tool]\nkvconform = 3", "pyproject.toml: tool.kvconform: expected a table, got 3"),
    (
        [],
        {},
        "[tool.kvconform]\nconfig = {a = 2027-01-31}",
        "pyproject.toml: tool.kvconform.config: expected values that JSON can hold",
    ),
    (
        [],
        {},
        "[[tool.kvconform.features]]\nmla = true",
        "pyproject.toml: tool.kvconform.features: expected a table, got [{'mla': True}]",
    ),
    (
        [],
        {},
        "[tool.kvconform.known]\ncase = 'a'",
        "pyproject.toml: tool.kvconform.known: expected a list of tables, got {'case': 'a'}",
    ),
    (
        [],
        {},
        "[[tool.kvconform.known]]\ncase = 'kv::a'",
        "pyproject.toml: tool.kvconform.known[0]: issue is missing",
    ),
]


@pytest.mark.parametrize(
    ("arguments", "environment", "pyproject", "says"), COMMANDS, ids=[row[-1][:40] for row in COMMANDS]
)
def test_the_command_ends_with_a_usage_error(
    kv, pytester, monkeypatch, arguments, environment, pyproject, says
):
    if pyproject:
        (pytester.path / "pyproject.toml").write_text(pyproject)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    run = kv(*arguments, apart=True, undeclared=True)
    assert run.code == 4, run.text
    assert "Traceback" not in run.text
    assert says in run.text
    assert run.log == [] or run.log[-1] == "zygote closed"


def test_an_answer_that_cannot_be_written_is_one_sentence():
    code = "import sys; from pytest_kvconform import cli; sys.exit(cli.main(['list', 'levels']))"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120
        )
    assert (done.returncode, done.stderr) == (
        2,
        "kvconform: the output cannot be written: No space left on device\n",
    )


def test_a_command_that_is_interrupted_is_one_sentence(capsys, monkeypatch):
    def interrupted() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "main", interrupted)
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err == "kvconform: interrupted\n"
