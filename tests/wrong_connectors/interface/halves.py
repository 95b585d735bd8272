"""Connectors with one mistake each in what they are and how they start and end.

They are `Nothing`, which transfers nothing, or `Right`, which is vLLM's NixlConnector, but for what the first
sentence of their docstring says. Cases import this module under its full name; nothing here is imported by
the tests themselves.
"""

from __future__ import annotations

import os
import socket
import threading
import uuid
from typing import Any

from vllm.distributed.kv_transfer import has_kv_transfer_group, kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.metrics.cache_hit_source import CacheHitSource

Upstream = NixlPullConnector
CLOSES_S = 0.5  # after shutdown


class Right(NixlPullConnector):
    """No mistake: unlike NixlConnector it checks that its port is free before it starts the listener."""

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        scheduler = self.connector_scheduler
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((scheduler.side_channel_host, scheduler.side_channel_port))
        super().set_xfer_handshake_metadata_pp_aware(metadata)


class Nothing(KVConnectorBase_V1):
    """No mistake: it implements what it must, and transfers nothing."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()


def is_worker(connector: KVConnectorBase_V1) -> bool:
    return connector.role is KVConnectorRole.WORKER


# ---- the class -----------------------------------------------------------------------------------


class SwapsTheRoles(Nothing):
    """Gives the base class of each half the role of the other one."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        [other] = set(KVConnectorRole) - {role}
        super().__init__(vllm_config, other, kv_cache_config)


class TakesNoKeywords(Nothing):
    """start_load_kv has no **kwargs."""

    def start_load_kv(self, forward_context: Any) -> None:  # type: ignore[override]
        super().start_load_kv(forward_context)


class WaitsInACoroutine(Nothing):
    """on_new_request is a coroutine, which nobody awaits."""

    async def on_new_request(self, request: Any) -> None:  # type: ignore[override]
        super().on_new_request(request)


class TakesItselfInAStaticMethod(Nothing):
    """wait_for_layer_load is a static method and still takes `self`, which vLLM does not pass."""

    @staticmethod
    def wait_for_layer_load(self: Any, layer_name: str) -> None: ...


class ForgetsToInherit(Nothing):
    """Can finish all groups, and does not inherit SupportsHMA."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None


# ---- what it says of itself ----------------------------------------------------------------------


class NeedsAKey(Nothing):
    """Expects a key of the extra configuration when it is asked about CUDA graphs."""

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: Any) -> Any:
        return extra_config["layerwise"]


class PromisesByMethod(Nothing):
    """requires_kv_delivery is a method, so that vLLM takes it for true."""

    def requires_kv_delivery(self) -> bool:  # type: ignore[override]
        return False


class LoadsTheFirstGroup(Right):
    """Says that a load fills the first group only."""

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return (0,)


class NamesGroupsOnce(Right):
    """Returns an iterator, which can be read once."""

    def get_loaded_kv_cache_group_ids(self, request: Any) -> Any:
        return iter(super().get_loaded_kv_cache_group_ids(request))


class HidesAFailedReset(Nothing):
    """Answers 0 for a reset that failed. vLLM looks for False itself."""

    def reset_cache(self) -> Any:
        return 0


class CountsSourcesTwice(Nothing):
    """Counts tokens of a hit once for each tier that they pass."""

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        return {CacheHitSource.P2P: num_external_tokens, CacheHitSource.HOST: num_external_tokens}


class PushesForEver(Nothing):
    """Always has work to push."""

    def has_pending_push_work(self) -> bool:
        return True


class GivesOtherEvents(Nothing):
    """take_events returns events in a form of its own."""

    def take_events(self) -> Any:
        return [{"stored": 1}]


class AsksForNoLayout(Nothing):
    """Asks for a layout that vLLM does not have."""

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str:
        return "BHND"


class FlattensMemory(Nothing):
    """Takes memory for contiguous, whatever the layout."""

    def register_kv_caches(self, kv_caches: Any) -> None:
        for cache in kv_caches.values():
            cache.view(-1)
        super().register_kv_caches(kv_caches)


# ---- start ---------------------------------------------------------------------------------------


class SharesTheProcess(Nothing):
    """The worker half publishes only after a scheduler half was built in its own process."""

    met = threading.Event()

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        if not is_worker(self):
            self.met.set()

    def get_handshake_metadata(self) -> Any:
        if not self.met.is_set():
            raise RuntimeError("there is no scheduler half")
        return super().get_handshake_metadata()


class PlaysBothRoles(Nothing):
    """A scheduler half that is alone makes itself the worker half of its process."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        if not is_worker(self) and not has_kv_transfer_group():
            kv_transfer_state._KV_CONNECTOR_AGENT = self


class AsksForItsRank(Nothing):
    """The scheduler half asks for its tensor parallel rank, which only workers have."""

    def on_new_request(self, request: Any) -> None:
        if get_tensor_model_parallel_rank() == 0:
            super().on_new_request(request)


class ReadsLayersOfGroups(Right):
    """Both halves look up each layer's spec in the spec of its group."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        for group in kv_cache_config.kv_cache_groups:
            self.heads = {
                name: group.kv_cache_spec.kv_cache_specs[name].num_kv_heads for name in group.layer_names
            }


class CountsInWords(Nothing):
    """Does not say a number where the number of reports is asked for."""

    def get_finished_count(self) -> Any:
        return "all"


class SpeaksUnasked(Nothing):
    """Reports requests of somebody else as received."""

    def get_transfer_results(self, finished_req_ids: Any) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        results.finished_recving.add("cmpl-of-another-engine")
        return results


class ChangesTheEngineId(Nothing):
    """The worker half gives the engine an engine_id of its own."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        if is_worker(self):
            vllm_config.kv_transfer_config.engine_id = str(uuid.uuid4())


class RefusesInSilence(Right):
    """Refuses pipeline stages, and does not say why."""

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        if any(stage for stage, _ in metadata):
            raise ValueError
        super().set_xfer_handshake_metadata_pp_aware(metadata)


class PublishesALock(Right):
    """What the worker half publishes holds a lock."""

    def get_handshake_metadata(self) -> Any:
        published = super().get_handshake_metadata()
        published.lock = threading.Lock()
        return published


class LooksEveryNameUp(Nothing):
    """Expects every registered layer to be in a group."""

    def register_kv_caches(self, kv_caches: Any) -> None:
        groups = self._kv_cache_config.transfer_group_index_by_layer
        self.group_of = {name: groups[name] for name in kv_caches}
        super().register_kv_caches(kv_caches)


class HandsOverEveryGroup(Right):
    """Hands block ids of every group over, whether it is transferred or not."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        kept, params = super().request_finished_all_groups(request, block_ids)
        if params:
            params["blocks_by_group"] = [list(ids) for ids in block_ids]
        return kept, params


# ---- end -----------------------------------------------------------------------------------------


class LeavesAThread(Nothing):
    """A thread of the worker half goes on after shutdown."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        if is_worker(self):
            threading.Thread(target=threading.Event().wait, name="poller", daemon=True).start()


class EndsOnce(Nothing):
    """A second shutdown finds nothing to end, and raises."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.running = True

    def shutdown(self) -> None:
        del self.running
        super().shutdown()


class EndsWhatItRegistered(Nothing):
    """shutdown() of the worker half needs what register_kv_caches has made."""

    def register_kv_caches(self, kv_caches: Any) -> None:
        self.registered = list(kv_caches)
        super().register_kv_caches(kv_caches)

    def shutdown(self) -> None:
        if is_worker(self):
            self.registered.clear()
        super().shutdown()


class KeepsAFile(Nothing):
    """Every engine opens a file that nobody closes."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        os.open(os.devnull, os.O_RDONLY)


class ClosesLate(Nothing):
    """No mistake: the worker half listens on its port, and closes it soon after shutdown."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        if is_worker(self):
            self.listener = socket.create_server(("127.0.0.1", vllm_config.kv_transfer_config.kv_port))

    def shutdown(self) -> None:
        if is_worker(self):
            threading.Timer(CLOSES_S, self.listener.close).start()
        super().shutdown()
