"""Stores with a fault hook: right ones, which load in the step or between steps, and wrong ones.

The transfers that can fail are loads: one for each request. A save is none, see docs/stores.md.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from tests.faults.fault_hook import FaultHook
from tests.right_connectors.stores import InMemory, LooksUpInTheBackground, Orders, Part, WholeBlocks

STEP_S = 0.005  # for each step that a load is late which the step waits for
LATER = 8  # steps, while another load is still under way
FAILS_FIRST = 20  # tokens of the prompt whose load is to fail
WAITS = 5  # questions about the other prompt before its answer; the first load has failed by then


class _Hooked(FaultHook):
    """A store's class comes after it."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        FaultHook.__init__(self)
        super(FaultHook, self).__init__(vllm_config, role, kv_cache_config)


class _InTheStep(_Hooked):
    """Loads within the step that reads, and reports the blocks that it could not load."""

    invalid: frozenset[int] = frozenset()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for parts in self._get_connector_metadata().loads.values():
            what, steps = self.fault_of_next()
            time.sleep(steps * STEP_S)
            if what == "fail":
                self.invalid |= {block for _, block in parts}
            else:
                self.load(parts)

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self.invalid = self.invalid, frozenset()
        return set(invalid)


class InTheStep(_InTheStep, WholeBlocks):
    """No mistake: a store in a folder."""


class InMemoryInTheStep(_InTheStep, InMemory):
    """No mistake: a store in the memory of its process."""


class BetweenSteps(_Hooked, LooksUpInTheBackground):
    """No mistake: loads in threads, and names the requests whose load has failed."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.delayed: list[tuple[int, threading.Thread]] = []  # steps that a load waits
        self.failed: set[str] = set()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for id, parts in self._get_connector_metadata().loads.items():
            what, steps = self.fault_of_next()
            if what == "fail":
                self.fail(id, parts)
                continue
            self.loading[id] = threading.Thread(target=self.load, args=(parts,), daemon=True)
            self.delayed.append((steps, self.loading[id]))
        self.begin(0)

    def fail(self, id: str, parts: list[Part]) -> None:
        self.failed.add(id)

    def begin(self, steps: int) -> None:
        """Begin the loads that have waited long enough."""
        waiting = [(0 if self.start_delayed else left - steps, thread) for left, thread in self.delayed]
        self.delayed = [one for one in waiting if one[0] > 0]
        for left, thread in waiting:
            if left <= 0:
                thread.start()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        self.begin(1)
        waiting = {thread for _, thread in self.delayed}
        ended = {id for id, one in self.loading.items() if one not in waiting and not one.is_alive()}
        self.loading = {id: thread for id, thread in self.loading.items() if id not in ended}
        failed, self.failed = self.failed, set()
        return KVConnectorTransferResults(set(), ended | failed, failed)


# ---- wrong ------------------------------------------------------------------------------------------------


class ServesWhatFailed(InTheStep):
    """Reports nothing of a load that has failed: D computes with what lies in the blocks."""

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set()


class ServesWhatFailedInMemory(InMemoryInTheStep):
    """The same, in the engine that has saved."""

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set()


class ReportsSuccess(BetweenSteps):
    """Reports a load that has failed as finished."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        found = super().get_transfer_results(finished_req_ids)
        return KVConnectorTransferResults(set(), found.finished_recving, set())


class ReportsNothing(BetweenSteps):
    """Reports a load that has failed neither as finished nor as failed."""

    def fail(self, id: str, parts: list[Part]) -> None:
        pass


class FailsTheOthers(InTheStep):
    """Reports the blocks of every load of a step in which one has failed."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        if self.invalid:
            loads = self._get_connector_metadata().loads.values()
            self.invalid |= {block for parts in loads for _, block in parts}


class _WithinStart(threading.Thread):
    """Has ended when `start` returns, however busy the machine is."""

    def start(self) -> None:
        self.run()


class WritesAfterFailure(BetweenSteps):
    """Goes on with a load that it has reported as failed, after the request has ended."""

    def fail(self, id: str, parts: list[Part]) -> None:
        super().fail(id, parts)
        self.delayed.append((LATER, _WithinStart(target=self.load, args=(parts,))))


class WritesIntoFreedBlocks(WritesAfterFailure):
    """The same. The other request gets its blocks when those of the failed load are free again."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.asked: Counter[str] = Counter()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self.asked[request.request_id] += 1
        if request.num_tokens > FAILS_FIRST and self.asked[request.request_id] <= WAITS:
            return None, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


class NeverEndsASave(InTheStep):
    """Keeps the blocks of requests of which it saves something, and never reports that it has saved them."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.saving: set[str] = set()

    def build_connector_meta(self, scheduler_output: Any) -> Orders:
        orders = super().build_connector_meta(scheduler_output)
        self.saving |= orders.saves.keys()
        return orders

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        super().request_finished(request, block_ids)
        return request.request_id in self.saving, None
