"""Modules that the plugin loads by name: the suite, the rules, the bench and the model matrix.

Tests of the plugin replace them by a small package: the variable `_KVCONFORM_TEST_PACKAGE` names a package
with `suite/`, `rules/`, `bench.py`, `cells.py` and `known_limits.toml`. The variable is a seam for tests and
no setting: it has no flag and no TOML key, and it may change at any time.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def _module_name(real: str, replacement: str) -> str:
    package = os.environ.get("_KVCONFORM_TEST_PACKAGE")
    return f"{package}.{replacement}" if package else real


def suite_package() -> str:
    """Return the dotted name of the package whose folders are the tiers."""
    return _module_name("pytest_kvconform.suite", "suite")


def package_folder(package: str) -> Path:
    """Return the folder of a package. Raises ModuleNotFoundError."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"there is no package {package}")
    return Path(next(iter(spec.submodule_search_locations)))


def rules_folder() -> Path:
    """Return the folder of the rules' TOML files."""
    return package_folder(_module_name("pytest_kvconform.rules", "rules"))


def bench_module() -> Any:
    """Return the module that starts engines.

    It has start_zygote, probe_subject, Benches, SubjectFacts and BadSubject.
    """
    return importlib.import_module(_module_name("pytest_kvconform.rigs.bench", "bench"))


def limits_file() -> Path:
    """Return the file of known limits, see model_matrix/limits.py."""
    cells = importlib.util.find_spec(_module_name("model_matrix.cells", "cells"))
    assert cells is not None
    assert cells.origin is not None
    return Path(cells.origin).with_name("known_limits.toml")


def expand_matrix(matrix: str, families: Sequence[str] = (), topologies: Sequence[str] = ()) -> list[Any]:
    """Return the cells of a matrix as model_matrix/cells.py returns them.

    Raises ValueError for a family or topology that the matrix does not have.
    """
    module = importlib.import_module(_module_name("model_matrix.cells", "cells"))
    cells: list[Any] = module.expand(matrix, families, topologies)
    return cells
