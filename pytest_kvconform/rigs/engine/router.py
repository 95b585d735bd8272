"""What a router gives P and D for one hand-over: kv_transfer_params, by the hand-over that is declared.

- handoff: P gets vLLM's own request for a prefill, and D what P returned.
- rendezvous: P and D get one transfer id, and each the address of the other. The router knows both before any
  token is computed, and gives D nothing of what P returns.
- MODULE:FUNCTION: a function of the author, which stands for a router of his own. It gets the params of a
  rendezvous, and returns those of each request.
- none: no params.
"""

from __future__ import annotations

import json
from typing import Any, Protocol

from pytest_kvconform.result import Blocked
from pytest_kvconform.rigs.engine.messages import PREFILL, Output
from pytest_kvconform.rigs.processes import author_hook
from pytest_kvconform.rigs.processes.place import LOOPBACK
from pytest_kvconform.rigs.processes.ports import BOOTSTRAP_PORT

RENDEZVOUS = "rendezvous"
ID = "transfer_id"
DIRECTION = ("do_remote_decode", "do_remote_prefill")
# what P was given by a function of an author -> transfer id, which the function may have given another name
_given: dict[str, str] = {}


class Placed(Protocol):
    """Of an engine or its specification: what its address follows from."""

    @property
    def kv_transfer_config(self) -> dict[str, Any]: ...
    @property
    def environment(self) -> dict[str, str]: ...
    @property
    def tensor_parallel(self) -> int: ...


def prefill_params(
    handover: str,
    transfer_id: str,
    peer: Placed | None,
    zygote: str = "",
    returned: dict[str, Any] | None = None,
) -> dict[str, Any] | None:
    """Return the kv_transfer_params of P's request.

    `peer`: D, None: not known yet. `zygote`: its address, "": this process is a child of it. `returned`: what
    D returned for the turn before, as vLLM's examples/disaggregated/disaggregated_serving/
    disagg_proxy_multiturn.py gives it to P.
    """
    if handover == "none":
        return None
    if handover != RENDEZVOUS and not is_hook(handover):
        return PREFILL | (returned or {}) | {key: PREFILL[key] for key in DIRECTION}
    params = PREFILL | {ID: transfer_id} | (address_of(peer) if peer else {})
    if not is_hook(handover):
        return params
    given = _ask(handover, zygote, "P", params, returned)
    if given is None:
        raise Blocked(f"the hand-over {handover} returned None for P, whose request needs kv_transfer_params")
    _given[_word(given)] = transfer_id
    return given


def answered_params(outputs: list[Output]) -> dict[str, Any] | None:
    """The kv_transfer_params that the engine returned with the outputs of a request."""
    return next((o.kv_transfer_params for o in outputs if o.kv_transfer_params), None)


def decode_params(
    handover: str, transfer_id: str, peer: Placed, returned: dict[str, Any] | None, zygote: str = ""
) -> dict[str, Any] | None:
    """Return the kv_transfer_params of D's request, after P has ended. `peer`: P. `returned`: P's answer."""
    if handover != RENDEZVOUS and not is_hook(handover):
        return returned
    params = _asks_to_load(transfer_id, peer)
    return _ask(handover, zygote, "D", params, returned or {}) if is_hook(handover) else params


def early_params(handover: str, transfer_id: str, peer: Placed, zygote: str = "") -> dict[str, Any] | None:
    """Return the kv_transfer_params of D's request before P has computed a token; None: D has to wait."""
    if handover == RENDEZVOUS:
        return _asks_to_load(transfer_id, peer)
    if not is_hook(handover):
        return None
    return _ask(handover, zygote, "D", _asks_to_load(transfer_id, peer), None)


def transfer_id_of(params: Any) -> str:
    """Return the transfer id for which P got these params; "": none."""
    if not isinstance(params, dict):
        return ""
    found = params.get(ID) or _given.get(_word(params))
    return found if isinstance(found, str) else ""


def is_hook(handover: str) -> bool:
    """Whether a function of the author gives the params."""
    return ":" in handover


def address_of(engine: Placed) -> dict[str, Any]:
    """Return the address of an engine under the keys that vLLM's MooncakeConnector reads."""
    environment = engine.environment
    host = environment.get("VLLM_HOST_IP", LOOPBACK)  # set for engines on nodes
    return {
        "remote_engine_id": engine.kv_transfer_config["engine_id"],
        "remote_host": host,
        "remote_port": int(environment["VLLM_NIXL_SIDE_CHANNEL_PORT"]),
        "remote_bootstrap_addr": f"http://{host}:{environment[BOOTSTRAP_PORT]}",
        "tp_size": engine.tensor_parallel,
    }


def _asks_to_load(transfer_id: str, peer: Placed) -> dict[str, Any]:
    return {"do_remote_prefill": True, "do_remote_decode": False, ID: transfer_id} | address_of(peer)


def _ask(
    hook: str, zygote: str, side: str, params: dict[str, Any], returned: dict[str, Any] | None
) -> dict[str, Any] | None:
    if zygote:
        return author_hook.call(zygote, hook, side, params, returned)
    return author_hook.call_here(hook, side, params, returned)


def _word(params: dict[str, Any]) -> str:
    """Params as a key. Null values may be left out on the way."""
    return json.dumps({key: value for key, value in params.items() if value}, sort_keys=True, default=str)
