"""Every case of the suite can fail: a record of the catalogue makes it, or a test that a list names."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from pytest_kvconform.plan import load_module, module_names
from tests.helpers.wrong import Theme, Wrong, case_of
from tests.wrong_connectors.catalogue import THEMES
from tests.wrong_connectors.elsewhere import NEVER_ALONE, PROVED_BY, UNPROVEN

from .checkout import ROOT

RULES = {f"{module}::{case.name}": case.rule for module in module_names() for case in load_module(module)[1]}

# themes whose records all name rules
RULES_OF = ("finished", "matched", "params", "steps")


def found_by(theme: Theme) -> Iterator[set[str]]:
    """Of each wrong connector of a theme the cases that find it."""
    modules = theme.modules or {case.partition("::")[0] for case in RULES}
    here = {case for case in RULES if case.startswith(f"{theme.tier}/")}
    for record in theme.records:
        if isinstance(record, Wrong):
            named = set(map(case_of, record.fails))
            yield {
                case
                for case in here
                if name_of(case) in named
                and (case.partition("::")[0] in modules or name_of(case) in theme.also.split())
            }


def name_of(case: str) -> str:
    return case.partition("::")[2]


MISTAKES = [cases for theme in THEMES for cases in found_by(theme)]


def test_every_case_finds_a_mistake() -> None:
    assert RULES.keys() - set[str]().union(*MISTAKES) == PROVED_BY.keys() | UNPROVEN.keys()


def test_every_mistake_is_found() -> None:
    assert all(MISTAKES)


def test_what_proves_a_case_elsewhere_exists() -> None:
    for place in PROVED_BY.values():
        path, _, name = place.partition("::")
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, place


def test_every_case_finds_a_mistake_that_no_other_case_finds() -> None:
    """A record does not tell apart cases of one name in several modules of a tier."""
    found = [{f"{case.partition('/')[0]}::{name_of(case)}" for case in cases} for cases in MISTAKES]
    alone = set[str]().union(*(names for names in found if len(names) == 1))
    assert set[str]().union(*found) - alone == NEVER_ALONE.keys()


def test_every_rule_of_scheduler_halves_is_one_that_a_record_names_alone() -> None:
    alone = {record.rules for theme in THEMES for record in theme.records}
    modules = {one for theme in THEMES if theme.name in RULES_OF for one in theme.modules}
    due = {rule for case, rule in RULES.items() if case.partition("::")[0] in modules}
    # With too large a count every load waits for ever, so that other rules name it, too.
    assert due - alone == {"KV-LOAD-002"}
