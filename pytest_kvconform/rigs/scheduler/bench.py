"""The handle on the process in which cases of the scheduler rig run. One host for the current cell; a case is one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model_matrix import parse_topology
from pytest_kvconform.result import Blocked, Cell, Evidence, HarnessError, NotApplicable, Violation
from pytest_kvconform.rigs.bytes.bench import side_of
from pytest_kvconform.rigs.engine.handover import Deadlines
from pytest_kvconform.rigs.processes.child import ChildProcess, ForkRefused
from pytest_kvconform.rigs.processes.ports import free_port
from pytest_kvconform.rigs.scheduler.host import Ended, HostSpec

if TYPE_CHECKING:
    from pytest_kvconform.rigs.bench import Bench

CASE_PART = 0.5  # of the deadline of a call: a case takes milliseconds
GRACE_S = 10.0  # beyond a case's own deadline, which the host keeps
PORTS, RANKS = (
    4,
    8,
)  # sides with a port of their own, and how far apart these are: a connector may add its rank
HANGS = 3  # after so many cases that did not come back the rest is not tried


class SchedulerBench:
    """Runs cases of the tiers interface and protocol in a host process of the current cell."""

    def __init__(
        self, bench: Bench, names: Iterator[str], config: Callable[..., dict[str, Any]], limits: Deadlines
    ):
        self.bench, self.names, self.config, self.limits = bench, names, config, limits
        self._host: ChildProcess | None = None
        self._cell: Cell | None = None
        self._failed: dict[Cell, Ended] = {}  # cells for which there can be no host
        self._hung: list[str] = []

    def run(self, module: str, function: str, rule: str, variant: Any) -> Evidence:
        """Run a case in a fork of the host. Returns its evidence, or raises Violation, Blocked, NotApplicable or HarnessError."""
        if len(self._hung) >= HANGS:
            raise Blocked(
                f"{HANGS} cases did not come back in time, {self._hung[0]} first: others are not tried"
            )
        ended, deadline_s = self._failed.get(self.bench.cell), CASE_PART * self.limits.call
        if ended is None:
            ended = self._ask(("run", module, function, rule, variant, deadline_s), deadline_s + GRACE_S)
        match ended.kind:
            case "pass":
                evidence: Evidence = ended.value
                return evidence
            case "violation":
                if "did not come back within" in ended.value.happened:
                    self._hung.append(function)
                raise Violation(ended.value)
            case "blocked":
                raise Blocked(ended.value, refused=ended.refused)
            case "not applicable":
                raise NotApplicable(ended.value, refused=ended.refused)
        raise HarnessError(ended.value)

    def drop(self) -> None:
        """End the host."""
        if self._host is not None:
            self._host.end()
        self._host = self._cell = None

    def _ask(self, question: tuple[Any, ...], deadline_s: float) -> Ended:
        host = self._start()
        if isinstance(host, Ended):
            return host
        try:
            host.connection.send(question)
            ended: Ended = host.receive(deadline_s)
        except (OSError, EOFError, TimeoutError):
            log = "; ".join(host.last_lines()[-2:])
            self.drop()
            raise HarnessError(
                f"the process from which cases of {self.bench.cell} are forked is gone or stands still: {log}"
            ) from None
        return ended

    def _start(self) -> ChildProcess | Ended:
        cell = self.bench.cell
        if self._host is not None and self._cell == cell:
            return self._host
        self.drop()
        name = next(self.names)
        tp = dict(zip("PD", parse_topology(cell.topology), strict=True))
        folder = str(Path(self.bench.address).parent / f"store-{name}")
        port = free_port()  # and those up to the next that is given out, see ports.APART
        spec = HostSpec(
            cell=cell,
            subject=self.bench.subject,
            tensor_parallel=tp,
            memory={role: side_of(cell, role) for role in "PD"},
            transfer={
                role: {"kv_port": port + n * RANKS} | self.config(role, folder=folder)
                for n, role in enumerate("PD")
            },
            ports=tuple(port + n * RANKS for n in range(2, 2 + PORTS)),
            folder=folder,
            supports_hma=self.bench.facts.supports_hma,
            timeout_scale=max(1.0, self.bench.settings.timeout_scale),
        )
        target = "pytest_kvconform.rigs.scheduler.host:serve"
        try:
            host = ChildProcess(self.bench.address, f"{cell}-host-{name}", target, spec, self.limits.start)
        except ForkRefused as refused:
            raise HarnessError(str(refused)) from None
        try:
            word, value = host.receive(self.limits.start)
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
