"""Wrong changes of a request in on_new_request, and wrong metadata of build_connector_meta."""

from __future__ import annotations

import threading
from typing import Any

from .right import Answer, Ended, Right, loads, prefills

# ---- changes of requests ----


class CutsPlainPrompts(Right):
    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)
        if not request.kv_transfer_params and request.num_prompt_tokens > 1:
            cut(request)


class CutsAgain(Right):
    """Cuts P's prompt when it is asked: after a preemption once more."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        if prefills(request) and request.num_prompt_tokens > 1 and request.num_preemptions:
            cut(request)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


def cut(request: Any) -> None:
    del request.prompt_token_ids[-1:], request._all_token_ids[-1:]
    request.num_prompt_tokens -= 1


class ComputesAhead(Right):
    """Writes to what is the scheduler's."""

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)
        if loads(request):
            request.num_computed_tokens = request.num_tokens


# ---- the metadata of a step ----


class TellsNothing(Right):
    """Returns None for a step in which no request is scheduled."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata = super().build_connector_meta(scheduler_output)
        return metadata if scheduler_output.num_scheduled_tokens else None


class TellsALock(Right):
    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata: Any = super().build_connector_meta(scheduler_output)
        metadata.lock = threading.Lock()
        return metadata


class TakesTheEnds(Right):
    """Takes over the set of requests that have ended."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        scheduler_output.finished_req_ids.clear()
        return super().build_connector_meta(scheduler_output)


class RepeatsLoads(Right):
    """The metadata of a step repeats the loads of the step before."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata: Any = super().build_connector_meta(scheduler_output)
        again, self.notes = self.notes, dict(metadata.reqs_to_recv)
        metadata.reqs_to_recv = again | metadata.reqs_to_recv
        return metadata


class SendsAgain(Right):
    """Orders the last send in every step, with its blocks, also after they were sent."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        kept, params = super().request_finished_all_groups(request, block_ids)
        if kept:
            self.notes = {request.request_id: block_ids}
        return kept, params

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata: Any = super().build_connector_meta(scheduler_output)
        metadata.blocks_to_send = dict(self.notes)
        return metadata


class ReusesTheList(Right):
    """One list for every step, filled anew: that of the step before changes with it."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata: Any = super().build_connector_meta(scheduler_output)
        self.blocks: list[int] = getattr(self, "blocks", [])
        self.blocks[:] = [
            b for request in scheduler_output.scheduled_new_reqs for group in request.block_ids for b in group
        ]
        metadata.blocks = self.blocks
        return metadata
