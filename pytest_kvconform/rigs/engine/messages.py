"""Records that travel between pytest and an engine's process: frozen, pickled, arrays as NumPy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

# The id of a request is like that of vLLM's servers: the router's id, the same on both sides, and 8
# hexadecimal digits of the server. A connector that pushes pairs P's request with D's by the first part
# (`get_base_request_id`, nixl/utils.py).
ON_P, ON_D = "0000000a", "0000000d"


def request_names(word: str, requests: int, samples: int) -> list[str]:
    """The router's ids of D's requests. vLLM puts the number of a sample before the id of its request.

    Source: v1/engine/parallel_sampling.py: get_child_info.
    """
    return [f"{i}_{word}-0" if samples > 1 else f"{word}-{i}" for i in range(requests)]


def id_on_p(name: str) -> str:
    """The id of the request of P that computes the prompt of a request of D, all samples of it included."""
    return f"{name.partition('_')[2] or name}-{ON_P}"


# kv_transfer_params that vLLM's own proxy sends to P.
PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

# Fields of KVTransferConfig for engines without a connector.
NO_CONNECTOR = {
    "kv_connector": "NoConnector",
    "kv_connector_module_path": "pytest_kvconform.rigs.engine.no_connector",
}
LOADING = "WAITING_FOR_REMOTE_KVS"  # vLLM's status of a request whose load is under way
# vLLM's variable for the layout of convolution states: vLLM or the connector sets it
CONV_LAYOUT = "VLLM_SSM_CONV_STATE_LAYOUT"


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How to build one engine."""

    role: str  # "P" prefills, "D" decodes
    checkpoint: str  # folder of a model
    tensor_parallel: int
    dtype: str
    block_size: int  # tokens
    num_blocks: int  # size of the pool, the null block included
    max_model_len: int  # tokens
    max_batched_tokens: int  # tokens a step; smaller than a prompt: chunked prefill
    kv_transfer_config: dict[str, Any]  # the fields of vLLM's KVTransferConfig
    environment: dict[str, str]  # set before the engine is built: ports
    handover: str = "handoff"  # how D learns which KV to load: "handoff" or "rendezvous"
    save_delay: float = 0.0  # seconds after which a store finds what was saved
    engine_arguments: dict[str, Any] = {}  # further fields of vLLM's EngineArgs


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """One KV cache group, as vLLM formed it."""

    kind: str  # "attention" or "state"
    block_size: int  # tokens
    window: int  # tokens of the sliding window; 0: all
    layers: tuple[str, ...]


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What vLLM made of a specification."""

    groups: tuple[Group, ...]
    num_blocks: int
    block_size: int  # tokens: the scheduler's
    connector: str  # class of the connector that was really built
    backend: str  # attention backend
    layout: str  # KV cache layout
    hma: bool  # hybrid memory allocator on
    prefix_caching: bool
    pid: int
    conv_layout: str = ""  # of convolution states


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The KV of one request in logical coordinates, with all tensor parallel ranks put together."""

    request: str
    tokens: int  # the KV of tokens [0, tokens) was to be there
    groups: tuple[Group, ...]
    tables: tuple[tuple[int, ...], ...]  # block ids per group; 0 is the null block
    # attention layer -> [token, head, plane (K, V), word]. Latent attention has one head and one plane. Of a
    # head that several ranks hold, D's rows have a copy for each of them, side by side, and P's have one.
    rows: dict[str, np.ndarray]
    # attention layer -> [token], whether the token lies on a block that is not the null block
    present: dict[str, np.ndarray]
    # state layer -> segments: convolution (Q, K, V), recurrent; [channel, ...]
    state: dict[str, tuple[np.ndarray, ...]]
    changed: tuple[int, ...] = ()  # unowned blocks that changed since the request was added


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request to an engine."""

    id: str
    tokens: tuple[int, ...]
    max_tokens: int
    kv_transfer_params: dict[str, Any] | None = None
    salt: str = ""  # separates the prefix caches of requests that must not share
    # the harness puts this KV in place, and the connector never hears of the request
    oracle: Snapshot | None = None
    watch: bool = False  # take a snapshot before the first forward that reads loaded KV
    stop: tuple[int, ...] = ()  # tokens at which it ends
    allowed: tuple[int, ...] = ()  # tokens that may be generated; none: any


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """What one step returned for one request."""

    id: str
    tokens: tuple[int, ...]  # more than one where draft tokens were accepted
    logprobs: tuple[np.ndarray, ...]  # of each token: over the whole vocabulary, sorted by token id
    finish: str | None  # vLLM's finish reason
    kv_transfer_params: dict[str, Any] | None


class Unfinished(msgspec.Struct, frozen=True):
    """A request that has not ended in time. As text it is a sentence."""

    role: str
    status: str  # vLLM's request status, last seen; "": it was not scheduled
    run: str = ""  # in which run, if not the subject's

    def __str__(self) -> str:
        return f"{self.role}'s request is {self.status or 'not scheduled'}{self.run}"


def listed(requests: Iterable[Unfinished]) -> str:
    """Unfinished requests in one sentence; "" without any."""
    return "; ".join(map(str, requests))


class Trace(msgspec.Struct, kw_only=True):
    """What an engine did with the prompt of one request, as counted in the scheduler's own output."""

    id: str
    prompt_tokens: int
    local_tokens: int = 0  # hit in the engine's own prefix cache
    external_tokens: int = 0  # announced by the connector and accepted
    asynchronous: bool = False  # the request waited for remote KV (WAITING_FOR_REMOTE_KVS)
    computed_tokens: int = 0  # prompt tokens that went through the model
    first_computed: int = -1  # position of the first of them
    drafted: int = 0  # tokens of a draft model that the model verified
    accepted: int = 0  # those of them that became output
    steps: int = 0
    status: str = ""  # vLLM's request status, last seen
    delayed_free: bool = False  # the connector kept the blocks at the end
    handed_over: bool = False  # the connector returned kv_transfer_params at the end

    @property
    def keeps_for_others(self) -> bool:
        """Whether the connector kept the blocks at the end, and returned how others find them."""
        return self.delayed_free and self.handed_over


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """What a call to step did."""

    outputs: tuple[Output, ...]
    computed: int  # tokens that went through the model
    look: Any = None  # what has become of requests, `bytes.messages.Look`, where scripts ask for it


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine holds. Idle, everything but `free_blocks` is empty."""

    free_blocks: int
    total_blocks: int  # without the null block
    requests: tuple[str, ...]  # known to the scheduler
    group_requests: tuple[tuple[str, ...], ...]  # per group: requests with blocks
    unfinished: bool  # the scheduler has work (`has_requests`)
    # of `requests`, those that have ended with kv_transfer_params: their blocks are kept for others
    promised: tuple[str, ...] = ()


class Leftovers(msgspec.Struct, frozen=True, kw_only=True):
    """What the process still has after the engine was shut down, and did not have before it was built."""

    threads: tuple[str, ...]
    listening: tuple[str, ...]  # "127.0.0.1:5600"
    children: tuple[str, ...]  # processes: "4711 python"
    error: str = ""  # exception that shutdown raised
    frames: tuple[tuple[str, int, str], ...] = ()  # its stack: file, line, function
