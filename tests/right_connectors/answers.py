"""Right connectors that answer or report later than at once, or more often than once."""

from __future__ import annotations

import time
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, KVConnectorTransferResults

from reference_connector import ReferenceConnector
from reference_connector.messages import Handoff, Lease, Load, Orders
from reference_connector.scheduler import Scheduler

Answer = tuple[int | None, bool]


class NoneBySteps(ReferenceConnector):
    """A look-up whose answer arrives with the third step after the first question, as those of vLLM's
    MooncakeStoreConnector and OffloadingConnector.
    """

    later: float = 3  # steps
    none: Answer = (None, False)

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.first_asked: dict[str, float] = {}
        self.steps = 0

    def now(self) -> float:
        return self.steps

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        answer = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if (
            answer[0]
            and self.now() - self.first_asked.setdefault(request.request_id, self.now()) < self.later
        ):
            return self.none
        return answer

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        self.steps += 1
        return super().build_connector_meta(scheduler_output)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        self.first_asked.pop(request.request_id, None)
        return super().request_finished_all_groups(request, block_ids)


class NoneByTime(NoneBySteps):
    """A look-up that takes 150 ms, as one that asks a metadata server."""

    later = 0.15  # seconds

    def now(self) -> float:
        return time.monotonic()


class NoneTrue(NoneBySteps):
    """(None, True) the first time, as vLLM's LMCacheMPConnector."""

    later, none = 1, (None, True)


class NoneForStrangers(NoneBySteps):
    """A look-up for every request, also for those without kv_transfer_params, as that of a connector that
    looks prompts up in a store before it reads the params.
    """

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        if self.now() - self.first_asked.setdefault(request.request_id, self.now()) < self.later:
            return self.none
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


class OutOfOrder(NoneForStrangers):
    """Of two requests the second one has its answer first, as with a thread for each look-up."""

    later = 1

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        at_once = len(self.first_asked) % 2
        self.first_asked.setdefault(request.request_id, self.now() - at_once * self.later)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


class OtherHalf(ReferenceConnector):
    """The reference connector with another scheduler half."""

    half: type[Half]

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler.__class__ = self.half
            self._scheduler.start()

    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler.failed = set(connector_output.failed_recving or ())
        super().update_connector_output(connector_output)


class Half(Scheduler):
    """A scheduler half that knows which loads have failed, and which requests ended while they loaded."""

    def start(self) -> None:
        self.failed: set[str] = set()  # of the report that is being read
        self.ended: set[str] = set()
        self.noted: set[str] = set()

    def request_finished(self, request: Any, blocks: Any) -> Any:
        self.noted.discard(request.request_id)
        if request.request_id in self._loading:
            self.ended.add(request.request_id)
        return super().request_finished(request, blocks)

    def on_loads_finished(self, names: set[str] | None) -> None:
        for name in names or ():
            if name in self._loading and name not in self.ended and self.keeps(name):
                self._loading.discard(name)  # it may be announced again, and P is not notified
                self.noted.add(name)
            else:
                super().on_loads_finished({name})
            self.ended.discard(name)

    def keeps(self, name: str) -> bool:
        """Whether a load whose end was reported leaves P's blocks as they are."""
        return False


class StrictHalf(Half):
    def on_loads_finished(self, names: set[str] | None) -> None:
        for name in names or ():
            if name in self.noted:
                raise KeyError(name)
            if name in self._loading and name not in self.ended:
                self.noted.add(name)
        super().on_loads_finished(names)


class StrictBookkeeping(OtherHalf):
    """Takes the report on a load once, as vLLM's scheduler, which asserts on a second one."""

    half = StrictHalf


class RetriesHalf(Half):
    def keeps(self, name: str) -> bool:
        return name in self.failed and name not in self.noted


class Retries(OtherHalf):
    """Loads once more what has failed once, with kv_load_failure_policy=recompute: D has not notified P, so
    that P still keeps it.
    """

    half = RetriesHalf


class LoadsAgainHalf(Half):
    def keeps(self, name: str) -> bool:
        return name not in self.failed

    def update_state_after_alloc(self, request: Any, blocks: Any, external: int) -> None:
        if external > 0 or request.request_id not in self.noted:
            super().update_state_after_alloc(request, blocks, external)


class LoadsAgain(OtherHalf):
    """D notifies P when D's request has ended, and not when its load has. After a preemption D loads the same
    blocks again, which costs less than to compute them.
    """

    half = LoadsAgainHalf


class OneLoadHalf(Half):
    def get_num_new_matched_tokens(self, request: Any, computed: int) -> Any:
        answer = super().get_num_new_matched_tokens(request, computed)
        return (None, False) if answer[0] and self._loading else answer


class BusyHalf(Half):
    def get_num_new_matched_tokens(self, request: Any, computed: int) -> Any:
        return (0, False) if self._loading else super().get_num_new_matched_tokens(request, computed)


class ComputesWhenBusy(OtherHalf):
    """Loads one request at a time. D computes the prompts of those that come meanwhile."""

    half = BusyHalf


class OneLoadAtATime(OtherHalf):
    """Loads one request after the other, for the sake of latency: the others are asked later. Requests that
    load nothing go on.
    """

    half = OneLoadHalf


class LaterHalf(Half):
    def start(self) -> None:
        super().start()
        self.waiting: list[tuple[int, Orders]] = []
        self.steps = 0

    def take_orders(self) -> Orders:
        self.steps += 1
        orders = super().take_orders()
        if orders.loads:
            self.waiting.append((self.steps + 2, Orders(loads=orders.loads)))
        orders.loads = {}
        while self.waiting and self.waiting[0][0] <= self.steps:
            orders.loads |= self.waiting.pop(0)[1].loads
        return orders


class OrdersLater(OtherHalf):
    """Hands each load to the workers two steps after its blocks were allocated, as a connector that limits
    how much is under way. The request waits for remote KV meanwhile.
    """

    half = LaterHalf


class GrowsHalf(Half):
    def start(self) -> None:
        super().start()
        self.known: dict[Lease, tuple[int, int]] = {}  # how often D asked, and what D had itself

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> Any:
        if handoff := self._handoffs.get(request.request_id):
            self.known[handoff.lease] = self.known.get(handoff.lease, (0, 0))[0] + 1, computed
        return super().get_num_new_matched_tokens(request, computed)

    def _forget(self, name: str) -> None:
        if handoff := self._handoffs.get(name):
            self.known.pop(handoff.lease, None)
        super()._forget(name)

    def _stop(self, handoff: Handoff, prompt: int) -> int:
        stop = super()._stop(handoff, prompt)
        if any(group.state or group.window for group in self._groups):
            return stop  # P has these for the end of the prompt alone
        tokens = max(group.tokens for group in self._groups)
        asked, computed = self.known.get(handoff.lease, (0, 0))
        return min(stop, (computed // tokens + asked) * tokens)


class AnswersMoreLater(OtherHalf):
    """P's blocks become available one after the other: D is told of one more at each question. The answer of
    the step in which the request gets its blocks counts, and D computes the rest. States and windows are
    there at once.
    """

    half = GrowsHalf


class OnceHalf(Half):
    def start(self) -> None:
        super().start()
        self.taken: set[Lease] = set()

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)
        handoff = self._handoffs.get(request.request_id)
        if handoff is None:
            return
        if handoff.lease in self.taken:
            self._leases[handoff.lease].requests.discard(request.request_id)
            del self._handoffs[request.request_id]
        self.taken.add(handoff.lease)

    def _forget(self, name: str) -> None:
        handoff = self._handoffs.get(name)
        super()._forget(name)
        if handoff is not None and name not in self._handoffs:
            self.taken.discard(handoff.lease)


class ServesOnce(OtherHalf):
    """Gives what P has computed to one request. D computes another one with the same params."""

    half = OnceHalf


class NoEvents(ReferenceConnector):
    """take_events returns None: vLLM's scheduler tests the truth of the events. MultiConnector iterates over
    them, so that this is wrong inside it.
    """

    def take_events(self) -> Any:
        return None


class TakesItsTime(ReferenceConnector):
    """Takes two seconds on P and two on D: with deadlines of a tenth, a hand-over has three on each."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        if (request.kv_transfer_params or {}).get("do_remote_decode"):
            time.sleep(2.0)
        return super().request_finished_all_groups(request, block_ids)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if (request.kv_transfer_params or {}).get("do_remote_prefill"):
            time.sleep(2.0)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


class FailsByBlocks(ReferenceConnector):
    """Reports the blocks of a load that has failed, and the request a step later and not as failed: as
    MoRIIOConnector and other connectors with get_finished. vLLM takes that for one KV cache group only.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.one_group = len(kv_cache_config.kv_cache_groups) == 1
        self.loads: dict[str, Load] = {}
        self.invalid: set[int] = set()
        self.late: set[str] = set()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata: Any = self._get_connector_metadata()
        self.loads |= metadata.orders.loads
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        failed = results.failed_recving if self.one_group else set()
        for name in failed:
            self.invalid.update(block for group in self.loads[name].groups for block in group.blocks if block)
        received = results.finished_recving - failed | self.late
        self.late = failed
        self.loads = {name: load for name, load in self.loads.items() if name not in received}
        return KVConnectorTransferResults(results.finished_sending, received, results.failed_recving - failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self.invalid = self.invalid, set()
        return invalid
