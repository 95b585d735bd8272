"""Connectors with one mistake each in hooks of vLLM's second model runner, in block tables that they keep
themselves, or in windows.

All of them are vLLM's NixlConnector, or ReferenceConnector, but for what the first sentence of their
docstring says.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

from vllm.distributed.kv_transfer import has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from reference_connector import ReferenceConnector
from tests.wrong_connectors.engine import Groups, Right

__all__ = [
    "ClipsEachWindow",
    "EndsWithTheForward",
    "FollowsTheFirst",
    "ForgetsAtCapture",
    "HandsOverWhatRuns",
    "LoadsWhatRuns",
    "StopsAtWarmUp",
]

# ---- hooks of the second model runner ----


class LoadsWhatRuns(Right):
    """Takes the requests that run, which start_load_kv gets by name, for those that are to be loaded."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        for name in kwargs.get("request_ids", ()):
            metadata.reqs_to_recv[name]
        super().start_load_kv(forward_context, **kwargs)


class ForgetsAtCapture(Right):
    """After the capture of CUDA graphs it has forgotten all, the registered memory too: it loads nothing."""

    captured = False

    def reset_capture_state(self) -> None:
        self.captured = True

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self.captured:
            self._get_connector_metadata().reqs_to_recv.clear()
        super().start_load_kv(forward_context, **kwargs)


class StopsAtWarmUp(Right):
    """Its thread ends when vLLM has no connector, as during warm-up, and without it nothing is loaded."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def watch(self) -> None:
        while has_kv_transfer_group():
            time.sleep(0.001)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if not self.thread.is_alive():
            self._get_connector_metadata().reqs_to_recv.clear()
        super().start_load_kv(forward_context, **kwargs)


class EndsWithTheForward(Right):
    """Takes finish_forward for the end of the step: loads that start after it find no metadata."""

    def finish_forward(self) -> None:
        self.clear_connector_metadata()


class HandsOverWhatRuns(Right):
    """Hands over what ran in the last step that was scheduled: with a step in flight P's request did not."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        self.running = set(scheduler_output.num_scheduled_tokens)
        return super().build_connector_meta(scheduler_output)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        ended = super().request_finished_all_groups(request, block_ids)
        return ended if request.request_id in self.running else (False, None)


# ---- block tables ----


class FollowsTheFirst(Right):
    """Follows block tables from step to step, and adds the new blocks of the first running request to all."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.tables = dict[str, list[int]]()

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        for new in scheduler_output.scheduled_new_reqs:
            self.tables[new.req_id] = list(new.block_ids[0])
        running = scheduler_output.scheduled_cached_reqs
        for name in running.req_ids:
            self.tables[name] += (running.new_block_ids[0] or [[]])[0]
        return super().build_connector_meta(scheduler_output)

    def request_finished_all_groups(self, request: Any, block_ids: Groups) -> Any:
        return super().request_finished_all_groups(request, (self.tables.pop(request.request_id),))


class ClipsEachWindow(ReferenceConnector):
    """Loads the window alone of all layers that have one, also where vLLM keeps all their tokens."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            specs = [group.kv_cache_spec for group in kv_cache_config.transfer_groups]
            self._scheduler._groups = tuple(
                replace(group, window=getattr(spec, "sliding_window", None) or 0)
                for group, spec in zip(self._scheduler._groups, specs, strict=True)
            )
