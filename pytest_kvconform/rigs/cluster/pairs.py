"""The one start of a pair of engines, P and D of a cell, and its cache.

`EngineBench`, `ByteBench` and `FaultBench` have an `EnginePairs` each, and so has what runs without the
connector. A pair runs until the engines of another cell start, or until the bench ends it. A pair that did
not start is not started again, unless a port was taken: then it is started once more, with other ports.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from model_matrix import parse_topology
from pytest_kvconform.result import Blocked, Cell
from pytest_kvconform.rigs.context import RunContext
from pytest_kvconform.rigs.engine.handle import EngineFailed, EngineHandle, leave_all
from pytest_kvconform.rigs.engine.messages import EngineFacts
from pytest_kvconform.rigs.missing import what_is_missing
from pytest_kvconform.rigs.processes.place import Place
from pytest_kvconform.rigs.processes.stacks import is_of_class

Handle = TypeVar("Handle", bound=EngineHandle)
TAKEN = "Address already in use"  # of the system, for EADDRINUSE
Key = tuple[Cell, str]  # cell, word: a cell can have several pairs
PlaceOf = Callable[[Cell, str], Place]  # cell, role -> where the engine starts


def start_handle(
    context: RunContext, kind: type[Handle], place: Place, name: str, spec: Any, calls: int = 1
) -> Handle:
    """Start an engine. `calls`: how many times as long as usual one call of it may take."""
    limits, facts = context.deadlines, context.facts
    handle = kind(place, name, spec, calls * limits.call, limits.start, context.hung_in)
    handle.own = partial(is_of_class, file=facts.file, module=facts.module)
    return handle


class EnginePairs(Generic[Handle]):
    """Pairs of engines with handles of one class."""

    def __init__(
        self,
        context: RunContext,
        handle: type[Handle],
        calls: int = 1,
        remark: str = "",
        *,
        alone: bool = False,
        place: PlaceOf | None = None,
    ):
        """`calls`: how many times as long as usual one call of an engine may take.

        `remark`: what the progress line adds about these engines. `alone`: P is D, too. `place`: where an
        engine of a cell starts; None: where the context says.
        """
        self.context, self.handle, self.calls, self.remark = context, handle, calls, remark
        self.roles = "P" if alone else "PD"
        self.place = place or (lambda cell, role: context.place(role))
        self._pairs: dict[Key, tuple[Handle, Handle]] = {}
        self._folders: dict[Key, Path] = {}  # where the store of a pair saves
        self._started: dict[Key, tuple[EngineFacts, EngineFacts] | EngineFailed] = {}
        context.running.register(self.end_all)

    def pair(self, cell: Cell, spec: Callable[[str, int, str], Any], word: str = "") -> tuple[Handle, Handle]:
        """P and D of a cell, running. Raises EngineFailed if one does not start, or did not start before, and
        Blocked at once if engines have shown that this environment lacks something, or if a port is taken on
        a node.

        `spec`: role, tensor parallel size and folder of a store -> specification of one engine.
        """
        key = cell, word
        if key in self._pairs:
            return self._pairs[key]
        if isinstance(before := self._started.get(key), EngineFailed):
            self.note_what_is_missing(before)
            raise before
        self.context.require_nothing_missing()
        self.context.running.make_room(cell)
        tp = dict(zip("PD", parse_topology(cell.topology), strict=True))
        engines = " and ".join(f"{role} (TP {tp[role]})" for role in self.roles)
        self.context.progress(f"starting {engines}{self.remark}")
        try:
            try:
                pair, up = self._start(key, spec, tp)
            except EngineFailed as failed:
                if not _port_was_taken(failed):
                    raise
                # If the connector itself holds the port, the second start fails, too.
                self.context.progress(f"a port was taken: starting {engines} again, with other ports")
                pair, up = self._start(key, spec, tp)
        except EngineFailed as failed:
            if self.context.places and _port_was_taken(failed):
                raise Blocked(f"a port that was free where pytest runs is not on a node: {failed}") from None
            self.context.note("start", failed.how == "hung")
            self._started[key] = failed
            self.note_what_is_missing(failed)
            raise
        self._started[key] = up[0], up[-1]
        pair[0].keeps = cell in self.context.keeping
        self._pairs[key] = pair[0], pair[-1]
        return self._pairs[key]

    def _start(
        self, key: Key, spec: Callable[[str, int, str], Any], tp: dict[str, int]
    ) -> tuple[list[Handle], list[EngineFacts]]:
        """Start the engines of a pair. Raises EngineFailed if one does not start: then none runs."""
        cell, _ = key
        name = self.context.next_name()
        folder = self._folders[key] = self.context.store_folder(name)
        places = {role: self.place(cell, role) for role in self.roles}
        pair: list[Handle] = []
        try:
            for role in self.roles:
                known_as, made = f"{cell}-{role}-{name}", spec(role, tp[role], str(folder))
                pair.append(start_handle(self.context, self.handle, places[role], known_as, made, self.calls))
            return pair, [engine.wait_ready() for engine in pair]
        except EngineFailed:
            for engine in pair:
                engine.end()
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def note_what_is_missing(self, failed: EngineFailed) -> None:
        """Note it and raise Blocked, if engines did not start because this environment lacks something."""
        if failed.waits:
            waits = f"its start waits for a server: start it, or configure its address ({failed.sentence})"
            self.context.missing.append(f"{self.context.subject.connector} cannot start here: {waits}")
            self.context.require_nothing_missing()
        note_missing(self.context, [(failed.kind, failed.reason)])

    def running(self, cell: Cell, word: str = "") -> bool:
        """Whether a pair is running."""
        return (cell, word) in self._pairs

    def started(self, cell: Cell, word: str = "") -> tuple[EngineFacts, EngineFacts] | EngineFailed | None:
        """P and D of a cell: vLLM's facts about them, or why they did not start.

        None: no case has asked for them yet.
        """
        return self._started.get((cell, word))

    def end(self, cell: Cell, word: str = "") -> None:
        """Let the engines of one pair shut down, see `leave_all`."""
        folder = self._folders.pop((cell, word), None)
        pair = self._pairs.pop((cell, word), ())
        if pair and pair[0].kept:
            self.context.keeping.add(cell)
            self.context.note("release", True)
        leave_all(tuple(dict.fromkeys(pair)), str(folder or ""))

    def end_all(self) -> None:
        """End the engines of all pairs."""
        for key in list(self._folders):
            self.end(*key)


def note_missing(context: RunContext, causes: Iterable[tuple[str, str]]) -> None:
    """Note it and raise Blocked, if a cause of a failed start is that this environment lacks something.

    `causes`: the class of an exception, and what it says.
    """
    subject = context.subject
    for kind, cause in causes:
        if lacks := what_is_missing(kind, cause, subject.module or "", subject.packages):
            context.missing.append(f"{subject.connector} cannot start here: {lacks}")
            context.require_nothing_missing()


def _port_was_taken(failed: EngineFailed) -> bool:
    """Whether an engine did not start because another process listened on one of its ports."""
    return any(TAKEN in text for text in (failed.sentence, *failed.log))
