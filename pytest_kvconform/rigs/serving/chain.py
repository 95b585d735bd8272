"""The servers P and D, the router between them, and the baseline, for one cell."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model_matrix import load_families, parse_topology, speculative_config
from pytest_kvconform.result import Blocked, Cell, NotApplicable
from pytest_kvconform.rigs.context import RunContext, port_environment
from pytest_kvconform.rigs.processes.ports import free_port
from pytest_kvconform.rigs.serving.messages import ServerSpec
from pytest_kvconform.rigs.serving.metrics import Unreachable, get
from pytest_kvconform.rigs.serving.server import (
    Endpoint,
    LocalProcess,
    Router,
    Server,
    wait_until_healthy,
)

MAX_SEQS = 8  # requests at once in a server
TARGETS = {"P": "kv_producer", "D": "kv_consumer"}
NO_CONNECTOR = {
    "kv_connector": "NoConnector",
    "kv_connector_module_path": "pytest_kvconform.rigs.engine.no_connector",
    "kv_buffer_device": "cpu",
}
# What vllm-router's --kv-connector is for connectors that vLLM registers. It knows three ways in which D
# learns which KV to load.
BY_NAME = {"MooncakeConnector": "mooncake", "MoRIIOConnector": "moriio"}
BY_HANDOVER = {"handoff": "nixl"}


@dataclass(frozen=True)
class Chain:
    """What is asked in one cell."""

    subject: Endpoint  # answers with the connector: the router, or D for a store
    baseline: Endpoint  # answers without it
    decode: Endpoint  # whose counters are the evidence
    fill: Endpoint | None = None  # is asked before the subject: P, which saves to a store
    processes: tuple[LocalProcess, ...] = ()  # ours, which have to stay alive

    def end(self) -> None:
        """End every process of ours."""
        for one in self.processes:
            one.end()


def router_word(context: RunContext) -> str:
    """The word of vllm-router's --kv-connector for the subject. Raises NotApplicable if there is none."""
    subject = context.subject
    word = (not subject.module and BY_NAME.get(subject.connector)) or BY_HANDOVER.get(subject.handover, "")
    if not word:
        raise NotApplicable(
            f"vllm-router does not know the hand-over {subject.handover!r} of {subject.connector}; servers "
            "behind a router that does are asked with --kv-router-url and --kv-decode-url"
        )
    return word


def start(
    context: RunContext, cell: Cell, checkpoint: Path, longest: int, with_connector: bool = True
) -> Chain:
    """Start P, D and the router of a cell, and wait until they answer.

    `checkpoint`: folder with the tokenizer, too; `longest`: tokens of the longest prompt with its answer;
    `with_connector`: without it the servers have a connector that does nothing.

    Raises EngineFailed if one of them does not start, NotApplicable, Blocked and HarnessError.
    """
    store = context.subject.profile == "store"
    word = "" if store else router_word(context)
    remark = "" if with_connector else " without the connector"
    context.running.end_all()  # engines of the other rigs, of this cell, too: servers need the memory
    context.running.make_room(cell)
    p_size, d_size = parse_topology(cell.topology)
    context.progress(f"starting the servers P (TP {p_size}) and D (TP {d_size}){remark}")
    name = context.next_name()
    folder = str(context.store_folder(name))
    sizes = {"P": p_size, "D": d_size} | ({"B": d_size} if store else {})
    processes: list[LocalProcess] = []
    try:
        servers: dict[str, Server] = {}
        for role, size in sizes.items():
            transfer = None if role == "B" else _transfer(context, role, folder, with_connector)
            spec = _spec(context, cell, role, size, checkpoint, longest, transfer, name)
            servers[role] = Server(context, spec, f"{cell}-server-{role}-{name}")
            processes.append(servers[role])
        wait_until_healthy(processes, 2 * context.deadlines.start)
        if store:
            return Chain(servers["D"], servers["B"], servers["D"], servers["P"], tuple(processes))
        router = Router(context, servers["P"].url, servers["D"].url, word, f"{cell}-router-{name}")
        processes.append(router)
        wait_until_healthy([router], context.deadlines.start)
        return Chain(router, servers["D"], servers["D"], None, tuple(processes))
    except BaseException:
        for one in processes:
            one.end()
        raise


def attach(context: RunContext) -> Chain:
    """The chain of servers that already run. Raises Blocked if one does not answer."""
    settings = context.settings
    if context.subject.profile == "store" and not settings.baseline_url:
        raise Blocked(
            "D loads from the store when it is asked alone, too: give --kv-baseline-url, a server that "
            "answers without the connector"
        )
    decode = Endpoint("decode server", settings.decode_url)
    baseline = Endpoint("baseline server", settings.baseline_url or settings.decode_url)
    given = [decode, baseline]
    if settings.router_url:
        given.append(Endpoint("router", settings.router_url))
    else:
        given.append(Endpoint("prefill server", settings.prefill_url))
    for one in given:
        try:
            get(f"{one.url}/health", context.deadlines.call)
        except Unreachable as error:
            raise Blocked(f"the {one.role} cannot be asked: {error}") from None
    if settings.router_url:
        return Chain(given[-1], baseline, decode)
    router = Router(context, settings.prefill_url, decode.url, router_word(context), "router-of-deployment")
    try:
        wait_until_healthy([router], context.deadlines.start)
    except BaseException:
        router.end()
        raise
    return Chain(router, baseline, decode, None, (router,))


@contextlib.contextmanager
def started(context: RunContext, cell: Cell, checkpoint: Path, longest: int, **more: bool) -> Iterator[Chain]:
    """`start`, and the end of every process at the end of the block."""
    chain = start(context, cell, checkpoint, longest, **more)
    try:
        yield chain
    finally:
        chain.end()


def _transfer(context: RunContext, role: str, folder: str, with_connector: bool) -> dict[str, Any]:
    given = context.transfer_config(role, port=free_port(), folder=folder)
    return given if with_connector else NO_CONNECTOR | {"kv_role": given["kv_role"]}


def _spec(
    context: RunContext,
    cell: Cell,
    role: str,
    tensor_parallel: int,
    checkpoint: Path,
    longest: int,
    transfer: dict[str, Any] | None,
    name: str,
) -> ServerSpec:
    family = load_families()[cell.family]
    blocks = -(-longest // family.block_size) + 1
    draft = speculative_config(family, checkpoint)
    groups = 1 + bool(family.sliding_window) + family.has_state * 3
    return ServerSpec(
        role=role,
        checkpoint=str(checkpoint),
        port=free_port(),
        tensor_parallel=tensor_parallel,
        dtype=family.dtype,
        block_size=family.block_size,
        # room for what P keeps until D has read it, too; of different sizes, so that no id fits by accident
        num_blocks=2 * MAX_SEQS * blocks * groups + (16 if role == "D" else 0),
        max_model_len=longest,
        max_seqs=MAX_SEQS,
        kv_transfer_config=transfer,
        environment=port_environment(),
        engine_arguments={"speculative_config": draft} if draft else {},
        records=str(Path(context.address).parent / f"prompts-{role}-{name}.jsonl"),
    )
