"""Streams, events and the batched copy of a GPU, on host memory.

The names and the arguments are those of torch.cuda and of vLLM's kernels. Kernels that compute run at once on
a CPU, so the stream of the computation is always up to date. A copy waits in its stream until an event behind
it was asked for LATE times, until somebody waits for such an event, or until another stream needs it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

LATE = 2  # questions for an event that are answered with "not yet": connectors ask once a step


class Stream:
    """Work that is done in order, and later."""

    by_handle: ClassVar[weakref.WeakValueDictionary[int, Stream]] = weakref.WeakValueDictionary()
    _handles = itertools.count(1)

    def __init__(self, *args: Any, **kwargs: Any):
        self.cuda_stream = next(self._handles)  # what vLLM passes to CUDA's driver
        self.by_handle[self.cuda_stream] = self
        self._work: deque[Callable[[], None]] = deque()
        self._lock = threading.RLock()

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -1

    def put(self, work: Callable[[], None]) -> None:
        with self._lock:
            self._work.append(work)

    def wait_stream(self, other: Stream) -> None:
        """Let work that is put into this stream later wait for all work that the other stream has now."""
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        """Let work that is put into this stream later wait for the event."""
        self.put(event.wait_for())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Do all that was put here."""
        self.record_event().synchronize()

    def run_until(self, done: Callable[[], bool]) -> None:
        """Do the work in its order until `done` is true."""
        with self._lock:
            while not done() and self._work:
                self._work.popleft()()


class _Computation(Stream):
    """The stream of the computation: a CPU has done all of it."""

    def put(self, work: Callable[[], None]) -> None:
        work()


class Event:
    """A point in a stream."""

    def __init__(self, *args: Any, **kwargs: Any):
        self._stream: Stream | None = None
        self._reached: list[float] = []  # when; a later `record` begins a list of its own
        self._asked = 0

    def record(self, stream: Stream | None = None) -> None:
        self._stream, self._asked = stream or current_stream(), 0
        reached = self._reached = []
        self._stream.put(lambda: reached.append(time.perf_counter()))

    def query(self) -> bool:
        """Whether the stream has come here. It comes here when it was asked for the third time."""
        if not self._reached:
            self._asked += 1
            if self._asked > LATE:
                self.synchronize()
        return self._stream is None or bool(self._reached)

    def synchronize(self) -> None:
        self.wait_for()()

    def wait_for(self) -> Callable[[], None]:
        """Return what waits for this point, also if the event is recorded again before."""
        stream, reached = self._stream, self._reached
        return lambda: stream.run_until(lambda: bool(reached)) if stream is not None else None

    def elapsed_time(self, later: Event) -> float:
        """Milliseconds between two events, both of them reached."""
        return (later._reached[0] - self._reached[0]) * 1e3


_COMPUTATION = _Computation()
_chosen = threading.local()


def current_stream(*args: Any) -> Stream:
    """The stream that this thread has chosen with `use_stream`, or else that of the computation."""
    return getattr(_chosen, "stream", _COMPUTATION)


@contextlib.contextmanager
def use_stream(stream: Stream) -> Iterator[None]:
    """Put copies into a stream: torch.cuda.stream."""
    before = current_stream()
    _chosen.stream = stream
    try:
        yield
    finally:
        _chosen.stream = before


def swap_blocks_batch(sources: Any, targets: Any, sizes: Any, **how: Any) -> None:
    """vLLM's kernel of this name: copy so many bytes from each address to each other one.

    The arguments are int64 [copy].
    """
    copies = list(zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True))
    current_stream().put(functools.partial(_copy, copies))


def batch_memcpy(targets: int, sources: int, sizes: int, count: int, *rest: Any) -> int:
    """cuMemcpyBatchAsync: the same with the addresses of arrays. The last argument is the stream's handle."""
    array = ctypes.c_uint64 * count
    listed = (array.from_address(address)[:] for address in (sources, targets, sizes))
    copies = list(zip(*listed, strict=True))
    Stream.by_handle[rest[-1]].put(functools.partial(_copy, copies))
    return 0


def copies_left() -> int:
    """How many copies of this process are still to be made. Events that nobody asks for are none.

    A GPU makes them by itself. Here somebody has to ask for their events, or wait for them.
    """
    streams = list(Stream.by_handle.values())
    return sum(isinstance(work, functools.partial) for one in streams for work in list(one._work))


def _copy(copies: list[tuple[int, int, int]]) -> None:
    for source, target, size in copies:
        ctypes.memmove(target, source, size)
