"""The start of an engine, call by call, and what the two halves pass to one another."""

from __future__ import annotations

import operator
import pickle
import threading
from typing import Any

from pytest_kvconform.case import case
from pytest_kvconform.result import Cell, Evidence, HarnessError, NotApplicable, first_line, message_of
from pytest_kvconform.rigs.processes.cores import Deadline
from pytest_kvconform.rigs.scheduler.rig import Rig
from pytest_kvconform.rigs.scheduler.violations import HookRaised
from pytest_kvconform.rigs.scheduler.worker_half import WorkerHalf
from pytest_kvconform.rigs.vllm_setup.worker import (
    has_process_groups,
    has_worker_half,
    uses_accelerator,
)
from pytest_kvconform.suite.interface._cells import each_memory, once

# Seconds after which a hook that has nothing to wait for counts as hanging; times --kv-timeout-scale.
FOREVER_S = 2.0


def roles(cell: Cell, matrix: str) -> tuple[str, ...]:
    """Variants: both roles for the control family, otherwise D alone, which registers no less than P."""
    return ("P", "D") if once(cell) or matrix != "quick" else ("D",)


@case(
    "KV-ROLE-001",
    applies=each_memory,
    variants=lambda cell, matrix: roles(cell, matrix) if once(cell) or matrix != "quick" else (),
    rig="scheduler",
)
def worker_half_starts_without_scheduler_half(rig: Rig, role: str) -> Evidence:
    """Without a scheduler half the worker half is built, registered, and returns its handshake metadata."""
    half = WorkerHalf(rig, role)
    half.construct()
    half.register_kv_caches(half.allocate_kv_caches())
    return Evidence(
        looked_at=len(half.layers), unit="layers", notes={"publishes": len(half.handshake_metadata())}
    )


@case("KV-ROLE-002", variants=roles, rig="scheduler")
def scheduler_half_runs_without_worker_half(rig: Rig, role: str) -> Evidence:
    """The scheduler half runs a request to its end in a process without a worker half.

    The process has no process groups and no KV memory.
    """
    if has_process_groups() or has_worker_half():
        raise HarnessError(
            "the process of the case had process groups or a worker half before the case began"
        )
    on_device = uses_accelerator()
    side = rig.side(role)
    id = side.add(rig.prompt(side.block_size + 3))
    side.run()
    if has_worker_half():
        raise rig.violation(
            "",
            "the scheduler half built a worker half in its own process",
            diagnosis="the scheduler half does the worker half's work, too",
        )
    if uses_accelerator() and not on_device:
        raise rig.violation(
            "",
            "the scheduler half initialized the accelerator",
            diagnosis="the scheduler half uses device memory",
        )
    return Evidence(looked_at=len(side.calls), unit="calls", notes={"finish": side.results[id].finish or ""})


@case("KV-LIFE-001", applies=each_memory, variants=roles, rig="scheduler")
def engine_starts_in_vllm_call_order(rig: Rig, role: str) -> Evidence:
    """vLLM's start works in its order.

    The order is worker half, memory, scheduler half, get_finished_count, handshake metadata. Two steps
    without requests follow.
    """
    half = WorkerHalf(rig, role)
    side = half.start()
    count = side.connector.get_finished_count()
    if count and not _is_count(count):  # vLLM: get_finished_count() or the number of ranks
        raise rig.violation(
            "",
            f"get_finished_count() returned {count!r}",
            diagnosis="get_finished_count returns neither None nor a count",
        )
    for _ in range(2):
        reported = half.step_without_tokens(side)
        for name in ("finished_sending", "finished_recving", "failed_recving", "invalid_block_ids"):
            if found := getattr(reported, name, None):
                raise rig.violation(
                    "", f"in a step without any request the worker half reports {name} = {found}"
                )
    due = int(operator.index(count)) if count else "one a rank"
    return Evidence(looked_at=2, unit="steps", notes={"reports that make one": due})


def _is_count(value: Any) -> bool:
    """Whether vLLM can count down from a value (KVOutputAggregator): an integer of any type, 1 or more."""
    try:
        return operator.index(value) >= 1
    except TypeError:
        return False


@case("KV-LIFE-002", applies=once, variants=roles, rig="scheduler")
def halves_leave_engine_id_unchanged(rig: Rig, role: str) -> Evidence:
    """After each half has started, kv_transfer_config has the engine_id that vLLM gave it.

    This holds for the engine's configuration and for the one that the half keeps. An engine_id of the
    connector's own is its choice.
    """
    half = WorkerHalf(rig, role)
    given = half.config.kv_transfer_config.engine_id
    half.construct()
    half.register_kv_caches(half.allocate_kv_caches())
    kept = _engine_ids("worker", half, half.connector)
    side = half.scheduler_side()
    half.set_handshake_metadata(side)
    kept |= _engine_ids("scheduler", half, side.connector)
    for place, found in kept.items():
        if found != given:
            raise rig.violation(
                "",
                f"vLLM gave the engine the engine_id {given}, and {place} has {found}",
                diagnosis=f"{place}: vLLM's engine_id was changed",
            )
    return Evidence(looked_at=len(kept), unit="engine ids")


def _engine_ids(which: str, half: WorkerHalf, connector: Any) -> dict[str, Any]:
    """Return place -> engine_id, of the engine's configuration and of the one that a half keeps (base.py)."""
    own = getattr(connector, "_vllm_config", half.config)
    return {
        f"kv_transfer_config after the start of the {which} half": half.config.kv_transfer_config.engine_id,
        f"kv_transfer_config of the {which} half": own.kv_transfer_config.engine_id,
    }


@case(
    "KV-LIFE-003",
    applies=once,
    variants=lambda cell, matrix: ("no_rank", "one_rank", "two_stages"),
    rig="scheduler",
)
def set_xfer_handshake_metadata_takes_any_ranks(rig: Rig, which: str) -> Evidence:
    """set_xfer_handshake_metadata_pp_aware takes what the workers publish: nothing, the metadata of a rank,
    or that of two pipeline stages.

    It may refuse two stages with an exception that says why.
    """
    half = WorkerHalf(rig, "P")
    half.construct()
    half.register_kv_caches(half.allocate_kv_caches())
    side, published = half.scheduler_side(), half.handshake_metadata()
    if which != "no_rank" and not published:
        raise NotApplicable(f"{rig.subject.connector} publishes no handshake metadata")
    if which == "no_rank" and published:
        raise NotApplicable(f"each worker of {rig.subject.connector} publishes handshake metadata")
    given = (
        {}
        if which == "no_rank"
        else published
        if which == "one_rank"
        else {(stage, 0): published[0, 0] for stage in (0, 1)}
    )
    hook = "set_xfer_handshake_metadata_pp_aware"
    try:
        side.recorder.call(hook, side.connector.set_xfer_handshake_metadata_pp_aware, given)
    except HookRaised as raised:  # the base class, too, refuses pipeline stages
        if which != "two_stages" or not isinstance(raised.error, Exception) or not str(raised.error):
            raise
        return Evidence(looked_at=1, unit="calls", notes={"refused": str(raised.error).splitlines()[0][:120]})
    half.step_without_tokens(side)
    return Evidence(looked_at=1, unit="calls", notes={"ranks": len(given)})


@case("KV-LIFE-004", applies=once, rig="scheduler")
def start_on_taken_port_does_not_hang(rig: Rig, _: None) -> Evidence:
    """A second engine is given the port of the first one: its start raises or uses another port.

    It does not wait for ever.
    """
    half = WorkerHalf(rig, "P")
    half.start()
    if not (taken := half.listening_ports()):
        raise NotApplicable(f"{rig.subject.connector} listens on none of the ports that the suite configured")
    second, published, reported = half.scheduler_side(), half.handshake_metadata(), list[BaseException]()

    def introduce() -> None:
        try:
            second.connector.set_xfer_handshake_metadata_pp_aware(published)
        except BaseException as error:
            reported.append(error)

    thread = threading.Thread(target=introduce, daemon=True)
    thread.start()
    deadline = Deadline(waited := rig.scaled_seconds(FOREVER_S))
    while thread.is_alive() and not deadline.over():
        thread.join(max(0.0, deadline.left()))
    if thread.is_alive():
        raise rig.violation(
            "",
            f"an engine listens on port {', '.join(map(str, taken))}, and another one with the same port "
            "still waits in "
            f"set_xfer_handshake_metadata after {waited:g} s",
            diagnosis="the start waits for a listener that could not bind its port, and raises no error",
        )
    return Evidence(
        looked_at=len(taken),
        unit="ports",
        notes={
            "the second engine": f"{type(reported[0]).__name__}: {message_of(reported[0])}"
            if reported
            else "started"
        },
    )


@case("KV-WIRE-001", applies=once, variants=roles, rig="scheduler")
def worker_metadata_survives_pickle(rig: Rig, role: str) -> Evidence:
    """Records that the worker half sends survive pickling, and have the methods that vLLM calls.

    They are handshake metadata, worker metadata and statistics.
    """
    half = WorkerHalf(rig, role)
    side = half.start()
    step = half.step_without_tokens(side)
    reported = {
        "get_handshake_metadata": (half.call_hook("get_handshake_metadata"), ()),
        "build_connector_worker_meta": (getattr(step, "kv_connector_worker_meta", None), ("aggregate",)),
        "get_kv_connector_stats": (
            getattr(step, "kv_connector_stats", None),
            ("aggregate", "is_empty", "to_dict"),
        ),
    }
    given = {hook: (value, methods) for hook, (value, methods) in reported.items() if value is not None}
    if not given:
        raise NotApplicable(
            f"{rig.subject.connector} publishes no handshake metadata, and a step without requests returns "
            "no worker metadata or statistics"
        )
    for hook, (value, methods) in given.items():
        if missing := [name for name in methods if not callable(getattr(value, name, None))]:
            raise rig.violation(
                "",
                f"{hook} returned a {type(value).__name__} without the method {missing[0]}, which vLLM calls",
                diagnosis=f"what {hook} returns lacks {missing[0]}",
            )
        try:
            pickle.loads(pickle.dumps(value))
        except Exception as error:
            text = f"{type(error).__name__}: {first_line(error, 160)}"
            raise rig.violation(
                "",
                f"a {type(value).__name__} of {hook} does not survive pickle: {text}",
                diagnosis=f"what {hook} returns cannot leave the worker's process",
            ) from None
    return Evidence(looked_at=len(given), unit="answers", notes=dict.fromkeys(given, "survives"))


@case(
    "KV-REGISTER-001", applies=each_memory, variants=lambda cell, matrix: ("shared_layer",), rig="scheduler"
)
def register_kv_caches_takes_every_layer(rig: Rig, which: str) -> Evidence:
    """register_kv_caches accepts every layer of the model.

    It also accepts a name in no group whose tensor is another layer's.
    """
    half = WorkerHalf(rig, "P")
    half.construct()
    caches = half.allocate_kv_caches()
    source = next(name for name in caches if "self_attn" in name or "attn" in name)
    shared = f"model.layers.{len(caches) + 3}.self_attn.attn"
    half.layers[shared] = half.config.compilation_config.static_forward_context[shared] = half.layers[source]
    half.register_kv_caches(caches | {shared: caches[source]})
    return Evidence(
        looked_at=len(caches) + 1,
        unit="layers",
        notes={"memory": len({c.untyped_storage().data_ptr() for c in caches.values()})},
    )


@case(
    "KV-LAYOUT-002",
    applies=once,
    variants=lambda cell, matrix: ("LBHNC", "LBNHC") if matrix == "quick" else ("LBHNC", "LBNHC", "BLHNC"),
    rig="scheduler",
)
def register_kv_caches_takes_resolved_layout(rig: Rig, layout: str) -> Evidence:
    """register_kv_caches accepts memory in the layout that vLLM resolved, and a step works.

    The connector may have asked for another layout.
    """
    half = WorkerHalf(rig, "P", layout=layout)
    side = half.start()
    half.step_without_tokens(side)
    if (now := half.config.cache_config.kv_cache_layout) != layout:
        raise rig.violation(
            "",
            f"vLLM resolved the layout {layout}, and the connector changed it to {now}",
            diagnosis="the layout was changed",
        )
    return Evidence(looked_at=len(half.layers), unit="layers", notes={"layout": layout})
