"""The parts that the plugin finds by name: the suite, the rules, the bench and the matrix.

The plugin's own tests put a small package in their place by naming it in `_KVCONFORM_TEST_PACKAGE`: it holds `suite/`, `rules/`, `bench.py` and
`cells.py`. That is a seam for tests and no setting: it has no flag, no key, and no promise.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def _part(ours: str, theirs: str) -> str:
    stand_in = os.environ.get("_KVCONFORM_TEST_PACKAGE")
    return f"{stand_in}.{theirs}" if stand_in else ours


def suite_package() -> str:
    """Dotted name of the package whose folders are the tiers."""
    return _part("pytest_kvconform.suite", "suite")


def package_folder(package: str) -> Path:
    """Where a package lies. Raises ModuleNotFoundError."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"there is no package {package}")
    return Path(next(iter(spec.submodule_search_locations)))


def rules_folder() -> Path:
    """Where the files of the rules lie."""
    return package_folder(_part("pytest_kvconform.rules", "rules"))


def bench_module() -> Any:
    """The module that starts engines: `start_zygote`, `probe_subject`, `Bench`, `SubjectFacts`, `BadSubject`."""
    return importlib.import_module(_part("pytest_kvconform.rigs.bench", "bench"))


def expand_matrix(matrix: str, families: Sequence[str] = (), topologies: Sequence[str] = ()) -> list[Any]:
    """Cells of the matrix, `model_matrix.Place`. Raises ValueError for a word that names none of them."""
    cells: list[Any] = importlib.import_module(_part("model_matrix.cells", "cells")).expand(
        matrix, families, topologies
    )
    return cells
