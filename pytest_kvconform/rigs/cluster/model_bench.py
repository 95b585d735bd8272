"""The bench of cases on the engine rig: two real engines, and the observation of every scenario."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from model_matrix import CheckpointError, ensure_checkpoint, load_families, speculative_config
from pytest_kvconform.result import Blocked, Cell, HarnessError, blocked_by
from pytest_kvconform.rigs.cluster.control import (
    REFUSAL_S,
    WITHOUT,
    Control,
    hung,
    patient,
    shows_connector,
    without_connector,
)
from pytest_kvconform.rigs.cluster.loop import play
from pytest_kvconform.rigs.cluster.model_handover import observe
from pytest_kvconform.rigs.cluster.observation import Observation
from pytest_kvconform.rigs.cluster.pairs import EnginePairs
from pytest_kvconform.rigs.cluster.release import is_full
from pytest_kvconform.rigs.context import Deadlines, RunContext
from pytest_kvconform.rigs.engine.ends import MOMENT_S
from pytest_kvconform.rigs.engine.handle import EngineFailed, ModelEngineHandle
from pytest_kvconform.rigs.engine.messages import EngineFacts, EngineSpec, Leftovers
from pytest_kvconform.rigs.processes.cores import Deadline
from pytest_kvconform.rigs.processes.ports import free_port
from pytest_kvconform.rigs.scenario import Prompt, Scenario, lengthened, tokens, with_new_tokens
from pytest_kvconform.rigs.vllm_setup.overrides import reason_not_to_speculate

BLOCKS = {"P": 96, "D": 112}  # pools of different sizes: no address of one engine fits the other by accident
ROOM = 12  # blocks for each further block of a prompt: prompts at once, times KV cache groups
LONG = "long"  # the pair of a cell whose pools have room for longer prompts
PROMPT_BLOCKS = 8  # a request may be this many blocks long
# Handed over before a scenario that moves little or nothing, if it is the first one on its engines. Peers
# that have met answer at once, and the outcome of a case must not depend on the cases before it.
INTRODUCTION = Scenario("introduction", (Prompt(tokens(33)),), max_tokens=1)
# Hangs of a cell after which its other scenarios are not tried. Until then new engines go on, unless they
# hang in the plainest hand-over, too (INTRODUCTION).
HANGS = 3
# After engines have hung in so many cells, or failed without the connector, too, further cells would only
# take long, and are not tried.
DEAD_CELLS = 3


Pair = tuple[ModelEngineHandle, ModelEngineHandle]  # P and D


class EngineBench:
    """Runs each scenario of a cell once, however many cases judge its observation."""

    def __init__(self, context: RunContext):
        self.context = context
        self.pairs = EnginePairs(context, ModelEngineHandle)
        self.control = Control(context, ModelEngineHandle)
        # for the oracle of a store
        self.without = EnginePairs(patient(context), ModelEngineHandle, remark=WITHOUT)
        self._introduced: tuple[ModelEngineHandle, ModelEngineHandle] | None = (
            None  # engines that have handed something over
        )
        self._observations: dict[tuple[Cell, str, int], Observation] = {}
        self._ends: dict[Cell, tuple[Leftovers, Leftovers] | Exception] = {}
        self._dead: dict[Cell, str] = {}  # cells in which no scenario is tried any more, with the sentence
        self._slow: dict[Cell, str] = {}  # those of them that took long
        # Cells in which no further scenario runs: what the Blocked of each is made with.
        self._over: dict[Cell, tuple[str, bool, str]] = {}

    def facts_of_engines(self, cell: Cell) -> tuple[EngineFacts, EngineFacts]:
        """What vLLM made of P and of D.

        Raises EngineFailed if the connector kept one from starting, Blocked if something else did.
        """
        if not isinstance(self.pairs.started(cell), tuple):
            self._refuse_dead(cell)
            self.engines(cell)
        found = self.pairs.started(cell)
        assert isinstance(found, tuple)
        return found

    def observe(self, cell: Cell, scenario: Scenario, longer: int = 0) -> Observation:
        """The observation of a scenario in a cell; runs it on first use.

        `longer`: tokens that the prompts have beyond those of the cell's scenarios; such scenarios have a
        pair of engines of their own.

        Raises Blocked or HarnessError if it cannot run; Blocked, too, if an earlier scenario of the cell was
        refused after a long wait.
        """
        key = (cell, scenario.name, longer)
        if key not in self._observations:
            self.context.require_known_handover("engine", store=True)
            self._refuse_dead(cell)
            if cell in self._over:
                raise Blocked(*self._over[cell])
            try:
                pair = self.engines(cell, longer)
            except EngineFailed as failed:
                case = f"kv::engine/start::engines_start[{cell}]"
                raise blocked_by(case, failed.sentence, failed.declined) from None
            soon = Deadline(REFUSAL_S, tuple(one.process.watched for one in pair), look=True)
            plain = scenario.due and not scenario.abort and not self.control.hangs[cell]
            first = [] if self._introduced is pair or plain else [INTRODUCTION]
            for one in [*(lengthened(one, longer) for one in first), scenario]:
                kept_before = bool(pair[0].kept)
                observation = self._observe(cell, one, *pair, longer)
                if observation.failed or observation.stuck:
                    observation = self._without_connector(cell, one, longer, observation)
                if observation.failed or observation.stuck or observation.refused:
                    break
            observation = replace(observation, scenario=scenario, kept_before=kept_before)
            self._observations[key], self._introduced = observation, pair
            if observation.refused:  # P may keep until its lease ends what D has not read
                if soon.over():
                    on = f"kv::engine/handover::completes[{cell}-{scenario}]"
                    self._over[cell] = f"depends on {on}", observation.declined, on
                self.pairs.end(cell, _word(longer))
            elif scenario.unread and pair[0].kept and not kept_before:
                # P may keep until its lease ends what D does not read: other scenarios have fresh engines
                pair[0].kept = None
                self.pairs.end(cell, _word(longer))
            elif is_full(pair[0]):
                self.pairs.end(cell, _word(longer))
        self.context.shown_calls[:] = self._observations[key].calls
        return self._observations[key]

    def _observe(
        self,
        cell: Cell,
        scenario: Scenario,
        p: ModelEngineHandle,
        d: ModelEngineHandle,
        longer: int,
    ) -> Observation:
        without = None
        if self.context.subject.is_store:
            scenario = replace(scenario, prompts=with_new_tokens(scenario.prompts))
            without = self._engines_without(cell, longer, p.facts)
        try:
            return self._observe_with(cell, scenario, p, d, self.context.deadlines, without)
        except Blocked:  # the oracle's engines have failed
            self.without.end(cell, _word(longer))
            raise

    def _observe_with(
        self,
        cell: Cell,
        scenario: Scenario,
        p: ModelEngineHandle,
        d: ModelEngineHandle,
        deadlines: Deadlines,
        without: Pair | None,
    ) -> Observation:
        dtype = load_families()[cell.family].dtype
        ids = self.context.next_name
        script = partial(observe, scenario=scenario, dtype=dtype, deadlines=deadlines, ids=ids)
        observed: Observation = play(script, p, d, *(without or ()))
        return observed

    def _engines_without(self, cell: Cell, longer: int, facts: EngineFacts) -> Pair:
        """P and D of a cell without the connector, for the oracle of a store. Raises Blocked."""

        def spec(role: str, tensor_parallel: int, folder: str) -> EngineSpec:
            return without_connector(self._spec(cell, role, tensor_parallel, longer), facts)

        try:
            return self.without.pair(cell, spec, _word(longer))
        except EngineFailed as failed:
            raise Blocked(f"the oracle's engines do not start: {failed.sentence}") from None

    def _without_connector(
        self, cell: Cell, scenario: Scenario, longer: int, observed: Observation
    ) -> Observation:
        """Note whether a scenario in which an engine failed fails without the connector, too.

        The engines are ended. Other scenarios of the cell have fresh ones, see `Control.is_over`.
        """
        for word in ("", LONG):
            self.pairs.end(cell, word)
        with self.control.broken(cell, lambda why: self._dead.update({cell: why})):
            excuse = self.control.excuse(
                cell,
                observed,
                lambda role, tp, folder: self._spec(cell, role, tp, longer, folder),
                lambda p, d: self._observe_with(
                    cell,
                    scenario,
                    p,
                    d,
                    self.control.deadlines,
                    (p, d) if self.context.subject.is_store else None,
                ),
                observed.decoder,
                _word(longer),
            )
        if not excuse:
            self.context.note("request", bool(observed.stuck))
            self.context.note("call", observed.failed is not None and observed.failed.how == "hung")
            if hung(observed):
                self.context.hanging.add(cell)
        if self.control.is_over(cell, observed, excuse, 1 if scenario.name == INTRODUCTION.name else HANGS):
            failed = observed.failed.sentence if observed.failed else str(observed.stuck[0])
            self._dead[cell] = excuse or failed
            if excuse or hung(observed):
                self._slow[cell] = self._dead[cell]
        return replace(observed, excuse=excuse)

    def leftovers(self, cell: Cell) -> tuple[Leftovers, Leftovers]:
        """Shut P and D of a cell down and return what their processes still have.

        Raises EngineFailed if one could not, Blocked if it could not without the connector either.
        """
        if cell not in self._ends:
            self._refuse_dead(cell)
            p, d = self.engines(cell)
            try:
                self._ends[cell] = ends = _shut_down(p, d, self.context.deadlines.shutdown)
                frames = tuple(frame for left in ends if left.error for frame in left.frames)
                failed = any(left.error for left in ends)
            except EngineFailed as error:
                self._ends[cell], frames, failed = error, error.frames, True
            self.pairs.end(cell)
            if failed and not shows_connector(frames, self.context.facts):
                self._ends[cell] = self._shutdown_without_connector(cell, d.facts) or self._ends[cell]
        found = self._ends[cell]
        self.context.note("shutdown", isinstance(found, EngineFailed) and found.how == "hung")
        if isinstance(found, Exception):
            raise found
        return found

    def _shutdown_without_connector(self, cell: Cell, facts: EngineFacts) -> Blocked | None:
        """Return Blocked if engines do not shut down without the connector either."""
        seconds = self.control.deadlines.shutdown
        excuse = self.control.excuse_call(
            cell,
            lambda role, tp, folder: self._spec(cell, role, tp, 0),
            lambda p, d: next((left.error for left in _shut_down(p, d, seconds) if left.error), ""),
            facts,
        )
        return Blocked(excuse) if excuse else None

    def engines(self, cell: Cell, longer: int = 0) -> tuple[ModelEngineHandle, ModelEngineHandle]:
        """P and D of a cell, running.

        Raises EngineFailed if the connector keeps one from starting, Blocked if something else does.
        """
        reason = reason_not_to_speculate(self.context.facts.device)
        if reason and load_families()[cell.family].draft:
            raise Blocked(reason)
        self.context.require_kernels()

        def spec(role: str, tensor_parallel: int, folder: str) -> EngineSpec:
            return self._spec(cell, role, tensor_parallel, longer, folder)

        try:
            return self.pairs.pair(cell, spec, _word(longer))
        except EngineFailed as failed:
            if excuse := self.control.excuse_start(cell, failed, spec, _word(longer)):
                raise Blocked(excuse) from None
            raise

    def _refuse_dead(self, cell: Cell) -> None:
        if cell in self._dead:
            failed = f"an engine of {cell} failed before: {self._dead[cell]}"
            raise Blocked(failed, depends_on=str(cell))
        if len(self._slow) >= DEAD_CELLS:
            raise Blocked(
                f"engines of {len(self._slow)} cells failed before, last: {list(self._slow.values())[-1]}"
            )

    def _spec(self, cell: Cell, role: str, tensor_parallel: int, longer: int, folder: str = "") -> EngineSpec:
        family = load_families()[cell.family]
        try:
            checkpoint = ensure_checkpoint(family)
            draft = speculative_config(family, checkpoint)
        except CheckpointError as error:
            raise HarnessError(str(error)) from None
        if not self.context.place(role).has(str(checkpoint)):
            raise Blocked(
                f"the node of {role}, {self.context.place(role).host}, has no {checkpoint}: let "
                "KVCONFORM_CACHE_DIR be a folder that every node sees"
            )
        return EngineSpec(
            role=role,
            checkpoint=str(checkpoint),
            tensor_parallel=tensor_parallel,
            dtype=family.dtype,
            block_size=family.block_size,
            num_blocks=BLOCKS[role] + ROOM * -(-longer // family.block_size),
            max_model_len=PROMPT_BLOCKS * family.block_size + longer,
            max_batched_tokens=2 * (PROMPT_BLOCKS * family.block_size + longer),
            kv_transfer_config=self.context.transfer_config(role, port=free_port(), folder=folder),
            environment=self.context.engine_environment(role),
            handover=self.context.subject.way,
            save_delay=self.context.subject.save_delay,
            engine_arguments={"speculative_config": draft} if draft else {},
        )


def _word(longer: int) -> str:
    """The word of a pair of engines, see `EnginePairs`."""
    return LONG if longer else ""


def _shut_down(p: ModelEngineHandle, d: ModelEngineHandle, seconds: float) -> tuple[Leftovers, Leftovers]:
    p.send("shutdown")  # both at once: each waits for threads of its own, for MOMENT_S
    d.send("shutdown")
    return p.answer("shutdown", seconds + MOMENT_S), d.answer("shutdown", seconds + MOMENT_S)
