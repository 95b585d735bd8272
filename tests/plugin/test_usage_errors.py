"""A mistake in what people write ends the command with exit code 4 and one sentence."""

from __future__ import annotations

import pytest

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
