"""A zygote on another node: connections to it, and the logs of its children, through the actor there."""

from __future__ import annotations

import ipaddress
import os
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from typing import Any

import ray

from pytest_kvconform.rigs.processes.place import Place

ANSWER_S = 60.0  # for an actor to answer: a node may be gone, and Ray would wait for it


@dataclass(frozen=True, kw_only=True)
class NodePlace(Place):
    """The zygote of one node. `address` stays that of the zygote where pytest runs, for an author's hook."""

    role: str
    peer: str  # address of the node of the other engine
    actor: Any = field(compare=False, repr=False)  # a handle on a `NodeHost`

    def connect(self) -> Any:
        return NodeConnection(self.actor)

    def has(self, path: str) -> bool:
        return ask(self.actor.has, path) is not False

    def length(self, name: str) -> int:
        return ask(self.actor.length, name) or 0

    def text(self, name: str, since: int, longest: int) -> bytes:
        return ask(self.actor.text, name, since, longest) or b""

    def write_stacks(self, pid: int) -> None:
        ask(self.actor.write_stacks, pid)

    def watched(self, pid: int) -> int:
        return os.getpid()  # the child is on another machine, and this process waits for its answer

    def unreachable(self, params: Mapping[str, Any] | None) -> str:
        """Why an engine here cannot reach its peer by these params: they name a loopback address."""
        for key, value in _texts(params or {}):
            if _is_loopback(value):
                return (
                    f"kv_transfer_params name {value!r} ({key}): on the node of {self.role}, {self.host}, "
                    f"that is {self.role} itself; its peer is on {self.peer}"
                )
        return ""


class NodeConnection:
    """A connection to the zygote of a node, or to a child of it, with the methods of `Connection`."""

    def __init__(self, actor: Any):
        self._actor, self._pending = actor, None
        self._number = _must(actor.open)

    def send(self, message: Any) -> None:
        """Raises OSError if the connection has ended."""
        _must(self._actor.send, self._number, bytes(ForkingPickler.dumps(message)))

    def poll(self, timeout: float | None = 0.0) -> bool:
        """Whether a message, or the end of the connection, can be read within `timeout` seconds."""
        if self._pending is None:
            self._pending = self._actor.receive.remote(self._number)
        return bool(ray.wait([self._pending], timeout=timeout)[0])

    def recv(self) -> Any:
        """The next message. Raises EOFError if the connection has ended."""
        self.poll(None)
        pending, self._pending = self._pending, None
        try:
            message = ray.get(pending, timeout=ANSWER_S)
        except ray.exceptions.RayError:
            message = None
        if message is None:
            raise EOFError
        return pickle.loads(message)

    def close(self) -> None:
        ask(self._actor.close, self._number)

    def __enter__(self) -> NodeConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def ask(method: Any, *arguments: Any) -> Any:
    """Call a method of an actor. Returns None if it fails, or the actor does not answer."""
    try:
        return ray.get(method.remote(*arguments), timeout=ANSWER_S)
    except ray.exceptions.RayError:
        return None


def _must(method: Any, *arguments: Any) -> Any:
    """Call a method of an actor. Raises OSError if it fails, or the actor does not answer."""
    try:
        return ray.get(method.remote(*arguments), timeout=ANSWER_S)
    except ray.exceptions.RayError as error:
        raise OSError(str(error)) from None


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(key, text) of every text in params."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, inside in value.items():
            yield from _texts(inside, str(name))
    elif isinstance(value, list | tuple):
        for inside in value:
            yield from _texts(inside, key)


def _is_loopback(text: str) -> bool:
    """Whether a text is a loopback address, also in a URL or with a port."""
    host = text.rpartition("//")[2].partition("/")[0]
    host = host[1:].partition("]")[0] if host.startswith("[") else host
    host = host.partition(":")[0] if host.count(":") == 1 else host
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
