"""One transfer on two byte engines, from prompts to the checks of every rank of D."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from pytest_kvconform.kvspace.pools.sources import Source
from pytest_kvconform.result import HarnessError, HookCall
from pytest_kvconform.rigs.bytes.handle import ByteEngineHandle
from pytest_kvconform.rigs.bytes.messages import ByteRequest, Check, shared_owners
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
from pytest_kvconform.rigs.engine.release import Release, tokens_of_others, until_released, until_saved
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
    excuse: str = ""  # if one failed: how the same fails without the connector, see `engine.control`
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


Observed = TypeVar("Observed", bound=TransferObservation)


def observe_transfer(
    transfer: Transfer,
    p: ByteEngineHandle,
    d: ByteEngineHandle,
    limits: Deadlines,
    ids: Callable[[], str],
    before_load: Callable[[], object] = lambda: None,
) -> TransferObservation:
    """Run one transfer. A failure of an engine is part of the observation.

    With a store P computes and saves, and D, whose cache is empty, finds it in the store. No
    kv_transfer_params travel. P may be D: it saves, other requests overwrite its blocks, its prefix cache is
    emptied, and then it loads. `before_load` is called before D has a request, unless D has it before P.
    """
    if p.spec.store:
        transfer = replace(transfer, prompts=with_new_tokens(transfer.prompts))
    observed = TransferObservation(transfer, p.facts, d.facts, request_s=limits.request)
    return watched(observed, p, d, lambda: _run(observed, p, d, limits, ids(), before_load))


def watched(
    observed: Observed, p: ByteEngineHandle, d: ByteEngineHandle, run: Callable[[], Observed]
) -> Observed:
    """Run what fills in an observation. A failure of an engine is part of it, and so is what they log."""
    started = time.monotonic()
    logs = [(engine, engine.begin_log()) for engine in (p, d)]
    try:
        observed = run()
        if observed.stuck and p is d:
            observed = replace(observed, copies_left=p.copies_left())
    except EngineFailed as failed:
        observed = replace(observed, failed=failed)
    return replace(observed, logged=logged(logs), seconds=time.monotonic() - started)


def _run(
    observed: TransferObservation,
    p: ByteEngineHandle,
    d: ByteEngineHandle,
    limits: Deadlines,
    salt: str,
    before_load: Callable[[], object],
) -> TransferObservation:
    transfer = observed.transfer
    alone = p is d
    seconds, watched = limits.request + 2 * p.spec.save_delay, tuple({p.process.watched, d.process.watched})
    deadline = Deadline(seconds, watched)
    both(p, d, "poison")
    owners = shared_owners([prompt.tokens for prompt in transfer.prompts])
    make = _Requests(transfer, owners, salt, p, d)
    sources = [make(i, "p") for i in range(len(transfer.prompts))]
    targets: list[ByteRequest] = []
    beside: list[str] = []
    ends: dict[str, Output] = {}
    at_once = not transfer.preempt and all(make.early(i) is not None for i in range(len(sources)))
    if at_once:  # as a router sends them: D has its request before P has computed a token
        beside = _warm(transfer, make, p, d, deadline)
        targets = [make(i, "d") for i in range(len(sources))]
    p.budget(transfer.budget * len(transfer.prompts), transfer.budget)  # all are chunked side by side
    reuse = transfer.reuse or alone  # one engine must not find what it is to load
    p.reuse(reuse)
    for engine in (p, d):
        engine.replay(transfer.graphs)
    for request in sources:
        p.add(request)
    for request in targets:
        d.add(request)
    if transfer.preempt == "P":
        p.step_beside(d)
        p.preempt(sources[0].id)
    stuck = until_finished(p, d, [request.id for request in sources], ends, deadline)
    if stuck:
        return replace(observed, stuck=stuck)
    source, saving = p.source(), Deadline(seconds, watched)
    if p.spec.store:
        until_saved(p, d, limits.release)
    while reuse and not at_once and not p.overwritten() and not saving.over():
        p.step()
    before: tuple[Check, ...] = ()
    if alone:
        source, before = _forget(p, source, limits)
    deadline = Deadline(seconds, watched)  # what P took is not D's
    if not at_once:
        beside = _warm(transfer, make, p, d, deadline)  # only now, so that P finds nothing that D has saved
        before_load()
        targets = [make(i, "d", ends[request.id]) for i, request in enumerate(sources)]
        for request in targets:
            d.add(request)
    if transfer.preempt == "D":
        while not (outputs := d.step_beside(p).outputs) and not deadline.over():
            if not alone:  # its own outputs would be lost
                p.step()
        ends |= {output.id: output for output in outputs if output.finish}
        if targets[0].id not in ends:  # a load that was refused ends its request before a token
            d.preempt(targets[0].id)
    stuck = until_finished(d, p, [request.id for request in targets], ends, deadline)
    for name in beside:
        d.abort(name)
    errors = sum(name in ends and ends[name].finish == "error" for name in beside)
    p.budget(0)
    p.reuse(False)
    if reuse and not alone:  # what overwrote P's blocks lies there, too
        source = _with_later(source, p.source())
    received = tuple(
        Received(
            name=f"request {i}",
            length=len(prompt.tokens),
            prefill=p.trace(sources[i].id),
            decode=d.trace(targets[i].id),
            finish=(ends[targets[i].id].finish or "") if targets[i].id in ends else "",
            checks=d.pop_checks(targets[i].id),
        )
        for i, prompt in enumerate(transfer.prompts)
    )
    observed = replace(observed, requests=received, failed_beside=errors, stuck=stuck, source=source)
    if stuck:
        return observed
    refused = any(r.finish == "error" for r in received)  # P may wait for its lease to end then
    released = until_released(p, d, limits.release, p_may_keep=refused)
    observed = replace(observed, usage=released.usage, released=released)
    statistics = p.statistics(), StatisticsTrace() if alone else d.statistics()
    of_p, of_d = both(p, d, "audit")
    return replace(observed, statistics=statistics, audits=(before or of_p, of_d))


def _forget(engine: ByteEngineHandle, source: Source, limits: Deadlines) -> tuple[Source, tuple[Check, ...]]:
    """Empty the prefix cache of an engine whose blocks were overwritten, and poison its pool.

    Returns the places of the rows that were saved and of those that overwrote them, and the last look at the
    pool before.
    """
    engine.budget(0)  # that of P alone
    until_saved(engine, engine, limits.release)  # what overwrote the blocks is saved, too
    engine.reuse(False)
    source = _with_later(source, engine.source())
    before = engine.audit()
    engine.poison()
    return source, before


def _with_later(source: Source, later: Source) -> Source:
    """The places of rows, and of those that were written since, with all writers of the blocks."""
    return replace(later, tables={**later.tables, **source.tables})


def _warm(
    transfer: Transfer, make: _Requests, p: ByteEngineHandle, d: ByteEngineHandle, deadline: Deadline
) -> list[str]:
    """Let D compute prefixes of the prompts by itself, so that its own prefix cache has them.

    Returns the requests that go on.
    """
    running = list[str]()
    tokens = [prompt.warm or tokens_of_others(d.spec) for prompt in transfer.prompts]
    for i, count in enumerate(tokens):
        if count:
            warm = make(i, "w", tokens=count)
            d.add(warm)
            if transfer.beside:
                while not d.step_beside(p).outputs and not deadline.over():
                    pass
                running.append(warm.id)
            elif stuck := until_finished(d, p, [warm.id], {}, deadline):
                raise HarnessError(f"D did not compute a prefix of {transfer} by itself: {listed(stuck)}")
    if any(tokens):
        d.poison(keep_cache=True)
    return running


class _Requests:
    """Makes the requests of a transfer: on P and on D, with the owners of their tokens."""

    def __init__(
        self,
        transfer: Transfer,
        owners: list[np.ndarray],
        salt: str,
        p: ByteEngineHandle,
        d: ByteEngineHandle,
    ):
        self.transfer, self.owners, self.salt, self.p, self.d = transfer, owners, salt, p.spec, d.spec
        self.zygote = p.process.address
        self._early: dict[int, dict[str, Any] | None] = {}

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
            id=f"{self.salt}-{index}-{IDS[side]}",
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


def both(p: ByteEngineHandle, d: ByteEngineHandle, name: str) -> tuple[Any, Any]:
    """One call on both engines at once: each looks at its whole pool."""
    if p is d:
        return (answer := p.call(name)), answer
    p.send(name)
    d.send(name)
    return p.answer(name), d.answer(name)


def until_finished(
    engine: ByteEngineHandle,
    peer: ByteEngineHandle,
    names: list[str],
    ends: dict[str, Output],
    deadline: Deadline,
) -> tuple[Unfinished, ...]:
    """Step both engines until requests of the first have ended.

    Returns the requests that have not ended by the deadline.
    """
    waiting = set(names) - ends.keys()
    while waiting:
        for steps, beside in ((engine, peer), (peer, engine)):
            for output in steps.step_beside(beside).outputs if waiting else ():
                if output.finish or output.kv_transfer_params:
                    ends[output.id] = output
                    waiting.discard(output.id)
        if waiting and deadline.over():
            stuck = tuple(Unfinished(engine.role, engine.trace(name).status) for name in sorted(waiting))
            for name in waiting:
                engine.abort(name)
            return stuck
    return ()
