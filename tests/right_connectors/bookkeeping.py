"""Right connectors whose records differ from those of NixlConnector.

Each is the reference connector but for what its docstring says.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import hashlib
import itertools
import json
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole

from reference_connector import ReferenceConnector
from reference_connector.connector import Metadata
from reference_connector.messages import Load, Orders

from .leftovers import *  # noqa: F403  # for the tests

Ended = tuple[bool, dict[str, Any] | None]
KEY = "remote_block_ids"


# ---- what the metadata of a step names ----


class LevelTriggered(ReferenceConnector):
    """Repeats every order for a load until it is reported. The workers take each once."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.open: dict[str, Load] = {}
        self.taken: set[str] = set()

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        orders = self._scheduler.take_orders()
        self.open |= orders.loads
        return Metadata(_with_loads(orders, dict(self.open)))

    def update_connector_output(self, connector_output: Any) -> None:
        for name in connector_output.finished_recving or ():
            self.open.pop(name, None)
        super().update_connector_output(connector_output)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata: Any = self._get_connector_metadata()
        loads = metadata.orders.loads
        new = {name: load for name, load in loads.items() if name not in self.taken}
        self.taken = set(loads)
        self._worker.start(_with_loads(metadata.orders, new))


def _with_loads(orders: Orders, loads: dict[str, Load]) -> Orders:
    return Orders(loads=loads, leases=orders.leases, releases=orders.releases, renewals=orders.renewals)


class RepeatsSends(ReferenceConnector):
    """P names a lease in the metadata of every step until it is reported as sent."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.open: dict[int, str] = {}
        self.taken: set[int] = set()

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        orders = self._scheduler.take_orders()
        self.open |= orders.leases
        orders.leases = dict(self.open)
        return Metadata(orders)

    def update_connector_output(self, connector_output: Any) -> None:
        sent = connector_output.finished_sending or ()
        self.open = {number: name for number, name in self.open.items() if name not in sent}
        super().update_connector_output(connector_output)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata: Any = self._get_connector_metadata()
        leases = metadata.orders.leases
        new = {number: name for number, name in leases.items() if number not in self.taken}
        self.taken = set(leases)
        orders = _with_loads(metadata.orders, metadata.orders.loads)
        orders.leases = new
        self._worker.start(orders)


@dataclass
class Met(Metadata):
    requests: list[str] = field(default_factory=list)


class PairsById(ReferenceConnector):
    """Notes every request and tells its workers of it, with and without params, as a connector whose P and D
    meet by the id of the request.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.met: set[str] = set()

    def on_new_request(self, request: Any) -> None:
        self.met.add(request.request_id)
        super().on_new_request(request)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return Met(self._scheduler.take_orders(), sorted(self.met))

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        self.met.discard(request.request_id)
        return super().request_finished_all_groups(request, block_ids)


# ---- params and ends ----


class RanksInParams(ReferenceConnector):
    """P's params list its layers, as those of connectors do that send layer by layer: small numbers."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        kept, params = super().request_finished_all_groups(request, block_ids)
        return kept, params | {"remote_layer_indices": list(range(32))} if params else params


class OwnKeys(ReferenceConnector):
    """P's params hold numbers as keys, a tuple and a set, which D reads as msgpack and JSON leave them. Every
    request gets params, also one that is not handed over: what the connector has done for it.
    """

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        kept, params = super().request_finished_all_groups(request, block_ids)
        more = {"ranks": {0: "host", 1: "host"}, "layers": (0, 31), "dtypes": {"bfloat16"}}
        return kept, (params or {}) | more


class CutsAgain(ReferenceConnector):
    """P cuts a prompt by a token whenever it is scheduled anew, also after a preemption, and says in the
    params how many tokens it has computed.
    """

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        asked = request.kv_transfer_params
        prefill = isinstance(asked, dict) and asked.get("do_remote_decode")
        if prefill and request.num_preemptions and request.num_prompt_tokens > 1:
            del request.prompt_token_ids[-1:], request._all_token_ids[-1:]
            request.num_prompt_tokens -= 1
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


class NoHeartbeat(ReferenceConnector):
    """D sends P nothing while a request waits: P keeps blocks for a fixed time, or until D has read them."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        orders = self._scheduler.take_orders()
        orders.renewals = []
        return Metadata(orders)


# ---- start, capabilities and shutdown ----


class OwnEngineId(ReferenceConnector):
    """Has an attribute engine_id of its own, host and port, as vLLM's MoRIIOConnector."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.engine_id = f"127.0.0.1:{vllm_config.kv_transfer_config.kv_port}"


class TruthValues(ReferenceConnector):
    """Answers with None, numbers and NumPy's values where vLLM tests the truth of an answer, counts with it
    or looks a number up in it, and with lists where vLLM unpacks.
    """

    supports_divergent_local_hybrid_hits = np.bool_(True)

    @property
    def requires_kv_delivery(self) -> Any:
        return int(self._kv_transfer_config.is_kv_producer)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> Any:
        return extra_config.get("layerwise")

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        tokens, asynchronous = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return [tokens, np.bool_(asynchronous)]

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        kept, params = super().request_finished_all_groups(request, block_ids)
        return [len(block_ids) if kept else None, params]

    def has_pending_push_work(self) -> Any:
        return np.bool_(super().has_pending_push_work())

    def has_pending_block_frees(self) -> Any:
        return None

    def take_events(self) -> Any:
        return ()

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> Any:
        return None

    def reset_cache(self) -> Any:
        return 1

    def get_finished_count(self) -> Any:
        return np.int64(self._vllm_config.parallel_config.world_size)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> Any:
        return np.array(super().get_loaded_kv_cache_group_ids(request))


class OfOneHalf(ReferenceConnector):
    """Knows its promises in the scheduler half alone, where vLLM reads them, and gives the base class a copy
    of the configuration.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(copy.copy(vllm_config), role, kv_cache_config)

    @property
    def requires_kv_delivery(self) -> bool:
        return self._scheduler is None


class StaticHooks(ReferenceConnector):
    """Hooks that need no object, since they do nothing or answer the same for all, are static methods, and
    one is a class method.
    """

    @staticmethod
    def wait_for_layer_load(layer_name: str) -> None: ...

    @staticmethod
    def save_kv_layer(layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    @staticmethod
    def wait_for_save() -> None: ...

    @staticmethod
    def has_pending_block_frees() -> bool:
        return False

    @classmethod
    def get_finished_count(cls) -> int | None:
        return None


class ReadsNowAndThen(ReferenceConnector):
    """Reads from P once more after every other release, so that no two loads begin as many transfers."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.releases, self.plain = itertools.count(), None

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        reads = self._worker._reads
        self.plain, reads.read_ledgers = reads.read_ledgers, self.read_ledgers

    def read_ledgers(self, peer: Any, ranks: Any, entry: int, deadline: float) -> Any:
        rests = deadline == float("inf") and next(self.releases) % 2
        return iter(()) if rests else self.plain(peer, ranks, entry, deadline)


class PacksParams(ReferenceConnector):
    """P's params are one word that D alone can read: what the reference says, with a check sum, in base64."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        kept, params = super().request_finished_all_groups(request, block_ids)
        data = json.dumps(params).encode()
        word = base64.b64encode(hashlib.sha256(data).digest() + data).decode()
        return kept, params and {"do_remote_prefill": True, "word": word}

    def on_new_request(self, request: Any) -> None:
        given = request.kv_transfer_params
        if isinstance(given, dict) and "word" in given:
            request.kv_transfer_params = None
            with contextlib.suppress(TypeError, ValueError):
                data = base64.b64decode(given["word"], validate=True)
                if given.get("do_remote_prefill") and hashlib.sha256(data[32:]).digest() == data[:32]:
                    request.kv_transfer_params = json.loads(data[32:])
        super().on_new_request(request)
        request.kv_transfer_params = given


@dataclass
class Written(KVConnectorMetadata):
    orders: Any


class PacksMetadata(ReferenceConnector):
    """Its metadata is a string of bytes, in which nobody else finds requests and blocks."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return Written(msgspec.msgpack.encode(self._scheduler.take_orders()))

    def _get_connector_metadata(self) -> Any:
        found = super()._get_connector_metadata()
        return (
            found if type(found) is Metadata else Metadata(msgspec.msgpack.decode(found.orders, type=Orders))
        )


class NamesRuns(ReferenceConnector):
    """Metadata and params name blocks as [first, count] of each run."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return Written(_with_blocks(msgspec.to_builtins(self._scheduler.take_orders()), _runs))

    def _get_connector_metadata(self) -> Any:
        if type(found := super()._get_connector_metadata()) is Metadata:
            return found
        return Metadata(msgspec.convert(_with_blocks(copy.deepcopy(found.orders), _blocks), Orders))

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        keeps, params = super().request_finished_all_groups(request, block_ids)
        return keeps, params and params | {KEY: [*map(_runs, params[KEY])]}

    def on_new_request(self, request: Any) -> None:
        params = request.kv_transfer_params
        with contextlib.suppress(TypeError, ValueError, KeyError):  # of a router, or none
            request.kv_transfer_params = params | {KEY: [*map(_blocks, params[KEY])]}
        super().on_new_request(request)
        request.kv_transfer_params = params


def _runs(blocks: list[int]) -> list[list[int]]:
    runs = np.split(np.array(blocks, int), np.flatnonzero(np.diff(blocks) != 1) + 1)
    return [[int(run[0]), len(run)] for run in runs if len(run)]


def _blocks(runs: list[list[int]]) -> list[int]:  # of a stranger, too: a run has no more than 65,536
    return [first + further for first, count in runs for further in range(min(count, 1 << 16))]


def _with_blocks(orders: dict[str, Any], change: Any) -> dict[str, Any]:
    for load in orders["loads"].values():
        for group in load["groups"]:
            group["blocks"] = change(group["blocks"])
        load["handoff"][KEY] = [*map(change, load["handoff"][KEY])]
    return orders
