"""The one table of connectors: every record of every theme."""

from __future__ import annotations

import importlib
import pkgutil

from tests.helpers.case_runner import OF_VLLM
from tests.helpers.wrong import Theme, Wrong
from tests.wrong_connectors import right_designs, table

MODULES = [
    importlib.import_module(f"{table.__name__}.{one.name}") for one in pkgutil.iter_modules(table.__path__)
]
THEMES: tuple[Theme, ...] = tuple(theme for module in (*MODULES, right_designs) for theme in module.THEMES)


def named(name: str) -> Theme:
    [theme] = [one for one in THEMES if one.name == name]
    return theme


def wrong_connectors() -> set[tuple[str, str]]:
    """Module and class of each wrong connector, but for those of vLLM."""
    found = set()
    for theme in THEMES:
        for record in theme.records:
            module, _, name = record.connector.rpartition(":")
            if isinstance(record, Wrong) and name not in OF_VLLM:
                found.add((module or theme.module, name))
    return found
