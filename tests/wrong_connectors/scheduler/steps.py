"""Mistakes that show with a step in flight, slow hooks, and optional hooks that keep no promise."""

from __future__ import annotations

import time
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, KVCacheEvent

from reference_connector import ReferenceConnector

from .right import Ended, Right

__all__ = [
    "AcceptsTails",
    "AsksItsServer",
    "HandsOverTheLastStep",
    "KeepsWhatStillRuns",
    "NotesTheLastStep",
    "PollsWithATimeout",
    "ReferenceConnector",
    "RepeatsEvents",
    "SavesTails",
    "YieldsEvents",
]
SLOW_S = 0.05
ENDS = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")


# ---- a step in flight ----


class NotesTheLastStep(Right):
    """At the end of a request it looks up how much the last step computed of it."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        self.notes = dict(scheduler_output.num_scheduled_tokens)
        return super().build_connector_meta(scheduler_output)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        if request.status.name in ENDS:
            self.notes[request.request_id] += 1
        return super().request_finished_all_groups(request, block_ids)


class HandsOverTheLastStep(Right):
    """Hands over what ran in the last step that was scheduled, and no other request."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        self.notes = dict(scheduler_output.num_scheduled_tokens)
        return super().build_connector_meta(scheduler_output)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        kept, params = super().request_finished_all_groups(request, block_ids)
        return (kept, params) if request.request_id in self.notes else (False, None)


class KeepsWhatStillRuns(Right):
    """Keeps the blocks of a request that ends while it is scheduled again. Nobody reports them."""

    runs = 0

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        self.notes, self.runs = dict(self.notes), self.runs + 1
        self.notes |= {
            id: [*self.notes.get(id, ()), self.runs] for id in scheduler_output.num_scheduled_tokens
        }
        return super().build_connector_meta(scheduler_output)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        kept, params = super().request_finished_all_groups(request, block_ids)
        ran = self.notes.pop(request.request_id, [0])
        more = len(ran) > request.num_output_tokens and ran[-1] == self.runs
        return kept or (more and request.status.name == "FINISHED_STOPPED"), params


# ---- slow hooks ----


class AsksItsServer(Right):
    """Waits 50 ms for an answer in each step."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        time.sleep(SLOW_S)
        return super().build_connector_meta(scheduler_output)


class PollsWithATimeout(Right):
    """Waits 50 ms for transfers that end, also if none is under way."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        time.sleep(SLOW_S)
        return super().get_transfer_results(finished_req_ids)


# ---- optional hooks ----


class AcceptsTails(Right):
    """Accepts partial tails and does not save them."""

    def register_finished_partial_tail(
        self, request: Any, block_ids: Any, partial_tail_offloads: Any
    ) -> bool:
        return True


class SavesTails(Right):
    """No mistake: it accepts partial tails and orders their save, as MooncakeStoreConnector does."""

    def register_finished_partial_tail(
        self, request: Any, block_ids: Any, partial_tail_offloads: Any
    ) -> bool:
        self.notes[request.request_id] = list(partial_tail_offloads)
        return True

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata: Any = super().build_connector_meta(scheduler_output)
        metadata.tails, self.notes = self.notes, {}
        return metadata


class RepeatsEvents(Right):
    """take_events returns its list, and never empties it."""

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)
        event = BlockRemoved(block_hashes=[len(self.events)], medium="CPU")
        self.__dict__.setdefault("kept", []).append(event)

    @property
    def events(self) -> list[KVCacheEvent]:
        return self.__dict__.get("kept", [])

    def take_events(self) -> Any:
        return self.events


class YieldsEvents(RepeatsEvents):
    """No mistake: a generator that empties its list, as OffloadingConnector has."""

    def take_events(self) -> Any:
        yield from self.__dict__.pop("kept", [])
