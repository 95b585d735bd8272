"""Transport: the few operations that the connector needs to move bytes, and NIXL, which does them.

Every call is made by the thread that runs the worker's steps: NIXL promises nothing to more threads than one.
"""

import contextlib
import logging
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from reference_connector.plan import Runs

logger = logging.getLogger("vllm.reference_connector.transport")
# Where memory is: NIXL's name of its kind, "DRAM" or "VRAM", and the number of the device.
Place = tuple[str, int]
HOST: Place = ("DRAM", 0)


class TransportError(Exception):
    """A transfer or a message that failed. The message is one sentence."""


@dataclass(frozen=True)
class Memory:
    """A piece of memory that peers may read, or into which this worker reads."""

    address: int
    nbytes: int
    place: Place = HOST
    zero: Callable[[int, int], None] | None = None  # zero(i, n): n bytes from byte i on, and wait for them


class Transport:
    """One NIXL agent (nixl/_api.py). Every method may raise TransportError."""

    def __init__(self, backends: list[str], num_threads: int, progress_thread: bool):
        from vllm.distributed.nixl_utils import NixlWrapper, nixl_agent_config

        if NixlWrapper is None or nixl_agent_config is None:
            raise RuntimeError("NIXL is not installed: pip install nixl")
        config = nixl_agent_config(
            enable_prog_thread=progress_thread, num_threads=num_threads, backends=backends
        )
        self._agent = NixlWrapper(str(uuid.uuid4()), config)
        self._registered: list[Any] = []

    def register(self, memory: Sequence[Memory]) -> None:
        for kind in sorted({m.place[0] for m in memory}):
            pieces = [(m.address, m.nbytes, m.place[1], "") for m in memory if m.place[0] == kind]
            self._registered.append(self._agent.register_memory(pieces, kind))

    def metadata(self) -> bytes:
        """What a peer needs to connect, once everything is registered."""
        return bytes(self._agent.get_agent_metadata())

    def connect(self, metadata: bytes) -> str:
        """The name of a peer."""
        with _failing("accept the peer"):
            name = self._agent.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def disconnect(self, peer: str) -> None:
        with _failing("disconnect from a peer"):
            self._agent.remove_remote_agent(peer)

    def prepare(self, peer: str, runs: Runs, here: Place, there: Place) -> Any:
        """The handle of a read that has not begun."""
        with _failing("prepare a read"):
            sides = []
            for addresses, (kind, device) in ((runs.local, here), (runs.remote, there)):
                rows = np.empty((len(addresses), 3), np.int64)
                rows[:, 0], rows[:, 1], rows[:, 2] = addresses, runs.length, device
                sides.append(self._agent.get_xfer_descs(rows, kind))
            return self._agent.initialize_xfer("READ", *sides, peer)

    def begin(self, handle: Any) -> None:
        with _failing("begin a read"):
            self._agent.transfer(handle)

    def done(self, handle: Any) -> bool:
        """False while the read is in progress. Raises TransportError if it has failed."""
        with _failing("read"):
            state = self._agent.check_xfer_state(handle)
            if state not in ("DONE", "PROC"):
                raise TransportError(f"the state of the transfer is {state}")
            return bool(state == "DONE")

    def release(self, handle: Any) -> bool:
        """Forget a read that has ended: one in progress cannot be cancelled. False if it may still write."""
        try:
            self._agent.release_xfer_handle(handle)
        except Exception:  # a part of it has failed, and another part is in progress
            return False
        return True

    def notify(self, peer: str, message: bytes) -> None:
        with _failing("notify a peer"):
            self._agent.send_notif(peer, notif_msg=message)

    def notifications(self) -> list[bytes]:
        """Those that arrived since the last call."""
        with _failing("look for notifications"):
            return [message for messages in self._agent.get_new_notifs().values() for message in messages]

    def close(self) -> None:
        """Release all memory. With the agent end all reads: this alone stops one that is in progress."""
        for descriptors in self._registered:
            try:
                self._agent.deregister_memory(descriptors)
            except Exception as error:
                logger.warning("NIXL could not release a piece of memory: %s", error)
        del self._agent  # its threads and sockets end with it


@contextlib.contextmanager
def _failing(what: str) -> Iterator[None]:
    """Raise TransportError for any error of NIXL: NIXL has many classes, which mean the same here."""
    try:
        yield
    except Exception as error:
        raise TransportError(f"NIXL could not {what}: {error}") from None
