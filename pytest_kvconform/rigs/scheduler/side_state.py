"""One engine without workers, as a case looks at it: vLLM's scheduler with the connector's scheduler half."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pytest_kvconform.result import NotApplicable
from pytest_kvconform.rigs.context import SHORTER, times_longer
from pytest_kvconform.rigs.engine.messages import LOADING
from pytest_kvconform.rigs.engine.router import RENDEZVOUS, decode_params
from pytest_kvconform.rigs.history import Call
from pytest_kvconform.rigs.scheduler.connector_class import miss_reports
from pytest_kvconform.rigs.scheduler.recorder import Recorder
from pytest_kvconform.rigs.scheduler.steps import RequestOutput, Step, load_is_ordered, ordered_ids
from pytest_kvconform.rigs.vllm_setup.answers import params_after_the_way
from pytest_kvconform.rigs.vllm_setup.compat import resolve_kv_cache_block_sizes
from pytest_kvconform.rigs.vllm_setup.engine_config import block_hasher
from pytest_kvconform.rigs.vllm_setup.hooks import FINISHED

if TYPE_CHECKING:
    from pytest_kvconform.rigs.scheduler.own_workers.own_reports import OwnReports
    from pytest_kvconform.rigs.scheduler.rig import Rig
    from pytest_kvconform.subject import Subject

RANKS = 8  # how far apart the ports of two sides are: a connector may add its rank
BLOCKS_APART = 256  # block ids between two sides, and below those of the first one; times `longer`
BLOCK = 16  # tokens of the smallest block of the cells
BLOCKS = 100  # of a side, the null block not included; times `longer`
LENGTH = 3 * BLOCK  # tokens of a prompt: most have fewer
# get_num_new_matched_tokens may answer None as long as this, and at least so many times. vLLM has no limit.
# The look-ups of real connectors take some steps (OffloadingConnector), or a round trip to a server.
ANSWER_S, OF_WORKERS_S, ANSWER_STEPS = 2.0, 10.0, 50


def first_block(subject: Subject, index: int) -> int:
    """The block id below those of side number `index`, from 0.

    Small numbers are block ids of no side: connectors also keep lists of ranks, layers and groups.
    """
    return BLOCKS_APART * longer(subject) * (index + 1)


def longer(subject: Subject) -> int:
    """How many times as many blocks a side has for a connector that loads long prompts only."""
    return times_longer(subject, BLOCK, LENGTH)


class SideState:
    """Builds vLLM's scheduler and reads it. `side.Side` drives it.

    Attributes: `scheduler`, `manager` (KVCacheManager), `connector`: vLLM's own objects; `ranks`: workers
    that report; `block_size`: tokens, the scheduler's; `group_sizes`: tokens a block, by KV cache group;
    `finished`: ids of requests that have ended; `steps`: all steps; `results`: last outputs of requests that
    ended.
    """

    def __init__(self, rig: Rig, role: str, index: int, config: Any, kv_config: Any, first_block: int):
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator

        self.rig, self.role, self.name = rig, role, f"{role}{index}"
        self.config, self.kv_config, self.first_block = config, kv_config, first_block
        # where peers find this engine, see router.Placed
        self.kv_transfer_config = {"engine_id": config.kv_transfer_config.engine_id}
        self.environment = dict(os.environ)
        self.tensor_parallel: int = config.parallel_config.tensor_parallel_size
        self.recorder = Recorder(rig.host.note_running_hook, self.name)
        self.worker: Callable[[Any], Any] | None = None  # a real worker half: output of a step -> its report
        self.own: OwnReports | None = None  # the same, of a side whose connector waits for what it reports
        self.steps: list[Step] = []
        self.finished: list[str] = []
        self.results: dict[str, RequestOutput] = {}  # of requests that ended with an output
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.with_params: set[str] = set()  # ids of requests that a case gave kv_transfer_params
        self._taken: list[Any] = []
        self.transfer_ids: dict[str, str] = {}  # of requests on which P and D meet by an id
        self.block_size, hash_size = resolve_kv_cache_block_sizes(kv_config, config)
        create = KVConnectorFactory.create_connector

        def create_connector(*args: Any, **kwargs: Any) -> Any:
            return self.recorder.wrap_hooks(self.recorder.call("__init__", create, *args, **kwargs))

        KVConnectorFactory.create_connector = create_connector
        try:
            self.scheduler: Any = config.scheduler_config.get_scheduler_cls()(
                vllm_config=config,
                kv_cache_config=kv_config,
                structured_output_manager=rig.host.structured_output,
                block_size=self.block_size,
                hash_block_size=hash_size,
                log_stats=True,
            )
        finally:
            KVConnectorFactory.create_connector = create
        self.connector = self.scheduler.connector
        self.manager = self.scheduler.kv_cache_manager
        self.group_sizes = tuple(
            manager.block_size for manager in self.manager.coordinator.single_type_managers
        )
        self._set_aside_blocks(first_block)
        self.free_blocks_at_start = self.manager.block_pool.get_num_free_blocks()
        self.ranks = config.parallel_config.world_size
        self._aggregator = KVOutputAggregator.from_connector(self.connector, self.ranks)
        self._hasher = block_hasher(config, hash_size)

    def status(self, id: str) -> str:
        """Name of vLLM's RequestStatus; "gone": the scheduler does not know the request any more."""
        request = self.scheduler.requests.get(id)
        return "gone" if request is None else str(request.status.name)

    def waits_for_remote_kv(self, id: str) -> bool:
        """Whether a request is in WAITING_FOR_REMOTE_KVS and no worker has reported its load."""
        request = self.scheduler.requests.get(id)
        return (
            request is not None
            and self.status(id) == LOADING
            and id not in self.scheduler.finished_recving_kv_req_ids
        )

    def unfinished_requests(self) -> tuple[str, ...]:
        """Requests that have not ended."""
        return tuple(id for id, request in self.scheduler.requests.items() if not request.is_finished())

    def delayed_free_requests(self) -> tuple[str, ...]:
        """Requests that have ended and whose blocks are not freed yet.

        request_finished returned True, or the requests were loading.
        """
        return tuple(id for id, request in self.scheduler.requests.items() if request.is_finished())

    def num_computed_tokens(self, id: str) -> int:
        """num_computed_tokens of a request that vLLM's scheduler has."""
        return int(self.scheduler.requests[id].num_computed_tokens)

    def finished_while_loading(self, id: str) -> bool:
        """Whether a request ended while it was loading and no worker has reported the load yet.

        The scheduler keeps its blocks although request_finished did not ask for it.
        """
        return id in self.delayed_free_requests() and not any(
            call.result[0] for call in self.calls_of("request_finished", id)
        )

    def locally_computed_tokens(self, id: str) -> int:
        """Prompt tokens of a request that went through this side's model, each counted once."""
        spans = [step.scheduled[id] for step in self.steps if id in step.scheduled]
        return len({token for first, end in spans for token in range(first, min(end, len(self.prompts[id])))})

    def blocks(self, id: str) -> tuple[tuple[int, ...], ...]:
        """Block ids of a request, by KV cache group; 0 is the null block."""
        return tuple(tuple(ids) for ids in self.manager.get_block_ids(id))

    def blocks_had(self, id: str) -> frozenset[int]:
        """Block ids that a request had when vLLM allocated them, and at its end."""
        tables = [
            call.arguments["blocks"]
            for hook in ("update_state_after_alloc", "request_finished")
            for call in self.calls_of(hook, id)
        ]
        return frozenset(block for table in tables for group in table for block in group if block)

    def owns_block(self, block: int) -> bool:
        """Whether a number is a block id of this side's pool."""
        return self.first_block < block < self.first_block + BLOCKS_APART * longer(self.rig.subject)

    def unused_blocks(self) -> frozenset[int]:
        """Blocks that nobody references: vLLM may give them to any request."""
        return frozenset(one.block_id for one in self.manager.block_pool.blocks if not one.ref_cnt)

    def free_blocks(self) -> int:
        """Number of free blocks."""
        return int(self.manager.block_pool.get_num_free_blocks())

    def kv_transfer_params(self, id: str) -> dict[str, Any]:
        """kv_transfer_params that P returned for a request that has ended, as they reach D.

        With rendezvous the router adds the id and P's address. Raises NotApplicable if P returned none.
        """
        output = self.results.get(id)
        if self.rig.subject.handover == RENDEZVOUS and output is not None:
            given = self._decode_params(id, self.rig.subject.way)
            return given if self.rig.subject.hook else params_after_the_way((output.params or {}) | given)
        if output is None or output.params is None:
            what = "returns no kv_transfer_params for a request that asks for a hand-over"
            sentence = f"{self.rig.subject.connector} {what}"
            long = len(self.prompts.get(id, ())) > self.block_size
            raise NotApplicable(sentence, refused=long and not self.rig.subject.is_store)
        return params_after_the_way(output.params)

    def telling_params(self, id: str) -> dict[str, Any]:
        """What may tell D of a request of P that has ended: what P returned, and `kv_transfer_params`.

        Params that a function of the author makes may name neither P's engine nor the transfer. D learns both
        where it meets P, so they are added.
        """
        made_of = self._decode_params(id, RENDEZVOUS) if self.rig.subject.hook else {}
        names = {key: made_of[key] for key in ("remote_engine_id", "transfer_id") if key in made_of}
        return (self.returned_params(id) or {}) | names | self.kv_transfer_params(id)

    def returned_params(self, id: str) -> dict[str, Any] | None:
        """kv_transfer_params as P returned them for a request that has ended; None: it returned none."""
        output = self.results.get(id)
        return None if output is None else output.params

    def _decode_params(self, id: str, way: str) -> dict[str, Any]:
        return decode_params(way, self.transfer_ids.get(id, ""), self, self.returned_params(id)) or {}

    @property
    def calls(self) -> tuple[Call, ...]:
        """Every call of a hook, in order."""
        return tuple(self.recorder.calls)

    def calls_of(self, hook: str, id: str | None = None) -> tuple[Call, ...]:
        """Calls of one hook, about one request.

        "request_finished" stands for request_finished_all_groups, too.
        """
        names = FINISHED if hook == "request_finished" else (hook,)
        return tuple(
            call for call in self.recorder.calls if call.hook in names and id in (None, call.request)
        )

    def match_is_pending(self, id: str) -> bool:
        """Whether get_num_new_matched_tokens answered None for a request in the last step: vLLM asks
        again.
        """
        unsure = self.recorder.unsure.get(id)
        return unsure is not None and unsure.step == len(self.steps)

    def match_is_overdue(self, id: str) -> bool:
        """Whether get_num_new_matched_tokens has answered None for a request ANSWER_STEPS times or more, and
        for longer than `patience_s`.
        """
        unsure = self.recorder.unsure.get(id)
        if unsure is None or unsure.times < ANSWER_STEPS:
            return False
        if overdue := unsure.since.passed() > self.patience_s:
            miss_reports(self)
        return overdue

    @property
    def patience_s(self) -> float:
        """How long get_num_new_matched_tokens may answer None. Real workers wait for peers meanwhile."""
        if self.own is None:
            return self.rig.scaled_seconds(ANSWER_S)
        return self.rig.scaled_seconds(OF_WORKERS_S) * (SHORTER if self.rig.waited else 1.0)

    def matched_tokens(self, id: str) -> tuple[int, bool]:
        """The last answer of get_num_new_matched_tokens for a request, None not included; (0, False): there
        was none.
        """
        answers = self.match_answers(id)
        return answers[-1] if answers else (0, False)

    def match_answers(self, id: str, since: int = 0) -> list[tuple[int, bool]]:
        """The answers of get_num_new_matched_tokens for a request after its first `since` calls. None is no
        answer.
        """
        calls = self.calls_of("get_num_new_matched_tokens", id)[since:]
        return [(call.result[0], bool(call.result[1])) for call in calls if call.result[0] is not None]

    def declined_to_load(self, id: str) -> bool:
        """Whether get_num_new_matched_tokens answered 0 although this side lacks a whole block or more."""
        calls = self.calls_of("get_num_new_matched_tokens", id)
        lacks = calls[-1].arguments["num_tokens"] - calls[-1].arguments["num_computed_tokens"] if calls else 0
        return lacks > self.block_size and calls[-1].result[0] == 0

    def load_is_ordered(self, id: str) -> bool:
        """Whether the metadata has ordered all of the last load of a request: see steps.py."""
        return load_is_ordered(self, id)

    def ordered_ids(self, id: str) -> frozenset[int]:
        """Block ids, and other numbers in lists, of metadata that has mentioned a request since its last load
        began. See `Step.block_ids_for`.
        """
        return ordered_ids(self, id)

    def ordered_loads(self) -> list[str]:
        """Requests that wait for remote KV and whose loads are ordered, in the last step at the latest."""
        waiting = [id for id in self.unfinished_requests() if self.waits_for_remote_kv(id)]
        return [id for id in waiting if self.load_is_ordered(id)]

    def loads_started(self, id: str) -> int:
        """How many times update_state_after_alloc was called with external tokens for a request."""
        return sum(
            call.arguments["num_external_tokens"] > 0
            for call in self.calls_of("update_state_after_alloc", id)
        )

    def first_external_tokens(self, id: str) -> int:
        """External tokens of the first call of update_state_after_alloc for a request."""
        calls = self.calls_of("update_state_after_alloc", id)
        return int(calls[0].arguments["num_external_tokens"]) if calls else 0

    def request(self, id: str) -> Any:
        """vLLM's own Request object."""
        return self.scheduler.requests[id]

    def full_attention_groups(self) -> tuple[int, ...]:
        """KV cache groups in which every token of a request has its KV: neither a window nor a state."""
        names = [type(group.kv_cache_spec).__name__ for group in self.kv_config.kv_cache_groups]
        return tuple(
            index for index, name in enumerate(names) if name in ("FullAttentionSpec", "MLAAttentionSpec")
        )

    def forget_records(self) -> None:
        """Drop the records of steps and calls, and empty the prefix cache, before a scenario is repeated."""
        self.steps.clear()
        self.recorder.forget()
        self.results.clear()
        self.evict_prefix_cache()

    def evict_prefix_cache(self) -> None:
        """Empty the prefix cache: free blocks lose their hashes. The connector is not notified."""
        pool = self.manager.block_pool
        pool.evict_blocks(
            {block.block_id for block in pool.blocks if block.block_hash is not None and not block.ref_cnt}
        )

    def _set_aside_blocks(self, first: int) -> None:
        """Take the blocks below `first` out of the pool for good: block ids of two sides then differ."""
        pool = self.manager.block_pool
        if first:
            pool.free_block_queue.popleft_n(first)
            pool.num_gpu_blocks -= first
