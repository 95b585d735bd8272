"""One transfer on two byte engines, from prompts to the checks of every rank of D."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pytest_kvconform.kvspace.pools.sources import Source
from pytest_kvconform.result import HarnessError, HookCall
from pytest_kvconform.rigs.bytes.messages import ByteRequest, Check, shared_owners
from pytest_kvconform.rigs.cluster.engine import Engine, Steps
from pytest_kvconform.rigs.cluster.loop import nothing, watching
from pytest_kvconform.rigs.cluster.release import Release, tokens_of_others, until_released, until_saved
from pytest_kvconform.rigs.cluster.turns import both, until_finished
from pytest_kvconform.rigs.context import Deadlines
from pytest_kvconform.rigs.engine.handle import EngineFailed, logged
from pytest_kvconform.rigs.engine.messages import (
    ON_D,
    ON_P,
    EngineFacts,
    Output,
    Trace,
    Unfinished,
    Usage,
    listed,
)
from pytest_kvconform.rigs.engine.router import decode_params, early_params, prefill_params
from pytest_kvconform.rigs.processes.cores import Deadline
from pytest_kvconform.rigs.scenario import Transfer, with_new_tokens
from pytest_kvconform.rigs.vllm_setup.statistics import StatisticsTrace

IDS = {"p": ON_P, "d": ON_D, "w": "0000000e"}  # w: D computes a prefix by itself
BESIDE = 100  # tokens that such a request generates at most, if it runs beside the load


@dataclass(frozen=True)
class Received:
    """One request: what was done with it, and the checks of D's pools.

    The checks were made before the first forward that reads loaded KV.
    """

    name: str
    length: int  # tokens of the prompt
    prefill: Trace
    decode: Trace
    finish: str  # vLLM's finish reason on D
    checks: tuple[Check, ...] = ()  # of every rank and load


@dataclass(frozen=True)
class TransferObservation:
    """All that was observed in one transfer. Cases judge it; nothing is judged here."""

    transfer: Transfer
    prefiller: EngineFacts
    decoder: EngineFacts
    requests: tuple[Received, ...] = ()
    # the whole pool of every rank of P and of D, after the end
    audits: tuple[tuple[Check, ...], tuple[Check, ...]] = ((), ())
    usage: tuple[Usage, Usage] | None = None
    released: Release | None = None  # the wait for that
    request_s: float = 0.0  # for which requests were waited at most
    # what became of the statistics of P and of D
    statistics: tuple[StatisticsTrace, StatisticsTrace] = (StatisticsTrace(), StatisticsTrace())
    failed_beside: int = 0  # requests that ran on D beside the load, and ended with an error
    failed: EngineFailed | None = None
    excuse: str = ""  # if one failed: how the same fails without the connector, see `control`
    stuck: tuple[Unfinished, ...] = ()
    copies_left: int = 0  # in the suite's copy engine, if a request is stuck
    logged: tuple[str, ...] = ()
    calls: tuple[HookCall, ...] = ()  # the last ones of P and D
    source: Source | None = None  # where P's rows lay, for the diagnosis
    seconds: float = 0.0

    @property
    def refused(self) -> str:
        """Why the connector refused all requests, if it ended them with an error; "" otherwise."""
        if all(r.finish != "error" for r in self.requests):
            return ""
        return self.logged[-1] if self.logged else "no engine logged a reason"

    @property
    def loads(self) -> bool:
        """Whether D had to load rows of KV."""
        return any(check.rows_due for r in self.requests for check in r.checks)

    @property
    def is_wrong(self) -> bool:
        """Whether the pool of a rank holds what it should not, after the end."""
        return any(check.pool.wrong for audits in self.audits for check in audits)

    @property
    def declined(self) -> bool:
        """Whether the connector refused requests cleanly.

        No engine has failed, no request is stuck, and no word in D's pool is wrong.
        """
        clean = not (self.failed or self.stuck) and not any(
            check.pool.wrong for r in self.requests for check in r.checks
        )
        return clean and any(r.finish == "error" for r in self.requests)


def observe_transfer(
    p: Engine,
    d: Engine,
    transfer: Transfer,
    limits: Deadlines,
    ids: Callable[[], str],
    before_load: Callable[[], Steps] = nothing,
) -> Steps:
    """Run one transfer. A failure of an engine is part of the TransferObservation.

    With a store P computes and saves, and D, whose cache is empty, finds it in the store. No
    kv_transfer_params travel. P may be D: it saves, other requests overwrite its blocks, its prefix cache is
    emptied, and then it loads. `before_load` is called before D has a request, unless D has it before P.
    """
    if p.spec.store:
        transfer = replace(transfer, prompts=with_new_tokens(transfer.prompts))
    observed = TransferObservation(transfer, p.facts, d.facts, request_s=limits.request)
    return (yield from watched(observed, p, d, _run(observed, p, d, limits, ids(), before_load)))


def watched(observed: TransferObservation, p: Engine, d: Engine, run: Steps) -> Steps:
    """Run what fills in an observation. A failure of an engine is part of it, and so is what they log."""
    started = time.monotonic()
    logs = [(engine.handle, engine.handle.begin_log()) for engine in (p, d)]
    try:
        observed = yield from run
        if observed.stuck and p is d:
            observed = replace(observed, copies_left=(yield from p.call("copies_left")))
    except EngineFailed as failed:
        observed = replace(observed, failed=failed)
    return replace(observed, logged=logged(logs), seconds=time.monotonic() - started)


def _run(
    observed: TransferObservation,
    p: Engine,
    d: Engine,
    limits: Deadlines,
    salt: str,
    before_load: Callable[[], Steps],
) -> Steps:
    transfer = observed.transfer
    seconds = limits.request + 2 * p.spec.save_delay
    yield from both(p, d, "poison")
    make = _Requests(transfer, salt, p, d)
    at_once = not transfer.preempt and all(make.early(i) is not None for i in make.numbers)
    stuck, targets, beside = yield from _prefill(transfer, make, p, d, seconds, at_once)
    if stuck:
        return replace(observed, stuck=stuck)
    source, before = yield from _save(transfer, p, d, limits, seconds, at_once)
    deadline = watching(seconds, p, d)  # what P took is not D's
    if not at_once:
        beside = yield from _warm(transfer, make, p, d, deadline)  # now, so that P finds nothing D has saved
        yield from before_load()
        targets = [make(i, "d", p.ends[make.id(i, "p")].output) for i in make.numbers]
        for request in targets:
            yield from d.add(request)
    if transfer.preempt == "D":
        yield from _preempt_d(p, d, targets[0].id, deadline)
    stuck = yield from until_finished(d, p, [request.id for request in targets], deadline)
    for name in beside:
        yield from d.call("abort", name)
    yield from p.call("budget", 0)
    yield from p.call("reuse", False)
    if transfer.reuse and p is not d:  # what overwrote P's blocks lies there, too
        source = _with_later(source, (yield from p.call("source")))
    received = []
    for i in make.numbers:
        received.append((yield from _received(transfer, make, p, d, i)))
    errors = sum(name in d.ends and d.ends[name].output.finish == "error" for name in beside)
    observed = replace(observed, requests=tuple(received), failed_beside=errors, stuck=stuck, source=source)
    if stuck:
        return observed
    refused = any(r.finish == "error" for r in received)  # P may wait for its lease to end then
    released = yield from until_released(p, d, limits.release, p_may_keep=refused)
    observed = replace(observed, usage=released.usage, released=released)
    of_p = yield from p.call("statistics")
    statistics = of_p, StatisticsTrace() if p is d else (yield from d.call("statistics"))
    audits = yield from both(p, d, "audit")
    return replace(observed, statistics=statistics, audits=(before or audits[0], audits[1]))


def _prefill(
    transfer: Transfer, make: _Requests, p: Engine, d: Engine, seconds: float, at_once: bool
) -> Steps:
    """Let P compute the prompts. `at_once`: D has its requests before P has computed a token, as a router
    sends them.

    Returns P's requests that have not ended, D's requests, and those that run beside the load.
    """
    deadline, targets, beside = watching(seconds, p, d), list[ByteRequest](), list[str]()
    if at_once:
        beside = yield from _warm(transfer, make, p, d, deadline)
        targets = [make(i, "d") for i in make.numbers]
    # all are chunked side by side
    yield from p.call("budget", transfer.budget * len(transfer.prompts), transfer.budget)
    yield from p.call("reuse", transfer.reuse or p is d)  # one engine must not find what it is to load
    for engine in (p, d):
        yield from engine.call("replay", transfer.graphs)
    for request in make.sources:
        yield from p.add(request)
    for request in targets:
        yield from d.add(request)
    if transfer.preempt == "P":
        yield from p.step_beside(d)
        yield from p.call("preempt", make.id(0, "p"))
    stuck = yield from until_finished(p, d, [request.id for request in make.sources], deadline)
    return stuck, targets, beside


def _save(
    transfer: Transfer, p: Engine, d: Engine, limits: Deadlines, seconds: float, at_once: bool
) -> Steps:
    """Let a store save, and others overwrite P's blocks. One engine that is P and D forgets what it has.

    Returns the places of P's rows, and what P's pool was before it forgot.
    """
    source, saving = (yield from p.call("source")), watching(seconds, p, d)
    if p.spec.store:
        yield from until_saved(p, d, limits.release)
    while (transfer.reuse or p is d) and not at_once:
        if (yield from p.call("overwritten")) or saving.over():
            break
        yield from p.call("step", 0.0)
    if p is not d:
        return source, ()
    yield from p.call("budget", 0)  # that of P alone
    yield from until_saved(p, p, limits.release)  # what overwrote the blocks is saved, too
    yield from p.call("reuse", False)
    source = _with_later(source, (yield from p.call("source")))
    before = yield from p.call("audit")
    yield from p.call("poison")
    return source, before


def _preempt_d(p: Engine, d: Engine, name: str, deadline: Deadline) -> Steps:
    """Preempt D's request after its first token."""
    while not (yield from d.step_beside(p)).outputs and not deadline.over():
        if p is not d:
            yield from p.call("step", 0.0)
    if name not in d.ends:  # a load that was refused ends its request before a token
        yield from d.call("preempt", name)


def _received(transfer: Transfer, make: _Requests, p: Engine, d: Engine, index: int) -> Steps:
    """What became of one request. Returns Received."""
    name = make.id(index, "d")
    return Received(
        name=f"request {index}",
        length=len(transfer.prompts[index].tokens),
        prefill=(yield from p.call("trace", make.id(index, "p"))),
        decode=(yield from d.call("trace", name)),
        finish=(d.ends[name].output.finish or "") if name in d.ends else "",
        checks=(yield from d.call("pop_checks", name)),
    )


def _with_later(source: Source, later: Source) -> Source:
    """The places of rows, and of those that were written since, with all writers of the blocks."""
    return replace(later, tables={**later.tables, **source.tables})


def _warm(transfer: Transfer, make: _Requests, p: Engine, d: Engine, deadline: Deadline) -> Steps:
    """Let D compute prefixes of the prompts by itself, so that its own prefix cache has them.

    Returns the requests that go on.
    """
    running = list[str]()
    tokens = [prompt.warm or tokens_of_others(d.spec) for prompt in transfer.prompts]
    for i, count in enumerate(tokens):
        if count:
            warm = make(i, "w", tokens=count)
            yield from d.add(warm)
            if transfer.beside:
                while not (yield from d.step_beside(p)).outputs and not deadline.over():
                    pass
                running.append(warm.id)
            elif stuck := (yield from until_finished(d, p, [warm.id], deadline)):
                raise HarnessError(f"D did not compute a prefix of {transfer} by itself: {listed(stuck)}")
    if any(tokens):
        yield from d.call("poison", True)
    return running


class _Requests:
    """Makes the requests of a transfer: on P and on D, with the owners of their tokens."""

    def __init__(self, transfer: Transfer, salt: str, p: Engine, d: Engine):
        self.transfer, self.salt, self.p, self.d = transfer, salt, p.spec, d.spec
        self.owners = shared_owners([prompt.tokens for prompt in transfer.prompts])
        self.numbers = range(len(transfer.prompts))
        self.zygote = p.handle.process.address
        self._early: dict[int, dict[str, Any] | None] = {}
        self.sources = [self(i, "p") for i in self.numbers]

    def id(self, index: int, side: str) -> str:
        return f"{self.salt}-{index}-{IDS[side]}"

    def early(self, index: int) -> dict[str, Any] | None:
        """The params of D's request before P has computed a token; None: D has to wait."""
        if index not in self._early:
            transfer_id = f"{self.salt}-{index}"
            self._early[index] = early_params(self.p.handover, transfer_id, self.p, self.zygote)
        return self._early[index]

    def __call__(self, index: int, side: str, handed: Output | None = None, tokens: int = 0) -> ByteRequest:
        prompt = self.transfer.prompts[index].tokens
        length, transfer_id = tokens or len(prompt), f"{self.salt}-{index}"
        params = None
        if side == "p":
            params = prefill_params(self.p.handover, transfer_id, self.d, self.zygote)
        elif side == "d":
            returned = handed.kv_transfer_params if handed else None
            params = (
                decode_params(self.p.handover, transfer_id, self.p, returned, self.zygote)
                if handed
                else self.early(index)
            )
        return ByteRequest(
            id=self.id(index, side),
            tokens=prompt[:length],
            max_tokens={
                "p": self.transfer.generates,
                "d": 2 if self.transfer.preempt == "D" else 1,  # one that is preempted while it runs
                "w": BESIDE if self.transfer.beside else 1,
            }[side],
            kv_transfer_params=params,
            salt=self.salt,
            watch=side == "d",
            owners=self.owners[index][:length],
            number=index,
        )
