"""Records that travel between pytest, a byte engine and its ranks: frozen, pickled; arrays are NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from pytest_kvconform.kvspace.pools.compare import PoolComparison
from pytest_kvconform.rigs.engine.messages import Request

BACKEND, PACKED = "backend", "packed"


class ByteEngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How to build one byte engine."""

    role: str  # "P" prefills, "D" decodes; the bytes that an engine computes name its role
    geometry: str  # id in model_matrix.geometries
    model: str = ""  # the model's name, in place of the geometry's
    dtype: str = ""  # of the model and of its KV, in place of the geometry's
    tensor_parallel: int
    block_size: int  # tokens; models with states: raised to what vLLM would choose
    num_blocks: int  # size of the pool, the null block included
    kv_transfer_config: dict[str, Any]  # the fields of vLLM's KVTransferConfig
    environment: dict[str, str]  # set before the engine is built: ports
    max_model_len: int = 1024  # tokens; vLLM wants a pool that holds one request of this length
    max_batched_tokens: int = 4096  # tokens a step
    layout: str = ""  # "LBHNC", "LBNHC", "BLHNC", ...; empty: what vLLM resolves
    cache_dtype: str = "auto"  # vLLM's kv_cache_dtype
    conv_layout: str = "DS"  # of convolution states: "DS" = (channel, token), "SD" = (token, channel)
    prefix_caching: bool = True
    in_flight: bool = False  # vLLM's asynchronous scheduling
    # order within a block: as the installed attention backend has it, or PACKED: [K | V] of each token
    content: str = BACKEND
    kernel_block: int = 0  # tokens of the kernel's blocks, PACKED only; 0: any multiple of 16
    device: str = "cpu"  # "cpu" or "cuda"
    handover: str = "handoff"  # how D learns which KV to load: "handoff", "rendezvous" or "none"
    save_delay: float = 0.0  # seconds after which a store finds what was saved
    store: bool = False  # loads may bring what either engine has computed and saved
    engine_arguments: dict[str, Any] = {}  # further fields of vLLM's EngineArgs
    fake: str = ""  # "first", "last": where a fake connector is beside the subject in MultiConnector
    few: bool = False  # the first layers of the model alone
    # how it speculates: "eagle3", with a draft model whose layer has KV, or "ngram", without; "": as the
    # geometry does
    speculation: str = ""
    first_block: int = 0  # the block id below those that it may use
    max_seqs: int = 16  # requests that may run at once
    data_parallel: tuple[int, int] = (0, 1)  # its rank, of how many


class ByteRequest(Request, frozen=True, kw_only=True):
    """One request to a byte engine."""

    # int per prompt token: number of the first request of the run with the same
    # tokens up to and including this one
    owners: np.ndarray
    number: int  # of this request in the run, 0 to 255: owner of the tokens it generates
    either: bool = False  # a load may bring what either engine has computed
    embeds: bool = False  # its prompt is embeddings, made of its tokens: it has no token ids


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """What has become of the requests of an engine."""

    statuses: dict[str, str]  # request that has not ended -> name of its status
    kept: frozenset[str]  # requests that have ended and whose blocks are kept
    idle: bool  # no request is left, also none whose blocks are kept, and nothing is to be pushed


def token_after(position: int) -> int:
    """The token that a byte engine generates after `position` tokens.

    It is a fixed function, so that requests with one prompt agree.
    """
    return 5 + position * 2654435761 % 2**32 % 491


def shared_owners(prompts: list[tuple[int, ...]]) -> list[np.ndarray]:
    """For each prompt an int [token]: the number of the prompt that owns the token.

    That is the first prompt with the same tokens up to and including this one.
    """
    owners = []
    for number, prompt in enumerate(prompts):
        mine = np.full(len(prompt), number)
        for other in reversed(range(number)):
            same = 0
            for a, b in zip(prompt, prompts[other], strict=False):
                if a != b:
                    break
                same += 1
            mine[:same] = other
        owners.append(mine)
    return owners


@dataclass(frozen=True)
class Missing:
    """Tokens that a request's next forward reads and whose entry in the block table is the null block."""

    group: int
    layers: tuple[str, ...]
    window: int  # tokens; 0: all
    block_size: int  # tokens
    tokens: tuple[int, ...]  # positions; of a state the number of tokens that it covers


@dataclass(frozen=True)
class Stale:
    """Rows of D's new blocks that vLLM would have zeroed and that still hold poison."""

    layer: str
    tokens: tuple[int, ...]  # positions
    loaded: tuple[int, int]  # the first and the last token that were due in this layer


@dataclass(frozen=True)
class Check:
    """One rank's storage against what it should hold."""

    rank: int
    pool: PoolComparison
    request: str = ""  # the request whose loaded KV was due; empty: an audit
    local: int = 0  # tokens [local, computed) were due, of window layers those that the next forward reads
    computed: int = 0
    rows_due: int = 0  # of attention, and channels of states; those that are missing not included
    bytes_due: int = 0
    missing: tuple[Missing, ...] = ()
    stale: tuple[Stale, ...] = ()  # layer by layer, where vLLM zeroes new blocks
    # blocks of the request whose load the connector reported as failed on this rank
    failed: tuple[int, ...] = ()
    # of an audit: requests that lacked words at their check, all of which have come since
    late: tuple[str, ...] = ()
    seconds: float = 0.0  # that the check took

    @property
    def clean(self) -> bool:
        """Whether every byte is what it should be and nothing is missing."""
        return not self.pool.wrong and not self.missing


# ---- between an engine and its ranks -----------------------------------------------------------------------


@dataclass(frozen=True)
class StepPart:
    """What one step computes of one request."""

    request: str
    first: int  # tokens [first, end)
    end: int
    owners: np.ndarray  # int per token of [first, end)
    tables: tuple[np.ndarray, ...]  # block ids per group; 0 is the null block
    tokens: tuple[int, ...]  # that it generates; none if its prompt is not complete
    drafts: tuple[int, ...]  # that the draft model proposes to follow them


@dataclass(frozen=True)
class LoadCheck:
    """A request whose loaded KV the step reads for the first time."""

    request: str
    local: int  # tokens [local, computed) were loaded
    computed: int
    owners: np.ndarray  # int per token of [0, computed)
    tables: tuple[np.ndarray, ...]
    loaded: np.ndarray  # blocks that the load was allowed to write
    cached: bool = True  # whether D has a prefix cache
    either: bool = False  # whether either engine may have computed it


@dataclass(frozen=True)
class StepWork:
    """What a rank does in one step, beside vLLM's scheduler output."""

    parts: tuple[StepPart, ...]
    load_checks: tuple[LoadCheck, ...]
    after_load: bool  # the loads happen within the step
    groups: np.ndarray  # int8 per block: the KV cache group whose content it has, -1: none
    loading: np.ndarray  # blocks that loads may write right now, those of `load_checks` included
    replayed: bool = False  # whether vLLM would replay this step as a full CUDA graph
