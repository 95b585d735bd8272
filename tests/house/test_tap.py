"""Hooks of a connector are wrapped in one module: `pytest_kvconform.rigs.tap`."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from pytest_kvconform.rigs.vllm_setup.hooks import HOOKS

from .checkout import ROOT

RIGS, TAP = ROOT / "pytest_kvconform" / "rigs", "tap.py"
NAMES = {hook.name for hook in HOOKS}


def wrapped_hooks(source: str) -> Iterator[int]:
    """Lines that set a hook on an object: `x.HOOK = ...`, `setattr(connector, ...)`."""
    for node in ast.walk(ast.parse(source)):
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in targets:
            if isinstance(target, ast.Attribute) and target.attr in NAMES:
                yield node.lineno
        sets = isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr"
        if sets and ast.unparse(node.args[0]).rpartition(".")[2] == "connector":
            yield node.lineno


def test_no_other_module_wraps_a_hook() -> None:
    files = [file for file in RIGS.rglob("*.py") if file != RIGS / TAP]
    found = {str(file.relative_to(RIGS)): [*wrapped_hooks(file.read_text("utf-8"))] for file in files}
    assert {name: lines for name, lines in found.items() if lines} == {}
    assert [*wrapped_hooks((RIGS / TAP).read_text("utf-8"))]


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("connector.start_load_kv = f", [1]),
        ("side.connector.shutdown = f", [1]),
        ("for name in names:\n    setattr(self.connector, name, f)", [2]),
        ("self.connector = None", []),
        ("setattr(module, name, f)", []),
    ],
)
def test_a_planted_wrapper_is_found(source: str, lines: list[int]) -> None:
    assert [*wrapped_hooks(source)] == lines
