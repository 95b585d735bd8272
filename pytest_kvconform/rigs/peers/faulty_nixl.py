"""A transport that misbehaves on demand, for connectors built on NIXL: delays, failures, messages that come
twice, late, reversed or never.

`install` puts a subclass of the real `nixl_agent` in its place wherever a loaded module refers to it, and
where modules that are imported later will find it. Bytes are moved by the real agent and by nothing else;
what the subclass changes is when a transfer is begun, what is said about it, and which notifications are
passed on. Without an instruction (`arm`) it changes nothing.

NIXL's Python API is that of nixl 1.5 (nixl/_api.py: transfer, check_xfer_state, release_xfer_handle,
get_new_notifs, update_notifs, check_remote_xfer_done). Time is counted in rounds: a round of a transfer is a
question for its state, or for new notifications if the connector asks for those more often.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pytest_kvconform.rigs.scenario import NEVER, POLL, POST, REVERSED, TWICE, Faults
from pytest_kvconform.rigs.vllm_setup.nixl_agents import replace_agent_class


class FaultReport(msgspec.Struct, frozen=True, kw_only=True):
    """What became of an instruction on one rank."""

    agents: int = 0  # agents that the connector has made; 0: it does not use NIXL
    transfers: int = 0  # transfers begun since the instruction
    changed: int = 0  # of these, held, delayed or failed
    failed: int = 0  # of these, failed
    notifications: int = 0  # messages treated as the instruction says
    pending: int = (
        0  # transfers not begun yet, failed ones that may still write, messages that are not due yet
    )

    def __add__(self, other: FaultReport) -> FaultReport:
        return FaultReport(
            **{name: getattr(self, name) + getattr(other, name) for name in FaultReport.__struct_fields__}
        )


@dataclass
class _Flight:
    """One transfer that an instruction is for."""

    handle: Any
    message: bytes
    faults: Faults
    since: int  # rounds of the agent when it was asked for
    asked: int = 0  # questions for its state
    done: int = 0  # of these, since it was made
    posted: bool = False
    failed_at: int = -1  # round of the first bad answer
    over: bool = False  # nothing of it can write any more


NOTHING = Faults()


@dataclass
class _Orders:
    """What holds in this process."""

    transfers: tuple[Faults, ...] = ()
    notifications: Faults = NOTHING
    agents: list[FaultyAgent] = field(default_factory=list)

    def of(self, number: int) -> Faults | None:
        """What holds for the transfer of this number."""
        return next(
            (faults for faults in self.transfers if not faults.transfers or number in faults.transfers), None
        )


_orders = _Orders()


class FaultyAgent:
    """What stands before NIXL's own methods. `install` joins it with the real class, of which every other
    method stays.
    """

    real: Any  # the class nixl_agent
    notifs: dict[str, list[bytes]]  # the real agent's: what check_remote_xfer_done looks through
    error: type[Exception] = RuntimeError  # what NIXL raises when its backend fails

    def __init__(self, *args: Any, **kwargs: Any):
        self._flights: dict[Any, _Flight] = {}
        self._rounds = 0
        self._waiting: list[tuple[int, str, bytes]] = []  # round at which it is due, sender, message
        self._early: dict[str, list[bytes]] = {}  # what arrived while nobody asked
        self._lock = threading.RLock()
        self._forget()
        self.real.__init__(self, *args, **kwargs)
        _orders.agents.append(self)

    def _forget(self) -> None:
        """Begin to count anew."""
        self._begun = self._changed = self._failed = self._treated = 0

    def _struck(self) -> FaultReport:
        with self._lock:
            open_flights = sum(self._is_open(flight) for flight in self._flights.values())
            return FaultReport(
                agents=1,
                transfers=self._begun,
                changed=self._changed,
                failed=self._failed,
                notifications=self._treated,
                pending=open_flights + sum(due > self._rounds for due, _, _ in self._waiting),
            )

    def _is_open(self, flight: _Flight) -> bool:
        """Whether the transfer may still write."""
        if flight.faults.fail:
            return bool(flight.faults.linger) and not flight.over
        if not flight.posted:
            return True
        with contextlib.suppress(self.error):
            return (
                not getattr(flight.handle, "_released", False)
                and self.real.check_xfer_state(self, flight.handle) == "PROC"
            )
        return False

    # ---- transfers -----------------------------------------------------------------------------------------

    def transfer(self, handle: Any, notif_msg: bytes = b"") -> Any:
        with self._lock:
            faults = _orders.of(self._begun)
            self._begun += 1
            self._flights.pop(handle, None)  # a handle may be used again
            if faults is None:
                return self.real.transfer(self, handle, notif_msg)
            self._changed += 1
            self._failed += bool(faults.fail)
            if faults.fail == POST:
                raise self.error("NIXL_ERR_BACKEND: the transfer was not begun (asked for by the test suite)")
            flight = self._flights[handle] = _Flight(handle, notif_msg, faults, self._rounds)
            self._advance(flight)
            return "PROC"

    def check_xfer_state(self, handle: Any) -> Any:
        with self._lock:
            flight = self._flights.get(handle)
            if flight is None:
                return self.real.check_xfer_state(self, handle)
            flight.asked += 1
            round_ = self._advance(flight)
            if flight.faults.fail:
                if round_ <= flight.faults.hold:
                    return "PROC"
                if flight.failed_at < 0:
                    flight.failed_at = round_
                if flight.faults.fail == POLL:
                    raise self.error(
                        "NIXL_ERR_REMOTE_DISCONNECT: the transfer failed (asked for by the test suite)"
                    )
                return "ERR"
            state = self.real.check_xfer_state(self, handle) if flight.posted else "PROC"
            flight.done += state == "DONE"
            return "PROC" if state == "DONE" and flight.done <= flight.faults.late else state

    def release_xfer_handle(self, handle: Any) -> Any:
        with self._lock:
            flight = self._flights.get(handle)
            if flight is not None and flight.faults.linger and not flight.over:
                raise self.error(
                    "NIXL_ERR_REPOST_ACTIVE: the transfer cannot be cancelled (asked for by the test suite)"
                )
            self._flights.pop(handle, None)
        return self.real.release_xfer_handle(self, handle)

    def _start_held(self) -> None:
        with self._lock:
            for flight in self._flights.values():
                flight.faults = msgspec.structs.replace(flight.faults, hold=0)
            self._advance_all()

    def _advance_all(self) -> None:
        """One round of the agent."""
        self._rounds += 1
        for flight in list(self._flights.values()):
            with contextlib.suppress(self.error):  # the next question for its state will hear of it
                self._advance(flight)

    def _advance(self, flight: _Flight) -> int:
        """Do what is due. Returns the round of the transfer."""
        faults = flight.faults
        round_ = max(flight.asked, self._rounds - flight.since)
        if getattr(flight.handle, "_released", False):  # past this agent, by the handle's own release()
            flight.posted = flight.over = True
            return round_
        due = (
            round_ >= faults.hold
            if not faults.fail
            else faults.linger > 0 and 0 <= flight.failed_at <= round_ - faults.linger
        )
        if due and not flight.posted:
            flight.posted = True
            self.real.transfer(self, flight.handle, flight.message)
        if faults.linger and flight.posted:
            flight.over = self.real.check_xfer_state(self, flight.handle) != "PROC"
        return round_

    # ---- notifications -------------------------------------------------------------------------------------

    def get_new_notifs(self, *args: Any, **kwargs: Any) -> dict[str, list[bytes]]:
        with self._lock:
            arrived, self._early = self._early, {}
            for sender, messages in self.real.get_new_notifs(self, *args, **kwargs).items():
                arrived.setdefault(sender, []).extend(messages)
            self._advance_all()
            return self._passed_on(arrived)

    def _progress(self) -> None:
        """Do what NIXL's own thread would do now: serve the transfers of peers."""
        with self._lock:
            self._advance_all()
            for sender, messages in self.real.get_new_notifs(self).items():
                self._early.setdefault(sender, []).extend(messages)

    def update_notifs(self, *args: Any, **kwargs: Any) -> dict[str, list[bytes]]:
        notifs = self.notifs
        for sender, messages in self.get_new_notifs(*args, **kwargs).items():
            notifs.setdefault(sender, []).extend(messages)
        return notifs

    def check_remote_xfer_done(
        self,
        remote_agent_name: str,
        lookup_tag: bytes,
        backends: list[str] | None = None,
        tag_is_prefix: bool = True,
    ) -> bool:
        mine = self.update_notifs(backends or []).get(remote_agent_name, [])
        for message in mine:
            if message.startswith(lookup_tag) if tag_is_prefix else lookup_tag in message:
                mine.remove(message)
                return True
        return False

    def _passed_on(self, arrived: dict[str, list[bytes]]) -> dict[str, list[bytes]]:
        """Sender -> messages that the connector gets to see now."""
        faults, now = _orders.notifications, self._rounds
        out: dict[str, list[bytes]] = {}
        for sender, messages in arrived.items():
            for message in messages:
                self._treated += bool(faults.notifications)
                if faults.notifications in ("", TWICE):
                    out.setdefault(sender, []).append(message)
                if faults.notifications and faults.notifications != NEVER:
                    self._waiting.append((now + faults.delay, sender, message))
        backwards = faults.notifications == REVERSED
        if not self._waiting or (backwards and len(self._waiting) < 2 and self._waiting[0][0] > now):
            return out
        due = [w for w in self._waiting if backwards or w[0] <= now]
        self._waiting = [w for w in self._waiting if w not in due]
        for _, sender, message in reversed(due) if backwards else due:
            out.setdefault(sender, []).append(message)
        return out


def install() -> bool:
    """Put the agent that obeys in the place of NIXL's, see `replace_agent_class`. Returns whether NIXL is
    installed.
    """
    return replace_agent_class(_faulty)


def _faulty(real: Any, error: type[Exception]) -> Any:
    if issubclass(real, FaultyAgent):
        return real
    members = {"real": real, "error": error, "__module__": real.__module__}
    return type("nixl_agent", (FaultyAgent, real), members)


def arm(orders: tuple[Faults, ...], rank: int) -> None:
    """Give every agent of this process instructions, in place of those before. Transfers under way keep
    theirs.
    """
    mine = [faults for faults in orders if not faults.ranks or rank in faults.ranks]
    _orders.transfers = tuple(faults for faults in mine if faults.hold or faults.late or faults.fail)
    _orders.notifications = next((faults for faults in mine if faults.notifications), NOTHING)
    for agent in _orders.agents:
        agent._forget()


def start_held_transfers() -> None:
    """Begin every transfer that is held, whatever its rounds."""
    for agent in _orders.agents:
        agent._start_held()


def progress() -> None:
    """Let the agents of this process serve their peers although the connector asks them nothing, as with a
    progress thread (see `nixl`).

    An engine that has no request left does not step, and then a peer that still reads from it would wait for
    ever instead of reading what stands there by now.
    """
    for agent in _orders.agents:
        agent._progress()


def struck() -> FaultReport:
    """What became of the instructions in this process."""
    return sum((agent._struck() for agent in _orders.agents), FaultReport())
