"""What a case is given: the bench of one pytest process, with one part for each rig."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_kvconform.result import Blocked, Cell, HookCall
from pytest_kvconform.rigs.cluster.byte_bench import ByteBench
from pytest_kvconform.rigs.cluster.fault_bench import FaultBench
from pytest_kvconform.rigs.cluster.model_bench import EngineBench
from pytest_kvconform.rigs.cluster.peers.bench import PeerBench
from pytest_kvconform.rigs.cluster.scripts.bench import ScriptBench
from pytest_kvconform.rigs.context import RunContext, SubjectFacts
from pytest_kvconform.rigs.launch import Zygote, launch_zygote, start_zygote, wait_for_zygote
from pytest_kvconform.rigs.nodes import Nodes
from pytest_kvconform.rigs.probe_subject import BadSubject, probe_subject
from pytest_kvconform.rigs.processes import author_hook
from pytest_kvconform.rigs.processes.marks import Marks
from pytest_kvconform.rigs.scheduler.bench import SchedulerBench
from pytest_kvconform.rigs.second_zygote import SecondZygote
from pytest_kvconform.rigs.serving.bench import ServingBench
from pytest_kvconform.rigs.serving.metrics import Unreachable
from pytest_kvconform.rigs.serving.server import Endpoint

if TYPE_CHECKING:
    from pytest_kvconform.settings import Settings
    from pytest_kvconform.subject import Subject

__all__ = [
    "BadSubject",
    "Bench",
    "Benches",
    "SubjectFacts",
    "Zygote",
    "facts_of_deployment",
    "launch_zygote",
    "probe_subject",
    "start_zygote",
    "wait_for_zygote",
]


@dataclass(frozen=True)
class Bench:
    """What one case is given: its cell, and the benches of the rigs, which it asks for observations.

    `faults` and `peers` belong to the rig "peers". `scripts` runs cases that are scripts, in cells of any of
    them. Engines start when a case first asks for them.
    """

    cell: Cell
    context: RunContext
    engine: EngineBench
    bytes: ByteBench
    faults: FaultBench
    peers: PeerBench
    scripts: ScriptBench
    scheduler: SchedulerBench
    serving: ServingBench

    @property
    def subject(self) -> Subject:
        return self.context.subject

    @property
    def settings(self) -> Settings:
        return self.context.settings

    @property
    def facts(self) -> SubjectFacts:
        return self.context.facts


class Benches:
    """The benches of one pytest process, for all of its cases."""

    def __init__(
        self,
        address: str,
        subject: Subject,
        settings: Settings,
        facts: SubjectFacts,
        progress: Callable[[str], None],
        shared: Path | None = None,
    ):
        """`address`: of the zygote. `shared`: folder for what the pytest processes of a run tell each other.

        Raises Blocked if the installed vLLM does not run on the device that was asked for.
        """
        if settings.device not in ("auto", facts.device) and not settings.deployed:
            raise Blocked(
                f"--kv-device={settings.device} was asked for, and the installed vLLM runs on {facts.device}"
            )
        self.facts = facts
        self.context = RunContext(address, subject, settings, facts, progress)
        if shared is not None:
            self.context = replace(
                self.context,
                in_vain=Marks(shared / "in_vain"),
                hanging=Marks(shared / "hanging"),
                keeping=Marks(shared / "keeping"),
            )
        placed = self.context
        self._nodes: Nodes | None = None
        if settings.ray:
            self._nodes = Nodes(subject, settings, address, facts, self.context.deadlines.start)
            placed = replace(self.context, places=self._nodes.places)
        self.engine = EngineBench(placed)
        self._second_zygote = SecondZygote(address, settings, progress)
        self.bytes = ByteBench(placed, self._second_zygote.place)
        self.faults = FaultBench(placed)
        self.peers = PeerBench(self.context)
        self.scripts = ScriptBench(self.context)
        self.scheduler = SchedulerBench(self.context, self.scripts)
        self.serving = ServingBench(self.context)

    def at(self, cell: Cell, of_case: Iterable[str] = (), of_all: Iterable[str] = ()) -> Bench:
        """The bench of the next case, which is in this cell.

        `of_case`: the scenarios between peers that it observes; `of_all`: those of all cases of the cell.
        """
        self.peers.expect(of_case, of_all)
        self.context.shown_calls.clear()
        return Bench(
            cell=cell,
            context=self.context,
            engine=self.engine,
            bytes=self.bytes,
            faults=self.faults,
            peers=self.peers,
            scripts=self.scripts,
            scheduler=self.scheduler,
            serving=self.serving,
        )

    def hook_calls(self) -> tuple[HookCall, ...]:
        """The last calls of hooks in what the case has observed last, with times of the clock."""
        return tuple(self.context.shown_calls)

    def close(self) -> list[str]:
        """End every engine and the scheduler host process. Returns sentences about what did not end."""
        self.context.running.end_all()
        author_hook.end(self.context.address)
        self.scheduler.drop()
        return [*self._second_zygote.close(), *(self._nodes.close() if self._nodes else [])]


def facts_of_deployment(
    settings: Settings, address: str, subject: Subject, deadline_s: float
) -> SubjectFacts:
    """What is known of a connector in servers that already run: neither it nor vLLM need be installed here.

    Raises Blocked or HarnessError.
    """
    wait_for_zygote(address, deadline_s)
    decode, version = Endpoint("decode server", settings.decode_url, headers=settings.headers), ""
    with contextlib.suppress(Unreachable):  # told where it is asked
        version = decode.version()
    return SubjectFacts(
        name=subject.connector,
        module=subject.module or "",
        file="",
        supports_hma=True,
        vllm=version,
        device="",
    )
