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
from pytest_kvconform.rigs.context import Deadlines
from pytest_kvconform.rigs.engine.handle import EngineFailed, ModelEngineHandle, hook_calls, logged
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
from pytest_kvconform.rigs.engine.observation import (
    Generated,
    Observation,
    RequestObservation,
    compared,
    generated,
    has_kv_before,
    logprob_distance,
    with_state,
)
from pytest_kvconform.rigs.engine.release import tokens_of_others, until_released, until_saved
from pytest_kvconform.rigs.engine.router import answered_params, decode_params, prefill_params
from pytest_kvconform.rigs.processes.cores import Deadline
from pytest_kvconform.rigs.scenario import VOCABULARY, Prompt, Scenario

Pair = tuple[ModelEngineHandle, ModelEngineHandle]  # P and D
SUBJECT, ORACLE = "subject", "oracle"
POLL_S = 0.02  # how long D polls before P gets a step
FLOAT32_TOLERANCE = 1e-4  # of log-probabilities, see DESIGN.md


def observe(
    scenario: Scenario,
    p: ModelEngineHandle,
    d: ModelEngineHandle,
    dtype: str,
    deadlines: Deadlines,
    ids: Callable[[], str],
    without: Pair | None = None,
) -> Observation:
    """Run one scenario: subject, then oracle. What fails or does not end is part of the observation.

    `without`: of a store, P and D without the connector. The oracle uses them: the store would save and find
    what is computed in its run, too. It brings as many tokens as D has loaded in the subject's run. A state
    is that after exactly these tokens, so P computes only them.
    """
    empty = Observation(scenario, p.facts, d.facts, request_s=deadlines.request)
    try:
        return _observe(empty, (p, d), without, dtype, deadlines, ids)
    except EngineFailed as failed:
        return replace(empty, failed=failed, calls=hook_calls(p, d))
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
    pair: Pair,
    without: Pair | None,
    dtype: str,
    deadlines: Deadlines,
    ids: Callable[[], str],
) -> Observation:
    scenario, started = base.scenario, time.monotonic()
    logs = [(engine, engine.begin_log()) for engine in pair]
    hook_calls(*pair)  # those of an earlier scenario are forgotten
    subject = _run(scenario, _Pass(*pair, SUBJECT, deadlines, ids(), is_store=without is not None))
    base = replace(base, logged=logged(logs))
    if subject.stuck:
        return replace(base, stuck=subject.stuck, calls=hook_calls(*pair))
    released = until_released(*pair, deadlines.release)
    base = replace(base, usage=released.usage, released=released, calls=hook_calls(*pair))
    base = replace(base, seconds={"subject": time.monotonic() - started})
    if scenario.abort:
        return base
    brings = tuple(subject.decode[name].first_computed for name in subject.names) if without else ()

    def oracle() -> tuple[list[Generated], list[Snapshot]]:
        one = _Pass(*(without or pair), ORACLE, deadlines, ids(), brings=brings)
        try:
            return _oracle(scenario, one)
        except (EngineFailed, _OracleStuck) as failed:
            if without is None:
                raise
            raise Blocked(f"the oracle's engines, which have no connector, failed: {failed}") from None

    wanted = oracle()
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
    noise = max(logprob_distance(a, b) for a, b in zip(wanted[0], oracle()[0], strict=True))
    return replace(
        base, noise=noise, tolerance=noise, tolerance_source=f"two oracle runs differ by {noise:.3g}"
    )


@dataclass(frozen=True)
class _Pass:
    """One pass through a scenario: by whom, and how D comes to the KV."""

    p: ModelEngineHandle
    d: ModelEngineHandle
    mode: str
    deadlines: Deadlines
    salt: str  # of the prefix caches: passes share nothing
    is_store: bool = False  # P saves, and D finds it
    brings: tuple[int, ...] = ()  # tokens of each prompt that the oracle brings; (): all but the last


def _oracle(scenario: Scenario, one: _Pass) -> tuple[list[Generated], list[Snapshot]]:
    """Of each request: what D generates after a perfect hand-over, and the KV that was handed over."""
    run = _run(scenario, one)
    if run.stuck:
        raise _OracleStuck(run.stuck)
    until_released(one.p, one.d, one.deadlines.release)
    return [generated(run.outputs[name]) for name in run.names], [run.source[name] for name in run.names]


@dataclass
class _Run:
    """State of one pass through a scenario."""

    names: list[str]
    outputs: dict[str, list[Output]]
    prefill: dict[str, Trace] = field(default_factory=dict)
    decode: dict[str, Trace] = field(default_factory=dict)
    source: dict[str, Snapshot] = field(default_factory=dict)  # P's KV after the prompt
    target: dict[str, Snapshot | None] = field(default_factory=dict)  # D's KV before its first forward
    stuck: tuple[Unfinished, ...] = ()


def _run(scenario: Scenario, one: _Pass) -> _Run:
    """One pass. Prefix caches are emptied first. Unowned blocks are poisoned."""
    one.p.poison()
    one.d.poison()
    seconds = one.deadlines.request + 2 * one.p.spec.save_delay
    deadline = Deadline(seconds, (one.p.process.watched, one.d.process.watched))
    if scenario.prompts[0].turn:
        earlier = tuple(Prompt(prompt.tokens[: prompt.turn]) for prompt in scenario.prompts)
        run = _hand_over(replace(scenario, prompts=earlier), replace(one, brings=()), deadline, "-turn")
        if run.stuck:
            return run
        one.p.poison(keep_cache=True)
        one.d.poison(keep_cache=True)
    return _hand_over(scenario, one, deadline)


def _hand_over(scenario: Scenario, one: _Pass, deadline: Deadline, word: str = "") -> _Run:
    """Let P compute the prompts and D generate. `word`: of the requests' names."""
    prompts, p, d = scenario.expanded(), one.p, one.d
    run = _Run(request_names(f"{one.salt}-{one.mode}{word}", len(prompts), scenario.n), {})
    if not one.is_store:
        _warm(scenario, one, run, deadline)
    _prefill(scenario, one, run, prompts, deadline)
    if run.stuck or scenario.abort == "prefill":
        return run
    if one.is_store:
        until_saved(p, d, one.deadlines.release)
        _warm(scenario, one, run, deadline)  # only now, so that P finds nothing that D has saved
        if run.stuck:
            return run
    handed = {name: answered_params(run.outputs[name]) for name in run.names}
    run.outputs = {name: [] for name in run.names}
    for i, (name, prompt) in enumerate(zip(run.names, prompts, strict=True)):
        source = name if scenario.n == 1 else run.names[0]
        params = None
        if one.mode == SUBJECT:
            params = decode_params(p.spec.handover, source, p.spec, handed[source], p.process.address)
        d.add(
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
        _abort_decode(scenario, p, d, run)
        return run
    _until_finished(d, p, [f"{name}-{ON_D}" for name in run.names], run, deadline)
    for name, prompt in zip(run.names, prompts, strict=True):
        trace = run.decode[name] = d.trace(f"{name}-{ON_D}")
        # a request whose load failed has computed nothing, and vLLM forgets its hit
        lost = trace.computed_tokens and not trace.local_tokens
        if prompt.warm >= d.facts.block_size and lost and not run.stuck:
            raise HarnessError(f"{scenario}: D computed a prefix by itself and found nothing of it again")
        run.target[name] = d.pop_snapshot(f"{name}-{ON_D}")
        run.outputs[name] = run.outputs.pop(f"{name}-{ON_D}", [])
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


def _warm(scenario: Scenario, one: _Pass, run: _Run, deadline: Deadline) -> None:
    """Let D compute prefixes of the prompts by itself, so that its own prefix cache has them. D may load what
    P has saved to a store.
    """
    for i, prompt in enumerate(prompts := scenario.expanded()):
        if tokens := prompt.warm or tokens_of_others(one.d.spec):
            warm = _add(one.d, f"{one.salt}-warm-{i}", prompt.tokens[:tokens], one.salt)
            _until_finished(one.d, one.p, [warm], run, deadline)
    if run.stuck and not one.is_store:
        raise HarnessError(f"D did not compute a prefix of {scenario} by itself: {listed(run.stuck)}")
    if prompts[0].warm or tokens_of_others(one.d.spec):
        one.d.poison(keep_cache=True)


def _prefill(
    scenario: Scenario, one: _Pass, run: _Run, prompts: tuple[Prompt, ...], deadline: Deadline
) -> None:
    """Let P compute the prompts, all at once, and note its KV.

    The n samples of one prompt have one prefill.
    """
    p, d = one.p, one.d
    names = run.names if scenario.n == 1 else run.names[:1]
    has_state = any(group.kind == "state" for group in p.facts.groups)
    p.budget(scenario.budget)
    for index, (name, prompt) in enumerate(zip(names, prompts, strict=False)):
        tokens = prompt.tokens
        if one.mode == ORACLE and has_state and len(tokens) > 1:
            # the oracle needs P's state before the token with which D goes on: the last one, if D loads all
            loads = one.brings[index : index + scenario.n]  # of the samples of this prompt
            tokens = tokens[: max(loads, default=0) or -1]
        subject = one.mode == SUBJECT
        params = prefill_params(p.spec.handover, name, d.spec, p.process.address) if subject else None
        request = Request(id=id_on_p(name), tokens=tokens, max_tokens=1, salt=one.salt, watch=True)
        p.add(msgspec.structs.replace(request, kv_transfer_params=params))
        run.outputs[id_on_p(name)] = []
    if scenario.abort == "prefill":
        p.step_beside(d)
        for name in names:
            p.abort(id_on_p(name))
        p.budget(0)
        return
    _until_finished(p, d, [id_on_p(name) for name in names], run, deadline)
    p.budget(0)
    if run.stuck:  # P has no KV of the prompt yet
        return
    for name in names:
        run.prefill[name] = p.trace(id_on_p(name))
        run.outputs[name] = run.outputs.pop(id_on_p(name))
        snapshot = p.pop_snapshot(id_on_p(name))
        if snapshot is not None:
            run.source[name] = snapshot
    for name in run.names[len(names) :]:
        run.prefill[name], run.source[name] = run.prefill[names[0]], run.source[names[0]]
        run.outputs[name] = []


def _add(engine: ModelEngineHandle, name: str, tokens: tuple[int, ...], salt: str) -> str:
    engine.add(Request(id=name, tokens=tokens, max_tokens=1, salt=salt))
    return name


def _until_finished(
    engine: ModelEngineHandle, peer: ModelEngineHandle, names: list[str], run: _Run, deadline: Deadline
) -> None:
    """Step an engine, and its peer in between, until all requests have ended.

    Requests that have not ended by the deadline are noted in `run.stuck`.
    """
    waiting = set(names)
    for name in names:
        run.outputs.setdefault(name, [])
    while waiting:
        for steps, beside, poll in ((engine, peer, POLL_S), (peer, engine, 0.0)):
            for output in steps.step_beside(beside, poll).outputs if waiting else ():
                if output.id in waiting:
                    run.outputs[output.id].append(output)
                    if output.finish is not None:
                        waiting.discard(output.id)
        if waiting and deadline.over():
            run.stuck = tuple(Unfinished(engine.role, engine.trace(name).status) for name in sorted(waiting))
            for name in waiting:
                engine.abort(name)
            return


def _abort_decode(scenario: Scenario, p: ModelEngineHandle, d: ModelEngineHandle, run: _Run) -> None:
    """Abort D's requests before the first step, or once their load is under way."""
    if scenario.abort == "loading":
        d.step_beside(p)
    for name in run.names:
        d.abort(f"{name}-{ON_D}")
