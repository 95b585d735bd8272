"""Options: the keys of `kv_connector_extra_config`. All of them are checked before the engine starts."""

from typing import Annotated, Any, Literal

import msgspec

Fact = Literal["model", "revision", "dtype", "quantization", "rope", "window", "cache_dtype", "draft", "vllm"]
Seconds = Annotated[float, msgspec.Meta(ge=0.01, le=86400)]
# Options of NixlConnector that are not here, and why. docs/reference.md has a table of all of them.
OF_NIXL_CONNECTOR = {
    "bidirectional_kv_xfer": "KV goes from P to D only, and P computes or caches what a next turn needs",
    "decoder_kv_blocks_ttl": "D keeps no blocks for P",
    "enforce_handshake_compat": "allow_different lists what may differ",
    "engine_ttl": "a peer is forgotten when another one answers at its address",
    "kv_recompute_threshold": "D loads whatever P has",
}


class BadOption(ValueError):
    """An option is unknown, or its value is wrong. The message is one sentence."""

    def __init__(self, why: str):
        super().__init__(f"kv_connector_extra_config: {why}")


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options and their defaults. Times are in seconds."""

    kv_lease_duration: Seconds = 30.0  # P keeps KV that no peer reads for this time
    heartbeat_interval: Seconds = 5.0  # at which D renews leases, at least six times in P's kv_lease_duration
    handshake_timeout: Seconds = 5.0  # for one answer of a peer's side channel
    transfer_timeout: Seconds = 120.0  # from the beginning of a load to its end; longer ones fail
    side_channel_host: str = ""  # where P listens and D asks; "": VLLM_NIXL_SIDE_CHANNEL_HOST
    # Plus the data parallel index. 0: any free one. None: VLLM_NIXL_SIDE_CHANNEL_PORT where it is set, else 0
    side_channel_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] | None = None
    backends: tuple[str, ...] = ("UCX",)  # of NIXL
    num_threads: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 0  # of NIXL's backend, besides the caller's
    # NIXL's progress thread. None: on, except where KV is in host memory, since it keeps one core busy.
    progress_thread: bool | None = None
    # The key of the deployment: "file:PATH", "env:NAME", or "none". "": none, and peers of this machine only
    key: str = ""
    peers: tuple[str, ...] = ()  # to which D connects: names, addresses, networks like "10.0.0.0/8". (): all
    allow_different: tuple[Fact, ...] = ()  # of P and D, see trust/identity.py


def read_options(extra: dict[str, Any]) -> Options:
    """The options of `kv_connector_extra_config`. Raises BadOption."""
    for name in sorted(set(extra) & set(OF_NIXL_CONNECTOR)):
        raise BadOption(f"{name} is NixlConnector's: {OF_NIXL_CONNECTOR[name]}")
    if unknown := sorted(set(extra) - set(Options.__struct_fields__)):
        raise BadOption(f"no option {unknown[0]!r}; there are {', '.join(Options.__struct_fields__)}")
    try:
        return msgspec.convert(extra, Options)
    except msgspec.ValidationError as error:
        raise BadOption(str(error)) from None
