"""One engine without workers: vLLM's real scheduler with the connector's scheduler half, and a scripted worker. See scheduler_rig.py."""

from __future__ import annotations

import json
import os
import pickle
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_kvconform.result import Blocked, HarnessError, NotApplicable, Violation
from pytest_kvconform.rigs.scheduler.leaks import integers, leaks, mentions
from pytest_kvconform.rigs.scheduler.recorder import Call, Recorder
from pytest_kvconform.rigs.scheduler.violations import SchedulerStopped
from pytest_kvconform.rigs.vllm_setup.compat import resolve_kv_cache_block_sizes
from pytest_kvconform.rigs.vllm_setup.hooks import FINISHED

if TYPE_CHECKING:
    from pytest_kvconform.rigs.scheduler.rig import Rig

APART = 256  # block ids between two sides
STEPS = 200  # that a run may take
AGAIN = 5  # loads of one request after which it is no longer chance
END_OF_SEQUENCE = 2
SAID = 7  # the token that the scripted worker samples


@dataclass(frozen=True)
class WorkerReport:
    """What one rank says at the end of a step: ids of requests; `invalid` block ids (one KV cache group only)."""

    sent: Iterable[str] = ()
    received: Iterable[str] = ()
    failed: Iterable[str] = ()  # of those received
    invalid: Iterable[int] = ()


@dataclass(frozen=True)
class RequestOutput:
    """What one step said about one request."""

    tokens: tuple[int, ...]
    finish: str | None  # "stop", "length", "abort", "error"; None: it goes on
    params: dict[str, Any] | None  # kv_transfer_params, as the connector returned them


@dataclass(frozen=True)
class Step:
    """What one step did."""

    number: int  # from 1
    scheduled: dict[str, tuple[int, int]]  # request -> tokens [first, end) that are computed in it
    outputs: dict[str, RequestOutput]
    metadata: Any  # the connector's, after the way to a worker (pickle)
    has_sync_kv_loads: bool  # scheduler_output.has_sync_kv_loads: a synchronous load happens in this step
    finished: frozenset[str]  # finished_req_ids: requests of whose end the workers are notified
    preempted: frozenset[str]
    metadata_object: Any  # the metadata's own object, which the connector may still hold

    def mentions(self, request: str) -> bool:
        """Whether the metadata holds the id of a request in any place."""
        return bool(mentions(self.metadata, request))

    def block_ids_for(self, request: str) -> frozenset[int]:
        """Block ids, or other listed numbers, that the metadata holds if it mentions a request: the orders for its load or its save."""
        return integers(self.metadata) if self.mentions(request) else frozenset()


class Side:
    """One engine without workers. Made by `Rig.side`.

    Attributes: `scheduler`, `manager` (KVCacheManager), `connector`: vLLM's own objects; `ranks`: workers that report; `block_size`:
    tokens, the scheduler's; `group_sizes`: tokens a block, by KV cache group; `finished`: ids of requests that have ended; `steps`: all steps.
    """

    def __init__(self, rig: Rig, role: str, index: int, config: Any, kv_config: Any, first_block: int):
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler

        self.rig, self.role, self.name = rig, role, f"{role}{index}"
        self.config, self.kv_config, self.first_block = config, kv_config, first_block
        self.recorder = Recorder(rig.host.note_running_hook)
        self.steps: list[Step] = []
        self.finished: list[str] = []
        self.results: dict[str, RequestOutput] = {}  # of requests that ended with an output
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.worker: Callable[[Any], Any] | None = (
            None  # a real one instead of the script: SchedulerOutput -> KVConnectorOutput
        )
        self._preempting, self._taken = "", list[Any]()
        self.block_size, hash_size = resolve_kv_cache_block_sizes(kv_config, config)
        create = KVConnectorFactory.create_connector

        def create_connector(*args: Any, **kwargs: Any) -> Any:
            return self.recorder.wrap_hooks(self.recorder.call("__init__", create, *args, **kwargs))

        KVConnectorFactory.create_connector = create_connector
        try:
            self.scheduler: Any = Scheduler(
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
        self._hash = rig.host.hash_function()
        init_none_hash(self._hash)
        self._hasher = get_request_block_hasher(hash_size, self._hash)
        self._watch_allocations()

    # ---- requests -----------------------------------------------------------------------------------------------------------------

    def add(
        self,
        prompt: Iterable[int],
        params: Mapping[str, Any] | None = None,
        id: str = "",
        max_tokens: int = 1,
        *,
        stop: bool = False,
        read_cache: bool = True,
    ) -> str:
        """Hand a request to the scheduler. Returns its id.

        `params`: kv_transfer_params; they go through JSON, as through the API server. `stop`: its first token is the end of the sequence,
        so that it ends with "stop". `read_cache=False`: it must not read prefix caches, as one that wants log-probabilities of its prompt.
        Raises HarnessError if the params are no JSON.
        """
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.request import Request

        id = id or f"cmpl-{self.name}-{len(self.prompts):04d}"
        if params is not None:
            try:
                params = json.loads(json.dumps(params))
            except (TypeError, ValueError) as error:
                raise HarnessError(f"a case gave params that are no JSON: {error}") from None
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0,
            detokenize=False,
            ignore_eos=not stop,
            skip_reading_prefix_cache=not read_cache,
            extra_args=None if params is None else {"kv_transfer_params": params},
        )
        sampling.update_from_generation_config({}, END_OF_SEQUENCE)
        request = EngineCoreRequest(
            request_id=id,
            prompt_token_ids=list(prompt),
            mm_features=None,
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        self.prompts[id] = tuple(prompt)
        made = Request.from_engine_core_request(request, self._hasher)
        made.__dict__["kv_stops"] = stop
        self._guarded(self.scheduler.add_request, made)
        return id

    def step(
        self,
        sent: Iterable[str] = (),
        received: Iterable[str] = (),
        failed: Iterable[str] = (),
        invalid: Iterable[int] = (),
        *,
        ranks: tuple[WorkerReport, ...] | None = None,
    ) -> Step:
        """One step of the engine: schedule(), what the workers report, update_from_output().

        Ids in `sent` and `received` are reported by every rank; `failed` ones are reported as received as well. `ranks` says instead what
        each rank reports. Raises Violation if vLLM's scheduler cannot go on with what the connector answered.
        """
        report = WorkerReport(sent, [*received, *failed], failed, invalid)
        reports = ranks or (report,) * self.ranks
        self.recorder.step = len(self.steps) + 1
        output = self._guarded(self.scheduler.schedule)
        given = output.kv_connector_metadata
        metadata = pickle.loads(pickle.dumps(given))
        ended, preempted = frozenset(output.finished_req_ids), frozenset(output.preempted_req_ids or ())
        said: dict[str, RequestOutput] = {}
        scheduled = {
            id: (
                self.scheduler.requests[id].num_computed_tokens - number,
                self.scheduler.requests[id].num_computed_tokens,
            )
            for id, number in output.num_scheduled_tokens.items()
        }
        made = [self._rank_output(list(scheduled), one) for one in reports]
        whole = self._aggregator.aggregate(made) if self.ranks > 1 else made[0]
        if self.worker is not None:
            whole.kv_connector_output = self.worker(output)
        for batch in self._guarded(self.scheduler.update_from_output, output, whole).values():
            for one in batch.outputs:
                finish = None if one.finish_reason is None else str(one.finish_reason)
                said[one.request_id] = RequestOutput(tuple(one.new_token_ids), finish, one.kv_transfer_params)
        self.results |= {id: one for id, one in said.items() if one.finish}
        self._note_ends()
        has_sync_kv_loads = output.has_sync_kv_loads
        self.steps.append(
            Step(len(self.steps) + 1, scheduled, said, metadata, has_sync_kv_loads, ended, preempted, given)
        )
        return self.steps[-1]

    def run(self, until: Callable[[], bool] | None = None, limit: int = STEPS, sent: bool = False) -> int:
        """Step until `until()`, or until every request has ended. Every load is reported as received in the step after it began, and with
        `sent` every kept block as sent. Returns the number of steps; raises Violation if `limit` steps are not enough.
        """
        for number in range(limit + 1):
            if (
                until()
                if until is not None
                else not self.unfinished_requests() and not (sent and self.delayed_free_requests())
            ):
                return number
            self.step(
                received=[id for id in self.unfinished_requests() if self.waits_for_remote_kv(id)],
                sent=self.delayed_free_requests() if sent else (),
            )
        waiting = (
            ", ".join(f"{id} is {self.status(id)}" for id in self.unfinished_requests()) or "nobody waits"
        )
        if again := [
            (id, loads) for id in self.unfinished_requests() if (loads := self.loads_started(id)) > AGAIN
        ]:
            raise self.rig.violation(
                "KV-MATCH-005",
                f"{again[0][0]} was loaded {again[0][1]} times: each time it is asked about it is announced again",
            )
        self.require_standard_reports()
        if unsure := [id for id in self.unfinished_requests() if self.match_is_pending(id)]:
            raise self.rig.violation(
                "KV-MATCH-006",
                f"in {limit} steps get_num_new_matched_tokens knew no answer for {unsure[0]}: it waits",
            )
        raise self.rig.violation(
            "KV-LOAD-001", f"after {limit} steps {self.name} has not come to the end it was run to: {waiting}"
        )

    def abort(self, id: str, how: str = "FINISHED_ABORTED") -> None:
        """End a request from outside, in whatever state it is; `how` is a name of vLLM's RequestStatus."""
        from vllm.v1.request import RequestStatus

        self._guarded(self.scheduler.finish_requests, id, RequestStatus[how])
        self._note_ends()

    def preempt(self, id: str) -> None:
        """Preempt a running request in the next step: the scheduler finds no block for it."""
        self._preempting = id

    def take_all_free_blocks(self) -> None:
        """Take every free block from the pool, so that vLLM can allocate none. What the blocks cached is lost."""
        pool = self.manager.block_pool
        self._taken += pool.get_new_blocks(pool.get_num_free_blocks())

    def return_taken_blocks(self) -> None:
        """Free the blocks that `take_all_free_blocks` took."""
        self.manager.block_pool.free_blocks(reversed(self._taken))
        self._taken = []

    def warm_prefix_cache(self, prompt: Iterable[int], tokens: int) -> None:
        """Compute the first `tokens` tokens of a prompt with a request that the connector is told nothing about, so that they stand in the
        prefix cache of this side. What a later request hits of them, whole blocks that every KV cache group has, is vLLM's to say.
        """
        id = self.add(list(prompt)[:tokens], id=f"warm-{self.name}-{len(self.prompts):04d}")
        self.run(lambda: self.status(id) == "gone")

    def evict_prefix_cache(self) -> None:
        """Forget the prefix cache: free blocks keep no hash."""
        pool = self.manager.block_pool
        pool.evict_blocks(
            {block.block_id for block in pool.blocks if block.block_hash is not None and not block.ref_cnt}
        )

    def set_token_budget(self, tokens: int) -> None:
        """Let a step compute at most this many tokens: longer prompts are computed in chunks."""
        self.scheduler.max_num_scheduled_tokens = tokens

    # ---- looking ------------------------------------------------------------------------------------------------------------------

    def status(self, id: str) -> str:
        """Name of vLLM's RequestStatus; "gone": the scheduler does not know the request any more."""
        request = self.scheduler.requests.get(id)
        return "gone" if request is None else str(request.status.name)

    def waits_for_remote_kv(self, id: str) -> bool:
        """Whether a request waits for its KV."""
        request = self.scheduler.requests.get(id)
        return (
            request is not None
            and self.status(id) == "WAITING_FOR_REMOTE_KVS"
            and id not in self.scheduler.finished_recving_kv_req_ids
        )

    def unfinished_requests(self) -> tuple[str, ...]:
        """Requests that have not ended."""
        return tuple(id for id, request in self.scheduler.requests.items() if not request.is_finished())

    def delayed_free_requests(self) -> tuple[str, ...]:
        """Requests that have ended and whose blocks the connector keeps (it returned True), or that were cancelled while loading."""
        return tuple(id for id, request in self.scheduler.requests.items() if request.is_finished())

    def num_computed_tokens(self, id: str) -> int:
        """vLLM's num_computed_tokens of a living request."""
        return int(self.scheduler.requests[id].num_computed_tokens)

    def finished_while_loading(self, id: str) -> bool:
        """Whether a request ended while it was loading, and nobody has reported the load yet: the scheduler keeps its blocks, and the
        connector did not ask for it.
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

    def owns_block(self, block: int) -> bool:
        """Whether a number is a block id of this side's pool."""
        return self.first_block < block < self.first_block + APART

    def free_blocks(self) -> int:
        """Number of free blocks."""
        return int(self.manager.block_pool.get_num_free_blocks())

    def kv_transfer_params(self, id: str) -> dict[str, Any]:
        """What P handed over for a request that has ended, after the way through JSON. Raises NotApplicable if nothing was."""
        said = self.results.get(id)
        if said is None or said.params is None:
            said_nothing = f"{self.rig.subject.connector} returns no kv_transfer_params for a request that asks for a hand-over"
            raise NotApplicable(said_nothing, refused=len(self.prompts.get(id, ())) > self.block_size)
        found: dict[str, Any] = json.loads(json.dumps(said.params))
        return found

    @property
    def calls(self) -> tuple[Call, ...]:
        """Every call of a hook, in order."""
        return tuple(self.recorder.calls)

    def calls_of(self, hook: str, id: str | None = None) -> tuple[Call, ...]:
        """Calls of one hook, about one request. "request_finished" stands for request_finished_all_groups, too."""
        names = FINISHED if hook == "request_finished" else (hook,)
        return tuple(
            call for call in self.recorder.calls if call.hook in names and id in (None, call.request)
        )

    def match_is_pending(self, id: str) -> bool:
        """Whether the last answer about a request was None: ask again."""
        calls = self.calls_of("get_num_new_matched_tokens", id)
        return bool(calls) and calls[-1].result[0] is None

    def matched_tokens(self, id: str) -> tuple[int, bool]:
        """The last answer of get_num_new_matched_tokens for a request; (0, False) if it was never asked."""
        calls = self.calls_of("get_num_new_matched_tokens", id)
        return (calls[-1].result[0] or 0, calls[-1].result[1]) if calls else (0, False)

    def declined_to_load(self, id: str) -> bool:
        """Whether the connector announced nothing of a request of which this side lacks a whole block or more."""
        calls = self.calls_of("get_num_new_matched_tokens", id)
        lacks = calls[-1].arguments["num_tokens"] - calls[-1].arguments["num_computed_tokens"] if calls else 0
        return lacks > self.block_size and calls[-1].result[0] == 0

    def loads_started(self, id: str) -> int:
        """How many times a request was admitted with external tokens."""
        return sum(
            call.arguments["num_external_tokens"] > 0
            for call in self.calls_of("update_state_after_alloc", id)
        )

    def first_external_tokens(self, id: str) -> int:
        """External tokens with which a request was first admitted."""
        calls = self.calls_of("update_state_after_alloc", id)
        return int(calls[0].arguments["num_external_tokens"]) if calls else 0

    def leaks(self) -> tuple[str, ...]:
        """What is left although every request has ended and every kept block was sent: see `leaks.leaks`. Runs one empty step first, in
        which the connector tells its workers of the ends.
        """
        self.step()
        return leaks(self)

    def require_standard_reports(self) -> None:
        """Raise Blocked for a store whose workers report what they have saved in words of their own, which no script knows: what waits for
        such a report waits here for ever.
        """
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1 as Base

        own = type(self.connector).build_connector_worker_meta is not Base.build_connector_worker_meta
        if own and self.worker is None and self.rig.subject.profile == "store":
            raise Blocked(
                f"{self.rig.subject.connector} waits for its own workers' reports (build_connector_worker_meta); here are none"
            )

    def call_hook(self, hook: str, *args: Any) -> Any:
        """Call a hook of the connector as vLLM would; its checks apply. Raises HookRaised."""
        return getattr(self.connector, hook)(*args)

    def request(self, id: str) -> Any:
        """vLLM's own Request object."""
        return self.scheduler.requests[id]

    def update_connector_output(self, report: WorkerReport) -> None:
        """Call update_connector_output with a report alone, as vLLM does before it acts on it; empty sets are None. Raises HookRaised."""
        self.call_hook("update_connector_output", self._rank_output([], report).kv_connector_output)

    def reset_prefix_cache(self) -> bool:
        """What an operator can ask for at any time: empty the prefix cache, the connector's own included."""
        return bool(self._guarded(self.scheduler.reset_prefix_cache, False, True))

    def full_attention_groups(self) -> tuple[int, ...]:
        """KV cache groups in which every token of a request has its KV: neither a window nor a state."""
        names = [type(group.kv_cache_spec).__name__ for group in self.kv_config.kv_cache_groups]
        return tuple(
            index for index, name in enumerate(names) if name in ("FullAttentionSpec", "MLAAttentionSpec")
        )

    def connector_state(self) -> dict[str, Any]:
        """What the connector's object holds, without what vLLM has given to it."""
        given = ("_vllm_config", "_kv_transfer_config", "_kv_cache_config", "_kv_cache_manager")
        return {name: value for name, value in vars(self.connector).items() if name not in given}

    # ---- inside -------------------------------------------------------------------------------------------------------------------

    def _guarded(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call vLLM's scheduler. What it raises by itself, it raises over what the connector said or did."""
        try:
            return function(*args)
        except Violation:
            raise
        except Exception as error:
            if f"{os.sep}vllm{os.sep}" not in traceback.extract_tb(error.__traceback__)[-1].filename:
                raise
            last = next(
                (
                    f"; the connector's last answer was {c.result!r} of {c.hook}"
                    for c in reversed(self.calls)
                    if c.request
                ),
                "",
            )
            raise SchedulerStopped(self.name, error, last) from error

    def _rank_output(self, ids: list[str], report: WorkerReport) -> Any:
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        said = []
        for id in ids:
            request = self.scheduler.requests[id]
            token = END_OF_SEQUENCE if request.__dict__.get("kv_stops") else SAID
            said.append([token] if request.num_computed_tokens >= request.num_tokens else [])
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={id: index for index, id in enumerate(ids)},
            sampled_token_ids=said,
            kv_connector_output=KVConnectorOutput(
                finished_sending=set(report.sent) or None,
                finished_recving=set(report.received) or None,
                failed_recving=set(report.failed),
                invalid_block_ids=set(report.invalid),
            ),
        )

    def _note_ends(self) -> None:
        self.finished += [
            c.request for c in self.calls_of("request_finished") if c.request not in self.finished
        ]

    def _set_aside_blocks(self, first: int) -> None:
        """Take the blocks below `first` out of the pool for good: what is left has ids of this side only."""
        pool = self.manager.block_pool
        if first:
            pool.free_block_queue.popleft_n(first)
            pool.num_gpu_blocks -= first

    def _watch_allocations(self) -> None:
        allocate = self.manager.allocate_slots

        def allocate_slots(request: Any, *args: Any, **kwargs: Any) -> Any:
            victim = self.scheduler.requests.get(self._preempting)
            if victim is not None and victim in self.scheduler.running:
                self._preempting = ""
                self.scheduler.running.remove(victim)
                self.scheduler.running.append(victim)  # the last one is the one to go
                return None
            return allocate(request, *args, **kwargs)

        self.manager.allocate_slots = allocate_slots
