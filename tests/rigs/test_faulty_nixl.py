"""The transport that misbehaves on demand, over a stand-in for NIXL's agent.

Tests of what it changes, and that it changes nothing else.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pytest_kvconform.rigs.bytes.faulty import nixl as faulty_nixl
from pytest_kvconform.rigs.bytes.faulty import ranks as rank_faults
from pytest_kvconform.rigs.bytes.faulty.messages import FaultReport
from pytest_kvconform.rigs.bytes.faulty.nixl import FaultyAgent
from pytest_kvconform.rigs.scenario import LATE, NEVER, POLL, POST, REVERSED, STATUS, TWICE, Faults
from pytest_kvconform.rigs.vllm_setup import nixl_agents
from tests.reference.nixl.test_nixl import EXPECTED as MEASURED


class Real:
    """A transfer that was begun is made at once; what others send lies in `inbox`."""

    def __init__(self, name: str, nixl_conf: Any = None):
        self.name, self.begun, self.released = name, list[Any](), list[Any]()
        self.inbox: list[bytes] = []
        self.notifs: dict[str, list[bytes]] = {}

    def transfer(self, handle: Any, notif_msg: bytes = b"") -> str:
        self.begun.append(handle)
        return "PROC"

    def check_xfer_state(self, handle: Any) -> str:
        return "DONE" if handle in self.begun else "PROC"

    def release_xfer_handle(self, handle: Any) -> None:
        self.released.append(handle)

    def get_new_notifs(self, backends: Any = ()) -> dict[str, list[bytes]]:
        found, self.inbox = self.inbox, []
        return {"peer": found} if found else {}


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """agent(Faults(hold=2)) -> an agent of rank 0 with these instructions."""
    monkeypatch.setattr(faulty_nixl, "_active", faulty_nixl._ActiveFaults())
    kind = type("agent", (FaultyAgent, Real), {"real": Real})

    def make(*faults: Faults) -> Any:
        made = kind("a")
        faulty_nixl.set_faults(faults, 0)
        return made

    return make


def states(agent: Any, handle: Any, times: int) -> list[str]:
    return [agent.check_xfer_state(handle) for _ in range(times)]


def heard(agent: Any, times: int) -> list[list[bytes]]:
    return [agent.get_new_notifs().get("peer", []) for _ in range(times)]


def test_without_an_instruction_nothing_changes(agent: Callable[..., Any]) -> None:
    one = agent()
    one.inbox = [b"x"]
    assert one.transfer("h") == "PROC" and states(one, "h", 1) == ["DONE"] and heard(one, 2) == [[b"x"], []]
    one.release_xfer_handle("h")
    assert one.released == ["h"]
    assert faulty_nixl.fault_report() == FaultReport(agents=1, transfers=1)


def test_a_held_transfer_is_begun_late(agent: Callable[..., Any]) -> None:
    one = agent(Faults(hold=3))
    one.transfer("h")
    assert states(one, "h", 2) == ["PROC"] * 2 and one.begun == [] and faulty_nixl.fault_report().pending == 1
    assert states(one, "h", 1) == ["DONE"] and one.begun == ["h"] and faulty_nixl.fault_report().pending == 0


def test_a_held_transfer_that_is_released_is_made_as_nixl_makes_it(agent: Callable[..., Any]) -> None:
    one = agent(Faults(hold=3))
    one.transfer("h")
    found = {"before": one.check_xfer_state("h"), "release": one.release_xfer_handle("h") is None}
    found |= {"after": one.check_xfer_state("h"), "release again": one.release_xfer_handle("h") is None}
    assert one.begun == one.released == [] and faulty_nixl.fault_report().pending == 1
    heard(one, 3)
    assert found | {"goes on writing": one.begun == ["h"]} == MEASURED["released"]
    assert one.released == ["h"] and faulty_nixl.fault_report().pending == 0


def test_a_connector_that_asks_for_notifications_only_gets_its_transfer_all_the_same(
    agent: Callable[..., Any],
) -> None:
    one = agent(Faults(hold=3))
    one.transfer("h")
    heard(one, 3)
    assert one.begun == ["h"]


def test_a_transfer_that_is_made_is_said_late(agent: Callable[..., Any]) -> None:
    one = agent(Faults(late=2))
    one.transfer("h")
    assert one.begun == ["h"] and states(one, "h", 4) == ["PROC", "PROC", "DONE", "DONE"]


def test_failures(agent: Callable[..., Any]) -> None:
    one = agent(
        Faults(transfers=(0,), fail=STATUS, hold=1),
        Faults(transfers=(1,), fail=POLL),
        Faults(transfers=(2,), fail=POST),
    )
    one.transfer("a")
    one.transfer("b")
    with pytest.raises(RuntimeError, match="not begun"):
        one.transfer("c")
    one.transfer("d")
    assert states(one, "a", 3) == ["PROC", "ERR", "ERR"]
    with pytest.raises(RuntimeError, match="the transfer failed"):
        one.check_xfer_state("b")
    assert states(one, "d", 1) == ["DONE"] and one.begun == ["d"], "nothing else is moved"
    assert faulty_nixl.fault_report() == FaultReport(agents=1, transfers=4, changed=3, failed=3)


def test_a_failed_transfer_that_lingers_writes_in_the_end(agent: Callable[..., Any]) -> None:
    one = agent(Faults(fail=STATUS, linger=3))
    one.transfer("h")
    assert states(one, "h", 1) == ["ERR"]
    with pytest.raises(RuntimeError, match="cannot be cancelled"):
        one.release_xfer_handle("h")
    assert one.begun == [] and faulty_nixl.fault_report().pending == 1
    heard(one, 5)  # the connector has lost interest
    assert one.begun == ["h"] and faulty_nixl.fault_report().pending == 0
    one.release_xfer_handle("h")
    assert one.released == ["h"]


def test_ranks_and_numbers_choose(agent: Callable[..., Any]) -> None:
    one = agent(Faults(ranks=(1,), fail=POST), Faults(transfers=(1,), hold=9))
    one.transfer("a")
    one.transfer("b")
    assert one.begun == ["a"]


@pytest.mark.parametrize(
    ("faults", "expected"),
    [
        (Faults(notifications=TWICE), [[b"a", b"b", b"a", b"b"], [], []]),
        (Faults(notifications=TWICE, delay=2), [[b"a", b"b"], [], [b"a", b"b"]]),
        (Faults(notifications=LATE, delay=1), [[], [b"a", b"b"], []]),
        (Faults(notifications=NEVER), [[], [], []]),
        (Faults(notifications=REVERSED, delay=2), [[b"b", b"a"], [], []]),
    ],
)
def test_notifications(agent: Callable[..., Any], faults: Faults, expected: list[list[bytes]]) -> None:
    one = agent(faults)
    one.inbox = [b"a", b"b"]
    assert heard(one, 3) == expected
    assert faulty_nixl.fault_report().notifications == 2 and faulty_nixl.fault_report().pending == 0


def test_every_way_to_ask_for_notifications_is_the_same(agent: Callable[..., Any]) -> None:
    one = agent(Faults(notifications=LATE, delay=1))
    one.inbox = [b"done:1"]
    assert not one.check_remote_xfer_done("peer", b"done")
    assert one.check_remote_xfer_done("peer", b"done") and not one.check_remote_xfer_done("peer", b"done")
    one.inbox = [b"more"]
    assert one.update_notifs() == {"peer": []} and one.update_notifs() == {"peer": [b"more"]}


def test_progress_serves_peers_and_keeps_what_they_say(agent: Callable[..., Any]) -> None:
    one = agent()
    one.inbox = [b"early"]
    faulty_nixl.progress()
    one.inbox = [b"late"]
    assert heard(one, 1) == [[b"early", b"late"]]


def test_an_agent_ends_when_its_connector_forgets_it_and_what_it_did_stays_counted(
    agent: Callable[..., Any],
) -> None:
    class Handle:
        """That of a transfer."""

    one, handle = agent(Faults(hold=2, transfers=(1,))), Handle()
    one.transfer(handle)
    one.transfer(Handle())
    ends, ends_of_handle = weakref.ref(one), weakref.ref(handle)
    del handle
    one.begun.clear()  # of the stand-in
    assert ends_of_handle() is None  # no fault changes the first transfer
    del one
    assert ends() is None
    assert faulty_nixl.fault_report() == FaultReport(agents=1, transfers=2, changed=1)
    assert faulty_nixl.begun_and_ended() == (2, 0)


@pytest.mark.parametrize(
    ("config", "goes_on"),
    [
        (None, True),  # NIXL's default is a thread
        (SimpleNamespace(wants_progress_thread=True), True),
        (SimpleNamespace(wants_progress_thread=False), False),
        (SimpleNamespace(), False),  # on a GPU: the agent has the thread itself, if it is to have one
    ],
)
def test_an_agent_that_is_left_goes_on_if_it_would_have_a_thread(
    monkeypatch: pytest.MonkeyPatch, config: Any, goes_on: bool
) -> None:
    monkeypatch.setattr(faulty_nixl, "_active", faulty_nixl._ActiveFaults())
    one = type("agent", (FaultyAgent, Real), {"real": Real})("a", config)
    one.inbox = [b"x"]
    rank_faults.progress_of_left(None)
    assert (one.inbox == []) == goes_on
    faulty_nixl.progress()
    assert one.inbox == []


def test_every_module_that_refers_to_the_agent_gets_the_one_that_obeys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(name: str, **has: Any) -> ModuleType:
        module = ModuleType(name)
        vars(module).update(has)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    real = type("nixl_agent", (), {})
    monkeypatch.setattr(nixl_agents, "_users", [])
    monkeypatch.setattr(nixl_agents, "_last", "")
    for name in [name for name in sys.modules if name.partition(".")[0] == "nixl"]:
        monkeypatch.delitem(sys.modules, name)
    api, bindings = load("nixl._api", nixl_agent=real), load("nixl._bindings")
    load("nixl", _api=api, _bindings=bindings)
    early = load("loaded_early", NixlWrapper=real, other=FaultReport)
    nixl_agents.find_users_of_agent_class()
    late = load("loaded_late", agent_class=real)
    assert faulty_nixl.install()
    assert issubclass(api.nixl_agent, FaultyAgent) and issubclass(api.nixl_agent, real)
    assert early.NixlWrapper is late.agent_class is api.nixl_agent and early.other is FaultReport
    assert faulty_nixl.install() and api.nixl_agent.real is real  # once is enough
