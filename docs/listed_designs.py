"""The part of docs/design.md that lists the right and the wrong connectors of the tests."""

from __future__ import annotations

import ast
import json
import re
import textwrap
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1] / "tests"
RUNS = Path(__file__).with_name("right_connectors.json")  # ci/right_connectors.py writes it
HEAD = ("right connector", "what is unusual about it", "as in")


def listed_designs(table: Callable[[tuple[str, ...], list[tuple[str, ...]]], str]) -> str:
    """Return one row for each right connector, with its last runs, and how many wrong ones there are."""
    listed = tomllib.loads((TESTS / "right_connectors" / "right.toml").read_text(encoding="utf-8"))
    runs = json.loads(RUNS.read_bytes())
    matrices = tuple(one for one in ("quick", "full") if any(one in of for of in runs.values()))
    rows = []
    for module, entries in listed.items():
        file = (TESTS / "right_connectors").joinpath(*module.split(".")).with_suffix(".py")
        tree = ast.parse(file.read_text(encoding="utf-8"))
        said = {
            node.name: ast.get_docstring(node) or "" for node in tree.body if isinstance(node, ast.ClassDef)
        }
        rows += [
            (
                f"`{module}.{name}`",
                re.sub(r"\s+", " ", said[name]),
                entry["like"],
                *(_kept_run(runs.get(f"{module}.{name}", {}).get(matrix)) for matrix in matrices),
            )
            for name, entry in entries.items()
        ]
    wrong = {
        folder.name: len(_wrong_connectors(folder)) for folder in sorted(TESTS.iterdir()) if folder.is_dir()
    }
    counts = ", ".join(f"`tests/{name}` {number}" for name, number in wrong.items() if number)
    sentence = f"{sum(wrong.values())} wrong connectors, each with one mistake: {counts}."
    return f"{table((*HEAD, *matrices), rows)}\n\n{textwrap.fill(sentence, 108)}"


def _kept_run(run: dict[str, Any] | None) -> str:
    """What came out of a run of ci/right_connectors.py."""
    if run is None:
        return "not run"
    counts, conforms = run["counts"], run["verdict"] == "CONFORMS"
    warnings = f", {counts['WARNING']} warnings" if counts.get("WARNING") else ""
    return f"{counts.get('PASS', 0)} pass{warnings}{'' if conforms else ', ' + run['verdict']}"


def _wrong_connectors(folder: Path) -> set[str]:
    """The names of the wrong connectors that the tests of a folder run: see tests/helpers/wrong.py."""
    found = set()
    for file in folder.glob("test_*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        makers = {"Wrong"}
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                of = re.match(r"(?:functools\.)?partial\((\w+)", ast.unparse(node.value))
                makers |= {node.targets[0].id} if of and of[1] in makers else set()
        found |= {
            node.args[0].value
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and ast.unparse(node.func) in makers
            and len(node.args) == 2
            and isinstance(node.args[0], ast.Constant)
            and ast.unparse(node.args[1]) != "{}"  # what the tests compare a wrong one with
        }
    return found
