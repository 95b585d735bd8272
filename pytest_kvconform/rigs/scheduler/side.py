"""One engine without workers, as a case drives it: requests, scripted reports, ends. See rig.py."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable, Container, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pytest_kvconform.result import HarnessError, NotApplicable, Violation
from pytest_kvconform.rigs.engine.router import transfer_id_of
from pytest_kvconform.rigs.engine.stopped import SchedulerStopped
from pytest_kvconform.rigs.scheduler.connector_class import require_standard_reports
from pytest_kvconform.rigs.scheduler.leaks import leaks, told_ends, untold_ends
from pytest_kvconform.rigs.scheduler.side_state import SideState
from pytest_kvconform.rigs.scheduler.steps import (
    END_OF_SEQUENCE,
    Flight,
    RequestOutput,
    Step,
    WorkerReport,
    engine_request,
    rank_output,
    watch_allocations,
)
from pytest_kvconform.rigs.scheduler.violations import is_of_suite

if TYPE_CHECKING:
    from pytest_kvconform.rigs.scheduler.rig import Rig

STEPS = 200  # that a run may take, without those in which the connector's answer is awaited
PAUSE_S = 0.001  # after a step that computes nothing, as vLLM's EngineCore._process_engine_step makes it
MAX_LOADS = 5  # of one request; more are no chance
OF_RANKS = "KV-RANK-001 and KV-RANK-005 look at the ranks that report"
SAMPLED, POOLED = 7, (1.0,)  # the token that the scripted worker samples, and what it pools


class Side(SideState):
    """One engine without workers. Made by `Rig.side`."""

    def __init__(self, rig: Rig, role: str, index: int, config: Any, kv_config: Any, first_block: int):
        super().__init__(rig, role, index, config, kv_config, first_block)
        # Whether the scripted workers report every load in the step in which it is ordered.
        self.report_loads_at_once = False
        # Whether a step is in flight when the next one is scheduled: vLLM's asynchronous scheduling.
        self.asynchronous = bool(config.scheduler_config.async_scheduling)
        self._in_flight: Flight | None = None
        self.preempting, self.preemptions = "", 0  # see steps.watch_allocations
        watch_allocations(self)

    # ---- requests ------------------------------------------------------------------------------------------

    def add(
        self,
        prompt: Iterable[int],
        params: Mapping[str, Any] | None = None,
        id: str = "",
        max_tokens: int = 1,
        *,
        stop: bool = False,
        read_cache: bool = True,
        kind: str = "",
        **fields: Any,
    ) -> str:
        """Hand a request to the scheduler. Returns its id.

        `params`: kv_transfer_params; they go through JSON, as through the API server. `stop`: its first token
        is the end of the sequence, so that it ends with "stop". `read_cache=False`: it must not read prefix
        caches, as one that wants log-probabilities of its prompt. `kind`: see `steps.engine_request`.
        `fields`: further ones of vLLM's EngineCoreRequest. Raises HarnessError if the params are no JSON.
        """
        from vllm.v1.request import Request

        id = id or f"cmpl-{self.name}-{len(self.prompts):04d}"
        if params is not None:
            try:
                params = json.loads(json.dumps(params))
            except (TypeError, ValueError) as error:
                raise HarnessError(f"a case gave params that are no JSON: {error}") from None
        request = engine_request(id, list(prompt), params, max_tokens, stop, read_cache, kind, fields)
        self.prompts[id] = tuple(prompt)
        if params is not None:
            self.with_params.add(id)
        self.transfer_ids[id] = transfer_id_of(params)
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
        """Take one step of the engine: schedule(), the reports of the workers, update_from_output().

        Ids in `sent` and `received` are reported by every rank; `failed` ones are reported as received as
        well. `ranks` gives the reports of each rank instead. With asynchronous scheduling they are those of
        the step before, which is in flight during schedule(). Raises Violation if vLLM's scheduler cannot go
        on with what the connector answered, and NotApplicable for `ranks` if not every rank is to report.
        """
        count = self._aggregator._expected_finished_count
        if ranks and 1 <= count < self.ranks:
            raise NotApplicable(f"get_finished_count returned {count} for {self.ranks} ranks: {OF_RANKS}")
        if ranks and self.own is not None and self.rig.host.spec.tensor_parallel[self.role] > 1:
            raise NotApplicable(f"one rank reports what the connector's workers say themselves: {OF_RANKS}")
        report = WorkerReport([*sent], [*received, *failed], failed, invalid)
        if self.own is not None:
            self.own.wait_for(ranks[0] if ranks else report)
        self.take_step(ranks or (report,) * self.ranks)
        return self.steps[-1]

    def take_step(self, reports: tuple[WorkerReport, ...]) -> None:
        """Take one step with these reports, one a rank, see `step`."""
        if self.asynchronous and self._in_flight is None:
            self._in_flight = self._schedule()  # EngineCore.step_with_batch_queue first fills its queue
        ending = flight = self._schedule()
        if self.asynchronous:
            assert self._in_flight is not None
            ending, self._in_flight = self._in_flight, flight
        self._update(ending, reports)
        if self.recorder.unsure and not flight.sampled:
            time.sleep(PAUSE_S)
            if self.own is not None:
                self.rig.step_others(self)

    def end_flight(self) -> None:
        """Give the scheduler the output of the step that is in flight, if there is one."""
        flight, self._in_flight = self._in_flight, None
        if flight is not None:
            self._update(flight, (WorkerReport(),) * self.ranks)

    def _schedule(self) -> Flight:
        """Call schedule(), run a real worker, and note the step."""
        self.recorder.step = len(self.steps) + 1
        output = self._guarded(self.scheduler.schedule)
        given = output.kv_connector_metadata
        metadata = pickle.loads(pickle.dumps(given))
        ended, preempted = frozenset(output.finished_req_ids), frozenset(output.preempted_req_ids or ())
        scheduled, sampled, pooled, outputs = {}, {}, {}, dict[str, RequestOutput]()
        for id, number in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[id]
            scheduled[id] = request.num_computed_tokens - number, request.num_computed_tokens
            token = END_OF_SEQUENCE if request.__dict__.get("kv_stops") else SAMPLED
            done = request.num_computed_tokens >= request.num_tokens
            sampled[id] = [token] if done and not request.pooling_params else []
            pooled[id] = POOLED if done and request.pooling_params else None
        reported = self.worker(output) if self.worker is not None else None
        synchronous = output.has_sync_kv_loads
        self.steps.append(
            Step(len(self.steps) + 1, scheduled, outputs, metadata, synchronous, ended, preempted, given)
        )
        ordered = tuple(self.ordered_loads()) if self.report_loads_at_once else ()
        return Flight(output, sampled, pooled, outputs, ordered, reported)

    def _update(self, flight: Flight, reports: tuple[WorkerReport, ...]) -> None:
        """Call update_from_output() with the reports of the workers."""
        if self.report_loads_at_once:
            reports = (WorkerReport(received=flight.ordered),) * self.ranks
        made = [flight.rank_output(one) for one in reports]
        whole = self._aggregator.aggregate(made) if self.ranks > 1 else made[0]
        if self.own is not None:
            whole.kv_connector_output = self.own.merged(flight.worker, whole.kv_connector_output)
        elif self.worker is not None:
            whole.kv_connector_output = flight.worker
        flight.note_outputs(self._guarded(self.scheduler.update_from_output, flight.output, whole))
        if self.own is not None:
            self.own.require_held()
        self.results |= {id: one for id, one in flight.outputs.items() if one.finish}
        self._note_ends()

    def run(
        self,
        until: Callable[[], bool] | None = None,
        limit: int = STEPS,
        sent: bool = False,
        failing: Container[str] = (),
    ) -> int:
        """Step until `until()`, or until every request has ended.

        The workers report every load in the step after it was ordered: those of the requests in `failing` as
        failed, and the others as received. They report what `leaks.told_ends` returns as sent, and with
        `sent` every delayed free. Returns the number of steps. Raises Violation after `limit` steps, and if
        get_num_new_matched_tokens answers None for too long. Steps in which it answered None do not count.
        """
        first, counted, overdue = len(self.steps), 0, False
        while counted <= limit and not overdue:
            scripted = () if self.worker is not None else untold_ends(self) + told_ends(self)
            kept = self.delayed_free_requests() if sent else scripted
            ended = not self.unfinished_requests() and not kept
            if until() if until is not None else ended:
                return len(self.steps) - first
            begun = [id for id in self.unfinished_requests() if self.waits_for_remote_kv(id)]
            loading = [id for id in begun if self.load_is_ordered(id)]
            self.step(
                received=[id for id in loading if id not in failing],
                failed=[id for id in loading if id in failing],
                sent=self.delayed_free_requests() if sent else told_ends(self),
            )
            counted += not any(map(self.match_is_pending, self.unfinished_requests()))
            overdue = any(map(self.match_is_overdue, self.unfinished_requests()))
        steps = len(self.steps) - first
        waiting = (
            ", ".join(f"{id} is {self.status(id)}" for id in self.unfinished_requests()) or "no request waits"
        )
        if again := [
            (id, loads) for id in self.unfinished_requests() if (loads := self.loads_started(id)) > MAX_LOADS
        ]:
            raise self.rig.violation(
                "KV-MATCH-005",
                f"{again[0][0]} was loaded {again[0][1]} times: each get_num_new_matched_tokens announces it",
            )
        require_standard_reports(self)
        if unsure := list(filter(self.match_is_pending, self.unfinished_requests())):
            raise self.rig.violation(
                "KV-MATCH-006",
                f"in {steps} steps get_num_new_matched_tokens knew no answer for {unsure[0]}: it waits",
            )
        raise self.rig.violation(
            "KV-LOAD-001", f"after {steps} steps {self.name} has not come to the end it was run to: {waiting}"
        )

    def abort(self, id: str, how: str = "FINISHED_ABORTED") -> None:
        """End a request from outside, in any state. `how`: name of vLLM's RequestStatus."""
        from vllm.v1.request import RequestStatus

        self._guarded(self.scheduler.finish_requests, id, RequestStatus[how])
        self._note_ends()

    def preempt(self, id: str) -> None:
        """Preempt a running request: allocate_slots finds no block in the next step.

        With a step in flight, it finds none until vLLM may free the blocks of the request.
        """
        self.preempting, self.preemptions = id, self.scheduler.requests[id].num_preemptions

    def warm_prefix_cache(self, prompt: Iterable[int], tokens: int) -> None:
        """Let a request without params compute the first `tokens` tokens of a prompt, for the prefix cache.

        A later request hits whole blocks that every KV cache group has.
        """
        id = self.add(list(prompt)[:tokens], id=f"warm-{self.name}-{len(self.prompts):04d}")
        self.run(lambda: id in self.results)
        if self.worker is None and id in self.delayed_free_requests():
            self.step(sent=[id])
        elif self.own is not None and not self.rig.steps_on(self, lambda: self.status(id) == "gone"):
            self.rig.require_no_leaks(self)
        self.run(lambda: self.status(id) == "gone")

    def report_told_ends(self) -> None:
        """Let the workers report what `leaks.told_ends` returns, after a step that tells them of new ends."""
        if self.worker is None and untold_ends(self):
            self.step()
        if self.worker is None and (told := told_ends(self)):
            self.step(sent=told)

    def set_token_budget(self, tokens: int) -> None:
        """Let a step compute at most this many tokens: longer prompts are computed in chunks."""
        self.scheduler.max_num_scheduled_tokens = tokens

    def take_all_free_blocks(self) -> None:
        """Take every free block from the pool, so that vLLM can allocate none.

        What the blocks cached is lost.
        """
        pool = self.manager.block_pool
        self._taken += pool.get_new_blocks(pool.get_num_free_blocks())

    def return_taken_blocks(self) -> None:
        """Free the blocks that `take_all_free_blocks` took."""
        self.manager.block_pool.free_blocks(reversed(self._taken))
        self._taken = []

    def scatter_free_blocks(self) -> None:
        """Sort the free blocks so that vLLM allocates no two neighbours in turn: a run is then one block."""
        self.take_all_free_blocks()
        self._taken = [block for first in range(3) for block in self._taken[first::3]]
        self.return_taken_blocks()

    # ---- hooks of the connector ----------------------------------------------------------------------------

    def leaks(self) -> tuple[str, ...]:
        """What is left when every request has ended and its blocks were sent: see `leaks.leaks`.

        Takes one empty step first, in which the connector notifies its workers of the ends.
        """
        self.step()
        self.end_flight()
        return leaks(self)

    def call_hook(self, hook: str, *args: Any) -> Any:
        """Call a hook of the connector as vLLM does, with the checks of the recorder. Raises HookRaised."""
        return getattr(self.connector, hook)(*args)

    def update_connector_output(self, report: WorkerReport) -> None:
        """Call update_connector_output with one report. Raises HookRaised."""
        self.call_hook("update_connector_output", rank_output({}, {}, report).kv_connector_output)

    def reset_prefix_cache(self) -> bool:
        """Call vLLM's reset_prefix_cache for the connector's cache, too.

        An operator can call it at any time.
        """
        return bool(self._guarded(self.scheduler.reset_prefix_cache, False, True))

    # ---- inside --------------------------------------------------------------------------------------------

    def _guarded(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call vLLM's scheduler.

        Raises SchedulerStopped for what vLLM raises, or an object that it calls: the connector's answers are
        the cause.
        """
        try:
            return function(*args)
        except Violation:
            raise
        except Exception as error:
            if is_of_suite(error):
                raise
            raise SchedulerStopped(self.name, error, self.recorder.last_answer()) from error

    def _note_ends(self) -> None:
        self.finished += [
            c.request for c in self.calls_of("request_finished") if c.request not in self.finished
        ]
