"""What goes into a side and comes out: requests, reports of its workers, and records of its steps."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_kvconform.rigs.engine.objects import mentions
from pytest_kvconform.rigs.scheduler.leaks import integers
from pytest_kvconform.rigs.vllm_setup.kv_cache_specs import window_of

if TYPE_CHECKING:
    from pytest_kvconform.rigs.history import Call
    from pytest_kvconform.rigs.scheduler.side import Side
    from pytest_kvconform.rigs.scheduler.side_state import SideState

ORDER_STEPS = 20  # in which a connector may order a load; the request waits for remote KV meanwhile
END_OF_SEQUENCE = 2
# Kinds of requests that are not plain text: their prompt is embeddings (it has no token ids), they ask for
# a pooled output instead of tokens, or they are computed with a LoRA adapter.
KINDS = ("embeds", "pooling", "lora")
WIDTH = 8  # of an embedding


@dataclass(frozen=True)
class WorkerReport:
    """What one rank reports at the end of a step: request ids, and in `invalid` block ids.

    `invalid` is for models of one KV cache group.
    """

    sent: Iterable[str] = ()
    received: Iterable[str] = ()
    failed: Iterable[str] = ()  # of the received ones
    invalid: Iterable[int] = ()


@dataclass(frozen=True)
class RequestOutput:
    """The output of one request in one step."""

    tokens: tuple[int, ...]
    finish: str | None  # "stop", "length", "abort", "error"; None: the request goes on
    params: dict[str, Any] | None  # kv_transfer_params, as the connector returned them


@dataclass(frozen=True)
class Flight:
    """A step between schedule() and update_from_output()."""

    output: Any  # vLLM's SchedulerOutput
    sampled: dict[str, list[int]]  # scheduled request -> the tokens that its model samples, one or none
    pooled: dict[str, Any]  # scheduled request -> what is pooled of it, or None
    outputs: dict[str, RequestOutput]  # of the Step, to be filled
    ordered: tuple[str, ...]  # requests whose loads the metadata has ordered by now
    worker: Any  # KVConnectorOutput of a real worker; None: the reports are scripted

    def rank_output(self, report: WorkerReport) -> Any:
        """The ModelRunnerOutput of one rank that reports this."""
        return rank_output(self.sampled, self.pooled, report)

    def note_outputs(self, batches: dict[int, Any]) -> None:
        """Note what update_from_output returned: EngineCoreOutputs by client."""
        for one in (one for batch in batches.values() for one in batch.outputs):
            finish = None if one.finish_reason is None else str(one.finish_reason)
            self.outputs[one.request_id] = RequestOutput(
                tuple(one.new_token_ids), finish, one.kv_transfer_params
            )


def rank_output(sampled: dict[str, list[int]], pooled: dict[str, Any], report: WorkerReport) -> Any:
    """A ModelRunnerOutput: tokens and pooled output by request, and the report of one rank."""
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

    return ModelRunnerOutput(
        req_ids=list(sampled),
        req_id_to_index={id: index for index, id in enumerate(sampled)},
        sampled_token_ids=list(sampled.values()),
        pooler_output=list(pooled.values()) if any(pooled.values()) else None,
        kv_connector_output=KVConnectorOutput(
            finished_sending=set(report.sent) or None,
            finished_recving=set(report.received) or None,
            failed_recving=set(report.failed),
            invalid_block_ids=set(report.invalid),
        ),
    )


@dataclass(frozen=True)
class Step:
    """What one step did."""

    number: int  # from 1
    scheduled: dict[str, tuple[int, int]]  # request -> tokens [first, end) that are computed in it
    outputs: dict[str, RequestOutput]  # filled by update_from_output; with a step in flight one step later
    metadata: Any  # of build_connector_meta, after the way to a worker (pickle)
    has_sync_kv_loads: bool  # of the SchedulerOutput: a synchronous load happens in this step
    finished: frozenset[str]  # finished_req_ids: requests of whose end the workers are notified
    preempted: frozenset[str]  # preempted_req_ids
    metadata_object: Any  # what build_connector_meta returned; the connector may still change it

    def mentions(self, request: str) -> bool:
        """Whether the id of a request stands anywhere in the metadata."""
        return bool(mentions(self.metadata, request))

    def block_ids_for(self, request: str) -> frozenset[int]:
        """Block ids, and other numbers in lists, of metadata that mentions a request.

        They are what the metadata orders for the request's load or save.
        """
        return integers(self.metadata) if self.mentions(request) else frozenset()


def load_is_ordered(side: SideState, id: str) -> bool:
    """Whether the metadata has named all blocks of the last load of a request. A connector may order a load
    in parts, so a step that names no further ones ends the order, too. True also if the request has no load,
    and if ORDER_STEPS steps have passed: then the metadata names no blocks in a form that can be read.
    """
    if not (load := _last_load(side, id)) or len(side.steps) - load.step >= ORDER_STEPS:
        return True
    named = frozenset(filter(side.owns_block, ordered_ids(side, id)))
    return bool(named) and (
        _fills_all(side, id, load, named) or named <= ordered_ids(side, id, len(side.steps) - 1)
    )


def ordered_ids(side: SideState, id: str, until: int | None = None) -> frozenset[int]:
    """Integers of metadata that has mentioned a request since its last load began, in the first `until` steps
    of the side.
    """
    steps = side.steps[load.step - 1 : until] if (load := _last_load(side, id)) else []
    return frozenset().union(*(step.block_ids_for(id) for step in steps))


def _last_load(side: SideState, id: str) -> Call | None:
    calls = side.calls_of("update_state_after_alloc", id)
    return next((one for one in reversed(calls) if one.arguments["num_external_tokens"] > 0), None)


def _fills_all(side: SideState, id: str, load: Call, named: frozenset[int]) -> bool:
    """Whether these blocks are all that a load fills: those of full attention, those within the window of the
    last token, and of each state one slot.
    """
    [*_, asked] = (c for c in side.calls_of("get_num_new_matched_tokens", id) if c.step <= load.step)
    end = asked.arguments["num_computed_tokens"] + load.arguments["num_external_tokens"]
    for group, size in enumerate(side.group_sizes):
        spec = side.kv_config.kv_cache_groups[group].kv_cache_spec
        table, writable = load.arguments["blocks"][group], set(load.arguments["writable"][group])
        if type(spec).__name__ == "MambaSpec":
            missing = bool(writable) and not named & writable
        else:
            first = max(0, end - window + 1) // size if (window := window_of(spec)) else 0
            missing = bool(set(table[first : -(-end // size)]) & writable - named)
        if missing:
            return False
    return True


def engine_request(
    id: str,
    prompt: list[int],
    params: Mapping[str, Any] | None,
    max_tokens: int,
    stop: bool = False,
    read_cache: bool = True,
    kind: str = "",
    fields: Mapping[str, Any] | None = None,
) -> Any:
    """vLLM's EngineCoreRequest, as the API server sends it. `kind`: one of KINDS, "": plain text. `fields`:
    further fields, which win.

    Embeddings are made of the numbers of the prompt, so different prompts have different embeddings.
    """
    import torch
    from vllm import PoolingParams, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine import EngineCoreRequest

    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0,
        detokenize=False,
        ignore_eos=not stop,
        skip_reading_prefix_cache=not read_cache,
        extra_args=None if params is None else {"kv_transfer_params": params},
    )
    sampling.update_from_generation_config({}, END_OF_SEQUENCE)
    embeds = torch.tensor(prompt, dtype=torch.float32)[:, None].repeat(1, WIDTH)
    given = {
        "request_id": id,
        "prompt_token_ids": None if kind == "embeds" else prompt,
        "mm_features": None,
        "sampling_params": None if kind == "pooling" else sampling,
        "pooling_params": PoolingParams(task="embed") if kind == "pooling" else None,
        "arrival_time": time.time(),
        "lora_request": LoRARequest("adapter", 1, "/nowhere") if kind == "lora" else None,
        "cache_salt": None,
        "data_parallel_rank": None,
        "prompt_embeds": embeds if kind == "embeds" else None,
    }
    return EngineCoreRequest(**given | dict(fields or {}))


def watch_allocations(side: Side) -> None:
    """Let allocate_slots find no block while a request is to be preempted: see `Side.preempt`."""
    allocate = side.manager.allocate_slots

    def allocate_slots(request: Any, *args: Any, **kwargs: Any) -> Any:
        victim = side.scheduler.requests.get(side.preempting)
        if victim is not None and victim.num_preemptions > side.preemptions:
            side.preempting = ""
        elif victim is not None and victim in side.scheduler.running:
            side.scheduler.running.remove(victim)
            side.scheduler.running.append(victim)  # vLLM preempts the last one
            return None
        return allocate(request, *args, **kwargs)

    side.manager.allocate_slots = allocate_slots
