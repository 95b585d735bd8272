"""`ScriptBench`: runs the scripts of cases on engines of the cluster, and keeps engines for the next case."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pytest_kvconform.case_outcome import CaseEnd, run_case
from pytest_kvconform.result import Cell, Evidence, NotApplicable, Outcome
from pytest_kvconform.rigs.bytes.handle import ByteEngineHandle
from pytest_kvconform.rigs.cluster.engine import Engine, Steps
from pytest_kvconform.rigs.cluster.loop import Script, run
from pytest_kvconform.rigs.cluster.pairs import start_handle
from pytest_kvconform.rigs.cluster.scripts.cluster import RELEASES, Cluster
from pytest_kvconform.rigs.cluster.scripts.wanted import Wanted, spec_of
from pytest_kvconform.rigs.context import RunContext
from pytest_kvconform.rigs.engine.handle import EngineFailed, hook_calls, leave_all

APART = 67  # between the numbers of requests 0 of two cases: most have fewer requests

Body = Callable[[Cluster, Any], Steps]


class ScriptBench:
    """Runs scripts of cases, one at a time.

    Engines of the usual kind, `Wanted("P")` and `Wanted("D")`, run on for the next case of the cell if a case
    passed on them and left nothing.
    """

    def __init__(self, context: RunContext):
        self.context = context
        self.waited: set[Cell] = set()  # in which a case has waited in vain for the end of something
        self._running: dict[tuple[Wanted, ...], list[ByteEngineHandle]] = {}
        self._folders: dict[tuple[Wanted, ...], Path] = {}  # where a store saves
        self._used: tuple[Wanted, ...] = ()  # the engines of the case that runs
        self._cases = itertools.count()
        self._answers: dict[tuple[Any, ...], CaseEnd] = {}
        context.running.register(self.end_all)

    def run(self, cell: Cell, body: Body, rule: str, variant: Any) -> Evidence:
        """Run a case. Returns its evidence, or raises how it ended."""
        self.context.require_nothing_missing()
        self.context.running.make_room(cell)
        return self._run(cell, body, rule, variant)

    def answer(self, cell: Cell, body: Body, rule: str, variant: Any) -> CaseEnd:
        """The end of a script that is no case. It runs once, unless it ends in an error of the suite; engines
        of other benches run on meanwhile.
        """
        if (end := self._answers.get((cell, body, variant))) is None:
            self.end_all()
            end = run_case(lambda: self._run(cell, body, rule, variant), body.__name__)
            self.end_all()
            if end.outcome is not Outcome.HARNESS:
                self._answers[cell, body, variant] = end
        return end

    def _run(self, cell: Cell, body: Body, rule: str, variant: Any) -> Evidence:
        number = next(self._cases)
        secret = random.SystemRandom().getrandbits(64) if self.context.subject.is_store else number
        cluster = Cluster(self, cell, rule, secret, APART * number)
        script, clean = Script(body(cluster, variant), ()), False
        self._used = tuple[Wanted, ...]()
        try:
            run([script], lambda: cluster.engines)
            if script.failed:
                starting = script.failed.engine not in {one.name for one in cluster.engines if one.started}
                self.context.note("start", starting and script.failed.how == "hung")
                raise cluster.ended_by(script.failed, starting)
            clean = self._holds_nothing(cluster)
            found: Evidence = script.result
            return found
        except NotApplicable:
            clean = not script.failed and self._holds_nothing(cluster)
            raise
        finally:
            if not clean:
                self.context.shown_calls[:] = hook_calls(*(engine.handle for engine in cluster.engines))
            if cluster.waited_for:
                self.waited.add(cell)
                self.context.note("release", cluster.waited_for == RELEASES)
            if not clean or any(wanted != Wanted(wanted.role) for wanted in self._used):
                self._end(self._used)

    def engines(self, cell: Cell, wanted: tuple[Wanted, ...]) -> tuple[Engine, ...]:
        """Engines like these, paused: those that run, or new ones, which may not have started yet."""
        context, self._used, up = self.context, wanted, wanted in self._running
        handles = self._running.setdefault(wanted, [])
        if not up:
            name = context.next_name()
            context.progress(f"starting {' and '.join(one.role for one in wanted)} with few layers")
            folder = self._folders[wanted] = context.store_folder(name)
            for index, one in enumerate(wanted):
                first = handles[0].spec if one.data_parallel[0] else None
                spec, place = spec_of(one, context, cell, str(folder), first), context.place(one.role)
                known_as = f"{cell}-{one.role}-{name}-{index}"
                handles.append(start_handle(context, ByteEngineHandle, place, known_as, spec))
        names = [f"{one.role}{sum(o.role == one.role for o in wanted[:n])}" for n, one in enumerate(wanted)]
        if up:
            hook_calls(*handles)  # those of the case before are forgotten
        return tuple(
            Engine(name, handle, started=up, paused=True) for name, handle in zip(names, handles, strict=True)
        )

    def end_all(self) -> None:
        """End all engines."""
        for wanted in list(self._running):
            self._end(wanted)

    def _end(self, wanted: tuple[Wanted, ...]) -> None:
        leave_all(self._running.pop(wanted, ()), str(self._folders.pop(wanted, "")))

    @staticmethod
    def _holds_nothing(cluster: Cluster) -> bool:
        """Whether no engine knows a request or holds a block."""
        handles = [engine.handle for engine in cluster.engines]
        if any(handle.dead or handle.asked for handle in handles):
            return False
        with contextlib.suppress(EngineFailed):
            return all(
                not used.requests and used.free_blocks == used.total_blocks
                for used in (handle.usage() for handle in handles)
            )
        return False
