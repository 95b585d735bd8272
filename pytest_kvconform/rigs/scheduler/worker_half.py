"""One rank of an engine without a model: vLLM's own start of a worker, call by call.

    half = WorkerHalf(rig, "P")  # configuration, process groups, layers, KV cache groups; no connector yet
    half.construct()  # vLLM builds the worker half of the connector
    half.register_kv_caches(half.allocate_kv_caches())  # vLLM allocates KV memory, and registers it
    side = half.scheduler_side()  # the scheduler of the same engine, with the scheduler half
    half.set_handshake_metadata(side)  # what the rank publishes goes to the scheduler half
    half.shutdown()

The engine has one rank, whatever the topology of the cell: before a transfer all ranks do the same. The
layers and the memory are those of the byte rig (bytes/worker.py). A hook that raises becomes `HookRaised`.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs

from model_matrix.geometries import Geometry
from pytest_kvconform.result import Blocked
from pytest_kvconform.rigs.processes.hangs import DEVICE
from pytest_kvconform.rigs.processes.linux import listening_sockets, threads
from pytest_kvconform.rigs.scheduler.recorder import Recorder
from pytest_kvconform.rigs.scheduler.rig import Side
from pytest_kvconform.rigs.vllm_setup import worker
from pytest_kvconform.rigs.vllm_setup.engine_config import (
    adopt_kv_cache_config,
    choose_block_size,
    kv_cache_configs,
)

if TYPE_CHECKING:
    import torch

    from pytest_kvconform.rigs.scheduler.rig import Rig


class WorkerHalf:
    """One rank with the worker half of a connector.

    Attributes: `config`: vLLM's VllmConfig; `kv_config`: the rank's KVCacheConfig; `layers`: name ->
    stand-in; `connector`: the worker half, None until it is built; `threads`: ids of the threads that the
    process had before.
    """

    def __init__(
        self,
        rig: Rig,
        role: str,
        *,
        layout: str = "",
        port: int = 0,
        longest: int = 1,
        config: Any = None,
        blocks: int = 0,
        geometry: Geometry | None = None,
    ):
        """`layout`: name of the KVCacheLayout that vLLM resolved; "": the cell's.
        `port`: number of the side channel's port, see `HostSpec.ports`.
        `longest`: blocks of the longest request.
        `config`: a VllmConfig of one rank; None: made here. `blocks`: of the pool, 0: enough for one request.
        `geometry`: of the configuration; None: that of the cell.
        """
        from pytest_kvconform.rigs.bytes import worker as byte_worker
        from pytest_kvconform.rigs.bytes.specs import blocks_for
        from pytest_kvconform.rigs.scheduler.host import engine_spec

        if lacks := rig.subject.lacks(worker.device_type()):
            raise Blocked(lacks)
        self.rig, self.role = rig, role
        self.recorder = Recorder(rig.host.note_running_hook, f"{role}0", rank=0)
        self.connector: Any = None
        self.active: Any = None
        self.threads: frozenset[str] = frozenset()
        self.config = config or rig.host.single_rank_config(role)
        if layout:
            os.environ["VLLM_KV_CACHE_LAYOUT"] = layout
        cache = self.config.cache_config
        byte_worker.spec_of_process = spec = engine_spec(rig.host.spec, role, self.config)
        self.take_ports(port)
        meeting = Path(tempfile.gettempdir()) / f"meeting-{os.getpid()}"
        self._worker = byte_worker.ByteWorker(self.config, 0, 0, f"file://{meeting}", is_driver_worker=True)
        with worker.with_config(self.config):  # as vLLM's WorkerWrapperBase does
            rig.host.note_running_hook(DEVICE)
            self._worker.init_device()
            rig.host.note_running_hook("")
            self._worker.geometry = geometry or rig.geometry
            self._worker.load_model()
        meeting.unlink(missing_ok=True)
        choose_block_size(self.config)
        self.geometry, self.layers = self._worker.geometry, self._worker.layers
        # tokens; vLLM wants a pool that holds one request of this length, and it is real memory
        length = self.config.model_config.max_model_len = longest * cache.block_size
        blocks = blocks or blocks_for(rig.geometry, cache.block_size, length) + 2
        cache.num_gpu_blocks_override = blocks
        self._worker.spec = structs.replace(spec, max_model_len=length, num_blocks=blocks)
        specs = self._worker.get_kv_cache_spec()
        self.kv_config_of_scheduler, self.kv_config = kv_cache_configs(self.config, specs, 1)
        adopt_kv_cache_config(cache, self.kv_config)

    def take_ports(self, number: int) -> None:
        """Let the next start use these of the case's ports for side channels."""
        self.rig.take_ports(number, self.config)

    # ---- vLLM's start of a worker, call by call (v1/worker/gpu_worker.py: initialize_from_config) ----------

    def construct(self) -> Any:
        """Let vLLM build the worker half. Returns it."""
        self.threads = frozenset(threads())
        with worker.with_config(self.config):
            self.recorder.call(
                "__init__ of the worker half", worker.build_worker_half, self.config, self.kv_config
            )
        self.connector = worker.worker_half()
        return self.connector

    def allocate_kv_caches(self) -> dict[str, torch.Tensor]:
        """KV memory of every layer: views of one allocation, in the connector's memory pool if it has one."""
        pool = None if self.connector is None else self.call_hook("get_mem_pool_context")
        kernel_blocks = self._worker.kernel_blocks(self.kv_config)
        with pool or contextlib.nullcontext():
            caches = worker.allocate_kv_caches(
                self.config.cache_config, self.kv_config, self._worker.device, kernel_blocks
            )
        return {name: caches[name] for name in self.layers}

    def register_kv_caches(self, caches: dict[str, torch.Tensor]) -> None:
        """Let vLLM register KV memory, once."""
        from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

        for name, layer in self.layers.items():
            layer.bind_kv_cache(caches[name])
        self.active = self.recorder.call("register_kv_caches", ActiveKVConnector, self.config, caches)

    def handshake_metadata(self) -> dict[tuple[int, int], Any]:
        """What the rank publishes, by (pipeline stage, rank); empty: nothing."""
        found = self.call_hook("get_handshake_metadata")
        return {} if found is None else {(0, 0): found}

    def scheduler_side(self) -> Side:
        """The engine's scheduler, with the scheduler half of the same configuration."""
        self.config.scheduler_config.async_scheduling = self.rig.asynchronous
        return Side(self.rig, self.role, 0, self.config, self.kv_config_of_scheduler, 0)

    def set_handshake_metadata(self, side: Side) -> None:
        """Give the scheduler half what the rank publishes."""
        hook, metadata = side.connector.set_xfer_handshake_metadata_pp_aware, self.handshake_metadata()
        self.recorder.call("set_xfer_handshake_metadata", hook, metadata)

    def start(self) -> Side:
        """The whole start, in vLLM's order. Returns the scheduler's side."""
        self.construct()
        self.register_kv_caches(self.allocate_kv_caches())
        side = self.scheduler_side()
        self.set_handshake_metadata(side)
        return side

    # ---- after it ------------------------------------------------------------------------------------------

    def step_without_tokens(self, side: Side) -> Any:
        """A step in which nothing is computed: every hook of a worker's step, in vLLM's order.

        Returns vLLM's KVConnectorOutput, None if the connector reported nothing.
        """
        output = side.scheduler.schedule()
        reported = self.recorder.call(
            "a step without tokens", self.active.no_forward, output
        ).kv_connector_output
        if reported is not None:
            side.call_hook("update_connector_output", reported)
        return reported

    def listening_ports(self) -> list[int]:
        """Those of the ports that the engine was given on which this process listens."""
        given = {*self.rig.host.spec.ports, self.config.kv_transfer_config.kv_port}
        return sorted(given & {int(address.rpartition(":")[2]) for address in listening_sockets(os.getpid())})

    def call_hook(self, hook: str, *args: Any) -> Any:
        """Call a hook of the worker half. Raises HookRaised."""
        return self.recorder.call(hook, getattr(self.connector, hook), *args)

    def shutdown(self) -> None:
        """Let vLLM shut the worker half down, and forget it."""
        self.recorder.call("shutdown of the worker half", worker.shut_worker_half_down)
        self.active = self.connector = None
