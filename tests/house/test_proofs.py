"""Every case of the suite can fail: a record of the catalogue makes it, or a test that a list names."""

from __future__ import annotations

import ast

from tests.wrong_connectors.catalogue import RULES, THEMES, found_by, name_of
from tests.wrong_connectors.elsewhere import NEVER_ALONE, PROVED_BY, UNPROVEN
from tests.wrong_connectors.undo_checkers import proofs, undone

from .checkout import ROOT

# themes whose records all name rules
RULES_OF = ("finished", "matched", "params", "steps")
FOUND = [one for theme in THEMES for one in found_by(theme)]
MISTAKES = [cases for _, cases in FOUND]


def test_every_case_finds_a_mistake_before_a_change_lands() -> None:
    by_day = set[str]().union(*(cases for record, cases in FOUND if not record.night))
    assert RULES.keys() - by_day == PROVED_BY.keys() | UNPROVEN.keys()


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


def test_every_checker_can_be_undone() -> None:
    """As undo_checkers.py does it, which runs the proof of each."""
    assert proofs().keys() == RULES.keys() - UNPROVEN.keys()
    for case in RULES:
        module, _, name = case.partition("::")
        source = (ROOT / f"pytest_kvconform/suite/{module}.py").read_text(encoding="utf-8")
        [function] = [one for one in ast.parse(undone(source, name)).body if getattr(one, "name", "") == name]
        assert isinstance(function, ast.FunctionDef) and ast.get_docstring(function)
        assert any(isinstance(one, ast.Return) for one in function.body[1:3])
