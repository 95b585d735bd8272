"""The bench of the scheduler rig: one scheduler host process for the current cell.

A case is one call of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from model_matrix import parse_topology
from pytest_kvconform.case_outcome import CaseEnd
from pytest_kvconform.result import Blocked, Cell, Evidence, HarnessError, Outcome
from pytest_kvconform.rigs.bytes.specs import side_of
from pytest_kvconform.rigs.cluster.scripts.bench import ScriptBench
from pytest_kvconform.rigs.cluster.scripts.cluster import RELEASES
from pytest_kvconform.rigs.context import RunContext, transfer_config
from pytest_kvconform.rigs.processes.child import ChildProcess, ForkRefused, leave
from pytest_kvconform.rigs.processes.cores import MOST
from pytest_kvconform.rigs.processes.hangs import LEFT_OUT_S, PATIENCE, QUIET, UNSTARTED
from pytest_kvconform.rigs.processes.ports import PORTS_APART, free_port
from pytest_kvconform.rigs.scheduler.host import LEAVE_S, HostSpec
from pytest_kvconform.rigs.scheduler.own_workers.memory import Question, growing_places
from pytest_kvconform.rigs.scheduler.side_state import RANKS

CASE_PART = 0.5  # of the deadline of a call: a case takes milliseconds
AGAIN = 0.5  # of a case's deadline, after a case of its module that did not end in time
GRACE_S = 10.0  # beyond the latest end of a case's own deadline, which the host keeps, on a busy machine
STARTS = 2  # whole starts of an engine, which the halves of a case may take together; one that hangs ends it
# After so many cases of a module that did not end in time no other case of it is started, and after so many
# modules with such a case none at all. A shutdown that hangs says nothing about loads.
HANGS, MODULES = 2, 3


class SchedulerBench:
    """Runs cases of the tiers interface and protocol in a host process of the current cell."""

    def __init__(self, context: RunContext, scripts: ScriptBench):
        self.context, self.scripts = context, scripts
        self._grow: dict[tuple[Cell, str], frozenset[str]] = {}  # cell, role -> places that grow: memory.py
        self._host: ChildProcess | None = None
        self._cell: Cell | None = None
        self._failed: dict[Cell, CaseEnd] = {}  # cells for which the host does not start
        self._hung: dict[str, list[str]] = {}  # module -> cases that did not end in time
        self._at_fault: set[str] = set()  # modules in which the connector hung
        self._answers: dict[tuple[Any, ...], CaseEnd] = {}
        self._own_reports: set[Cell] = set()  # where workers of cases are real, see `run`

    def run(self, cell: Cell, module: str, function: str, rule: str, variant: Any) -> CaseEnd:
        """Run a case in a fork of the host.

        If the connector waits for reports of its own workers, which scripted ones do not make, the case runs
        again with real ones, and so do all later cases of the cell. It is BLOCKED if these cannot run here.
        Raises Blocked after several cases that hung, or one that waits for a server; HarnessError without a
        host.
        """
        self.context.require_nothing_missing()
        self._require_few_hangs(module)
        deadline_s = CASE_PART * self.context.deadlines.call * (AGAIN if module in self._at_fault else 1.0)
        start_s = self.context.deadlines.start
        longest_s = PATIENCE * deadline_s + STARTS * start_s + LEFT_OUT_S
        answers: dict[Question, frozenset[str]] = {}
        while True:
            case = module, function, rule, variant, answers
            question = case, cell in self._own_reports, deadline_s, start_s
            end, late = self._ask(cell, question, MOST * longest_s + GRACE_S)
            if end.asks is None:
                break
            found = self._growing(cell, end.asks, rule)
            if isinstance(found, CaseEnd):
                return found
            answers[end.asks] = found
        if end.unheard and end.outcome is not Outcome.PASS and cell not in self._own_reports:
            self._own_reports.add(cell)
            self.drop()  # the next host has more ports
            return self.run(cell, module, function, rule, variant)
        if late in (QUIET, UNSTARTED) and end.outcome is Outcome.BLOCKED:
            self.context.missing.append(end.reason)
        elif late:
            self._hung.setdefault(module, []).append(function)
            if end.outcome is not Outcome.BLOCKED:
                self._at_fault.add(module)
        self.context.note("start", late == UNSTARTED)
        self.context.note("release", end.waited_for == RELEASES)
        return end

    def _growing(self, cell: Cell, question: Question, rule: str) -> frozenset[str] | CaseEnd:
        """Which places grow on engines of the cluster, or how the script ended otherwise. Those that another
        case of the cell has seen grow are not looked at again.
        """
        known = self._grow.get((cell, question.role), frozenset())
        if mine := known & question.places:
            return mine
        end = self.scripts.answer(cell, growing_places, rule, question)
        if end.evidence is None:
            return end
        found = frozenset(end.evidence.notes)
        self._grow[cell, question.role] = known | found
        return found

    def answer(self, cell: Cell, function: Callable[..., Evidence], rule: str, variant: Any) -> CaseEnd:
        """The end of a function that is no case. It runs once, unless it ends in an error of the suite. See
        `run`.
        """
        key = (cell, function, variant)
        if (end := self._answers.get(key)) is None:
            end = self.run(cell, function.__module__, function.__name__, rule, variant)
            if end.outcome is not Outcome.HARNESS:
                self._answers[key] = end
        return end

    def _require_few_hangs(self, module: str) -> None:
        """Raise Blocked after many cases that hung."""
        if len(self._hung) >= MODULES:
            [first, *_] = self._hung.values()
            raise Blocked(
                f"cases of {MODULES} modules did not end in time, the first is {first[0]}: no other case is "
                "started"
            )
        if len(hung := self._hung.get(module, [])) >= HANGS:
            raise Blocked(
                f"{HANGS} cases of {module.rpartition('.')[2]} did not end in time, the first is {hung[0]}: "
                "no other case of it is started"
            )

    def drop(self) -> None:
        """End the host."""
        if self._host is not None:
            leave([self._host], LEAVE_S)
        self._host = self._cell = None

    def _ask(self, cell: Cell, question: tuple[Any, ...], deadline_s: float) -> tuple[CaseEnd, str]:
        host = self._failed.get(cell) or self._start(cell)
        if isinstance(host, CaseEnd):
            return host, ""
        try:
            host.connection.send(question)
            answer: tuple[CaseEnd, str] = host.receive(deadline_s)
        except (OSError, EOFError, TimeoutError):
            log = "; ".join(host.last_lines()[-2:])
            self.drop()
            raise HarnessError(
                f"the process from which cases of {cell} are forked is gone or hangs: {log}"
            ) from None
        return answer

    def _start(self, cell: Cell) -> ChildProcess | CaseEnd:
        context = self.context
        if self._host is not None and self._cell == cell:
            return self._host
        self.drop()
        name = context.next_name()
        tp = dict(zip("PD", parse_topology(cell.topology), strict=True))
        folder = str(context.store_folder(name))
        # and those up to the next that is given out, see ports.PORTS_APART; real workers listen on theirs
        firsts = [free_port() for _ in range(2 if cell in self._own_reports else 1)]
        ports = [first + n * RANKS for first in firsts for n in range(PORTS_APART // RANKS)]
        spec = HostSpec(
            cell=cell,
            subject=context.subject,
            tensor_parallel=tp,
            memory={role: side_of(cell, role) for role in "PD"},
            transfer={
                role: transfer_config(
                    context.subject, role, context.facts.device, port=ports[n], folder=folder
                )
                for n, role in enumerate("PD")
            },
            ports=tuple(ports[2:]),
            folder=folder,
            facts=context.facts,
            timeout_scale=context.scaled_seconds(1.0),
        )
        target = "pytest_kvconform.rigs.scheduler.host:serve"
        try:
            host = ChildProcess(context.address, f"{cell}-host-{name}", target, spec, context.deadlines.start)
        except ForkRefused as refused:
            raise HarnessError(str(refused)) from None
        try:
            word, value = host.receive(context.deadlines.start)
        except (OSError, EOFError, TimeoutError):
            lines = "; ".join(host.last_lines()[-2:])
            host.end()
            raise HarnessError(
                f"the process from which cases of {cell} are forked did not start: {lines}"
            ) from None
        if word != "ready":
            host.end()
            self._failed[cell] = value
            return self._failed[cell]
        self._host, self._cell = host, cell
        return host
