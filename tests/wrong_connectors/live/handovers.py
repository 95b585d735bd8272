"""P/D pairs for cases that are scripts: the reference connector with one mistake, or of another design."""

from __future__ import annotations

import base64
import dataclasses
import os
import struct
import time
from types import SimpleNamespace
from typing import Any

from msgspec import structs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, KVConnectorTransferResults

from reference_connector import ReferenceConnector, connector, leases
from reference_connector.messages import Load

Ended = tuple[bool, dict[str, Any] | None]


class Right(ReferenceConnector):
    """Right: the reference connector."""


class PacksBlocks(ReferenceConnector):
    """Right: block ids travel as one string, as connectors do that save bytes in headers."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        kept, params = super().request_finished_all_groups(request, block_ids)
        if params:
            tables = params.pop("remote_block_ids")
            packed = [base64.b64encode(self.pack(table)).decode() for table in tables]
            params["remote_packed"] = "|".join(packed)
        return kept, params

    def on_new_request(self, request: Any) -> None:
        params = request.kv_transfer_params
        if isinstance(params, dict) and "remote_packed" in params:
            words = params.pop("remote_packed").split("|")
            params["remote_block_ids"] = [self.unpack(base64.b64decode(word)) for word in words]
        super().on_new_request(request)

    def pack(self, blocks: list[int]) -> bytes:
        return struct.pack(f"<{len(blocks)}I", *blocks)

    def unpack(self, packed: bytes) -> list[int]:
        return list(struct.unpack(f"<{len(packed) // 4}I", packed))


class PacksOldBlocks(PacksBlocks):
    """Wrong: hands over the blocks that a request was given first, and not those that it has at the end."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.first: dict[str, Any] = {}

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        cached = scheduler_output.scheduled_cached_reqs
        for one in scheduler_output.scheduled_new_reqs:
            self.first[one.req_id] = [list(table) for table in one.block_ids]
        for name, new in zip(cached.req_ids, cached.new_block_ids, strict=True):
            for table, more in zip(self.first[name], new or (), strict=False):
                table += more
        return super().build_connector_meta(scheduler_output)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        tables = self.first.pop(request.request_id, block_ids)
        cut = tuple(table[: len(due)] for table, due in zip(tables, block_ids, strict=True))
        return super().request_finished_all_groups(request, cut)


class PacksInto16Bits(PacksBlocks):
    """Wrong: block ids have 16 bits."""

    def pack(self, blocks: list[int]) -> bytes:
        return super().pack([block & 0xFFFF for block in blocks])


class ForgetsLoads(ReferenceConnector):
    """Wrong: a step orders 16 loads at most, and forgets the others."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata: Any = super().build_connector_meta(scheduler_output)
        metadata.orders.loads = dict(list(metadata.orders.loads.items())[:16])
        return metadata


class TagsOfFiveBits(ReferenceConnector):
    """Wrong: a load is known by the last five bits of its number, and reads what the first such load read."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.number, self.handoffs = 0, dict[int, Any]()

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata: Any = super().build_connector_meta(scheduler_output)
        for name, load in list(metadata.orders.loads.items()):
            handoff = self.handoffs.setdefault(self.number % 32, load.handoff)
            metadata.orders.loads[name] = Load(handoff, load.groups)
            self.number += 1
        return metadata


class CountsBlocksInAByte(ReferenceConnector):
    """Wrong: a load reads 255 blocks at most, and is reported as if it had read all."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata: Any = super().build_connector_meta(scheduler_output)
        for name, load in list(metadata.orders.loads.items()):
            groups = [structs.replace(group, stop=min(group.stop, 255 * 16)) for group in load.groups]
            metadata.orders.loads[name] = Load(load.handoff, groups)
        return metadata


class LeavesFilesOpen(ReferenceConnector):
    """Wrong: opens a file for each load, and closes none."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        for _ in results.finished_recving:
            os.open(os.devnull, os.O_RDONLY)
        return results


class ClearsItsReports(ReferenceConnector):
    """Wrong: returns the sets that it goes on using, and clears them in the next step."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        mine: Any = self.__dict__.setdefault("mine", KVConnectorTransferResults(set(), set(), set()))
        for field in ("finished_sending", "finished_recving", "failed_recving"):
            getattr(mine, field).clear()
            getattr(mine, field).update(getattr(results, field) or ())
        return mine


class ParksReports(ReferenceConnector):
    """Right: its scheduler half takes what the workers report out of the report, and puts it into the next
    one.
    """

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        parked = self.__dict__.setdefault("parked", {})
        for field in ("finished_sending", "finished_recving"):
            reported = getattr(connector_output, field) or set()
            parked[field], told = set(reported), parked.get(field, set())
            reported.clear()
            reported.update(told)
            setattr(connector_output, field, reported)


class KeepsBlockIds(ReferenceConnector):
    """Wrong: its scheduler half keeps the block ids of every request."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.tables: list[Any] = []

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        self.tables.append(tuple(block_ids[0]))
        return super().request_finished_all_groups(request, block_ids)


class KeepsHandles(ReferenceConnector):
    """Wrong: its worker half releases the handle of a load in the end, and keeps its number."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        self.__dict__.setdefault("handles", []).extend(range(len(results.finished_recving)))
        return results


class KeepsAbortedReads(ReferenceConnector):
    """Wrong: its worker half keeps an entry for each load whose request ends before the load does."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        aborted = [id for id in finished_req_ids if id in self._worker._loads]
        self.__dict__.setdefault("aborted", []).extend(aborted)
        return super().get_transfer_results(finished_req_ids)


class ReportsAbortsTwice(ReferenceConnector):
    """Wrong, as LMCacheMPConnector 0.5.6: D keeps each request that has ended until its worker reports it as
    sent, also one whose load is aborted and reported as received.
    """

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        keeps, params = super().request_finished_all_groups(request, block_ids)
        return keeps or self._kv_transfer_config.kv_role == "kv_consumer", params

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        ended = finished_req_ids if self._kv_transfer_config.kv_role == "kv_consumer" else set()
        return dataclasses.replace(results, finished_sending=results.finished_sending | ended)


class LeaksLoads(ReferenceConnector):
    """Wrong: keeps an entry for each request that is aborted while it loads."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.kept: dict[str, float] = {}

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        if request.request_id in self._scheduler._loading:
            self.kept[request.request_id] = time.monotonic()
        return super().request_finished_all_groups(request, block_ids)


class LeaksAborts(LeaksLoads):
    """Wrong: keeps the lease of each request that is aborted on D, whatever the request does then."""

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)
        if handoff := self._scheduler._handoffs.get(request.request_id):
            request.__dict__["its_lease"] = handoff.remote_lease

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        if request.status.name == "FINISHED_ABORTED" and "its_lease" in request.__dict__:
            self.kept[request.__dict__["its_lease"]] = time.monotonic()
        return ReferenceConnector.request_finished_all_groups(self, request, block_ids)


class RemembersSome(ReferenceConnector):
    """Right: its worker half remembers the last 64 loads, to tell late messages from nonsense."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        known = self.__dict__.setdefault("recent", [])
        known.extend(results.finished_recving)
        del known[:-64]
        return results


class LeasesByWallClock(ReferenceConnector):
    """Wrong: leases end by the wall clock."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        leases.time = SimpleNamespace(monotonic=lambda: time.time())  # type: ignore[assignment]


class ExpiresByWallClock(ReferenceConnector):
    """Wrong: P's params have a time until which D may load, by P's clock; D compares it with its own."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        kept, params = super().request_finished_all_groups(request, block_ids)
        return kept, params | {"until": time.time() + 30} if params else params

    def on_new_request(self, request: Any) -> None:
        params = request.kv_transfer_params
        if not isinstance(params, dict) or params.get("until", time.time() + 1) > time.time():
            super().on_new_request(request)


class TakesTheLastBlock(ReferenceConnector):
    """Wrong: takes the last block of a table for the state, as if there were no scratch blocks."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            groups = connector._groups(kv_cache_config)
            self._scheduler._groups = tuple(
                type(group)(group.tokens, group.state, group.window, 0) for group in groups
            )


class ProducersLoadNothing(ReferenceConnector):
    """Wrong: its worker half loads nothing if the engine is a producer, though it may be a consumer, too."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata: Any = self._get_connector_metadata()
        if self._kv_transfer_config.is_kv_producer:
            metadata.orders.loads.clear()
        super().start_load_kv(forward_context, **kwargs)


class NamesTheFirstRank(ReferenceConnector):
    """Wrong: every data-parallel rank hands over the port of the first one."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        kept, params = super().request_finished_all_groups(request, block_ids)
        if params:
            params["remote_port"] -= self._vllm_config.parallel_config.data_parallel_index
        return kept, params


class CountsTokenIds(ReferenceConnector):
    """Wrong: every prompt has token ids to it."""

    def on_new_request(self, request: Any) -> None:
        self.longest = max(getattr(self, "longest", 0), len(request.prompt_token_ids))
        super().on_new_request(request)


class IgnoresEmbeddings(ReferenceConnector):
    """Wrong: D takes no notice of what is handed over to it for a prompt without token ids."""

    def on_new_request(self, request: Any) -> None:
        prefill = (request.kv_transfer_params or {}).get("do_remote_decode")
        if prefill or request.prompt_token_ids is not None:
            super().on_new_request(request)


class ReadsSamplingParams(ReferenceConnector):
    """Wrong: every request samples to it."""

    def on_new_request(self, request: Any) -> None:
        self.longest = max(getattr(self, "longest", 0), request.sampling_params.max_tokens)
        super().on_new_request(request)


class CutsAtColons(ReferenceConnector):
    """Wrong: P's workers report what stands before the first colon of an id."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        found = super().get_transfer_results(finished_req_ids)
        sent = {id.partition(":")[0] for id in found.finished_sending}
        return KVConnectorTransferResults(sent, found.finished_recving, found.failed_recving)


class DropsLongIds(ReferenceConnector):
    """Wrong: P's workers drop a notification of more than 256 characters."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        found = super().get_transfer_results(finished_req_ids)
        sent = {id for id in found.finished_sending if len(id) <= 256}
        return KVConnectorTransferResults(sent, found.finished_recving, found.failed_recving)


class HandsNoColonsOver(ReferenceConnector):
    """Wrong: P hands nothing over where an id has a colon."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        if ":" in request.request_id:
            request.kv_transfer_params = None
        return super().request_finished_all_groups(request, block_ids)
