"""What a router gives P and D for one hand-over: kv_transfer_params, by the hand-over that is declared.

- handoff: P gets vLLM's own request for a prefill, and D what P returned.
- rendezvous: P and D get one transfer id, and each the address of the other. The router knows both before any
  token is computed, and gives D nothing of what P returns.
- none: no params.
"""

from __future__ import annotations

from typing import Any, Protocol

from pytest_kvconform.rigs.engine.messages import PREFILL

RENDEZVOUS = "rendezvous"


class Placed(Protocol):
    """Of an engine or its specification: what its address follows from."""

    @property
    def kv_transfer_config(self) -> dict[str, Any]: ...
    @property
    def environment(self) -> dict[str, str]: ...
    @property
    def tensor_parallel(self) -> int: ...


def prefill_params(handover: str, transfer_id: str, peer: Placed) -> dict[str, Any] | None:
    """Return the kv_transfer_params of P's request. `peer`: D."""
    if handover == "none":
        return None
    return PREFILL | ({"transfer_id": transfer_id} | address_of(peer) if handover == RENDEZVOUS else {})


def decode_params(
    handover: str, transfer_id: str, peer: Placed, returned: dict[str, Any] | None
) -> dict[str, Any] | None:
    """Return the kv_transfer_params of D's request. `peer`: P. `returned`: what P answered."""
    if handover != RENDEZVOUS:
        return returned
    return {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": transfer_id} | address_of(
        peer
    )


def address_of(engine: Placed) -> dict[str, Any]:
    """Return the address of an engine under the keys that vLLM's MooncakeConnector reads."""
    environment = engine.environment
    return {
        "remote_engine_id": engine.kv_transfer_config["engine_id"],
        "remote_host": "127.0.0.1",
        "remote_port": int(environment["VLLM_NIXL_SIDE_CHANNEL_PORT"]),
        "remote_bootstrap_addr": f"http://127.0.0.1:{environment['VLLM_MOONCAKE_BOOTSTRAP_PORT']}",
        "tp_size": engine.tensor_parallel,
    }
