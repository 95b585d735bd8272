"""The fault hook of docs/stores.md: the page has the class that a connector of the tests inherits."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_kvconform.rigs.bytes.faulty.ranks import hook_has, questions
from pytest_kvconform.rigs.scenario import LATE, NEVER, POST, STATUS, Faults
from tests.docs.pages import PAGES, ROOT, blocks

HOOK = ROOT / "tests" / "faults" / "fault_hook.py"


@pytest.fixture
def hook() -> Any:
    """What the page's program makes."""
    [code] = [code for code in blocks(PAGES["docs/stores.md"], "python") if "kvconform_fault" in code]
    assert code.strip() in HOOK.read_text()
    names: dict[str, Any] = {}
    exec(code, names)
    return names["FaultHook"]()


@pytest.mark.parametrize(
    ("faults", "transfers"),
    [
        (Faults(transfers=(1,), fail=STATUS), [("", 0), ("fail", 0), ("", 0)]),
        (Faults(hold=7), [("delay", 7)] * 3),
        (Faults(transfers=(0, 2), fail=POST), [("fail", 0), ("", 0), ("fail", 0)]),
        (Faults(notifications=NEVER), [("drop", 0)] * 3),
    ],
    ids=["second", "all", "two", "silent"],
)
def test_the_example_does_what_the_suite_asks(
    hook: Any, faults: Faults, transfers: list[tuple[str, int]]
) -> None:
    hook.kvconform_fault("none", -1, 0)
    for question in questions(faults):
        hook.kvconform_fault(*question)
    assert [hook.fault_of_next() for _ in transfers] == transfers
    assert hook.kvconform_fault("", -1, 0) == sum(bool(what) for what, _ in transfers)
    assert hook.kvconform_fault("none", -1, 0) == 0
    assert hook.fault_of_next() == ("", 0)


def test_what_the_hook_cannot_be_asked_for() -> None:
    assert [hook_has(one) for one in (Faults(late=3), Faults(fail=STATUS, linger=3))] == [False, False]
    assert not hook_has(Faults(notifications=LATE))
