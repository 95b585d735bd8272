"""The option --mistakes: a table of what the suite says of each wrong connector of the tests that run.

One row for each wrong connector and rule: the mistake as the class describes it, the rule, and the sentence
of the first case that found it.

    make test-night ARGS=--mistakes=kv-mistakes.md
"""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

from pytest_kvconform.result import Outcome
from tests.helpers.case_runner import OF_VLLM, CaseRunner, CellRun

# Variable: the file to which each process appends what it found. KVCONFORM_... would be a setting.
FOUND = "MISTAKES_FOUND_BY_TESTS"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--mistakes", metavar="FILE", help="write a table of the wrong connectors that tests run"
    )


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("mistakes"):
        return
    if FOUND not in os.environ:  # a worker of pytest-xdist inherits it
        handle, os.environ[FOUND] = tempfile.mkstemp(prefix="mistakes-")
        os.close(handle)
    run = CaseRunner.run

    @functools.wraps(run)
    def recorded(runner: CaseRunner, connector: str, *args: Any, **options: Any) -> CellRun:
        found = run(runner, connector, *args, **options)
        if connector not in OF_VLLM:
            _note(runner, connector, found)
        return found

    CaseRunner.run = recorded  # type: ignore[method-assign]


def _note(runner: CaseRunner, connector: str, found: CellRun) -> None:
    """Append a line for each case that failed."""
    spec = connector if ":" in connector else f"{runner.module}:{connector}"
    facts, connector = runner.known[spec], spec.partition(":")[2]
    name = f"{facts.module}.{connector}"
    lines = [
        json.dumps((name, mistake(facts.file, connector), one.finding.rule, one.id, one.finding.happened))
        for one in found.results
        if one.finding and one.outcome is Outcome.FAIL
    ]
    with open(os.environ[FOUND], "a", encoding="utf-8") as file:
        file.write("".join(f"{line}\n" for line in lines))


@functools.cache
def mistake(file: str, name: str) -> str:
    """The first sentence of the docstring of a class, "" if it has none."""
    for node in ast.parse(Path(file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            words = re.sub(r"\s+", " ", ast.get_docstring(node) or "")
            return re.split(r"(?<=\.) ", words)[0]
    return ""


def table(lines: list[str]) -> str:
    """One row for each wrong connector and rule."""
    rows: dict[tuple[str, str], tuple[str, ...]] = {}
    for name, said, rule, case, happened in map(json.loads, lines):
        case = case.removeprefix("kv::").partition("[")[0]
        rows.setdefault((name, rule), (f"`{name}`", said, rule, f"`{case}`", happened))
    head = ("wrong connector", "its mistake", "rule", "case", "what the failure says")
    cells = [head, ("---",) * len(head), *(rows[key] for key in sorted(rows))]
    return "\n".join("| " + " | ".join(word.replace("|", "\\|") for word in row) + " |" for row in cells)


def pytest_unconfigure(config: pytest.Config) -> None:
    if not config.getoption("mistakes") or hasattr(config, "workerinput"):
        return
    found = Path(os.environ.pop(FOUND))
    lines = found.read_text(encoding="utf-8").splitlines()
    found.unlink()
    Path(config.getoption("mistakes")).write_text(f"{table(lines)}\n", encoding="utf-8")
