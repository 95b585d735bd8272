"""Options: what may stand in `kv_connector_extra_config`, every one of them checked before the engine starts."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

Seconds = Annotated[float, msgspec.Meta(gt=0, le=86400)]


class BadOption(ValueError):
    """An option that is unknown or not what it should be. The message is one sentence."""


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options and their defaults. Times are in seconds."""

    kv_lease_duration: Seconds = 30.0  # P keeps what nobody reads for so long
    heartbeat_interval: Seconds | None = (
        None  # D prolongs leases of requests that wait so often; None: a sixth of its own lease
    )
    handshake_timeout: Seconds = 5.0  # for one answer of a peer's side channel
    transfer_timeout: Seconds = 120.0  # from the beginning of a load to its end; longer ones fail
    side_channel_host: str = (
        ""  # where P listens, and the name under which D finds it; "": VLLM_NIXL_SIDE_CHANNEL_HOST
    )
    # Plus the data parallel index. 0: any free one, P tells D which. None: VLLM_NIXL_SIDE_CHANNEL_PORT where it is set, else 0.
    side_channel_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] | None = None
    backends: tuple[str, ...] = ("UCX",)  # of NIXL
    num_threads: Annotated[int, msgspec.Meta(ge=0, le=1024)] = (
        0  # of NIXL's backend, besides the one that calls it
    )
    progress_thread: bool | None = (
        None  # NIXL's; None: on, except where KV is in host memory, since it keeps one core busy
    )
    integrity: bool = False  # compare a digest of what was read with one that P makes; costs a pass over the bytes on both sides

    @property
    def heartbeat(self) -> float:
        return self.heartbeat_interval or self.kv_lease_duration / 6


def read_options(extra: dict[str, Any]) -> Options:
    """The options of `kv_connector_extra_config`. Raises BadOption."""
    if unknown := sorted(set(extra) - set(Options.__struct_fields__)):
        raise BadOption(
            f"kv_connector_extra_config: no option {unknown[0]!r}; there are {', '.join(Options.__struct_fields__)}"
        )
    try:
        return msgspec.convert(extra, Options)
    except msgspec.ValidationError as error:
        raise BadOption(f"kv_connector_extra_config: {error}") from None
