"""What cases of the byte rig run on: two byte engines of one cell, and the observation of every transfer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from model_matrix import load_geometries
from model_matrix.geometries import State
from pytest_kvconform.kv_config import TURN_S
from pytest_kvconform.result import Blocked, Cell, NotApplicable, blocked_by
from pytest_kvconform.rigs.bytes.handle import ByteEngineHandle
from pytest_kvconform.rigs.bytes.messages import ByteEngineSpec
from pytest_kvconform.rigs.bytes.specs import alike, byte_engine_spec, needed_blocks, zygotes
from pytest_kvconform.rigs.cluster.control import REFUSAL_S, Control
from pytest_kvconform.rigs.cluster.loop import play
from pytest_kvconform.rigs.cluster.pairs import EnginePairs
from pytest_kvconform.rigs.cluster.release import is_full
from pytest_kvconform.rigs.cluster.transfer import TransferObservation, observe_transfer
from pytest_kvconform.rigs.cluster.two_turns import TurnObservation, observe_turns
from pytest_kvconform.rigs.context import Deadlines, RunContext
from pytest_kvconform.rigs.engine.handle import EngineFailed, hook_calls
from pytest_kvconform.rigs.engine.messages import EngineFacts
from pytest_kvconform.rigs.processes.cores import Deadline
from pytest_kvconform.rigs.processes.place import Place
from pytest_kvconform.rigs.scenario import Transfer
from pytest_kvconform.rigs.vllm_setup.kv_cache_specs import NO_STATES, unified_in_vain

# Times the deadline of a call: one call may compare hundreds of megabytes, and name
# what millions of wrong words share.
SLOW_CALLS = 4
LONG = "long"  # the pair of a cell whose pools have room for longer prompts


def call_deadline(context: RunContext) -> float:
    """Seconds that one call of a byte engine may take."""
    return SLOW_CALLS * context.deadlines.call


def blocked_by_start(cell: Cell, failed: EngineFailed) -> Blocked:
    """The Blocked of a case whose engines did not start."""
    return blocked_by(f"kv::bytes/start::engines_start[{cell}]", failed.sentence, failed.declined)


def _word(longer: int, fake: str) -> str:
    """The word of a pair of engines, see EnginePairs."""
    return " ".join(filter(None, (LONG if longer else "", fake)))


class ByteBench:
    """Runs each transfer of a cell once, however many cases judge its observation."""

    def __init__(self, context: RunContext, second_zygote: Callable[[str], Place] | None = None):
        """`second_zygote`: geometry -> where a D starts that is no fork of P's zygote."""
        self.context, self._second_zygote = context, second_zygote
        alone = context.subject.is_same_engine
        self.pairs = EnginePairs(context, ByteEngineHandle, SLOW_CALLS, alone=alone, place=self._place)
        self.control = Control(context, ByteEngineHandle, SLOW_CALLS, alone=alone, place=self._place)
        self._observations: dict[tuple[Cell, str, int], TransferObservation] = {}
        self._turns: dict[tuple[Cell, Transfer], TurnObservation] = {}
        # Cells whose engines cannot start for a reason that is not the connector's fault: what to raise, and
        # the reason. The key None means all cells.
        self._excused: dict[Cell | None, tuple[type[Exception], str]] = {}
        # Cells in which no further transfer runs: what the Blocked of each is made with.
        self._over: dict[Cell, tuple[str, bool, str]] = {}

    def observe(self, cell: Cell, transfer: Transfer, longest: int, longer: int = 0) -> TransferObservation:
        """The observation of a transfer in a cell; runs it on first use.

        `longest` is the largest number of tokens at once in this cell. `longer`: tokens that the prompts
        have beyond those of the cell's transfers; such transfers have a pair of engines of their own.

        Raises Blocked if the transfer cannot run, or if an earlier transfer of the cell was refused after a
        long wait, or did not end.
        """
        key, word = (cell, transfer.name, longer), _word(longer, transfer.fake)
        if key not in self._observations:
            self._require_alike(cell)
            self.context.require_known_handover("byte", store=True, alone=True)
            if cell in self._over:
                raise Blocked(*self._over[cell])
            try:
                p, d = self._engines(cell, longest, word, transfer.fake)
            except EngineFailed as failed:
                raise blocked_by_start(cell, failed) from None
            soon = Deadline(REFUSAL_S, (p.process.watched, d.process.watched), look=True)
            found = self._observe(transfer, p, d, self.context.deadlines)
            late = soon.over()
            if found.failed or found.stuck or found.refused:
                for other in {"", LONG, word}:
                    self.pairs.end(cell, other)
                if not found.refused:
                    with self.control.broken(cell, lambda why: self._over.update({cell: (why, False, "")})):
                        found = replace(found, excuse=self._excuse(cell, transfer, longest, longer, found))
                if not found.excuse:
                    self.context.note("request", bool(found.stuck))
                    self.context.note("call", found.failed is not None and found.failed.how == "hung")
                on = "" if found.excuse else f"kv::bytes/handover::completes[{cell}-{transfer}]"
                refused = found.refused and not found.stuck
                if late if refused else self.control.is_over(cell, found, found.excuse):
                    self._over[cell] = found.excuse or f"depends on {on}", found.declined, on
            elif is_full(p, needed_blocks(cell, "P", longest)):
                self.pairs.end(cell, word)
            self._observations[key] = found
        self.context.shown_calls[:] = self._observations[key].calls
        return self._observations[key]

    def observe_turns(self, cell: Cell, transfer: Transfer, longest: int) -> TurnObservation:
        """The observation of two turns in a cell, on engines of their own; runs them on first use. D keeps
        its blocks for as long as it is configured, unless the second turn comes `late`.

        Raises Blocked or NotApplicable as `observe`.
        """
        if (cell, transfer) not in self._turns:
            self.context.require_known_handover("byte")
            if cell in self._over:
                raise Blocked(*self._over[cell])
            word, turn = f"turns-{transfer.name}", transfer.turn
            assert turn is not None
            turn_s = TURN_S if turn.late else 0.0
            policy = transfer.policy if transfer.fails else ""

            def spec(role: str, tensor_parallel: int, folder: str) -> ByteEngineSpec:
                return byte_engine_spec(
                    self.context, cell, role, longest, folder, policy=policy, turn_s=turn_s
                )

            def run(p: ByteEngineHandle, d: ByteEngineHandle, limits: Deadlines) -> TurnObservation:
                hook_calls(p, d)  # those of the start are forgotten
                ids = self.context.next_name
                script = partial(observe_turns, transfer=transfer, limits=limits, ids=ids)
                found: TurnObservation = play(script, p, d)
                return replace(found, calls=hook_calls(p, d))

            try:
                found = run(*self._pair(cell, spec, word), self.context.deadlines)
            except EngineFailed as failed:
                raise blocked_by_start(cell, failed) from None
            finally:
                self.pairs.end(cell, word)
            if found.failed or found.stuck:
                limits = self.control.deadlines
                excuse = self.control.excuse(
                    cell, found, spec, lambda p, d: run(p, d, limits), found.decoder, word
                )
                found = replace(found, excuse=excuse)
            self._turns[cell, transfer] = found
        self.context.shown_calls[:] = self._turns[cell, transfer].calls
        return self._turns[cell, transfer]

    def _observe(
        self, transfer: Transfer, p: ByteEngineHandle, d: ByteEngineHandle, deadlines: Deadlines
    ) -> TransferObservation:
        hook_calls(p, d)  # those of an earlier transfer are forgotten
        ids = self.context.next_name
        script = partial(observe_transfer, transfer=transfer, limits=deadlines, ids=ids)
        observed: TransferObservation = play(script, p, d)
        return replace(observed, calls=hook_calls(p, d))

    def _excuse(
        self, cell: Cell, transfer: Transfer, longest: int, longer: int, found: TransferObservation
    ) -> str:
        """Return why a transfer in which an engine failed fails without the connector, too; "": it passes."""
        return self.control.excuse(
            cell,
            found,
            lambda role, tp, folder: byte_engine_spec(self.context, cell, role, longest, folder),
            lambda p, d: self._observe(transfer, p, d, self.control.deadlines),
            found.decoder,
            _word(longer, transfer.fake),
        )

    def facts_of_engines(self, cell: Cell, longest: int) -> tuple[EngineFacts, EngineFacts]:
        """What vLLM made of P and of D.

        Raises EngineFailed if the connector kept one from starting, Blocked if something else did.
        """
        self._require_alike(cell)
        if not isinstance(self.pairs.started(cell), tuple):
            self._engines(cell, longest)
        found = self.pairs.started(cell)
        assert isinstance(found, tuple)
        return found

    def _engines(
        self, cell: Cell, longest: int, word: str = "", fake: str = ""
    ) -> tuple[ByteEngineHandle, ByteEngineHandle]:
        """P and D of a cell, running. Raises as `_pair`."""

        def spec(role: str, tensor_parallel: int, folder: str) -> ByteEngineSpec:
            return byte_engine_spec(self.context, cell, role, longest, folder, fake=fake)

        return self._pair(cell, spec, word)

    def _pair(
        self, cell: Cell, spec: Callable[[str, int, str], ByteEngineSpec], word: str
    ) -> tuple[ByteEngineHandle, ByteEngineHandle]:
        """A pair of engines of a cell, running.

        Raises EngineFailed, or Blocked or NotApplicable where the connector is excused.
        """
        self._raise_excuse(cell)
        try:
            return self.pairs.pair(cell, spec, word)
        except EngineFailed as failed:
            self._note_excuse(cell, failed)
            self._raise_excuse(cell)
            if excuse := self.control.excuse_start(cell, failed, spec, word):
                raise Blocked(excuse) from None
            raise

    def _place(self, cell: Cell, role: str) -> Place:
        """Where an engine of a cell starts. Nodes have a zygote each, whatever the cell."""
        if self._second_zygote and role == "D" and zygotes(cell) == 2 and not self.context.places:
            return self._second_zygote(cell.family)
        return self.context.place(role)

    def _require_alike(self, cell: Cell) -> None:
        """Raise NotApplicable where one engine cannot be P and D, and the connector loads in the same engine
        alone.
        """
        if not self.context.subject.is_same_engine or (alike(cell) and zygotes(cell) == 1):
            return
        what = "come from two zygotes" if alike(cell) else "differ"
        name = self.context.subject.connector
        raise NotApplicable(f"{name} loads in the engine alone that has saved, and P and D {what}")

    def _raise_excuse(self, cell: Cell) -> None:
        kind, sentence = self._excused.get(None) or self._excused.get(cell) or (None, "")
        if kind:
            raise kind(sentence) from None

    def _note_excuse(self, cell: Cell, failed: EngineFailed) -> None:
        """Note the reason if engines did not start and that is not the connector's fault."""
        subject, facts = self.context.subject, self.context.facts
        reason = failed.reason or failed.sentence
        if subject.lacks(facts.device):
            self._excused[None] = (
                Blocked,
                f"{subject.connector} does not start where vLLM runs on {facts.device}: {reason}",
            )
        states = any(isinstance(kind, State) for kind in load_geometries()[cell.family].kinds.values())
        unified = failed.how == "refused" and unified_in_vain(failed.frames)
        if subject.is_store and states and not facts.supports_hma and unified:
            self._excused[cell] = NotApplicable, f"{facts.name} {NO_STATES}: {reason}"
