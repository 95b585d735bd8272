"""What a script lets a byte engine do or undergo: preemptions and aborts at a chosen moment, sleep, clocks.

It also tells what the connector remembers, and what has become of requests.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
from msgspec.structs import replace

from pytest_kvconform.result import Finding, Violation
from pytest_kvconform.rigs.bytes.messages import Look
from pytest_kvconform.rigs.engine.clocks import set_ahead
from pytest_kvconform.rigs.engine.messages import EngineFacts, Step
from pytest_kvconform.rigs.engine.objects import mentions, named, state_of
from pytest_kvconform.rigs.engine.process import EngineProcess
from pytest_kvconform.rigs.engine.reports import Reports
from pytest_kvconform.rigs.engine.sizes import sizes_of
from pytest_kvconform.rigs.engine.stopped import SchedulerStopped, is_of_an_object
from pytest_kvconform.rigs.processes.linux import threads
from pytest_kvconform.rigs.tap import around

WIDTH = 8  # of an embedding
REPORTS = {  # hooks that report -> fields of what they return about loads; none: it is a set of blocks
    "get_transfer_results": ("finished_recving", "failed_recving"),
    "get_block_ids_with_load_errors": (),
}


class OnDemand(EngineProcess):
    """Calls of scripts. `ByteEngineProcess` has them."""

    requests: dict[str, Any]  # id -> ByteRequest
    hoard: list[Any]  # blocks that are taken in this step

    # ---- requests ------------------------------------------------------------------------------------------

    def look(self) -> Look:
        """What has become of the requests by now."""
        requests = self.scheduler.requests
        return Look(
            statuses={name: one.status.name for name, one in requests.items() if not one.is_finished()},
            kept=frozenset(name for name, one in requests.items() if one.is_finished()),
            idle=not self.scheduler.has_requests(),
        )

    def step_of_script(self) -> Step:
        """Take one step, also without requests: a connector may still have to tell its peer something, and an
        engine of a deployment is seldom without them.
        """
        scheduler = self.scheduler
        if not scheduler.has_requests():
            scheduler.has_requests = lambda: True  # EngineCore.step asks
        try:
            step = super().step(0.0)
        except Exception as error:
            if is_of_an_object(error):
                raise SchedulerStopped(self.spec.role, error) from error
            raise
        finally:
            vars(scheduler).pop("has_requests", None)
            if self.taker:
                self.return_blocks()
        return replace(step, look=self.look())

    def computed_tokens(self, request: str) -> int:
        """Tokens of a request of which vLLM's scheduler has KV; -1: it does not know the request any more."""
        known = self.scheduler.requests.get(request)
        return -1 if known is None else int(known.num_computed_tokens)

    def evict_prefix_cache(self) -> None:
        """Let the engine forget what it computed: free blocks lose their hashes. The connector is not
        notified.
        """
        pool = self.manager.block_pool
        pool.evict_blocks(
            {block.block_id for block in pool.blocks if block.block_hash is not None and not block.ref_cnt}
        )

    def remembered(self) -> dict[str, int]:
        """Place in the connector's scheduler half -> how many of the requests that have ended, and whose
        blocks are free, are named there: see `objects.named`.
        """
        return named(state_of(self.scheduler.connector), self.traces.keys() - self.scheduler.requests.keys())

    def end_request(self, request: str, status: str) -> None:
        """End a request from outside, in any state. `status`: name of vLLM's RequestStatus."""
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests([request], RequestStatus[status])

    def fail_load(self, request: str) -> None:
        """Let the worker half report the load of a request as failed."""
        self.to_fail = request

    def abort_once_admitted(self, requests: Iterable[str], status: str = "FINISHED_ABORTED") -> None:
        """End each of these requests, from now on, in the step in which it is admitted.

        vLLM takes aborts between the step of the workers and update_from_output (EngineCore.step). So a load
        that ends within that step is still under way for the scheduler half.
        """
        self.to_abort, self.status = set(requests), status

    def _prompt(self, request: Any) -> dict[str, Any]:
        """Embeddings are made of the numbers of the prompt: different prompts have different ones."""
        if not request.embeds:
            return {"prompt_token_ids": list(request.tokens)}
        import torch

        embeds = torch.tensor(request.tokens, dtype=torch.float32)[:, None].repeat(1, WIDTH)
        return {"prompt_token_ids": None, "prompt_embeds": embeds}

    # ---- preemption ----------------------------------------------------------------------------------------

    def preempt_for_another(self) -> str:
        """Let a running request need blocks in the next step, and no block be free but those of the last one.

        vLLM preempts the last one, whose id is returned. The other one writes into its blocks in that step.
        """
        self.taker = str(self.scheduler.running[-1].request_id)
        return self.taker

    def preempted(self) -> tuple[tuple[str, ...], bool]:
        """Requests that were preempted so far, and whether has_pending_block_frees returned True last: vLLM
        preempts nothing then.
        """
        return tuple(self.were_preempted), self.waits_for_frees

    def takes_blocks(self, request: str) -> bool:
        """Whether a request gets no block now: see `preempt_for_another`. All free blocks are taken then."""
        if not self.taker or request == self.taker or self.hoard:
            return False
        self.take_free_blocks()
        return True

    def take_free_blocks(self) -> None:
        """Take every free block, so that vLLM can allocate none until `return_blocks`."""
        self.hoard = self.manager.block_pool.get_new_blocks(self.manager.block_pool.get_num_free_blocks())

    def return_blocks(self) -> None:
        """Give back the blocks that were taken."""
        self.manager.block_pool.free_blocks(reversed(self.hoard))
        self.taker, self.hoard = "", []

    def watch_updates(self) -> None:
        """Watch what vLLM's scheduler is told at the end of each step, and what it asks."""
        self.reports, self.to_abort, self.to_fail, self.status = Reports(), set[str](), "", ""
        self.were_preempted, self.waits_for_frees = list[str](), False
        self.taker, self.hoard = "", []
        update = self.scheduler.update_from_output

        def update_from_output(scheduler_output: Any, output: Any) -> Any:
            self.were_preempted += scheduler_output.preempted_req_ids or ()
            if self.spec.few:
                self._change_report(getattr(output, "kv_connector_output", None))
            for request in [name for name in self.to_abort if self._was_admitted(name)]:
                self.to_abort.remove(request)
                self.end_request(request, self.status)
            return update(scheduler_output, output)

        def has_pending_block_frees(hook: Any, *args: Any) -> Any:
            answer = hook(*args)
            self.waits_for_frees = bool(answer)
            return answer

        self.scheduler.update_from_output = update_from_output
        around(self.scheduler.connector, "has_pending_block_frees", has_pending_block_frees)

    def _change_report(self, reported: Any) -> None:
        """Note what the worker half reports in a step, and let a load be reported as failed: see `fail_load`.
        update_connector_output may end it by the worker half's own metadata.
        """
        self.reports.note(reported)
        if reported is None or not (request := self.to_fail):
            return
        if request in (reported.finished_recving or ()) or mentions(
            reported.kv_connector_worker_meta, request
        ):
            reported.failed_recving = {*(reported.failed_recving or ()), request}

    def _was_admitted(self, request: str) -> bool:
        known = self.scheduler.requests.get(request)
        return known is None or known.status.name != "WAITING"

    # ---- the fake connector beside the subject in MultiConnector -------------------------------------------

    def load_by_fake(self, ends: str) -> None:
        """Let the fake connector load the next request, and report the load like this: see FakeConnector. A
        load that does not fail brings what the subject's would bring.
        """
        fake, _ = self._children(self.scheduler.connector)
        fake.loads, fake.ends = True, ends

    def watch_reports(self, rule: str) -> None:
        """Note from now on what the subject's worker half reports. A step raises Violation of this rule if
        MultiConnector cannot unite it with the reports of another connector.
        """
        self.reported_loads = set[str]()
        _, subject = self._children(self._workers(_half)[0])
        for hook, fields in REPORTS.items():
            around(subject, hook, partial(self._note_report, rule, hook, fields))

    def reported(self) -> frozenset[str]:
        """Requests whose loads the subject's worker half has reported."""
        return frozenset(self.reported_loads)

    def _children(self, multi: Any) -> tuple[Any, Any]:
        """The fake connector and the subject, inside MultiConnector."""
        from pytest_kvconform.rigs.vllm_setup.stand_ins.fake_connector import FakeConnector

        first, second = multi.sub_connectors
        return (first, second) if isinstance(first, FakeConnector) else (second, first)

    def _note_report(self, rule: str, name: str, fields: tuple[str, ...], hook: Any, *args: Any) -> Any:
        """Unite what is reported with other reports, as MultiConnector does."""
        answer = hook(*args)
        for field in fields or ("",):
            found = getattr(answer, field) if field else answer
            try:
                united = set().union(found) if field else set() | found
            except TypeError:
                what = f"{name}().{field}".removesuffix(".")
                happened = (
                    f"{what} is {str(found)[:80]}, a {type(found).__name__}, which MultiConnector cannot "
                    "unite with the set of another connector"
                )
                diagnosis = "a hook of the worker half returns no set"
                raise Violation(Finding(rule=rule, happened=happened, diagnosis=diagnosis)) from None
            self.reported_loads |= united if field else set()
        return answer

    def bring_fake_loads(self, scheduler_output: Any) -> None:
        """Write what loads of the fake connector bring in this step, before the worker's hooks."""
        if not self.spec.fake:
            return
        from pytest_kvconform.rigs.vllm_setup.stand_ins.fake_connector import LOADED, FakeMetadata

        given = scheduler_output.kv_connector_metadata.metadata
        loads = (one.loads for one in given if isinstance(one, FakeMetadata) and one.ends == LOADED)
        for name in (name for ordered in loads for name in ordered):
            trace, tables = self.traces[name], self.manager.get_block_ids(name)
            tokens = np.arange(trace.local_tokens, trace.local_tokens + trace.external_tokens)
            self._workers("kv_bring", tokens, [np.array(t) for t in tables], self.requests[name].number)

    # ---- sleep, ends, clocks and memory --------------------------------------------------------------------

    def supports_sleep_mode(self) -> bool:
        """Whether the connector says that it supports sleep mode: minors that know it ask the class."""
        ask = getattr(type(self.scheduler.connector), "supports_sleep_mode", None)
        return bool(ask and ask(self.config.kv_transfer_config))

    def sleep(self) -> bool:
        """Reset the prefix cache, and with it the connector's (v1/engine/core.py: EngineCore.sleep),
        unregister the KV cache, twice (v1/worker/gpu_worker.py: Worker.sleep and Worker.discard), and lose
        all KV. Its addresses stay. Returns False if the connector does not reset its cache: nothing else is
        done then.
        """
        if not self.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
            return False
        for _ in range(2):
            self._workers(_call_hook, "unregister_kv_caches")
        self._workers("kv_lose")
        return True

    def wake_up(self) -> None:
        """Restore the KV cache and publish it anew, twice: vLLM wakes up the KV cache alone, and then all
        (v1/worker/gpu_worker.py: Worker.wake_up; v1/engine/core.py: EngineCore.wake_up).
        """
        for _ in range(2):
            self._workers(_call_hook, "restore_kv_caches")
            [published] = self._workers("get_kv_connector_handshake_metadata")
            self.scheduler.connector.set_xfer_handshake_metadata_pp_aware(published or {})

    def end_engine(self) -> tuple[dict[str, str], set[str]]:
        """Shut the engine down; its process goes on. Returns id -> name of the threads that are there now,
        and the ids of those that this engine has left.
        """
        self.shutdown()
        return (now := threads()), now.keys() - self.before.threads.keys()

    def start_engine(self, spec: Any) -> EngineFacts:
        """Start another engine in this process, in the place of one that was shut down."""
        type(self).__init__(self, spec)
        return self.facts()

    def set_clock_ahead(self, seconds: float, monotonic: bool = False) -> None:
        """Let clocks of this process show another time: see clocks.py."""
        set_ahead(seconds, monotonic)

    def sizes(self) -> dict[str, int]:
        """What both halves of the connector remember, and what this process has open: see sizes.py."""
        gc.collect()
        return sizes_of({"scheduler half": self.scheduler.connector, "worker half": self._workers(_half)[0]})


def _call_hook(worker: Any, hook: str) -> None:
    getattr(_half(worker), hook)()


def _half(worker: Any) -> Any:
    return worker.connector.kv_connector
