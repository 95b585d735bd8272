"""The part of docs/registry.md that shows the entries of registry/."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pytest_kvconform import declaration
from pytest_kvconform.claims import registry

FOLDER = Path(__file__).parents[1] / registry.FOLDER
HEAD = ("connector", "vLLM, device", "levels", "day", "holds", "Reproduce")


def registered_results(
    table: Callable[[tuple[str, ...], list[tuple[str, ...]]], str], folder: Path = FOLDER
) -> str:
    """Return one row for each entry. What has expired is as of the day on which the page is written."""
    if not (entries := registry.read(folder)):
        return "\nThere is no result yet.\n"
    today = declaration.today()
    return f"\nAs of {today}:\n\n{table(HEAD, registry.rows(entries, today))}\n"
