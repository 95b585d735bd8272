"""`Rig`: what a case of the scheduler rig runs on. It makes sides, and hands requests over between them.

A case with `@case(RULE, rig="scheduler")` is a function `case(rig: Rig, variant) -> Evidence`. It runs in a
process of its own, forked for it. vLLM's own code schedules: Scheduler, KVCacheManager, Request,
KVOutputAggregator, with the KV cache groups of a real model. The scheduler builds the connector itself. There
is no worker: the case passes the reports of the workers to `step`.

    p, d = rig.side("P"), rig.side("D")
    first = p.add(rig.prompt(100), rig.prefill_params())  # a request that asks P for a hand-over
    p.run()  # steps until no request is left; P's blocks stay until the workers report them as sent
    second = d.add(rig.prompt(100), p.kv_transfer_params(first))  # params go through JSON, as between servers
    step = d.step()  # schedule(), then update_from_output()
    assert d.waits_for_remote_kv(second)  # an asynchronous load: no worker has reported it yet
    d.step(received=[second])  # every rank reports it
    d.run()
    p.step(sent=[first])
    p.leaks(), d.leaks()  # sentences; empty: nothing is left

`rig.hand_over(p, d, prompt)` does the first four lines. A case raises `rig.violation(...)`. A hook that
raises, an answer that vLLM cannot use and a scheduler that stops become violations without the case.
`side.calls` has every call of a hook.

Block ids tell sides apart: side number k of a rig (P is 0, D is 1, in the order in which they are made) has
the block ids from 256 * (k + 1) + 1. So a block id in metadata or params belongs to one side only, and
numbers below 257, such as ranks and layers, are no block ids.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model_matrix.geometries import Geometry, load_geometries
from pytest_kvconform.result import Blocked, Cell, Finding, HarnessError, NotApplicable, Violation
from pytest_kvconform.rigs.context import (
    SHORTER,
    declared_addition,
    declared_amount,
    port_environment,
    with_own_values,
)
from pytest_kvconform.rigs.engine.router import RENDEZVOUS, prefill_params
from pytest_kvconform.rigs.processes.cores import Deadline, own_core_wait
from pytest_kvconform.rigs.processes.hangs import LEFT_OUT_S
from pytest_kvconform.rigs.scenario import tokens, with_other_tokens
from pytest_kvconform.rigs.scheduler.connector_class import miss_reports, require_standard_reports
from pytest_kvconform.rigs.scheduler.leaks import goes_on
from pytest_kvconform.rigs.scheduler.side import Side
from pytest_kvconform.rigs.scheduler.side_state import (
    BLOCK,
    BLOCKS,
    BLOCKS_APART,
    RANKS,
    first_block,
    longer,
)
from pytest_kvconform.rigs.scheduler.steps import RequestOutput, Step, WorkerReport

if TYPE_CHECKING:
    from pytest_kvconform.rigs.scheduler.host import Host
    from pytest_kvconform.rigs.scheduler.own_workers.worker_beside import Nursery
    from pytest_kvconform.subject import Subject

__all__ = ["BLOCK", "BLOCKS", "RequestOutput", "Rig", "Side", "Step", "WorkerReport", "first_block", "longer"]

TOKENS_FROM = 1_000_000  # far above the block ids of every side
PAUSE_S = 0.01  # between steps of an engine that goes on without requests
SETTLE_S = 4.0  # without any change, after which nothing is expected any more
LEFT = "KV-FINISH-003"  # the rule that nothing is left


@dataclass
class Rig:
    """What one case runs on. Sides are made when they are asked for, and end with the process."""

    host: Host
    rule: str  # of the case
    waited: bool = False  # another case of the cell has waited in vain for the end of something
    ends_in_worker: dict[str, str] = field(default_factory=dict)  # see store_engine.end_in_worker
    # Whether sides that are made from now on schedule asynchronously: see Side.asynchronous.
    asynchronous: bool = False
    _sides: list[Side] = field(default_factory=list)
    nursery: Nursery | None = None  # what starts worker halves beside sides
    own_reports: bool = False  # whether sides have real workers, see own_workers/own_reports.py
    # question -> what engines of the cluster have answered: places, see memory.py
    answers: dict[Any, frozenset[str]] = field(default_factory=dict)
    asks: Any = None  # the question that the case ends with
    unheard: bool = False  # the connector has waited for reports that its scripted workers cannot make
    waited_for: str = ""  # what the case has waited for in vain
    left_out: float = 0.0  # seconds of the case that its deadline does not count, see `waits`
    _stepping: bool = False  # see `step_others`
    secret: int = field(default_factory=lambda: random.SystemRandom().getrandbits(64))

    @property
    def cell(self) -> Cell:
        """Geometry, topology and setup, by name."""
        return self.host.spec.cell

    @property
    def subject(self) -> Subject:
        """The connector under test: `profile` is "p2p", "store" or "same-engine"."""
        return self.host.spec.subject

    @property
    def geometry(self) -> Geometry:
        """The model whose KV cache groups the schedulers have."""
        return load_geometries()[self.cell.family]

    def side(
        self,
        role: str,
        *,
        blocks: int = 0,
        policy: str = "fail",
        config: Mapping[str, Any] | None = None,
        transfer: Callable[[Any], Any] | None = None,
        change_groups: Callable[[Any], None] | None = None,
    ) -> Side:
        """A new engine of a role, "P" or "D". Several of one role are independent, as after a restart.

        `blocks`: of the pool, all KV cache groups together, the null block not included, fewer than
        BLOCKS_APART times `longer`; 0: BLOCKS times `longer`.
        `policy`: kv_load_failure_policy. `config`: further keys of kv_connector_extra_config. `transfer`:
        makes another KVTransferConfig of the subject's, see fake_connector.py. `change_groups` changes the
        KVCacheConfig in place.
        """
        times = longer(self.subject)
        blocks = blocks or BLOCKS * times
        if not 1 <= blocks < BLOCKS_APART * times:
            raise HarnessError(f"a side has 1 to {BLOCKS_APART * times - 1} blocks, not {blocks}")
        first = first_block(self.subject, len(self._sides))
        vllm_config = self.host.vllm_config(role, policy, extra=config)
        number = len(self._sides) % (len(self.host.spec.ports) - 2)
        if self.own_reports and "kv_port" not in self.subject.config:  # each worker may listen on it
            vllm_config.kv_transfer_config.kv_port = self.host.spec.ports[number] + RANKS - 1
        if transfer is not None:
            vllm_config.kv_transfer_config = transfer(vllm_config.kv_transfer_config)
        vllm_config.scheduler_config.async_scheduling = self.asynchronous
        self.take_ports(number, vllm_config)
        index = sum(side.role == role for side in self._sides)
        if self.own_reports and change_groups is None:
            from pytest_kvconform.rigs.scheduler.own_workers.own_reports import start_side

            side = start_side(self, role, index, vllm_config, number, first, blocks)
        else:
            kv_config = self.host.kv_config(role, vllm_config, first + blocks + 1)
            if change_groups is not None:
                change_groups(kv_config)
            if self.nursery is not None and self.subject.asks_worker:
                self.nursery.start(role, vllm_config, number)
            side = Side(self, role, index, vllm_config, kv_config, first)
        self._sides.append(side)
        return side

    def take_ports(self, number: int, engine: Any) -> None:
        """Let an engine that starts in this process use these of the case's ports. `engine`: its VllmConfig,
        which is changed.
        """
        port, transfer = self.host.spec.ports[number], engine.kv_transfer_config
        os.environ.update(port_environment(port, RANKS))
        transfer.kv_connector_extra_config = with_own_values(transfer.kv_connector_extra_config, port, RANKS)

    def prompt(self, length: int, seed: int = 0, shared: int = 0) -> tuple[int, ...]:
        """A prompt; prompts of different seeds agree in the first `shared` tokens and differ at the next. No
        token is a block id, too. A store has saved no prompt of another case or run.

        It is longer than `length` if the connector declares that it loads nothing of so short a prompt.
        """
        if length > 1:
            length += declared_addition(self.subject, BLOCK)
        prompt = tokens(length, seed, shared)
        if self.subject.is_store:
            prompt = with_other_tokens(prompt, self.secret)
        return tuple(TOKENS_FROM + token for token in prompt)

    def renew_prompts(self) -> None:
        """Let prompts be others from now on: real workers of a store have saved those of an earlier run."""
        self.secret += 1

    def prefill_params(self) -> dict[str, Any]:
        """The params with which a proxy asks P for a hand-over; none for a store."""
        if self.subject.is_store:
            return {}
        keys = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
        # a function of the author has words of its own
        asked: dict[str, Any] = dict.fromkeys(() if self.subject.hook else keys)
        if self.subject.handover == RENDEZVOUS:
            # a long run has more cases than Linux has ids of processes, and P's answers may outlive a case
            return asked | (prefill_params(self.subject.way, str(uuid.uuid4()), None) or {})
        return {"do_remote_decode": True, "do_remote_prefill": False} | asked

    def hand_over(
        self, p: Side, d: Side, prompt: Iterable[int], max_tokens: int = 1, **more: Any
    ) -> tuple[str, str]:
        """Let P compute a prompt and add it to D with what P hands over.

        Returns both ids; D has made no step yet. `more`: of D's `add`.

        Raises NotApplicable if P hands nothing over: a store has nothing where no worker has saved.
        """
        prompt = tuple(prompt)
        first = p.add(prompt, self.prefill_params() or None)
        p.run(lambda: first in p.results)
        return first, d.add(prompt, p.kv_transfer_params(first), max_tokens=max_tokens, **more)

    def hand_over_and_load(
        self, p: Side, d: Side, prompt: Iterable[int], max_tokens: int = 1, **more: Any
    ) -> tuple[str, str]:
        """`hand_over`, and the step of D in which the load begins.

        Raises NotApplicable if D announces no asynchronous load.
        """
        first, second = self.hand_over(p, d, prompt, max_tokens, **more)
        self.start_loads(d, second)
        return first, second

    def step_until_matched(self, d: Side, *ids: str) -> Step:
        """Step D until the connector knows how much there is to load for these requests.

        Takes one step or more, and returns the last. A connector may not know it in time: see KV-MATCH-006.
        """
        while True:
            step = d.step()
            if not any(map(d.match_is_pending, ids)) or any(map(d.match_is_overdue, ids)):
                return step

    def start_loads(self, d: Side, *ids: str) -> Step:
        """Step D until loads of these requests have begun and are ordered. Returns the last step.

        Raises NotApplicable if one of them is not loaded asynchronously.
        """
        self.step_until_matched(d, *ids)
        if missing := [id for id in ids if not d.waits_for_remote_kv(id)]:
            answer = None if d.match_is_pending(missing[0]) else d.matched_tokens(missing[0])
            sentence = f"{self.subject.connector} begins no asynchronous load: it answered {answer}"
            if declared := declared_amount(self.subject):
                sentence += f" for {len(d.prompts[missing[0]])} tokens, and {declared} is declared"
            # a store has nothing to load of what no worker has saved
            declined = not self.subject.is_store and d.declined_to_load(missing[0])
            raise NotApplicable(sentence, refused=declined)
        return self.step_until_ordered(d, *ids)

    def step_until_ordered(self, d: Side, *ids: str) -> Step:
        """Step D until its metadata has ordered the loads of these requests. Returns the last step."""
        while not all(map(d.load_is_ordered, ids)):
            d.step()
        return d.steps[-1]

    def steps_on(self, side: Side, done: Callable[[], bool]) -> bool:
        """Step a side without requests as vLLM does (Scheduler.has_requests): once more for the last end, and
        while has_pending_push_work is true or blocks are kept, until `done()`, or for `settle_s`. Returns it.
        """
        side.step()
        for _ in self.waits(Deadline(self.settle_s)):
            if done() or not side.scheduler.has_requests():
                return done()
            time.sleep(PAUSE_S)
            side.step()
        miss_reports(side)
        return done()

    def step_others(self, side: Side) -> None:
        """Step the other sides with real workers, as vLLM does while they have requests, those that P keeps
        included: a transfer may need steps of the peer.
        """
        if self._stepping:
            return
        self._stepping = True
        for other in self._sides:
            if other is not side and other.own is not None and other.scheduler.has_requests():
                other.step()
        self._stepping = False

    def scaled_seconds(self, seconds: float) -> float:
        """How long a case waits for something: longer with --kv-timeout-scale, never shorter."""
        return seconds * self.host.spec.timeout_scale

    def waits(self, deadline: Deadline) -> Iterator[None]:
        """Yield until a deadline is over. The deadline of the case itself does not count these seconds."""
        while (left := deadline.left()) > 0:
            with self.wait(left):
                yield

    @contextlib.contextmanager
    def wait(self, most: float) -> Iterator[None]:
        """Do not count the seconds of a block for the deadline of the case itself, at most so many.

        They are left out when the block ends, and LEFT_OUT_S of a case in all. No deadline counts those in
        which this thread waits for a core, so they are not left out again.
        """
        began, waited = time.monotonic(), own_core_wait()
        yield
        took = time.monotonic() - began - (own_core_wait() - waited)
        seconds = max(0.0, min(took, most, LEFT_OUT_S - self.left_out))
        self.left_out += seconds
        self.host.hook.leave_out(seconds)

    @property
    def settle_s(self) -> float:
        """Seconds without any change after which nothing is expected any more."""
        return self.scaled_seconds(SETTLE_S) * (SHORTER if self.waited else 1.0)

    def violation(self, rule: str, happened: str, differs: str = "", **more: Any) -> Violation:
        """A violation to raise; `rule` "": that of the case. `more`: of its Finding."""
        return Violation(Finding(rule=rule or self.rule, happened=happened, differs=differs, **more))

    def ask(self, question: Any) -> frozenset[str]:
        """What engines of the cluster answer to a question, see memory.py. A case ends where it has asked,
        and begins again with the answer. Raises Blocked then.
        """
        if question not in self.answers:
            self.asks = question
            raise Blocked("engines of the cluster have not answered yet")
        return self.answers[question]

    def shared_file(self, name: str) -> Path:
        """A file of all cases that are forked from this host, for what one of them has found out."""
        return Path(f"{self.host.spec.folder}-{os.getppid()}.{name}")

    def require_no_leaks(self, *sides: Side) -> None:
        """Raise Violation (KV-FINISH-003) if anything is left on sides on which every request has ended.

        A store may hold blocks in vLLM's pool until its workers have saved them. A connector may tell its
        workers of an end in a later step.
        """
        for side in sides:
            side.report_told_ends()
            if (left := side.leaks()) and side.own is not None:
                side.own.pass_a_day()  # blocks that nobody reads may be held in vLLM's pool
            for _ in self.waits(Deadline(self.settle_s)):
                if not left or not goes_on(side):
                    break
                time.sleep(PAUSE_S)
                side.report_told_ends()
                left = side.leaks()  # looking takes a step
            if left:
                miss_reports(side)
                require_standard_reports(side)
                raise self.violation(
                    LEFT,
                    f"after every request has ended, on {side.name} {left[0]}",
                    differs="; ".join(left[1:]),
                )
