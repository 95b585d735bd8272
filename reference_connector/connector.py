"""ReferenceConnector: vLLM's interface (KVConnectorBase_V1), and nothing else. Read on in this order:

    scheduler.py               what is handed over, and when
    messages.py                the messages between P and D; what a lease is
    worker.py, reads.py        how a load goes from its order to its last byte
    leases.py                  how long P keeps its blocks
    peers.py, handshake.py     how a worker of D meets those of P
    trust/                     whom D believes, and whom P lets read; whether P's KV is that of D's model
    boxes.py, plan.py          how memory is described, and how two descriptions become runs of bytes
    transport.py, options.py   what moves them: NIXL; what can be set
    statistics.py              what vLLM logs and counts

vLLM makes one object of this class in the scheduler's process, and before that one in each worker. They
communicate through `Metadata` (scheduler to workers, each step), `WorkerReport` (back) and
`HandshakeMetadata` (once).
"""

import contextlib
import uuid
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import torch
from vllm import envs
from vllm.config import VllmConfig
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, MambaSpec

from reference_connector.boxes import boxes_of
from reference_connector.handshake import Listener
from reference_connector.messages import Address, Lease, Orders, Rank
from reference_connector.options import read_options
from reference_connector.scheduler import Group, Scheduler
from reference_connector.statistics import ReferenceMetrics, ReferenceStats
from reference_connector.transport import HOST, Memory, Transport
from reference_connector.trust.authentication import trust
from reference_connector.trust.identity import identity_of
from reference_connector.worker import Worker, no_stats


@dataclass
class Metadata(base.KVConnectorMetadata):
    orders: Orders


@dataclass
class HandshakeMetadata(base.KVConnectorHandshakeMetadata):
    rank: Rank


@dataclass
class WorkerReport(base.KVConnectorWorkerMetadata):
    """See `Results` in worker.py."""

    notified: set[Lease] = field(default_factory=set)
    missed: dict[Address, float] = field(default_factory=dict)

    def aggregate(self, other: Any) -> base.KVConnectorWorkerMetadata:
        return WorkerReport(self.notified | other.notified, self.missed | other.missed)


class ReferenceConnector(base.KVConnectorBase_V1, base.SupportsHMA):
    """P/D hand-over by pull. Each hook calls the scheduler half or the worker half, or does nothing."""

    with contextlib.suppress(ImportError):  # vLLM 0.31
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: VllmConfig, role: base.KVConnectorRole, kv_cache_config: KVCacheConfig):
        """Raises BadOption, or ValueError for a kind of parallelism that this connector does not support."""
        super().__init__(vllm_config, role, kv_cache_config)
        transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        self._options = options = read_options(transfer.kv_connector_extra_config)
        if (buffer := transfer.kv_buffer_device) != (device := current_platform.device_type):
            raise ValueError(f"there is no buffer: kv_buffer_device is {buffer}, and KV is on {device}")
        for name in ("pipeline", "decode_context", "prefill_context"):
            if (size := getattr(parallel, f"{name}_parallel_size")) > 1:
                raise ValueError(f"ReferenceConnector reads from TP ranks: {name}_parallel_size is {size}")
        host = options.side_channel_host or envs.VLLM_NIXL_SIDE_CHANNEL_HOST
        self._trust = trust(options, host, identity_of(vllm_config))
        self._listener: Listener | None = None
        self._report = WorkerReport()
        if role == base.KVConnectorRole.SCHEDULER:
            given = envs.VLLM_NIXL_SIDE_CHANNEL_PORT if envs.is_set("VLLM_NIXL_SIDE_CHANNEL_PORT") else 0
            port = given if options.side_channel_port is None else options.side_channel_port
            port = port + parallel.data_parallel_index if port else 0
            self._me = Address(host, port, transfer.engine_id, str(uuid.uuid4()))
            keys = ("remote_host", "remote_port", "remote_engine_id", "remote_incarnation")
            self._address = dict(zip(keys, msgspec.structs.astuple(self._me), strict=True))
            lookahead = getattr(vllm_config, "num_prefill_lookahead_tokens", 0)
            caching = vllm_config.cache_config.enable_prefix_caching
            groups = _groups(kv_cache_config)
            self._scheduler = Scheduler(groups, self._address, lookahead, caching, options, self._trust)

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """True: a load restores the states of all groups, whatever prefix of attention D has already."""
        return True

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """False (vLLM asks since 0.33): after a sleep the KV cache would have to be registered again."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """The layout with the longest runs that vLLM can split for kernels; any other works as well."""
        if (model := vllm_config.model_config) is None:
            return None
        return "LBHNC" if model.is_hybrid else "BLHNC" if model.use_mla else "BHLNC"

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Start to listen to peers: all workers have registered their memory."""
        ranks = [found.rank for _, found in sorted(metadata.items()) if isinstance(found, HandshakeMetadata)]
        if self._listener is None and ranks:
            self._listener = Listener(self._me, ranks, self._trust)
            self._address["remote_port"] = self._listener.port

    def on_new_request(self, request: Any) -> None:
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        tables = self._transferred(blocks.blocks)
        self._scheduler.update_state_after_alloc(request, tables, num_external_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return self._kv_cache_config.transfer_group_ids

    def build_connector_meta(self, scheduler_output: Any) -> base.KVConnectorMetadata:
        return Metadata(self._scheduler.take_orders())

    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler.on_loads_finished(connector_output.finished_recving)
        if isinstance(report := connector_output.kv_connector_worker_meta, WorkerReport):
            self._scheduler.on_worker_report(report.notified, report.missed)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.request_finished(request, self._transferred(block_ids))

    def _transferred(self, tables: Any) -> tuple[Any, ...]:
        """The block tables of the KV cache groups that take part in transfers, from those of all groups."""
        return tuple(tables[index] for index in self._kv_cache_config.transfer_group_ids)

    def has_pending_push_work(self) -> bool:
        """Whether the engine has to go on stepping without a request. The name of the hook is vLLM's."""
        return self._scheduler.busy

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        rank = parallel_state.get_tensor_model_parallel_rank()
        size = parallel_state.get_tensor_model_parallel_world_size()
        options, memory = self._options, _allocations(kv_caches)
        progress = options.progress_thread if options.progress_thread is not None else memory[0].place != HOST
        transport = Transport(list(options.backends), options.num_threads, progress)
        boxes = boxes_of(self._vllm_config, self._kv_cache_config, kv_caches, rank, size)
        zeroed = getattr(self._kv_cache_config, "needs_kv_cache_zeroing", False)
        self._worker = Worker(options, rank, size, transport, boxes, memory, self._trust, zeroed)

    def get_handshake_metadata(self) -> base.KVConnectorHandshakeMetadata | None:
        return HandshakeMetadata(self._worker.published)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        if isinstance(metadata, Metadata):
            self._worker.start(metadata.orders)

    def get_transfer_results(self, finished_req_ids: set[str]) -> base.KVConnectorTransferResults:
        results = self._worker.results()
        self._report.notified |= results.notified
        self._report.missed |= results.missed
        return base.KVConnectorTransferResults(results.sent, results.received, results.failed)

    def build_connector_worker_meta(self) -> base.KVConnectorWorkerMetadata | None:
        report, self._report = self._report, WorkerReport()
        return report if report.notified or report.missed else None

    # Loads end before their request runs, and D reads from P's cache: nothing is done layer by layer.
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return ReferenceStats(self._worker.stats()) if hasattr(self, "_worker") else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return ReferenceStats(data or no_stats())

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> KVConnectorPromMetrics:
        return ReferenceMetrics(*args)

    def shutdown(self) -> None:
        """Close both halves. vLLM may call this twice, and on an object whose `__init__` failed."""
        for half in ("_listener", "_worker"):
            if (found := self.__dict__.pop(half, None)) is not None:
                found.close()


with contextlib.suppress(ValueError):  # MultiConnector looks it up by its name alone: docs/findings.md
    KVConnectorFactory.register_connector("ReferenceConnector", __name__, "ReferenceConnector")


def _groups(kv_cache_config: KVCacheConfig) -> tuple[Group, ...]:
    """What the scheduler half needs of each KV cache group that takes part in transfers."""
    groups = []
    for spec in (group.kv_cache_spec for group in kv_cache_config.transfer_groups):
        window = 0 if isinstance(spec, FullAttentionSpec) else getattr(spec, "sliding_window", None) or 0
        scratch = getattr(spec, "num_speculative_blocks", 0)
        groups.append(Group(spec.block_size, isinstance(spec, MambaSpec), window, scratch))
    return tuple(groups)


def _allocations(kv_caches: dict[str, Any]) -> list[Memory]:
    """The allocations in which KV lies, each once: layers share them."""
    found = {}
    for view in kv_caches.values():
        storage, device = view.untyped_storage(), view.device
        place = HOST if device.type == "cpu" else ("VRAM", device.index or 0)
        flat = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
        zero = partial(_zero, flat)
        found[storage.data_ptr()] = Memory(storage.data_ptr(), storage.nbytes(), place, zero)
    return list(found.values())


def _zero(flat: torch.Tensor, start: int, count: int) -> None:
    flat[start : start + count].zero_()
    if flat.is_cuda:  # a read may write next to these bytes, or over them
        torch.cuda.current_stream(flat.device).synchronize()
