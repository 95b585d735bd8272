"""The one table of connectors: every record of every theme."""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter
from collections.abc import Iterator

from pytest_kvconform.plan import load_module, module_names
from tests.helpers.case_runner import OF_VLLM
from tests.helpers.wrong import Record, Theme, Wrong, case_of
from tests.wrong_connectors import right_designs, table

MODULES = [
    importlib.import_module(f"{table.__name__}.{one.name}") for one in pkgutil.iter_modules(table.__path__)
]
THEMES: tuple[Theme, ...] = tuple(theme for module in (*MODULES, right_designs) for theme in module.THEMES)


def _with_ids() -> Iterator[tuple[str, Theme, Record]]:
    """Every record with the id of its test. The second one of several with one name ends in "-2"."""
    seen = Counter[str]()
    for theme in THEMES:
        for record in theme.records:
            seen[name := f"{theme.name}-{record}"] += 1
            yield f"{name}-{seen[name]}" if seen[name] > 1 else name, theme, record


RECORDS = list(_with_ids())
# "<tier>/<module>::<case>" -> its rule
RULES = {f"{module}::{case.name}": case.rule for module in module_names() for case in load_module(module)[1]}


def found_by(theme: Theme) -> Iterator[tuple[Wrong, set[str]]]:
    """Each wrong connector of a theme, and the cases that find it."""
    modules = theme.modules or {case.partition("::")[0] for case in RULES}
    here = {case for case in RULES if case.startswith(f"{theme.tier}/")}
    for record in theme.records:
        if isinstance(record, Wrong):
            named = set(map(case_of, record.fails))
            yield (
                record,
                {
                    case
                    for case in here
                    if name_of(case) in named
                    and (case.partition("::")[0] in modules or name_of(case) in theme.also.split())
                },
            )


def name_of(case: str) -> str:
    return case.partition("::")[2]


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
