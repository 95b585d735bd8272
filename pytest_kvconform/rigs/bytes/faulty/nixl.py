"""A transport that fails on demand, for connectors built on NIXL.

Transfers are late or fail. Notifications arrive twice, late, reversed or never.

`install` replaces the real `nixl_agent` by a subclass wherever a loaded module refers to it, and where
modules that are imported later will find it. Only the real agent moves bytes. The subclass changes when a
transfer is begun, which state it reports, and which notifications it delivers. Without faults (`set_faults`)
it changes nothing. It keeps no agent alive: the end of an agent stops its reads.

NIXL's Python API is that of nixl 1.5 (nixl/_api.py: transfer, check_xfer_state, release_xfer_handle,
get_new_notifs, update_notifs, check_remote_xfer_done). Time is counted in rounds: a round of a transfer is a
question for its state, or for new notifications if the connector asks for those more often.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pytest_kvconform.rigs.bytes.faulty.messages import FaultReport
from pytest_kvconform.rigs.scenario import NEVER, POLL, POST, REVERSED, TWICE, Faults
from pytest_kvconform.rigs.vllm_setup.nixl_agents import replace_agent_class


@dataclass
class _FaultyTransfer:
    """One transfer that a fault changes."""

    handle: Any
    message: bytes
    faults: Faults
    since: int  # rounds of the agent when the connector began it
    asked: int = 0  # calls of check_xfer_state
    done: int = 0  # of these, since the bytes were moved
    posted: bool = False
    failed_at: int = -1  # round of the first bad answer
    over: bool = False  # it can no longer write
    released: bool = False  # by the connector, before it was made


NOTHING = Faults()


@dataclass(frozen=True)
class MadeAgent:
    """An agent that the connector has made."""

    agent: weakref.ref[FaultyAgent]
    binding: weakref.ref[Any]  # of NIXL. Handles of transfers refer to it: it may outlive the agent.
    wants_thread: bool


@dataclass
class _ActiveFaults:
    """The faults of this process."""

    transfers: tuple[Faults, ...] = ()
    notifications: Faults = NOTHING
    made: list[MadeAgent] = field(default_factory=list)  # those that are gone, too
    # What they did since the faults were set, by fields of FaultReport.
    counts: Counter[str] = field(default_factory=Counter)
    # Ids of transfers of which the connector does not know the end. A handle would keep the real agent alive.
    open: set[int] = field(default_factory=set)

    def of_transfer(self, number: int) -> Faults | None:
        """The first fault for the transfer of this number."""
        return next(
            (faults for faults in self.transfers if not faults.transfers or number in faults.transfers), None
        )


_active = _ActiveFaults()


class FaultyAgent:
    """Methods that replace those of NIXL's agent. `install` makes a subclass of it and the real class."""

    real: Any  # the class nixl_agent
    notifs: dict[str, list[bytes]]  # the real agent's: what check_remote_xfer_done looks through
    error: type[Exception] = RuntimeError  # what NIXL raises when its backend fails

    def __init__(self, *args: Any, **kwargs: Any):
        self._transfers: dict[Any, _FaultyTransfer] = {}
        self._rounds = 0
        self._waiting: list[tuple[int, str, bytes]] = []  # round at which it is due, sender, message
        self._undelivered: dict[str, list[bytes]] = {}  # what `_progress` received
        self._lock = threading.RLock()
        self._begun = 0  # transfers since the faults were set
        config = kwargs.get("nixl_conf", args[1] if len(args) > 1 else None)
        wants_thread = config is None or getattr(config, "wants_progress_thread", False)
        self.real.__init__(self, *args, **kwargs)
        binding = weakref.ref(getattr(self, "agent", self))
        _active.made.append(MadeAgent(weakref.ref(self), binding, wants_thread))

    def _pending(self) -> int:
        """Transfers that may still write, and notifications that are not due yet."""
        with self._lock:
            open_transfers = sum(self._may_still_write(transfer) for transfer in self._transfers.values())
            return open_transfers + sum(due > self._rounds for due, _, _ in self._waiting)

    def _may_still_write(self, transfer: _FaultyTransfer) -> bool:
        """Whether the transfer may still write."""
        if transfer.faults.fail:
            return bool(transfer.faults.linger) and not transfer.over
        if not transfer.posted:
            return True
        with contextlib.suppress(self.error):
            return (
                not getattr(transfer.handle, "_released", False)
                and self.real.check_xfer_state(self, transfer.handle) == "PROC"
            )
        return False

    # ---- transfers -----------------------------------------------------------------------------------------

    def transfer(self, handle: Any, notif_msg: bytes = b"") -> Any:
        with self._lock:
            faults = _active.of_transfer(self._begun)
            self._begun += 1
            _active.counts["transfers"] += 1
            self._transfers.pop(handle, None)  # a handle may be used again
            if faults is None:
                state = self.real.transfer(self, handle, notif_msg)
                self._note_state(handle, state)
                return state
            _active.counts["changed"] += 1
            _active.counts["failed"] += bool(faults.fail)
            if faults.fail == POST:
                raise self.error("NIXL_ERR_BACKEND: the transfer was not begun (asked for by the test suite)")
            transfer = self._transfers[handle] = _FaultyTransfer(handle, notif_msg, faults, self._rounds)
            self._advance(transfer)
            self._note_state(handle, "PROC")
            return "PROC"

    def _note_state(self, handle: Any, state: str) -> None:
        """Note what the connector is told about a transfer."""
        (_active.open.add if state == "PROC" else _active.open.discard)(id(handle))

    def check_xfer_state(self, handle: Any) -> Any:
        with self._lock:
            _active.open.discard(id(handle))  # if the question raises, the transfer has failed
            state = self._state(handle)
            self._note_state(handle, state)
            return state

    def _state(self, handle: Any) -> Any:
        """The state that the connector is told."""
        with self._lock:
            transfer = self._transfers.get(handle)
            if transfer is None:
                return self.real.check_xfer_state(self, handle)
            if transfer.released:
                return "DONE"  # as NIXL says
            transfer.asked += 1
            round_ = self._advance(transfer)
            if transfer.faults.fail:
                if round_ <= transfer.faults.hold:
                    return "PROC"
                if transfer.failed_at < 0:
                    transfer.failed_at = round_
                if transfer.faults.fail == POLL:
                    raise self.error(
                        "NIXL_ERR_REMOTE_DISCONNECT: the transfer failed (asked for by the test suite)"
                    )
                return "ERR"
            state = self.real.check_xfer_state(self, handle) if transfer.posted else "PROC"
            transfer.done += state == "DONE"
            return "PROC" if state == "DONE" and transfer.done <= transfer.faults.late else state

    def release_xfer_handle(self, handle: Any) -> Any:
        """Release a handle. As with NIXL, a transfer that is in progress is made all the same."""
        with self._lock:
            transfer = self._transfers.get(handle)
            if transfer is not None and transfer.faults.linger and not transfer.over:
                raise self.error(
                    "NIXL_ERR_REPOST_ACTIVE: the transfer cannot be cancelled (asked for by the test suite)"
                )
            _active.open.discard(id(handle))
            if transfer is not None and not (transfer.posted or transfer.faults.fail):
                transfer.released = True
                return None
            self._transfers.pop(handle, None)
        return self.real.release_xfer_handle(self, handle)

    def _start_held(self) -> None:
        with self._lock:
            for transfer in self._transfers.values():
                transfer.faults = msgspec.structs.replace(transfer.faults, hold=0)
            self._advance_all()

    def _advance_all(self) -> None:
        """One round of the agent."""
        self._rounds += 1
        for transfer in list(self._transfers.values()):
            with contextlib.suppress(self.error):  # the next check_xfer_state raises it
                self._advance(transfer)
                if transfer.released and transfer.posted and not self._may_still_write(transfer):
                    self.release_xfer_handle(transfer.handle)

    def _advance(self, transfer: _FaultyTransfer) -> int:
        """Begin the transfer if it is due. Returns its round."""
        faults = transfer.faults
        round_ = max(transfer.asked, self._rounds - transfer.since)
        if getattr(transfer.handle, "_released", False):  # by the handle's own release(), not by this agent
            transfer.posted = transfer.over = True
            return round_
        due = (
            round_ >= faults.hold
            if not faults.fail
            else faults.linger > 0 and 0 <= transfer.failed_at <= round_ - faults.linger
        )
        if due and not transfer.posted:
            transfer.posted = True
            self.real.transfer(self, transfer.handle, transfer.message)
        if faults.linger and transfer.posted:
            transfer.over = self.real.check_xfer_state(self, transfer.handle) != "PROC"
        return round_

    # ---- notifications -------------------------------------------------------------------------------------

    def get_new_notifs(self, *args: Any, **kwargs: Any) -> dict[str, list[bytes]]:
        with self._lock:
            arrived, self._undelivered = self._undelivered, {}
            for sender, messages in self.real.get_new_notifs(self, *args, **kwargs).items():
                arrived.setdefault(sender, []).extend(messages)
            self._advance_all()
            return self._delivered(arrived)

    def _progress(self) -> None:
        """Serve the transfers of peers, as NIXL's own thread would."""
        with self._lock:
            self._advance_all()
            for sender, messages in self.real.get_new_notifs(self).items():
                self._undelivered.setdefault(sender, []).extend(messages)

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

    def _delivered(self, arrived: dict[str, list[bytes]]) -> dict[str, list[bytes]]:
        """Sender -> notifications that the connector receives now."""
        faults, now = _active.notifications, self._rounds
        out: dict[str, list[bytes]] = {}
        for sender, messages in arrived.items():
            for message in messages:
                _active.counts["notifications"] += bool(faults.notifications)
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
    """Replace NIXL's agent class, see `replace_agent_class`. Returns whether NIXL is installed."""
    return replace_agent_class(_faulty)


def _faulty(real: Any, error: type[Exception]) -> Any:
    if issubclass(real, FaultyAgent):
        return real
    members = {"real": real, "error": error, "__module__": real.__module__}
    return type("nixl_agent", (FaultyAgent, real), members)


def set_faults(faults: tuple[Faults, ...], rank: int) -> None:
    """Give every agent of this process these faults, in place of earlier ones.

    Transfers under way keep theirs.
    """
    mine = [one for one in faults if not one.ranks or rank in one.ranks]
    _active.transfers = tuple(one for one in mine if one.hold or one.late or one.fail)
    _active.notifications = next((one for one in mine if one.notifications), NOTHING)
    _active.counts.clear()
    _active.open.clear()
    for agent in _agents():
        agent._begun = 0


def start_held_transfers() -> None:
    """Begin every transfer that a fault holds."""
    for agent in _agents():
        agent._start_held()


def progress() -> None:
    """Let agents serve their peers, as a progress thread would (see vllm_setup/nixl_agents.py).

    An engine without requests does not step. Without this a peer that still reads from it would wait for
    ever, instead of reading what is in the blocks by now.
    """
    for agent in _agents():
        agent._progress()


def agents_made() -> tuple[MadeAgent, ...]:
    """Every agent that the connector has made in this process, those that are gone, too."""
    return tuple(_active.made)


def _agents() -> list[FaultyAgent]:
    return [agent for made in agents_made() if (agent := made.agent()) is not None]


def begun_and_ended() -> tuple[int, int]:
    """Transfers begun since the faults were set, and those of them that the connector knows to have ended."""
    return _active.counts["transfers"], _active.counts["transfers"] - len(_active.open)


def fault_report() -> FaultReport:
    """What the faults did in this process."""
    counts = _active.counts
    return FaultReport(
        agents=len(_active.made),
        transfers=counts["transfers"],
        changed=counts["changed"],
        failed=counts["failed"],
        notifications=counts["notifications"],
        pending=sum(agent._pending() for agent in _agents()),
    )
