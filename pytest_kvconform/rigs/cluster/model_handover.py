"""One hand-over on two engines: a scenario runs through the subject, and again through an oracle.

The oracle uses the same two engines, in the same order of steps, without the subject (of a store, two other
engines without it): the harness reads P's KV in logical coordinates and writes it where D's block tables
place it. So a difference between the two runs comes from the subject, whatever the kernels do. A one-shot
prefill would be the wrong control: D computes the last prompt token alone, with another kernel.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import msgspec

from pytest_kvconform.result import Blocked, HarnessError
from pytest_kvconform.rigs.cluster.engine import Engine, Steps
from pytest_kvconform.rigs.cluster.loop import watching
from pytest_kvconform.rigs.cluster.observation import (
    Generated,
    Observation,
    RequestObservation,
    compared,
    generated,
    has_kv_before,
    logprob_distance,
    with_state,
)
from pytest_kvconform.rigs.cluster.release import tokens_of_others, until_released, until_saved
from pytest_kvconform.rigs.cluster.turns import until_finished
from pytest_kvconform.rigs.context import Deadlines
from pytest_kvconform.rigs.engine.handle import EngineFailed, hook_calls, logged
from pytest_kvconform.rigs.engine.messages import (
    ON_D,
    Output,
    Request,
    Snapshot,
    Trace,
    Unfinished,
    id_on_p,
    listed,
    request_names,
)
from pytest_kvconform.rigs.engine.router import answered_params, decode_params, prefill_params
from pytest_kvconform.rigs.processes.cores import Deadline
from pytest_kvconform.rigs.scenario import VOCABULARY, Prompt, Scenario

SUBJECT, ORACLE = "subject", "oracle"
POLL_S = 0.02  # how long D polls before P gets a step
FLOAT32_TOLERANCE = 1e-4  # of log-probabilities, see DESIGN.md


def observe(
    p: Engine,
    d: Engine,
    *without: Engine,
    scenario: Scenario,
    dtype: str,
    deadlines: Deadlines,
    ids: Callable[[], str],
) -> Steps:
    """Run one scenario: subject, then oracle. What fails or does not end is part of the Observation.

    `without`: of a store, P and D without the connector. The oracle uses them: the store would save and find
    what is computed in its run, too. It brings as many tokens as D has loaded in the subject's run. A state
    is that after exactly these tokens, so P computes only them.
    """
    empty = Observation(scenario, p.facts, d.facts, request_s=deadlines.request)
    try:
        return (yield from _observe(empty, (p, d), without, dtype, deadlines, ids))
    except EngineFailed as failed:
        return replace(empty, failed=failed, calls=hook_calls(p.handle, d.handle))
    except _OracleStuck as stuck:
        unfinished = (msgspec.structs.replace(one, run=" in the oracle's run") for one in stuck.requests)
        return replace(empty, stuck=tuple(unfinished))


class _OracleStuck(Exception):
    """Requests of the oracle's run did not end in time."""

    def __init__(self, requests: tuple[Unfinished, ...]):
        super().__init__(listed(requests))
        self.requests = requests


def _observe(
    base: Observation,
    pair: tuple[Engine, Engine],
    without: tuple[Engine, ...],
    dtype: str,
    deadlines: Deadlines,
    ids: Callable[[], str],
) -> Steps:
    scenario, started, handles = base.scenario, time.monotonic(), [engine.handle for engine in pair]
    logs = [(handle, handle.begin_log()) for handle in handles]
    hook_calls(*handles)  # those of an earlier scenario are forgotten
    subject = yield from _run(scenario, _Pass(*pair, SUBJECT, deadlines, ids(), is_store=bool(without)))
    base = replace(base, logged=logged(logs))
    if subject.stuck:
        return replace(base, stuck=subject.stuck, calls=hook_calls(*handles))
    released = yield from until_released(*pair, deadlines.release)
    base = replace(base, usage=released.usage, released=released, calls=hook_calls(*handles))
    base = replace(base, seconds={"subject": time.monotonic() - started})
    if scenario.abort:
        return base
    brings = tuple(subject.decode[name].first_computed for name in subject.names) if without else ()

    def oracle() -> Steps:
        p, d = without or pair
        one = _Pass(p, d, ORACLE, deadlines, ids(), brings=brings)
        try:
            return (yield from _oracle(scenario, one))
        except (EngineFailed, _OracleStuck) as failed:
            if not without:
                raise
            raise Blocked(f"the oracle's engines, which have no connector, failed: {failed}") from None

    wanted: tuple[list[Generated], list[Snapshot]] = yield from oracle()
    observed = tuple(
        compared(
            RequestObservation(
                name=f"request {i}",
                length=len(prompt.tokens),
                prefill=subject.prefill[name],
                decode=subject.decode[name],
                rows=None,
                got=generated(subject.outputs[name]),
                want=want,
            ),
            with_state(subject.source.get(name), state) if without else subject.source.get(name),
            subject.target.get(name),
        )
        for i, (prompt, name, want, state) in enumerate(
            zip(scenario.expanded(), subject.names, *wanted, strict=True)
        )
    )
    base = replace(
        base,
        requests=observed,
        seconds=base.seconds | {"oracle": time.monotonic() - started - base.seconds["subject"]},
    )
    if dtype == "float32":
        return replace(base, tolerance=FLOAT32_TOLERANCE, tolerance_source="float32")
    differs = any(r.got and r.want and logprob_distance(r.got, r.want) for r in observed)
    if not (differs or scenario.measure_noise):
        return replace(base, tolerance_source="equal to the last bit")
    again = yield from oracle()
    noise = max(logprob_distance(a, b) for a, b in zip(wanted[0], again[0], strict=True))
    return replace(
        base, noise=noise, tolerance=noise, tolerance_source=f"two oracle runs differ by {noise:.3g}"
    )


@dataclass(frozen=True)
class _Pass:
    """One pass through a scenario: by whom, and how D comes to the KV."""

    p: Engine
    d: Engine
    mode: str
    deadlines: Deadlines
    salt: str  # of the prefix caches: passes share nothing
    is_store: bool = False  # P saves, and D finds it
    brings: tuple[int, ...] = ()  # tokens of each prompt that the oracle brings; (): all but the last


def _oracle(scenario: Scenario, one: _Pass) -> Steps:
    """Of each request: what D generates after a perfect hand-over, and the KV that was handed over.

    Returns a list of Generated, and one of Snapshot.
    """
    run = yield from _run(scenario, one)
    if run.stuck:
        raise _OracleStuck(run.stuck)
    yield from until_released(one.p, one.d, one.deadlines.release)
    return [generated(run.outputs[name]) for name in run.names], [run.source[name] for name in run.names]


@dataclass
class _Run:
    """State of one pass through a scenario."""

    names: list[str]
    outputs: dict[str, list[Output]] = field(default_factory=dict)  # D's
    prefill: dict[str, Trace] = field(default_factory=dict)
    decode: dict[str, Trace] = field(default_factory=dict)
    source: dict[str, Snapshot] = field(default_factory=dict)  # P's KV after the prompt
    target: dict[str, Snapshot | None] = field(default_factory=dict)  # D's KV before its first forward
    stuck: tuple[Unfinished, ...] = ()


def _run(scenario: Scenario, one: _Pass) -> Steps:
    """One pass. Prefix caches are emptied first. Unowned blocks are poisoned. Returns _Run."""
    yield from one.p.call("poison")
    yield from one.d.call("poison")
    deadline = watching(one.deadlines.request + 2 * one.p.spec.save_delay, one.p, one.d)
    if scenario.prompts[0].turn:
        earlier = tuple(Prompt(prompt.tokens[: prompt.turn]) for prompt in scenario.prompts)
        run: _Run = yield from _hand_over(
            replace(scenario, prompts=earlier), replace(one, brings=()), deadline, "-turn"
        )
        if run.stuck:
            return run
        yield from one.p.call("poison", True)
        yield from one.d.call("poison", True)
    return (yield from _hand_over(scenario, one, deadline))


def _hand_over(scenario: Scenario, one: _Pass, deadline: Deadline, word: str = "") -> Steps:
    """Let P compute the prompts and D generate. `word`: of the requests' names. Returns _Run."""
    prompts, p, d = scenario.expanded(), one.p, one.d
    run = _Run(request_names(f"{one.salt}-{one.mode}{word}", len(prompts), scenario.n))
    if not one.is_store:
        yield from _warm(scenario, one, run, deadline)
    yield from _prefill(scenario, one, run, prompts, deadline)
    if run.stuck or scenario.abort == "prefill":
        return run
    if one.is_store:
        yield from until_saved(p, d, one.deadlines.release)
        yield from _warm(scenario, one, run, deadline)  # only now, so that P finds nothing that D has saved
        if run.stuck:
            return run
    handed = {name: answered_params(p.outputs.get(id_on_p(name), [])) for name in run.names}
    for i, (name, prompt) in enumerate(zip(run.names, prompts, strict=True)):
        source = name if scenario.n == 1 else run.names[0]
        params = None
        if one.mode == SUBJECT:
            params = decode_params(p.spec.handover, source, p.spec, handed[source], p.handle.process.address)
        yield from d.add(
            Request(
                id=f"{name}-{ON_D}",
                tokens=prompt.tokens,
                max_tokens=scenario.max_tokens,
                salt=one.salt,
                watch=True,
                kv_transfer_params=params,
                allowed=tuple(VOCABULARY[i :: scenario.n]) if scenario.n > 1 else (),  # samples differ
                oracle=_brought(one, i, run.source[name]),
            )
        )
    if scenario.abort:
        if scenario.abort == "loading":
            yield from d.step_beside(p)
        for name in run.names:
            yield from d.call("abort", f"{name}-{ON_D}")
        return run
    run.stuck = yield from until_finished(d, p, [f"{name}-{ON_D}" for name in run.names], deadline, POLL_S)
    for name, prompt in zip(run.names, prompts, strict=True):
        trace = run.decode[name] = yield from d.call("trace", f"{name}-{ON_D}")
        # a request whose load failed has computed nothing, and vLLM forgets its hit
        lost = trace.computed_tokens and not trace.local_tokens
        if prompt.warm >= d.facts.block_size and lost and not run.stuck:
            raise HarnessError(f"{scenario}: D computed a prefix by itself and found nothing of it again")
        run.target[name] = yield from d.call("pop_snapshot", f"{name}-{ON_D}")
        run.outputs[name] = d.outputs.get(f"{name}-{ON_D}", [])
    return run


def _brought(one: _Pass, index: int, source: Snapshot) -> Snapshot | None:
    """What the oracle puts in place on D. None: nothing, D computes the prompt."""
    if one.mode != ORACLE:
        return None
    tokens = one.brings[index] if one.brings else source.tokens
    if one.brings and tokens > 0 and not has_kv_before(source, tokens):
        raise Blocked(f"P has freed KV that D reads when it continues at token {tokens}")
    if one.brings and source.state and 0 < tokens != source.tokens:  # the samples of one prompt share a P
        raise Blocked(f"the oracle has P's state after {source.tokens} tokens, and D goes on after {tokens}")
    return msgspec.structs.replace(source, tokens=tokens) if tokens > 0 else None


def _warm(scenario: Scenario, one: _Pass, run: _Run, deadline: Deadline) -> Steps:
    """Let D compute prefixes of the prompts by itself, so that its own prefix cache has them. D may load what
    P has saved to a store.
    """
    for i, prompt in enumerate(prompts := scenario.expanded()):
        if tokens := prompt.warm or tokens_of_others(one.d.spec):
            warm = Request(
                id=f"{one.salt}-warm-{i}", tokens=prompt.tokens[:tokens], max_tokens=1, salt=one.salt
            )
            yield from one.d.add(warm)
            run.stuck = (yield from until_finished(one.d, one.p, [warm.id], deadline, POLL_S)) or run.stuck
    if run.stuck and not one.is_store:
        raise HarnessError(f"D did not compute a prefix of {scenario} by itself: {listed(run.stuck)}")
    if prompts[0].warm or tokens_of_others(one.d.spec):
        yield from one.d.call("poison", True)


def _prefill(
    scenario: Scenario, one: _Pass, run: _Run, prompts: tuple[Prompt, ...], deadline: Deadline
) -> Steps:
    """Let P compute the prompts, all at once, and note its KV.

    The n samples of one prompt have one prefill.
    """
    p, d = one.p, one.d
    names = run.names if scenario.n == 1 else run.names[:1]
    has_state = any(group.kind == "state" for group in p.facts.groups)
    yield from p.call("budget", scenario.budget)
    for index, (name, prompt) in enumerate(zip(names, prompts, strict=False)):
        tokens = prompt.tokens
        if one.mode == ORACLE and has_state and len(tokens) > 1:
            # the oracle needs P's state before the token with which D goes on: the last one, if D loads all
            loads = one.brings[index : index + scenario.n]  # of the samples of this prompt
            tokens = tokens[: max(loads, default=0) or -1]
        subject = one.mode == SUBJECT
        zygote = p.handle.process.address
        params = prefill_params(p.spec.handover, name, d.spec, zygote) if subject else None
        request = Request(id=id_on_p(name), tokens=tokens, max_tokens=1, salt=one.salt, watch=True)
        yield from p.add(msgspec.structs.replace(request, kv_transfer_params=params))
    if scenario.abort == "prefill":
        yield from p.step_beside(d)
        for name in names:
            yield from p.call("abort", id_on_p(name))
        yield from p.call("budget", 0)
        return
    run.stuck = yield from until_finished(p, d, [id_on_p(name) for name in names], deadline, POLL_S)
    yield from p.call("budget", 0)
    if run.stuck:  # P has no KV of the prompt yet
        return
    for name in names:
        run.prefill[name] = yield from p.call("trace", id_on_p(name))
        snapshot = yield from p.call("pop_snapshot", id_on_p(name))
        if snapshot is not None:
            run.source[name] = snapshot
    for name in run.names[len(names) :]:
        run.prefill[name], run.source[name] = run.prefill[names[0]], run.source[names[0]]
