"""The bench of cases on the engine rig: two real engines, and the observation of every scenario."""

from __future__ import annotations

from model_matrix import CheckpointError, ensure_checkpoint, load_families
from pytest_kvconform.result import Blocked, Cell, HarnessError
from pytest_kvconform.rigs.context import RunContext, port_environment
from pytest_kvconform.rigs.engine.handle import EngineFailed, ModelEngineHandle
from pytest_kvconform.rigs.engine.handover import observe
from pytest_kvconform.rigs.engine.messages import EngineFacts, EngineSpec, Leftovers
from pytest_kvconform.rigs.engine.observation import Observation
from pytest_kvconform.rigs.engine.pairs import EnginePairs
from pytest_kvconform.rigs.engine.release import is_half_full
from pytest_kvconform.rigs.processes.ports import free_port
from pytest_kvconform.rigs.scenario import Prompt, Scenario, lengthened, tokens

BLOCKS = {"P": 96, "D": 112}  # pools of different sizes: no address of one engine fits the other by accident
ROOM = 12  # blocks for each further block of a prompt: prompts at once, times KV cache groups
LONG = "long"  # the pair of a cell whose pools have room for longer prompts
PROMPT_BLOCKS = 8  # a request may be this many blocks long
# Handed over before a scenario that moves little or nothing, if it is the first one on its engines. Peers
# that have met answer at once, and the outcome of a case must not depend on the cases before it.
INTRODUCTION = Scenario("introduction", (Prompt(tokens(33)),), max_tokens=1)
# after the engines of so many cells have died, further cells would only take long, and are not tried
DEAD_CELLS = 3


class EngineBench:
    """Runs each scenario of a cell once, however many cases judge its observation."""

    def __init__(self, context: RunContext):
        self.context = context
        self.pairs = EnginePairs(context, ModelEngineHandle)
        self._introduced: tuple[ModelEngineHandle, ModelEngineHandle] | None = (
            None  # engines that have handed something over
        )
        self._observations: dict[tuple[Cell, str, int], Observation] = {}
        self._ends: dict[Cell, tuple[Leftovers, Leftovers] | EngineFailed] = {}
        self._dead: dict[Cell, str] = {}  # cells whose engines died, with the sentence

    def facts_of_engines(self, cell: Cell) -> tuple[EngineFacts, EngineFacts]:
        """What vLLM made of P and of D. Raises EngineFailed if one did not start."""
        if self.pairs.started(cell) is None:
            self._refuse_dead(cell)
            self.engines(cell)
        found = self.pairs.started(cell)
        if isinstance(found, EngineFailed):
            raise found
        assert found is not None
        return found

    def observe(self, cell: Cell, scenario: Scenario, longer: int = 0) -> Observation:
        """The observation of a scenario in a cell; runs it on first use.

        `longer`: tokens that the prompts have beyond those of the cell's scenarios; such scenarios have a
        pair of engines of their own.

        Raises Blocked or HarnessError if it cannot run.
        """
        key = (cell, scenario.name, longer)
        if key not in self._observations:
            self._refuse_dead(cell)
            try:
                pair = self.engines(cell, longer)
            except EngineFailed as failed:
                on = f"depends on kv::engine/start::engines_start[{cell}]: {failed.sentence}"
                raise Blocked(on, refused=failed.declined) from None
            run = (*pair, load_families()[cell.family].dtype, self.context.deadlines, self.context.next_name)
            try:
                if self._introduced is not pair and (scenario.abort or not scenario.due):
                    observe(lengthened(INTRODUCTION, longer), *run)
                observation = observe(scenario, *run)
            except EngineFailed as failed:
                self._bury(cell, failed.sentence)
                raise HarnessError(
                    f"an engine failed in the oracle's run, without the connector: {failed.sentence}"
                ) from None
            self._observations[key], self._introduced = observation, pair
            self.context.note("request", bool(observation.stuck))
            self.context.note("call", observation.failed is not None and observation.failed.how == "hung")
            if observation.failed:
                self._bury(cell, observation.failed.sentence)
            elif observation.stuck:
                self._bury(cell, observation.stuck[0])
            elif is_half_full(pair[0]):
                self.pairs.end(cell, LONG if longer else "")
        return self._observations[key]

    def leftovers(self, cell: Cell) -> tuple[Leftovers, Leftovers]:
        """Shut P and D of a cell down and return what their processes still have.

        Raises EngineFailed if one could not.
        """
        if cell not in self._ends:
            self._refuse_dead(cell)
            p, d = self.engines(cell)
            try:
                p.send("shutdown")  # both at once: each waits for threads of its own
                d.send("shutdown")
                seconds = self.context.deadlines.shutdown
                self._ends[cell] = p.answer("shutdown", seconds), d.answer("shutdown", seconds)
            except EngineFailed as failed:
                self._ends[cell] = failed
                self.context.note("shutdown", failed.how == "hung")
            self.pairs.end(cell)
        found = self._ends[cell]
        if isinstance(found, EngineFailed):
            raise found
        return found

    def engines(self, cell: Cell, longer: int = 0) -> tuple[ModelEngineHandle, ModelEngineHandle]:
        """P and D of a cell, running. Raises EngineFailed if one does not start."""
        return self.pairs.pair(
            cell,
            lambda role, tp, folder: self._spec(cell, role, tp, longer),
            LONG if longer else "",
        )

    def _refuse_dead(self, cell: Cell) -> None:
        if cell in self._dead:
            raise Blocked(f"an engine of {cell} failed before: {self._dead[cell]}")
        if len(self._dead) >= DEAD_CELLS:
            raise Blocked(
                f"engines of {len(self._dead)} cells failed before, last: {list(self._dead.values())[-1]}"
            )

    def _bury(self, cell: Cell, sentence: str) -> None:
        self._dead[cell] = sentence
        for word in ("", LONG):
            self.pairs.end(cell, word)

    def _spec(self, cell: Cell, role: str, tensor_parallel: int, longer: int) -> EngineSpec:
        family = load_families()[cell.family]
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
            num_blocks=BLOCKS[role] + ROOM * -(-longer // family.block_size),
            max_model_len=PROMPT_BLOCKS * family.block_size + longer,
            max_batched_tokens=2 * (PROMPT_BLOCKS * family.block_size + longer),
            kv_transfer_config=self.context.transfer_config(role, port=free_port()),
            environment=port_environment(),
        )
