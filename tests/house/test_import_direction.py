"""The house of the project: who may import whom, read from the source so that imports inside functions count too."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .checkout import ROOT

PLUGIN = "pytest_kvconform"
HEAVY = ("torch", "vllm", "transformers", "nixl")
UPPER = tuple(f"{PLUGIN}.{name}" for name in ("plugin", "settings", "verdict", "report", "cli"))
LIGHT = (
    *UPPER,
    *(f"{PLUGIN}.{name}" for name in ("declaration", "rules", "result", "case", "parts", "plan", "subject")),
)

# part of the house -> what it must not import, itself or from inside a function, with all that lies below the name
FORBIDDEN: dict[str, tuple[str, ...]] = {
    f"{PLUGIN}": ("reference_connector", "tests"),
    f"{PLUGIN}.rigs": (*UPPER, f"{PLUGIN}.suite", "pytest"),
    f"{PLUGIN}.suite": (*UPPER, *HEAVY),
    **dict.fromkeys(LIGHT, HEAVY),
    "model_matrix": (PLUGIN, "reference_connector", "tests", "torch", "vllm"),
    "reference_connector": (PLUGIN, "model_matrix", "tests"),
}

# part of the house -> all that it may import besides itself and the standard library
ALLOWED: dict[str, tuple[str, ...]] = {f"{PLUGIN}.kvspace": ("numpy",)}


def modules(root: Path) -> Iterator[tuple[str, Path]]:
    """Dotted name and file of every module of the distribution."""
    for package in (PLUGIN, "model_matrix", "reference_connector"):
        for file in sorted((root / package).rglob("*.py")):
            parts = file.relative_to(root).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), file


def imports(module: str, file: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import of a file, relative ones resolved, those for type checkers only left out."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for_types = {id(inner) for node in ast.walk(tree) if _is_type_checking(node) for inner in ast.walk(node)}
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            # `from a import b` may load the module a.b
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def below(name: str, top: str) -> bool:
    return name == top or name.startswith(top + ".")


def wrong_imports(root: Path) -> list[str]:
    return [
        f"{file.relative_to(root)}:{line} imports {name}"
        for module, file in modules(root)
        for line, name in imports(module, file)
        if is_wrong(module, name)
    ]


def is_wrong(module: str, name: str) -> bool:
    if any(
        below(module, part) and below(name, banned) for part, bans in FORBIDDEN.items() for banned in bans
    ):
        return True
    return any(
        below(module, part)
        and name.partition(".")[0] not in sys.stdlib_module_names
        and not any(below(name, one) for one in (part, *allowed))
        for part, allowed in ALLOWED.items()
    )


def test_every_import_goes_the_right_way() -> None:
    assert wrong_imports(ROOT) == []


def test_the_walk_sees_the_packages() -> None:
    seen = {module.partition(".")[0] for module, _ in modules(ROOT)}
    assert {PLUGIN, "model_matrix"} <= seen


@pytest.mark.parametrize(
    ("file", "source", "finds"),
    [
        (f"{PLUGIN}/kvspace/fill.py", "import torch", "torch"),
        (f"{PLUGIN}/kvspace/fill.py", "from ..rigs import engine", f"{PLUGIN}.rigs.engine"),
        (f"{PLUGIN}/kvspace/fill.py", "import msgspec", "msgspec"),
        (f"{PLUGIN}/kvspace/__init__.py", "from .. import suite", f"{PLUGIN}.suite"),
        (f"{PLUGIN}/rigs/bench.py", f"def f():\n    from {PLUGIN} import verdict", f"{PLUGIN}.verdict"),
        (f"{PLUGIN}/suite/engine/bytes.py", "import vllm.config", "vllm.config"),
        (f"{PLUGIN}/report/terminal.py", "def f():\n    import torch.cuda as c", "torch.cuda"),
        (f"{PLUGIN}/plugin.py", "try:\n    from vllm import LLM\nexcept ImportError:\n    pass", "vllm.LLM"),
        (f"{PLUGIN}/rules/model.py", "import reference_connector.boxes", "reference_connector.boxes"),
        ("model_matrix/cells.py", f"import {PLUGIN}", PLUGIN),
        ("reference_connector/plan.py", f"from {PLUGIN}.kvspace import address", f"{PLUGIN}.kvspace.address"),
    ],
)
def test_the_walk_finds_a_planted_import(tmp_path: Path, file: str, source: str, finds: str) -> None:
    planted = tmp_path / file
    planted.parent.mkdir(parents=True)
    planted.write_text(source)
    [found] = wrong_imports(tmp_path)
    assert found.startswith(f"{file}:")
    assert found.endswith(f" imports {finds}")


@pytest.mark.parametrize(
    ("file", "source"),
    [
        (
            f"{PLUGIN}/case.py",
            f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n    from {PLUGIN}.rigs import bench",
        ),
        (f"{PLUGIN}/rigs/engine_process.py", "import vllm, torch, numpy"),
        (f"{PLUGIN}/report/terminal.py", "import torchless"),
        (f"{PLUGIN}/kvspace/fill.py", "import re\nimport numpy.lib as np\nfrom .address import Address"),
        (
            f"{PLUGIN}/suite/engine/bytes.py",
            f"from {PLUGIN}.rigs.bench import Bench\nfrom {PLUGIN}.kvspace import diagnose",
        ),
    ],
)
def test_the_walk_lets_a_right_import_pass(tmp_path: Path, file: str, source: str) -> None:
    planted = tmp_path / file
    planted.parent.mkdir(parents=True)
    planted.write_text(source)
    assert wrong_imports(tmp_path) == []
