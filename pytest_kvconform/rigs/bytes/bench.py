"""What cases of the byte rig run on: two pattern engines of one cell at a time, and a memory of every transfer."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model_matrix import Geometry, Setup, Side, load_byte_matrices, load_geometries, parse_topology
from model_matrix.geometries import SlidingWindow, State, expand_layers
from pytest_kvconform.result import Blocked, Cell, NotApplicable
from pytest_kvconform.rigs.bytes.handle import ByteEngineHandle
from pytest_kvconform.rigs.bytes.handover import TransferObservation, observe_transfer
from pytest_kvconform.rigs.bytes.messages import PACKED, ByteEngineSpec
from pytest_kvconform.rigs.engine.handle import EngineFailed
from pytest_kvconform.rigs.engine.handover import Deadlines
from pytest_kvconform.rigs.engine.messages import EngineFacts
from pytest_kvconform.rigs.peers.bench import PeerBench
from pytest_kvconform.rigs.peers.fault_bench import FaultBench
from pytest_kvconform.rigs.processes.ports import free_port
from pytest_kvconform.rigs.scenario import Transfer
from pytest_kvconform.rigs.vllm_setup.kv_cache_specs import block_size_of

if TYPE_CHECKING:
    from pytest_kvconform.rigs.bench import Bench

LOOKS = 4  # times the deadline of a call: a call may compare hundreds of megabytes, and name what millions of wrong words have in common
ROOM = {
    "P": 4,
    "D": 9,
}  # blocks beyond what a transfer needs; different, so that no address of one side fits the other by accident


class ByteBench:
    """Pattern engines of one cell at a time."""

    def __init__(
        self, bench: Bench, names: Iterator[str], config: Callable[..., dict[str, Any]], limits: Deadlines
    ):
        self.bench, self.names, self.config, self.limits = bench, names, config, limits
        self.faulty = FaultBench(self)
        self.peers = PeerBench(self)
        self._pair: tuple[ByteEngineHandle, ByteEngineHandle] | None = None
        self._pair_cell: Cell | None = None
        self._started: dict[Cell, tuple[EngineFacts, EngineFacts] | EngineFailed] = {}
        self._seen: dict[tuple[Cell, str], TransferObservation] = {}
        self._folder: Path | None = None  # where a store of the current cell saves to
        # Cells (None: all) whose engines cannot start through no fault of the connector: what to raise, and why.
        self._excused: dict[Cell | None, tuple[type[Exception], str]] = {}
        # Cells of which nothing more is to be learned, with the id of the case that says why, and whether the connector declined cleanly.
        self._over: dict[Cell, tuple[str, bool]] = {}

    @property
    def patience(self) -> float:
        """Seconds that one call of a pattern engine may take."""
        return LOOKS * self.limits.call

    def observe(self, transfer: Transfer, longest: int) -> TransferObservation:
        """What a transfer shows in the current cell; runs it on first use. `longest` is the largest number of tokens at once in this cell.

        Raises Blocked where it cannot be run, or where an earlier transfer of the cell was refused or did not end.
        """
        cell = self.bench.cell
        key = (cell, transfer.name)
        if key not in self._seen:
            if cell in self._over:
                on, declined = self._over[cell]
                raise Blocked(f"stands on {on}", refused=declined)
            try:
                p, d = self._engines(longest)
            except EngineFailed as failed:
                on = f"stands on kv::bytes/start::engines_start[{cell}]: {failed.sentence}"
                raise Blocked(on, refused=failed.declined) from None
            seen = observe_transfer(
                transfer, p, d, self.limits, lambda: next(self.names), self.bench.subject.profile == "store"
            )
            self._seen[key] = seen
            if seen.failed or seen.stuck or seen.refused:
                self._over[cell] = f"kv::bytes/handover::completes[{cell}-{transfer}]", seen.declined
                self.drop()
        return self._seen[key]

    def facts(self, longest: int) -> tuple[EngineFacts, EngineFacts]:
        """What vLLM made of P and of D. Raises EngineFailed if one did not start."""
        if self.bench.cell not in self._started:
            self._engines(longest)
        found = self._started[self.bench.cell]
        if isinstance(found, EngineFailed):
            raise found
        return found

    def current(self, cell: Cell) -> bool:
        """Whether engines of a cell are running."""
        return self._pair is not None and self._pair_cell == cell

    def drop(self) -> None:
        """End the engines."""
        self.faulty.drop()
        if self._pair is not None:
            for engine in self._pair:
                engine.end()
        self._pair = self._pair_cell = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _engines(self, longest: int) -> tuple[ByteEngineHandle, ByteEngineHandle]:
        cell = self.bench.cell
        if self._pair is not None and self._pair_cell == cell:
            return self._pair
        self._raise_excuse(cell)
        self.bench.drop()  # the engines of another cell, of either rig
        before = self._started.get(cell)
        if isinstance(before, EngineFailed):
            raise before
        tp = dict(zip("PD", parse_topology(cell.topology), strict=True))
        self.bench.progress(f"starting P (TP {tp['P']}) and D (TP {tp['D']})")
        name = next(self.names)
        self._folder = Path(self.bench.address).parent / f"store-{name}"
        pair: list[ByteEngineHandle] = []
        try:
            for role in "PD":
                spec = self.spec(role, cell, tp[role], longest)
                pair.append(
                    ByteEngineHandle(
                        self.bench.address, f"{cell}-{role}-{name}", spec, self.patience, self.limits.start
                    )
                )
            self._started[cell] = pair[0].wait_ready(), pair[1].wait_ready()
        except EngineFailed as failed:
            for engine in pair:
                engine.end()
            self._excuse(cell, failed)
            self._raise_excuse(cell)
            self._started[cell] = failed
            raise
        self._pair, self._pair_cell = (pair[0], pair[1]), cell
        return self._pair

    def _raise_excuse(self, cell: Cell) -> None:
        kind, sentence = self._excused.get(None) or self._excused.get(cell) or (None, "")
        if kind:
            raise kind(sentence) from None

    def _excuse(self, cell: Cell, failed: EngineFailed) -> None:
        """Note if engines did not start and that is no fault of the connector's."""
        subject, facts = self.bench.subject, self.bench.facts
        said = failed.sentence.partition("did not start: ")[2] or failed.sentence
        if subject.requires_device not in ("", facts.device):
            self._excused[None] = (
                Blocked,
                f"{subject.connector} does not start where vLLM runs on {facts.device}: {said}",
            )
        states = any(isinstance(kind, State) for kind in load_geometries()[cell.family].kinds.values())
        if (
            subject.profile == "store"
            and states
            and not facts.supports_hma
            and failed.how == "refused"
            and "KV cache specs to one unified type" in said
        ):
            sentence = f"{facts.name} does not inherit SupportsHMA, and without it vLLM starts no model with states: {said}"
            self._excused[cell] = NotApplicable, sentence

    def spec(self, role: str, cell: Cell, tp: int, longest: int) -> ByteEngineSpec:
        """How one side of a cell is built, with room for `longest` tokens at once."""
        geometry, side = load_geometries()[cell.family], side_of(cell, role)
        return ByteEngineSpec(
            role=role,
            geometry=geometry.id,
            tensor_parallel=tp,
            block_size=side.block,
            num_blocks=blocks_for(geometry, block_size(cell, role), longest) + ROOM[role],
            max_model_len=longest,
            max_batched_tokens=2 * longest,
            kv_transfer_config={"kv_port": free_port()} | self.config(role, folder=str(self._folder)),
            environment={"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())},
            layout=side.layout,
            cache_dtype=side.dtype,
            conv_layout=side.conv,
            content=side.content,
            kernel_block=side.kernel,
            prefix_caching=side.prefix_caching,
            device=self.bench.facts.device,
            store=self.bench.subject.profile == "store",
        )


def side_of(cell: Cell, role: str) -> Side:
    """How memory is laid out on one side of a cell."""
    setup: Setup = load_byte_matrices().setups[cell.setup]
    return setup.prefill if role == "P" else setup.decode


def block_size(cell: Cell, role: str) -> int:
    """Tokens a block of attention layers has on one side."""
    side = side_of(cell, role)
    tp = dict(zip("PD", parse_topology(cell.topology), strict=True))[role]
    kernel = side.kernel or (16 if side.content == PACKED else 32)
    return block_size_of(load_geometries()[cell.family], tp, side.block, side.dtype, kernel_block=kernel)


def blocks_for(geometry: Geometry, size: int, tokens: int) -> int:
    """Blocks of `size` tokens that requests of so many tokens in all may hold, in all groups together.

    Counted as if vLLM gave every kind of layer groups as large as the rarest kind (v1/core/kv_cache_utils.py,
    `_get_kv_cache_groups_uniform_page_size`), which is never fewer groups than it makes.
    """
    counts: dict[str, int] = {}
    for layer in expand_layers(geometry):
        kind = (
            "window"
            if isinstance(layer.kind, SlidingWindow)
            else "state"
            if isinstance(layer.kind, State)
            else "full"
        )
        counts[kind] = counts.get(kind, 0) + 1
    rarest = min(counts.values())
    return sum(math.ceil(count / rarest) for count in counts.values()) * (math.ceil(tokens / size) + 1)
