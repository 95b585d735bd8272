"""Whose failure it is when an engine raises, dies or hangs: the connector's, or vLLM's and the machine's.

The failure is the connector's if code of the connector is in the stack. Otherwise the same is done again on
fresh engines without the connector, and the failure is the connector's if that passes. A run in which no
engine fails has no control, and costs nothing.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Generic, Protocol

import msgspec

from pytest_kvconform.result import Blocked, Cell, NotApplicable
from pytest_kvconform.rigs.cluster.pairs import EnginePairs, Handle, PlaceOf
from pytest_kvconform.rigs.context import Deadlines, RunContext, SubjectFacts
from pytest_kvconform.rigs.engine.handle import EngineFailed
from pytest_kvconform.rigs.engine.messages import CONV_LAYOUT, LOADING, NO_CONNECTOR, EngineFacts, Unfinished
from pytest_kvconform.rigs.processes.stacks import OF_VLLM, Frame, is_hook, is_of_class
from pytest_kvconform.rigs.vllm_setup.hooks import IN_STACKS

WITHOUT = " without the connector"  # in the progress line
LIMIT = 3  # failures that are not the connector's: after so many of a cell, its other scenarios are not tried
# engines that ended or raised, by the connector's fault: fresh ones start at once, and nobody waits in vain
DEATHS = 4
REFUSAL_S = 3.0  # after a refusal that took longer, the other scenarios of a cell are not tried


class Ended(Protocol):
    """How a scenario ended, in an observation of either rig."""

    @property
    def failed(self) -> EngineFailed | None: ...
    @property
    def stuck(self) -> tuple[Unfinished, ...]: ...


def shows_connector(frames: Iterable[Frame], facts: SubjectFacts) -> bool:
    """Whether a stack has code of the connector: of the package of its class, or a hook."""
    in_vllm = OF_VLLM in facts.file
    return any(
        OF_VLLM in frame[0]
        or (not in_vllm and is_of_class(frame, facts.file, facts.module))
        or is_hook(frame, IN_STACKS)
        for frame in frames
    )


def patient(context: RunContext) -> RunContext:
    """The context of engines without the connector: waits of full length, and what these engines do is not
    noted against the connector.
    """
    return replace(context, in_vain=set(), keeping=set(), hung_in=set())


class Control(Generic[Handle]):
    """Does again what failed, on fresh engines without the connector."""

    def __init__(
        self,
        context: RunContext,
        handle: type[Handle],
        calls: int = 1,
        *,
        alone: bool = False,
        place: PlaceOf | None = None,
    ):
        """`calls`, `alone` and `place`: see `EnginePairs`."""
        self.context = patient(context)
        self.pairs = EnginePairs(self.context, handle, calls, WITHOUT, alone=alone, place=place)
        self.excused: Counter[Cell] = Counter()  # failures that were not the connector's
        self.deaths: Counter[Cell] = Counter()  # those that were, but for hangs
        self.hangs: Counter[Cell] = Counter()
        self.errors: Counter[Cell] = Counter()  # of the suite, where it did again what had failed
        self._starts: dict[tuple[Cell, str], str] = {}

    @property
    def deadlines(self) -> Deadlines:
        """The deadlines of what runs without the connector."""
        return self.context.deadlines

    def excuse_start(
        self, cell: Cell, failed: EngineFailed, spec: Callable[[str, int, str], Any], word: str = ""
    ) -> str:
        """Return why engines do not start here without the connector either.

        "": the connector keeps them from starting. `spec` and `word`: see `EnginePairs.pair`.
        """
        if shows_connector(failed.frames, self.context.facts):
            return ""
        if (cell, word) not in self._starts:
            self._starts[cell, word] = self._fails(cell, spec, lambda p, d: "", None, word)
        return self._starts[cell, word]

    def excuse(
        self,
        cell: Cell,
        found: Ended,
        spec: Callable[[str, int, str], Any],
        run: Callable[[Handle, Handle], Ended],
        facts: EngineFacts,
        word: str = "",
    ) -> str:
        """Return why a scenario fails here without the connector, too; "": the failure is the connector's.

        `run` observes the scenario again on P and D. `facts`: of an engine that failed.
        """
        if found.failed and shows_connector(found.failed.frames, self.context.facts):
            return ""
        if not found.failed and found.stuck and found.stuck[0].status == LOADING:
            return ""
        return self.excuse_call(cell, spec, lambda p, d: _sentence(run(p, d)), facts, word)

    @contextlib.contextmanager
    def broken(self, cell: Cell, note: Callable[[str], None]) -> Iterator[None]:
        """Note in one sentence that what runs without the connector ends in errors of the suite.

        The first error of a cell may be that of one scenario. After the second one, every other scenario
        would start engines for the same error, with the connector and without it.
        """
        try:
            yield
        except (Blocked, NotApplicable):
            raise
        except Exception as error:
            self.errors[cell] += 1
            if self.errors[cell] > 1:
                note(f"what ran without the connector ended in {type(error).__name__}: {error}")
            raise

    def is_over(self, cell: Cell, found: Ended, excuse: str, hangs: int = 1) -> bool:
        """Whether no other scenario of the cell is tried after one in which an engine failed.

        After a death others are, on fresh engines. After so many hangs they would only wait again.
        `excuse`: why the failure is not the connector's.
        """
        if excuse:
            return self.excused[cell] >= LIMIT
        counted, most = (self.hangs, hangs) if hung(found) else (self.deaths, DEATHS)
        counted[cell] += 1
        return counted[cell] >= most

    def excuse_call(
        self,
        cell: Cell,
        spec: Callable[[str, int, str], Any],
        call: Callable[[Handle, Handle], str],
        facts: EngineFacts,
        word: str = "",
    ) -> str:
        """Return why a call of P and D fails here without the connector, too.

        "": `call` returned "", so a failure with the connector is the connector's.
        """
        why = self._fails(cell, spec, call, facts, word)
        self.excused[cell] += bool(why)
        return why

    def _fails(
        self,
        cell: Cell,
        spec: Callable[[str, int, str], Any],
        call: Callable[[Handle, Handle], str],
        facts: EngineFacts | None,
        word: str,
    ) -> str:
        try:
            pair = self.pairs.pair(cell, lambda *args: without_connector(spec(*args), facts), word)
            why = call(*pair)
        except EngineFailed as failed:
            why = failed.sentence
        finally:
            self.pairs.end(cell, word)
        return f"vLLM fails here without the connector, too: {why}" if why else ""


def without_connector(spec: Any, facts: EngineFacts | None = None) -> Any:
    """The specification of the same engine without the connector.

    `facts`: of the engine with the connector, if it started.
    """
    given = spec.kv_transfer_config
    config = NO_CONNECTOR | {key: given[key] for key in ("kv_role", "kv_buffer_device")}
    if "engine_id" in given:  # of a rendezvous: the router tells each side the other's, here, too
        config["engine_id"] = given["engine_id"]
    layout = {CONV_LAYOUT: facts.conv_layout} if facts and facts.conv_layout else {}
    return msgspec.structs.replace(
        spec, kv_transfer_config=config, environment={**spec.environment, **layout}
    )


def hung(found: Ended) -> bool:
    """Whether a request did not end, or an engine did not answer: whatever waits for it waits in vain."""
    return bool(found.stuck) or (found.failed is not None and found.failed.how == "hung")


def _sentence(found: Ended) -> str:
    return found.failed.sentence if found.failed else str(next(iter(found.stuck), ""))
