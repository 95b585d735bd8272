"""The rings of our tests: what runs in minutes, what runs before a change lands, and everything.

    make test          first: what FIRST names, and for each rule the first record of the catalogue about it
    make test-all      and the other connectors, servers, findings, pages and workflows
    make test-night    and what is marked `night`: long waits, and mistakes of which others stay

They give the option --ring. A ring has those before it; --rest leaves the first one out. Where somebody names
a file of tests, or selects with -k, -m or --lf, every test runs that is meant.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from pytest_kvconform.plan import load_module, module_names
from tests.helpers.wrong import Record, Wrong, case_of

TESTS = Path(__file__).parents[1]
RINGS = ("first", "all", "night")
CATALOGUE = "tests/wrong_connectors/test_catalogue.py"
# folders without engines, or with few of them
FIRST = (
    "causes claims cpu_layers declarations helpers house kvspace model_matrix origin plugin report "
    "small_suite"
).split()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ring", choices=RINGS, default=RINGS[-1], help="which of our tests run, see rings.py")
    parser.addoption("--rest", action="store_true", help="leave out the first ring, which has run")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "night: long, and run by make test-night alone")
    if hasattr(config, "workerinput"):
        config.option.ring, config.option.rest = config.workerinput["ring"]
        return
    selects = config.option.keyword or config.option.markexpr or config.getoption("lf", False)
    if selects or config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        config.option.ring, config.option.rest = RINGS[-1], False


def pytest_report_header(config: pytest.Config) -> str:
    """pytest-xdist does not tell how many tests its workers left out."""
    ours = config.option.ring != RINGS[-1] and not config.pluginmanager.has_plugin("kvconform-runner")
    return f"ring {config.option.ring}: others are larger, see tests/helpers/rings.py" if ours else ""


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_configure_node(node: Any) -> None:
    node.workerinput["ring"] = node.config.option.ring, node.config.option.rest


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With --dist loadfile a worker gets a file of tests, and of the catalogue of connectors a theme."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByTheme(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    return ByTheme(config, log)


def scope_of(nodeid: str) -> str:
    """What a worker runs whole: a file, or a theme of the catalogue of connectors."""
    file, _, test = nodeid.partition("::")
    return f"{file}::{test.partition('[')[2].partition('-')[0]}" if file.endswith(CATALOGUE) else file


@pytest.hookimpl(tryfirst=True)  # before -k and -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    least, most, proven = int(config.option.rest), RINGS.index(config.option.ring), set[str]()
    if (least, most) == (0, 2):
        return
    found = [(item, least <= ring_of(item, proven) <= most) for item in items]
    config.hook.pytest_deselected(items=[item for item, runs in found if not runs])
    items[:] = [item for item, runs in found if runs]


def ring_of(item: pytest.Item, proven: set[str]) -> int:
    """The number of the ring of a test.

    `proven`: the rules that tests before it prove, to which those of this test are added.
    """
    parameters = getattr(item, "callspec", None)
    given = parameters.params if parameters else {}
    record = given.get("record")
    if item.get_closest_marker("night") or (isinstance(record, Record) and record.night):
        return 2
    if item.path.relative_to(TESTS).parts[0] in FIRST:
        return 0
    new = rules_found_by(record) - proven if isinstance(record, Wrong) and given["theme"].first else set()
    proven |= new
    return 0 if new else 1


def rules_found_by(wrong: Wrong) -> set[str]:
    """The rules of the cases that find a wrong connector."""
    names = map(case_of, wrong.fails)
    return {*wrong.rules.split(), *(rule for name in names for rule in rules_of_cases().get(name, ()))}


@functools.cache
def rules_of_cases() -> dict[str, set[str]]:
    """Name of a function -> rules of the cases of this name."""
    found: dict[str, set[str]] = {}
    for module in module_names():
        for case in load_module(module)[1]:
            found.setdefault(case.name, set()).add(case.rule)
    return found


def is_night(config: pytest.Config) -> bool:
    """Whether a wrong connector runs the cases of all modules, and not only of those that find it."""
    return bool(config.option.ring == RINGS[-1])


def night(*values: Any) -> Any:
    """Parameters of a test that runs at night alone."""
    return pytest.param(*values, marks=pytest.mark.night)
