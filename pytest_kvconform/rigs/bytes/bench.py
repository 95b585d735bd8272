"""What cases of the byte rig run on: two byte engines of one cell, and the observation of every transfer."""

from __future__ import annotations

from model_matrix import load_geometries
from model_matrix.geometries import State
from pytest_kvconform.result import Blocked, Cell, NotApplicable
from pytest_kvconform.rigs.bytes.handle import ByteEngineHandle
from pytest_kvconform.rigs.bytes.handover import TransferObservation, observe_transfer
from pytest_kvconform.rigs.bytes.specs import byte_engine_spec
from pytest_kvconform.rigs.context import RunContext
from pytest_kvconform.rigs.engine.handle import EngineFailed
from pytest_kvconform.rigs.engine.messages import EngineFacts
from pytest_kvconform.rigs.engine.pairs import EnginePairs
from pytest_kvconform.rigs.engine.release import is_half_full
from pytest_kvconform.rigs.scenario import Transfer

# Times the deadline of a call: one call may compare hundreds of megabytes, and name
# what millions of wrong words share.
SLOW_CALLS = 4
LONG = "long"  # the pair of a cell whose pools have room for longer prompts


def call_deadline(context: RunContext) -> float:
    """Seconds that one call of a byte engine may take."""
    return SLOW_CALLS * context.deadlines.call


class ByteBench:
    """Runs each transfer of a cell once, however many cases judge its observation."""

    def __init__(self, context: RunContext):
        self.context = context
        self.pairs = EnginePairs(context, ByteEngineHandle, SLOW_CALLS)
        self._observations: dict[tuple[Cell, str, int], TransferObservation] = {}
        # Cells whose engines cannot start for a reason that is not the connector's fault: what to raise, and
        # the reason. The key None means all cells.
        self._excused: dict[Cell | None, tuple[type[Exception], str]] = {}
        # Cells in which no further transfer runs: the id of the case that has the reason, and whether the
        # connector declined cleanly.
        self._over: dict[Cell, tuple[str, bool]] = {}

    def observe(self, cell: Cell, transfer: Transfer, longest: int, longer: int = 0) -> TransferObservation:
        """The observation of a transfer in a cell; runs it on first use.

        `longest` is the largest number of tokens at once in this cell. `longer`: tokens that the prompts
        have beyond those of the cell's transfers; such transfers have a pair of engines of their own.

        Raises Blocked if the transfer cannot
        run, or if an earlier transfer of the cell was refused or did not end.
        """
        key = (cell, transfer.name, longer)
        if key not in self._observations:
            if cell in self._over:
                on, declined = self._over[cell]
                raise Blocked(f"depends on {on}", refused=declined)
            try:
                p, d = self._engines(cell, longest, LONG if longer else "")
            except EngineFailed as failed:
                on = f"depends on kv::bytes/start::engines_start[{cell}]: {failed.sentence}"
                raise Blocked(on, refused=failed.declined) from None
            store = self.context.subject.profile == "store"
            found = observe_transfer(transfer, p, d, self.context.deadlines, self.context.next_name, store)
            self._observations[key] = found
            self.context.note("request", bool(found.stuck))
            self.context.note("call", found.failed is not None and found.failed.how == "hung")
            if found.failed or found.stuck or found.refused:
                self._over[cell] = f"kv::bytes/handover::completes[{cell}-{transfer}]", found.declined
                for word in ("", LONG):
                    self.pairs.end(cell, word)
            elif is_half_full(p):
                self.pairs.end(cell, LONG if longer else "")
        return self._observations[key]

    def facts_of_engines(self, cell: Cell, longest: int) -> tuple[EngineFacts, EngineFacts]:
        """What vLLM made of P and of D. Raises EngineFailed if one did not start."""
        if self.pairs.started(cell) is None:
            self._engines(cell, longest)
        self._raise_excuse(cell)
        found = self.pairs.started(cell)
        if isinstance(found, EngineFailed):
            raise found
        assert found is not None
        return found

    def _engines(self, cell: Cell, longest: int, word: str = "") -> tuple[ByteEngineHandle, ByteEngineHandle]:
        """P and D of a cell, running.

        Raises EngineFailed, or Blocked or NotApplicable where the connector is excused.
        """
        self._raise_excuse(cell)
        try:
            return self.pairs.pair(
                cell,
                lambda role, tp, folder: byte_engine_spec(self.context, cell, role, longest, folder),
                word,
            )
        except EngineFailed as failed:
            self._note_excuse(cell, failed)
            self._raise_excuse(cell)
            raise

    def _raise_excuse(self, cell: Cell) -> None:
        kind, sentence = self._excused.get(None) or self._excused.get(cell) or (None, "")
        if kind:
            raise kind(sentence) from None

    def _note_excuse(self, cell: Cell, failed: EngineFailed) -> None:
        """Note the reason if engines did not start and that is not the connector's fault."""
        subject, facts = self.context.subject, self.context.facts
        reason = failed.sentence.partition("did not start: ")[2] or failed.sentence
        if subject.requires_device not in ("", facts.device):
            self._excused[None] = (
                Blocked,
                f"{subject.connector} does not start where vLLM runs on {facts.device}: {reason}",
            )
        states = any(isinstance(kind, State) for kind in load_geometries()[cell.family].kinds.values())
        unified = failed.how == "refused" and "KV cache specs to one unified type" in reason
        if subject.profile == "store" and states and not facts.supports_hma and unified:
            why = "does not inherit SupportsHMA, and without it vLLM starts no model with states"
            self._excused[cell] = NotApplicable, f"{facts.name} {why}: {reason}"
