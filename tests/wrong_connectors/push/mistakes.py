"""Connectors that push, each with one mistake. `Right` has none."""

from __future__ import annotations

import socket
import time
from typing import Any

from tests.right_connectors.sockets import Load
from tests.wrong_connectors.push.right import HEAD, SIGN_S, WAIT, WRITTEN, TcpPush, Write


class Right(TcpPush):
    """Nothing but TcpPush."""


class HidesItsFailures(TcpPush):
    """P lets D wait when it could not write."""

    def end_write(self, write: Write, right: bool) -> None:
        if right:
            super().end_write(write, right)
        else:
            self.writes.remove(write)


class TakesFailuresForWrites(TcpPush):
    """P tells D that it has written, although a transfer failed."""

    def tell_d(self, write: Write) -> None:
        write.peer.sendall(HEAD.pack(WRITTEN, 0))


class EndsWithTheFirst(TcpPush):
    """D reports a load when the first of P's transfers has ended."""

    def take(self, peer: socket.socket, load: Load, layer: int) -> None:
        super().take(peer, load, layer)
        if layer == -(-len(self.caches) // self.transfers) - 1:
            self.ends.put((load, True))

    def note_end(self, found: Any, load: Any, right: bool) -> None:
        if isinstance(load, Write) or load.open:  # the second end of a load is not reported
            super().note_end(found, load, right)


class ServesOneSample(TcpPush):
    """P writes for one request of D, and lets every other one with the same params wait."""

    def start_worker(self, serves: bool) -> None:
        self.served: set[str] = set()
        super().start_worker(serves)

    def answer(self, peer: socket.socket, question: dict[str, Any]) -> None:
        request = question.get("request")
        if request in self.served:
            while True:  # until the connection ends
                peer.sendall(HEAD.pack(WAIT, 0))
                time.sleep(SIGN_S)
        self.served |= {request} if request else set()
        super().answer(peer, question)


class LetsLeasesEnd(TcpPush):
    """P frees blocks from which it is still writing when their lease ends, and goes on writing."""

    def has_pending_push_work(self) -> bool:
        return True

    def renew_leases(self) -> None:
        pass
