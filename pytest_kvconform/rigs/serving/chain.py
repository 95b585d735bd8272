"""The servers P and D, the router between them, and the baseline, for one cell."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model_matrix import load_families, load_real_checkpoints, parse_topology, speculative_config
from pytest_kvconform.result import Blocked, Cell, NotApplicable
from pytest_kvconform.rigs.context import RunContext, port_environment
from pytest_kvconform.rigs.engine.messages import NO_CONNECTOR
from pytest_kvconform.rigs.processes.gpus import Lease, gpus_here, lease, require, shown
from pytest_kvconform.rigs.processes.ports import BOOTSTRAP_PORT, free_port
from pytest_kvconform.rigs.serving.data import Exam
from pytest_kvconform.rigs.serving.messages import ServerSpec
from pytest_kvconform.rigs.serving.metrics import Unreachable
from pytest_kvconform.rigs.serving.server import (
    ROUTER,
    Endpoint,
    LocalProcess,
    Router,
    Server,
    answer_seconds,
    bearer_key,
    wait_until_healthy,
)

MAX_SEQS = 8  # requests at once in a server
START = 2  # times the deadline of an engine's start
START_REAL = 20  # the same for a real checkpoint, whose weights are read first
GPUS_S = 6 * 3600.0  # for other runs to give GPUs back
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
    prefill: Endpoint | None = None  # P; None: it is not known
    fills: bool = False  # P is asked before the subject, and saves to a store
    processes: tuple[LocalProcess, ...] = ()  # ours, which have to stay alive
    gpus: Lease | None = None  # of the servers, if real checkpoints are served

    @property
    def own_cache(self) -> bool:
        """Whether D loads from a cache of its own, too, so that a server without the connector is asked."""
        return self.baseline is not self.decode and not self.fills

    def end(self) -> None:
        """End every process of ours, then give back the GPUs."""
        _end(self.processes, self.gpus)


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


def prefill_words(url: str, word: str, environment: Mapping[str, str]) -> tuple[str, ...]:
    """The words of vllm-router's --prefill for a P with this environment.

    With mooncake the router asks P's bootstrap server for the engine's id. Without a port it asks 8998, the
    default of vLLM.
    """
    port = environment.get(BOOTSTRAP_PORT) if word == BY_NAME["MooncakeConnector"] else None
    return (url, port) if port else (url,)


def sizes_of(context: RunContext, cell: Cell, with_baseline: bool = False) -> dict[str, int]:
    """The servers of a cell: role -> tensor parallel size. A store has a baseline besides P and D."""
    p_size, d_size = parse_topology(cell.topology)
    baseline = with_baseline or context.subject.is_store
    return {"P": p_size, "D": d_size} | ({"B": d_size} if baseline else {})


def require_gpus(context: RunContext, cell: Cell) -> None:
    """Raise Blocked if the real checkpoints of a cell cannot be served here: for want of GPUs."""
    if context.facts.device != "cuda":
        raise Blocked(
            f"the nightly matrix serves real checkpoints on GPUs, and vLLM {context.facts.vllm} runs on "
            f"{context.facts.device} here"
        )
    require(sum(sizes_of(context, cell).values()), gpus_here(), f"the cell {cell}")


def start(
    context: RunContext, cell: Cell, exam: Exam, with_connector: bool = True, with_baseline: bool = False
) -> Chain:
    """Start P, D and the router of a cell, and wait until they answer.

    `with_connector`: without it the servers have a connector that does nothing. `with_baseline`: a server
    without a connector is the baseline, as it is of a store, and not D.

    Raises EngineFailed if one of them does not start, NotApplicable, Blocked and HarnessError.
    """
    store = context.subject.is_store
    word = "" if store else router_word(context)
    remark = "" if with_connector else " without the connector"
    context.running.end_all()  # engines of the other rigs, of this cell, too: servers need the memory
    context.running.make_room(cell)
    sizes, nightly = sizes_of(context, cell, with_baseline), context.settings.nightly
    context.progress(f"starting the servers P (TP {sizes['P']}) and D (TP {sizes['D']}){remark}")
    name = context.next_name()
    folder = str(context.store_folder(name))
    processes: list[LocalProcess] = []
    gpus = _lease(context, cell, sum(sizes.values())) if nightly else None
    try:
        servers: dict[str, Server] = {}
        free = iter(gpus.gpus if gpus else ())
        for role, size in sizes.items():
            transfer = None if role == "B" else _transfer(context, role, folder, with_connector)
            environment = shown(itertools.islice(free, size)) if gpus else {}
            spec = server_spec(context, cell, role, size, exam, transfer, name, environment)
            servers[role] = Server(context, spec, f"{cell}-server-{role}-{name}")
            processes.append(servers[role])
        wait_until_healthy(processes, (START_REAL if nightly else START) * context.deadlines.start)
        if store:
            return Chain(servers["D"], servers["B"], servers["D"], servers["P"], True, tuple(processes), gpus)
        prefill = prefill_words(servers["P"].url, word, servers["P"].spec.environment)
        router = Router(context, prefill, servers["D"].url, word, f"{cell}-router-{name}")
        processes.append(router)
        wait_until_healthy([router], context.deadlines.start)
        baseline = servers.get("B", servers["D"])
        return Chain(router, baseline, servers["D"], servers["P"], False, tuple(processes), gpus)
    except BaseException:
        _end(processes, gpus)
        raise


def _lease(context: RunContext, cell: Cell, count: int) -> Lease:
    """Hold GPUs for the servers of a cell. Raises Blocked and OSError."""
    context.progress(f"taking {count} GPUs, as soon as no other run has them")
    return lease(count, gpus_here(), f"the cell {cell}", context.scaled_seconds(GPUS_S))


def _end(processes: Iterable[LocalProcess], gpus: Lease | None) -> None:
    """End processes, then give back their GPUs."""
    with contextlib.ExitStack() as stack:  # goes on where one end fails, and begins with the last
        if gpus is not None:
            stack.callback(gpus.give_back)
        for one in reversed(tuple(processes)):
            stack.callback(one.end)


def attach(context: RunContext) -> Chain:
    """The chain of servers that already run.

    Raises Blocked if one does not answer, does not take the key, or does not count what is the evidence.
    """
    settings, answer_s = context.settings, answer_seconds(context)
    if context.subject.is_store and not settings.baseline_url:
        raise Blocked(
            "D loads from the store when it is asked alone, too: give --kv-baseline-url, a server that "
            "answers without the connector"
        )
    given = {
        role: Endpoint(f"{role} server", url, answer_s, settings.headers)
        for role, url in (
            ("decode", settings.decode_url),
            ("baseline", settings.baseline_url or settings.decode_url),
            ("prefill", settings.prefill_url),
        )
        if url
    }
    for one in given.values():
        one.require_answers()
    decode, baseline, prefill = given["decode"], given["baseline"], given.get("prefill")
    try:
        decode.counters(), decode.block_size(), baseline.counters()
    except Unreachable as error:
        raise Blocked(str(error)) from None
    if settings.router_url:
        theirs = Endpoint(ROUTER, settings.router_url, answer_s, settings.headers)
        theirs.require_answers(paths_needed=False)
        return Chain(theirs, baseline, decode, prefill)
    word, key = router_word(context), bearer_key(settings.headers)
    for one in (decode, given["prefill"]):
        one.require_asked_by_our_router(key)
    deployed = prefill_words(settings.prefill_url, word, os.environ)
    router = Router(context, deployed, decode.url, word, "router-of-deployment", key)
    try:
        wait_until_healthy([router], context.deadlines.start)
    except BaseException:
        router.end()
        raise
    return Chain(router, baseline, decode, prefill, False, (router,))


@contextlib.contextmanager
def started(context: RunContext, cell: Cell, exam: Exam, **more: bool) -> Iterator[Chain]:
    """`start`, and the end of every process at the end of the block."""
    chain = start(context, cell, exam, **more)
    try:
        yield chain
    finally:
        chain.end()


def _transfer(context: RunContext, role: str, folder: str, with_connector: bool) -> dict[str, Any]:
    # A D that computes what a load failed to bring would be taken for one that loads. A store may lose what
    # it has found.
    policy = "" if context.subject.is_store else "fail"
    given = context.transfer_config(role, port=free_port(), folder=folder, policy=policy)
    if with_connector:
        return given
    return NO_CONNECTOR | {key: given[key] for key in ("kv_role", "kv_buffer_device")}


def server_spec(
    context: RunContext,
    cell: Cell,
    role: str,
    tensor_parallel: int,
    exam: Exam,
    transfer: dict[str, Any] | None,
    name: str,
    environment: dict[str, str],
) -> ServerSpec:
    """One server of a cell. `transfer`: fields of KVTransferConfig; `environment`: more of its variables."""
    return ServerSpec(
        role=role,
        checkpoint=str(exam.checkpoint),
        port=free_port(),
        tensor_parallel=tensor_parallel,
        max_model_len=exam.longest,
        max_seqs=MAX_SEQS,
        kv_transfer_config=transfer,
        environment=port_environment() | environment,
        records=str(Path(context.address).parent / f"prompts-{role}-{name}.jsonl"),
        **(_real_model(cell, exam) if context.settings.nightly else _canary(cell, exam, role)),
    )


def _canary(cell: Cell, exam: Exam, role: str) -> dict[str, Any]:
    """The fields of a ServerSpec that a tiny model has of its own."""
    family = load_families()[cell.family]
    blocks = -(-exam.longest // family.block_size) + 1
    draft = speculative_config(family, exam.checkpoint)
    groups = 1 + bool(family.sliding_window) + family.has_state * 3
    return {
        "dtype": family.dtype,
        "block_size": family.block_size,
        # room for what P keeps until D has read it, too; of different sizes, so that no id fits by accident
        "num_blocks": 2 * MAX_SEQS * blocks * groups + (16 if role == "D" else 0),
        "engine_arguments": {"speculative_config": draft} if draft else {},
    }


def _real_model(cell: Cell, exam: Exam) -> dict[str, Any]:
    """The fields of a ServerSpec that a real checkpoint has of its own. vLLM chooses blocks, as for users."""
    real = load_real_checkpoints()[cell.family]
    draft = {
        "method": "eagle3",
        "model": str(exam.draft),
        "num_speculative_tokens": real.draft.tokens if real.draft else 0,
    }
    return {
        "dtype": real.dtype,
        "block_size": None,
        "num_blocks": None,
        "engine_arguments": real.arguments | ({"speculative_config": draft} if real.draft else {}),
    }
