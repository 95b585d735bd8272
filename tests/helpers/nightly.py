"""The option --nightly, and the tests that `make test` leaves to the run of a night.

`tests/nightly.toml` lists them. They run where somebody names a file of tests or selects with -k or -m, too.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest

LISTED = Path(__file__).parents[1] / "nightly.toml"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="run the tests of tests/nightly.toml, too")


@pytest.hookimpl(tryfirst=True)  # workers of pytest-xdist get the options as they are after this
def pytest_configure(config: pytest.Config) -> None:
    selects = config.option.keyword or config.option.markexpr
    if not hasattr(config, "workerinput") and (
        selects or config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    ):
        config.option.nightly = True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.nightly:
        return
    left = listed()
    later = {item.nodeid for item in items if starts_with_one(item.nodeid, left)}
    if unknown := [one for one in left if not any(starts_with_one(nodeid, [one]) for nodeid in later)]:
        raise pytest.UsageError(f"{LISTED.name} names what is no test: {', '.join(unknown)}")
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in later])
    items[:] = [item for item in items if item.nodeid not in later]


def listed() -> list[str]:
    """Ids of tests, of tests with all their parameters, of files and of folders."""
    return [one for group in tomllib.loads(LISTED.read_text())["left"] for one in group["tests"]]


def starts_with_one(nodeid: str, ids: Iterable[str]) -> bool:
    """Whether the test is one of these, or in one of these."""
    return any(nodeid == one or nodeid.startswith((f"{one}[", f"{one}::", f"{one}/")) for one in ids)
