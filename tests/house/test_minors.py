"""One room changes with a minor of vLLM: no other module of the package knows one, or imports a function of
vLLM. What others may import are classes, which they drive or name as types.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from .checkout import ROOT
from .test_import_direction import modules

PLACES = ("pytest_kvconform/rigs", "pytest_kvconform/suite")
ROOM = "pytest_kvconform/rigs/vllm_setup"
# a number of a minor, or a comparison of versions
KNOWS = re.compile(r"\b0\.3\d\b|vllm\.__version__|(?:older|earlier|newer) minor|(?:before|since) vLLM \d")


def lines_that_know(root: Path) -> Iterator[str]:
    """FILE:LINE of each line outside the room that knows a minor."""
    for place in PLACES:
        for file in sorted((root / place).rglob("*.py")):
            if not file.is_relative_to(root / ROOM):
                for number, line in enumerate(file.read_text("utf-8").splitlines(), 1):
                    if KNOWS.search(line):
                        yield f"{file.relative_to(root)}:{number}"


def test_no_other_room_knows_a_minor() -> None:
    assert list(lines_that_know(ROOT)) == []


@pytest.mark.parametrize(
    "line",
    [
        'if vllm.__version__ < "1":',
        "x = 1  # since vLLM 1.0",
        '    """Before 0.32 none."""',
        "return None  # older minors have none",
    ],
)
def test_a_planted_branch_is_found(tmp_path: Path, line: str) -> None:
    for place in (*PLACES, ROOM):
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        (tmp_path / place / "a.py").write_text(f"import vllm\n{line}\n")
    assert list(lines_that_know(tmp_path)) == [f"{place}/a.py:2" for place in PLACES]


def functions_of_vllm(root: Path) -> Iterator[str]:
    """FILE:LINE of each import outside the room of what is no class of vLLM, or is private there."""
    for _, file in modules(root):
        name = file.relative_to(root)
        if name.is_relative_to(ROOM) or not name.is_relative_to("pytest_kvconform"):
            continue
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                imported = [(one.name, "") for one in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported = [(node.module, one.name) for one in node.names]
            else:
                continue
            for module, attribute in imported:
                if module.partition(".")[0] == "vllm" and not is_class(module, attribute):
                    yield f"{name}:{node.lineno} imports {attribute or 'a module'} of {module}"


def is_class(module: str, name: str) -> bool:
    """Whether `from module import name` brings a class that others may use.

    The sources of vLLM are read: to import them takes half a minute.
    """
    for node in names_of(module).get(name, ()) if not name.startswith("_") else ():
        if isinstance(node, ast.ImportFrom) and node.module:  # the class is defined in another module
            [original] = (one.name for one in node.names if name in (one.asname, one.name))
            return is_class(node.module, original)
        return isinstance(node, ast.ClassDef)
    return False


@functools.cache
def names_of(module: str) -> dict[str, list[ast.AST]]:
    """Name -> what defines or imports it in a module of the installed vLLM."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    place = Path(spec.origin).parent.joinpath(*module.split(".")[1:])
    files = [file for file in (place / "__init__.py", place.with_suffix(".py")) if file.exists()]
    found: dict[str, list[ast.AST]] = {}
    for node in ast.walk(ast.parse(files[0].read_text("utf-8"))) if files else ():
        if isinstance(node, ast.ImportFrom):
            for one in node.names:
                found.setdefault(one.asname or one.name, []).append(node)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.setdefault(node.name, []).append(node)
    return found


def test_no_other_room_imports_a_function_of_vllm() -> None:
    assert list(functions_of_vllm(ROOT)) == []


@pytest.mark.parametrize(
    ("source", "finds"),
    [
        ("from vllm.platforms import current_platform", "current_platform of vllm.platforms"),
        ("def f():\n    from vllm.config import set_current_vllm_config as x", "set_current_vllm_config of"),
        ("import vllm.config", "a module of vllm.config"),
        ("from vllm import config", "config of vllm"),
        ("from vllm.v1.request import Request, gone", "gone of vllm.v1.request"),
    ],
)
def test_a_planted_function_is_found(tmp_path: Path, source: str, finds: str) -> None:
    for place in (*PLACES, ROOM):
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        (tmp_path / place / "a.py").write_text(f"from vllm.v1.request import Request\n{source}\n")
    line = 1 + len(source.splitlines())
    found = list(functions_of_vllm(tmp_path))
    assert [text.partition(" ")[0] for text in found] == [f"{place}/a.py:{line}" for place in PLACES]
    assert all(f" imports {finds}" in text for text in found)
