"""The hooks of vLLM's KV connector interface as data: vLLM's call of each, and what is kept of a call.

The interface is KVConnectorBase_V1 and SupportsHMA (distributed/kv_transfer/kv_connector/v1/base.py). The
calls were read in v1/core/sched/scheduler.py, v1/engine/core.py, v1/worker/gpu/kv_connector.py,
v1/worker/kv_connector_model_runner_mixin.py, model_executor/layers/attention/kv_transfer_utils.py,
config/vllm.py and distributed/kv_transfer/kv_connector/v1/metrics.py.

A minor of vLLM has some of them: see `has_hook`. vLLM is imported inside functions only.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from pytest_kvconform.result import repr_of

CLASS, SCHEDULER, WORKER, BOTH = "class", "scheduler", "worker", "both halves"
Calls = dict[str, tuple[int, tuple[str, ...]]]  # hook -> (number of arguments by position, arguments by name)


class Hook(NamedTuple):
    """One hook and vLLM's call of it."""

    name: str
    half: str  # CLASS, SCHEDULER, WORKER or BOTH
    positional: int = 0  # arguments that vLLM passes by position
    keywords: tuple[str, ...] = ()  # arguments that vLLM passes by name
    needs_hma: bool = False  # only classes that inherit SupportsHMA have it
    recorded: bool = False  # the scheduler rig records its calls (scheduler/recorder.py)
    since: str = "0.31"  # the first minor of vLLM that has it, of those that the suite knows
    in_stacks: bool = True  # a stack through it shows where the connector was when its process died or hung


LOAD = ("scheduler_output", "request_state_indices", "request_ids", "num_tokens", "attn_metadata")
HOOKS = (
    Hook("get_required_kvcache_layout", CLASS, 1, in_stacks=False),
    Hook("requires_piecewise_for_cudagraph", CLASS, 1, in_stacks=False),
    Hook("supports_sleep_mode", CLASS, 1, since="0.33", in_stacks=False),
    Hook("build_kv_connector_stats", CLASS, 1, in_stacks=False),
    Hook("build_prom_metrics", CLASS, 4, in_stacks=False),
    Hook("bind_kv_cache_manager", SCHEDULER, 1, recorded=True),
    Hook("bind_gpu_block_pool", SCHEDULER, 1, in_stacks=False),
    Hook("on_new_request", SCHEDULER, 1, recorded=True),
    Hook("get_num_new_matched_tokens", SCHEDULER, 2, recorded=True),
    Hook("get_loaded_kv_cache_group_ids", SCHEDULER, 1, recorded=True, since="0.32", in_stacks=False),
    Hook("update_state_after_alloc", SCHEDULER, 3, recorded=True),
    Hook("get_external_cache_hit_sources", SCHEDULER, 2, recorded=True, since="0.32", in_stacks=False),
    Hook("build_connector_meta", SCHEDULER, 1, recorded=True),
    Hook("update_connector_output", SCHEDULER, 1, recorded=True),
    Hook("request_finished", SCHEDULER, 2, recorded=True),
    Hook("request_finished_all_groups", SCHEDULER, 2, needs_hma=True, recorded=True),
    Hook("register_finished_partial_tail", SCHEDULER, 3, recorded=True, in_stacks=False),
    Hook("take_events", SCHEDULER, recorded=True),
    Hook("has_pending_block_frees", SCHEDULER, recorded=True, in_stacks=False),
    Hook("has_pending_push_work", SCHEDULER, recorded=True),
    Hook("get_finished_count", SCHEDULER, recorded=True, in_stacks=False),
    Hook("set_xfer_handshake_metadata", SCHEDULER, 1),
    Hook("set_xfer_handshake_metadata_pp_aware", SCHEDULER, 1),
    Hook("reset_cache", SCHEDULER, recorded=True),
    Hook("get_mem_pool_context", WORKER, in_stacks=False),
    Hook("register_kv_caches", WORKER, 1),
    Hook("unregister_kv_caches", WORKER, since="0.33"),
    Hook("restore_kv_caches", WORKER, since="0.33"),
    Hook("set_host_xfer_buffer_ops", WORKER, 1),
    Hook("get_handshake_metadata", WORKER),
    Hook("handle_preemptions", WORKER, 1),
    Hook("bind_connector_metadata", WORKER, 1),
    Hook("start_load_kv", WORKER, 1, LOAD),
    Hook("wait_for_layer_load", WORKER, 1),
    Hook("save_kv_layer", WORKER, 3),
    Hook("finish_forward", WORKER),
    Hook("wait_for_save", WORKER),
    Hook("get_finished", WORKER, 1),
    Hook("get_transfer_results", WORKER, 1),
    Hook("get_block_ids_with_load_errors", WORKER),
    Hook("get_kv_connector_stats", BOTH, recorded=True),
    Hook("get_kv_connector_kv_cache_events", WORKER),
    Hook("build_connector_worker_meta", WORKER),
    Hook("clear_connector_metadata", WORKER),
    Hook("has_connector_metadata", WORKER, in_stacks=False),
    Hook("reset_capture_state", WORKER, in_stacks=False),
    Hook("shutdown", BOTH, recorded=True),
)
# vLLM calls one of them at the end of a request
FINISHED = (
    "request_finished",
    "request_finished_all_groups",
)
IN_STACKS = frozenset(hook.name for hook in HOOKS if hook.in_stacks)
# vLLM calls these in every step or for every request, and the engine waits for them.
STEP_LOOP = frozenset(
    (
        "on_new_request",
        "get_num_new_matched_tokens",
        "get_external_cache_hit_sources",
        "update_state_after_alloc",
        "build_connector_meta",
        "update_connector_output",
        *FINISHED,
        "take_events",
        "get_kv_connector_stats",
        "has_pending_push_work",
        "handle_preemptions",
        "bind_connector_metadata",
        "start_load_kv",
        "wait_for_layer_load",
        "save_kv_layer",
        "finish_forward",
        "wait_for_save",
        "get_transfer_results",
        "get_block_ids_with_load_errors",
        "get_kv_connector_kv_cache_events",
        "build_connector_worker_meta",
        "clear_connector_metadata",
    )
)
UPDATE, RESULTS, ERRORS = "update_connector_output", "get_transfer_results", "get_block_ids_with_load_errors"
RECORDED = tuple(hook.name for hook in HOOKS if hook.recorded)

# ---- what the history of a connector keeps of a call, see history.py ---------------------------------------

SENDING, RECVING, FAILED_RECVING = REPORTED = ("finished_sending", "finished_recving", "failed_recving")


def _names(ids: Any) -> tuple[str, ...]:
    """Names in an order, as plain texts: they go to another process. vLLM judges what has none."""
    found = ids if isinstance(ids, Iterable) else ()
    return tuple(sorted(str(one) if isinstance(one, str) else repr_of(one) for one in found))


def _reported(output: Any) -> dict[str, tuple[str, ...]]:
    """The requests in a report of workers."""
    return {where: _names(getattr(output, where)) for where in REPORTED}


def _allocated(request: Any, blocks: Any, num_external_tokens: int) -> dict[str, Any]:
    """`writable`: blocks that a load may write. Others are shared through the prefix cache, or null."""
    return {
        "num_external_tokens": num_external_tokens,
        "blocks": tuple(tuple(block.block_id for block in group) for group in blocks.blocks),
        "writable": tuple(
            tuple(b.block_id for b in group if b.block_hash is None and not b.is_null)
            for group in blocks.blocks
        ),
    }


def _finished(request: Any, *tables: Iterable[int]) -> dict[str, Any]:
    return {"blocks": tuple(map(tuple, tables)), "status": request.status.name}


# hook -> what is kept of its arguments before the call: numbers and names, not vLLM's own objects
ARGUMENTS: dict[str, Callable[..., dict[str, Any]]] = {
    "get_num_new_matched_tokens": lambda request, computed: {
        "num_computed_tokens": computed,
        "num_tokens": request.num_tokens,
    },
    "update_state_after_alloc": _allocated,
    "on_new_request": lambda request: {"num_tokens": request.num_tokens},
    UPDATE: _reported,
    FINISHED[0]: _finished,
    FINISHED[1]: lambda request, tables: _finished(request, *tables),
}
# hook -> what is kept of its answer; the arguments are those after the call
ANSWERS: dict[str, Callable[[Any, tuple[Any, ...]], Any]] = {
    "get_num_new_matched_tokens": lambda answer, args: (answer[0], bool(answer[1])),
    UPDATE: lambda answer, args: _reported(args[0]),  # vLLM reads what it makes of it
    FINISHED[0]: lambda answer, args: tuple(map(bool, answer)),  # whether it keeps blocks, and has params
    FINISHED[1]: lambda answer, args: tuple(map(bool, answer)),
    RESULTS: lambda answer, args: _reported(answer),
    ERRORS: lambda answer, args: tuple(sorted(answer or ())),
}

_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
# classes of the interface, and of its arguments and answers -> their modules
_CLASSES = {
    "KVConnectorBase_V1": f"{_V1}.base",
    "KVConnectorHandshakeMetadata": f"{_V1}.base",
    "KVConnectorWorkerMetadata": f"{_V1}.base",
    "KVConnectorRole": f"{_V1}.base",
    "SupportsHMA": f"{_V1}.base",
    "KVConnectorStats": f"{_V1}.metrics",
    "KVCacheEvent": "vllm.distributed.kv_events",
    "CacheHitSource": "vllm.v1.metrics.cache_hit_source",
}


def calls_of(*halves: str, hma: bool = False) -> Calls:
    """How vLLM calls the hooks of these halves; `hma`: of a class that inherits SupportsHMA."""
    return {
        hook.name: (hook.positional, hook.keywords)
        for hook in HOOKS
        if hook.half in halves and (hma or not hook.needs_hma)
    }


def class_named(name: str) -> Any:
    """A class of vLLM by its name. Raises KeyError for a class that no case needs."""
    return getattr(importlib.import_module(_CLASSES[name]), name)


def has_hook(name: str) -> bool:
    """Whether the interface of the installed vLLM has a hook: minors differ."""
    return any(hasattr(class_named(base), name) for base in ("KVConnectorBase_V1", "SupportsHMA"))
