"""The vLLM minors that are supported, and functions of vLLM that differ between them.

What is there is looked for, and versions are not compared: vLLM's main has no number that tells. Whoever
supports another minor begins here: change `SUPPORTED`, adapt the functions below, and run tests/rigs.
Other changes of a minor show up in the modules of this folder: overrides, engine configuration, hooks, KV
cache specs.

vLLM is imported inside functions only.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Collection
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SUPPORTED = ("0.31.", "0.32.", "0.33.")  # the versions of vLLM whose contract the suite tests


def is_development(version: str) -> bool:
    """Whether vLLM was built between releases, from its main: 0.33.1rc1.dev42+g017e9f444."""
    return ".dev" in version


def reason_not_supported(version: str) -> str:
    """Why this version of vLLM cannot be tested, as one sentence; "" if it can.

    The numbers of a development version tell nothing: they come from the nearest tag, and are 0.1 in a clone
    without tags.
    """
    if version.startswith(SUPPORTED) or is_development(version):
        return ""
    known = ", ".join(f"{minor}x" for minor in SUPPORTED)
    return f"vLLM {version} is installed, and this suite holds the contracts of {known}: install one of them"


def environment_without_gpu(version: str) -> dict[str, str]:
    """The environment in which a build of the distribution `vllm` runs on a machine without a GPU.

    vLLM's platform is CPU if the version has "cpu" in it, or the variable has (platforms/__init__.py). Builds
    for other accelerators find them by themselves.
    """
    label = version.partition("+")[2].split(".")
    if any(part.startswith(("cpu", "rocm", "tpu", "xpu")) for part in label):
        return {}
    return {"VLLM_TARGET_DEVICE": "cpu"}


def describe_build() -> str:
    """On which device the installed vLLM runs here, and what it lacks there to run a model.

    A build without a device (VLLM_TARGET_DEVICE=empty) has no library of kernels. Libraries of a build for
    CUDA have no kernels for CPUs.
    """
    import torch
    import vllm
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    if not any(Path(vllm.__file__).parent.glob("_*C*.so")):
        lacks = " without kernels"
    elif current_platform.is_cpu() and not hasattr(torch.ops._C, "cpu_attn_reshape_and_cache"):
        lacks = " with kernels for other devices"
    else:
        lacks = ""
    return f"runs on {current_platform.device_type or 'nothing here'}{lacks}"


def resolve_kv_cache_block_sizes(kv_config: Any, config: Any) -> tuple[int, int]:
    """(tokens of a block of the scheduler, tokens that one block hash stands for)."""
    from vllm.v1.core import kv_cache_utils

    block_size, hash_size = kv_cache_utils.resolve_kv_cache_block_sizes(kv_config, config)
    return block_size, hash_size


def select_common_block_size(block_size: int, backends: list[Any], specs: list[Any]) -> int:
    """Tokens of a kernel block that all these attention backends can use.

    A kernel block lies within a block of `block_size` tokens.
    """
    from vllm.v1.worker import utils

    select = utils.select_common_block_size
    if len(inspect.signature(select).parameters) == 2:  # 0.31
        return int(select(block_size, backends))
    return int(select(block_size, backends, specs))


def latent_shards(family: str) -> int | None:
    """`max_tp_shards` of the specs of a family's latent attention: 1, since every rank holds all of it. The
    layer of Kimi Linear leaves it out in 0.31 (models/kimi_k3/nvidia/mla.py; docs/findings.md).
    """
    import vllm

    return None if family == "kimi_linear" and vllm.__version__.startswith("0.31.") else 1


def server_options() -> Any:
    """The module with the options of vLLM's OpenAI-compatible server: make_arg_parser and their check."""
    try:
        from vllm.entrypoints.common import cli_args
    except ImportError:  # before 0.33
        from vllm.entrypoints.launchers import cli_args
    return cli_args


def pre_forward(active: Any, scheduler_output: Any, **more: Any) -> None:
    """Call ActiveKVConnector.pre_forward as vLLM's second model runner does. `more`: its attn_metadata.

    The connector's start_load_kv gets by name: the ids of the requests, where the worker keeps their state,
    and the number of tokens of the step; since 0.32 also the SchedulerOutput. Sources:
    v1/worker/gpu/model_runner.py: execute_model (connector_kwargs in 0.31); v1/worker/gpu/kv_connector.py:
    ActiveKVConnector._build_load_kwargs.
    """
    import torch

    ids = list(scheduler_output.num_scheduled_tokens)
    states, tokens = torch.arange(len(ids), dtype=torch.int32), scheduler_output.total_num_scheduled_tokens
    if "input_batch" not in inspect.signature(active.pre_forward).parameters:  # 0.31
        given = {"request_state_indices": states, "request_ids": ids, "num_tokens": tokens}
        active.pre_forward(scheduler_output, **given, **more)
        return
    batch = SimpleNamespace(req_ids=ids, idx_mapping=states, num_tokens=tokens)
    active.pre_forward(scheduler_output, batch, **more)


def defers_finalize(active: Any) -> bool:
    """Whether vLLM's second model runner calls wait_for_save after the results if a drafter runs: since
    0.33. Its first one always has.
    """
    return "defer_finalize" in inspect.signature(active.post_forward).parameters


def post_forward(active: Any, finished: set[str], draft: Callable[[], None] | None = None) -> Any:
    """Call the hooks after the forward as vLLM's second model runner does. Returns a KVConnectorOutput.

    `draft`: the forward of the draft model; None: there is none. Source: v1/worker/gpu/model_runner.py:
    sample_tokens.
    """
    if draft is None:
        return active.post_forward(finished)
    if not defers_finalize(active):
        draft()
        return active.post_forward(finished)
    reported = active.post_forward(finished, defer_finalize=True)
    draft()
    active.finalize_step()
    return reported


def drop_announced_tokens(scheduler: Any) -> bool:
    """Let vLLM's scheduler take none of the tokens that its connector announces from now on. Returns whether
    this vLLM can do so.

    With an auxiliary output (routed experts) it takes no tokens for which it has none. Source:
    v1/core/sched/scheduler.py: Scheduler.schedule, cap_external_hit.
    """
    try:
        from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
    except ImportError:
        return False
    if not hasattr(AuxOutputSchedulerConnector, "cap_external_hit"):  # before 0.33
        return False
    schedule = scheduler.schedule

    def schedule_with_auxiliary_output(*args: Any) -> Any:
        given = scheduler.kv_cache_manager, scheduler.connector
        scheduler.aux_output_connector = AuxOutputSchedulerConnector(*given)  # it remembers no earlier step
        try:
            return schedule(*args)
        finally:
            scheduler.aux_output_connector = None  # no worker has such an output

    scheduler.schedule = schedule_with_auxiliary_output
    return True


def defer_loads(scheduler: Any) -> bool:
    """Let vLLM's scheduler call update_state_after_alloc for an asynchronous load when the steps in flight
    have ended. Returns whether this vLLM can do so.

    It does with HiSparse. Source: v1/core/sched/scheduler.py: Scheduler._drain_deferred_loads.
    """
    if not hasattr(scheduler, "defer_async_loads"):  # before 0.33
        return False
    scheduler.defer_async_loads = scheduler.defer_block_free
    return bool(scheduler.defer_async_loads)


def hook_of_ends(connector: Any) -> str:
    """The hook by which a worker half hears which requests have ended, and reports what was transferred."""
    return "get_transfer_results" if hasattr(connector, "get_transfer_results") else "get_finished"


def watch_unpinned(pool: Any, note: Callable[[set[int]], None]) -> None:
    """Note blocks of vLLM's pool that a connector no longer holds, and that nobody else does.

    `note` gets their ids. Minors whose pool has no `unpin_blocks` have no such hold.
    """
    if (unpin := getattr(pool, "unpin_blocks", None)) is None:
        return

    def unpin_blocks(blocks: Any, *args: Any, **kwargs: Any) -> None:
        blocks = list(blocks)
        unpin(blocks, *args, **kwargs)
        note({block.block_id for block in blocks if not block.ref_cnt})

    pool.unpin_blocks = unpin_blocks


def defer_reports_of_failed_step(aggregator: Any) -> Callable[[list[Any]], None] | None:
    """What keeps the reports of all ranks of a step that has failed for the next step; None: before 0.33, or
    with one worker. Source: distributed/kv_transfer/kv_connector/utils.py: KVOutputAggregator.
    """
    return getattr(aggregator, "ft_defer_kv_connector_outputs", None)


def without_requests(output: Any, hidden: Collection[str]) -> Any:
    """The SchedulerOutput of a step as it would be without some requests: without their tokens and ends."""
    cached, blocks = output.scheduled_cached_reqs, getattr(output, "kv_connector_block_state", None)
    named = {*output.num_scheduled_tokens, *output.finished_req_ids, *(output.preempted_req_ids or ())}
    if named.union(blocks.req_ids if blocks else ()).isdisjoint(hidden):
        return output
    kept = [request_id not in hidden for request_id in cached.req_ids]

    def shown(value: Any) -> Any:
        """What a field says about requests by their ids, or in the order of `req_ids`."""
        if isinstance(value, dict):
            return {key: one for key, one in value.items() if key not in hidden}
        if isinstance(value, set):
            return value.difference(hidden)
        if isinstance(value, list) and len(value) == len(kept):
            return list(itertools.compress(value, kept))
        return value

    def changed(record: Any) -> Any:
        return replace(record, **{one.name: shown(getattr(record, one.name)) for one in fields(record)})

    found = replace(
        output,
        scheduled_new_reqs=[new for new in output.scheduled_new_reqs if new.req_id not in hidden],
        scheduled_cached_reqs=changed(cached),
        num_scheduled_tokens=(tokens := shown(output.num_scheduled_tokens)),
        total_num_scheduled_tokens=sum(tokens.values()),
        scheduled_spec_decode_tokens=shown(output.scheduled_spec_decode_tokens),
        finished_req_ids=shown(output.finished_req_ids),
        preempted_req_ids=shown(output.preempted_req_ids),
    )
    if blocks is not None:  # since 0.32
        found.kv_connector_block_state = changed(blocks)
    return found
