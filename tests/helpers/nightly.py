"""The option --nightly, and the tests that `make test` leaves to the run of a night.

`tests/nightly.toml` lists them. They run where somebody names a file of tests or selects with -k, -m or --lf,
too.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

LISTED = Path(__file__).parents[1] / "nightly.toml"
COLLECTED = pytest.StashKey[list[str]]()  # ids of all tests, also of those that are left out


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="run the tests of tests/nightly.toml, too")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        config.option.nightly = config.workerinput["nightly"]
        return
    selects = config.option.keyword or config.option.markexpr or config.getoption("lf", False)
    if selects or config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        config.option.nightly = True


def pytest_report_header(config: pytest.Config) -> str:
    """pytest-xdist does not tell how many tests its workers left out."""
    left_out = not config.option.nightly and not config.pluginmanager.has_plugin("kvconform-runner")
    return f"without the tests of {LISTED.name}: --nightly runs them" if left_out else ""


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_configure_node(node: Any) -> None:
    node.workerinput["nightly"] = node.config.option.nightly


@pytest.hookimpl(tryfirst=True)  # before -k and -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[COLLECTED] = [item.nodeid for item in items]
    if config.option.nightly:
        return
    ids = listed()
    config.hook.pytest_deselected(items=[item for item in items if is_listed(item.nodeid, ids)])
    items[:] = [item for item in items if not is_listed(item.nodeid, ids)]


def listed() -> set[str]:
    """Ids of tests, and of tests with all their parameters."""
    return {
        f"{entry['file']}::{entry['test']}{parameters}"
        for entry in tomllib.loads(LISTED.read_text())["left"]
        for parameters in [f"[{one}]" for one in entry.get("parameters", ())] or [""]
    }


def is_listed(test: str, ids: Collection[str]) -> bool:
    """Whether the id of a test is one of these, with or without its parameters."""
    return test in ids or test.partition("[")[0] in ids
