"""Plugins of our own tests, and the end of their run when one of pytest-xdist's workers was killed."""

from __future__ import annotations

import pytest

from pytest_kvconform.pytest_hooks.lost_workers import LostWorkers
from pytest_kvconform.rigs.processes import cores

# Only a conftest that pytest loads at its start may name plugins.
pytest_plugins = [
    "pytester",
    "tests.small_suite.runs",
    "tests.helpers.mistakes",
    "tests.helpers.rings",
    "tests.helpers.warm_zygotes",
]


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(LostWorkers(returncode=11), "lost-workers")


def pytest_runtest_setup() -> None:
    cores._looks.clear()  # a test may have its own clock, and its own waits for a core
