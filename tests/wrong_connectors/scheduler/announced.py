"""Mistakes that show when vLLM drops announced tokens, or lets them be loaded later, as it does since 0.33.

Older minors can do neither. There two functions of the rig are replaced by what vLLM 0.33's scheduler does.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from pytest_kvconform.rigs.vllm_setup import compat

from .right import Answer, Ended, Right

__all__ = ["KeepsWhatItAnnounced", "LoadsWhatItAnnounced", "PlansForOneStep"]


class LoadsWhatItAnnounced(Right):
    """Loads as much as it has announced, unless the request itself forbids it."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        if request.skip_reading_prefix_cache:
            return 0, False
        count, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        self.notes[request.request_id] = count
        return count, is_async

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, self.notes.pop(request.request_id, 0))

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        self.notes.pop(request.request_id, None)
        return super().request_finished_all_groups(request, block_ids)


class PlansForOneStep(Right):
    """Loads what it has announced in the same step."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        count, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        self.notes[request.request_id] = count
        return count, is_async

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if not num_external_tokens or request.request_id in self.notes:
            super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        self.notes.clear()
        return super().build_connector_meta(scheduler_output)


class KeepsWhatItAnnounced(Right):
    """Takes a request with announced tokens for one whose load is under way, and waits for the workers."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        count, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        self.notes[request.request_id] = count
        return count, is_async

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.notes.pop(request.request_id, None)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        if self.notes.pop(request.request_id, 0) and request.num_computed_tokens:
            self.half._stop_heartbeat(request.request_id)
            return True, None
        return super().request_finished_all_groups(request, block_ids)


# ---- vLLM 0.33's scheduler, in an older one ----


def drop_announced_tokens(scheduler: Any) -> bool:
    asked = scheduler.connector.get_num_new_matched_tokens

    def get_num_new_matched_tokens(request: Any, num_computed_tokens: int) -> Answer:
        return (0 if asked(request, num_computed_tokens)[0] is not None else None), False

    scheduler.connector.get_num_new_matched_tokens = get_num_new_matched_tokens
    return True


def defer_loads(scheduler: Any) -> bool:
    place, drain, finish = (
        scheduler.connector.update_state_after_alloc,
        scheduler._drain_deferred_frees,
        scheduler.finish_requests,
    )
    deferred: dict[str, tuple[int, int]] = {}

    def update_state_after_alloc(request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens and scheduler.sched_step_seq > scheduler.processed_step_seq:
            request.last_sched_seq = scheduler.sched_step_seq
            deferred[request.request_id] = scheduler.sched_step_seq, num_external_tokens
        else:
            place(request, blocks, num_external_tokens)

    def drain_deferred() -> None:
        drain()
        for id, (fence, tokens) in list(deferred.items()):
            if fence <= scheduler.processed_step_seq:
                del deferred[id]
                place(scheduler.requests[id], scheduler.kv_cache_manager.get_blocks(id), tokens)

    def finish_requests(id: str, status: Any) -> Any:
        if deferred.pop(id, None):
            scheduler.finished_recving_kv_req_ids.add(id)  # no worker will report it
        return finish(id, status)

    scheduler.deferred_loads = deferred
    scheduler.connector.update_state_after_alloc = update_state_after_alloc
    scheduler._drain_deferred_frees = drain_deferred
    scheduler.finish_requests = finish_requests
    return True


if not hasattr(Scheduler, "_drain_deferred_loads"):
    compat.drop_announced_tokens, compat.defer_loads = drop_announced_tokens, defer_loads
