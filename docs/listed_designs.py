"""The part of docs/design.md that lists the right and the wrong connectors of the tests."""

from __future__ import annotations

import ast
import json
import re
import sys
import textwrap
import tomllib
from collections import Counter
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
    places = [module.split(".") for module, _ in _wrong_connectors()]
    counts = Counter(names[1 if names[1] == "right_connectors" else 2] for names in places)
    themes = ", ".join(f"`{theme}` {count}" for theme, count in sorted(counts.items()))
    sentence = f"{counts.total()} wrong connectors, each with one mistake, by theme: {themes}."
    return f"{table((*HEAD, *matrices), rows)}\n\n{textwrap.fill(sentence, 108)}"


def _kept_run(run: dict[str, Any] | None) -> str:
    """What came out of a run of ci/right_connectors.py."""
    if run is None:
        return "not run"
    counts, conforms = run["counts"], run["verdict"] == "CONFORMS"
    warnings = f", {counts['WARNING']} warnings" if counts.get("WARNING") else ""
    return f"{counts.get('PASS', 0)} pass{warnings}{'' if conforms else ', ' + run['verdict']}"


def _wrong_connectors() -> set[tuple[str, str]]:
    """Module and class of each wrong connector of the catalogue of the tests."""
    sys.path.append(str(TESTS.parent))
    from tests.wrong_connectors.catalogue import wrong_connectors

    return wrong_connectors()
