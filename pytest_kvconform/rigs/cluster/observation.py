"""The observation of one scenario on two engines, each request in it, and the comparison of D's answers.

Cases judge an observation; nothing is judged here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from pytest_kvconform.kvspace.rows.compare import Due, RowComparison, compare_rows, compare_state
from pytest_kvconform.result import HookCall
from pytest_kvconform.rigs.cluster.release import Release
from pytest_kvconform.rigs.engine.handle import EngineFailed
from pytest_kvconform.rigs.engine.kv_access import POISON
from pytest_kvconform.rigs.engine.messages import EngineFacts, Output, Snapshot, Trace, Unfinished, Usage
from pytest_kvconform.rigs.scenario import Scenario


@dataclass(frozen=True)
class Generated:
    """What D generated for one request."""

    tokens: tuple[int, ...]
    logprobs: tuple[np.ndarray, ...]  # one array per token, over the whole vocabulary
    finish: str | None


@dataclass(frozen=True)
class RequestObservation:
    """One request of a scenario on its way from P to D."""

    name: str
    length: int  # prompt tokens
    prefill: Trace
    decode: Trace
    # D's cache against P's, before D's first forward; None: D never had a first forward
    rows: RowComparison | None
    state_bytes: int = 0  # bytes of recurrent state that were compared
    state_wrong: tuple[tuple[str, str, int, int, int], ...] = ()  # see kvspace.rows.compare
    state_tokens: tuple[int, int] = (0, 0)  # tokens that P's state covers; position at which D continued
    changed_blocks: tuple[int, ...] = ()  # unowned blocks that changed on D
    got: Generated | None = None
    want: Generated | None = None


@dataclass(frozen=True)
class Observation:
    """All that was observed in one scenario."""

    scenario: Scenario
    prefiller: EngineFacts
    decoder: EngineFacts
    requests: tuple[RequestObservation, ...] = ()
    failed: EngineFailed | None = None  # an engine died, hung or raised
    excuse: str = ""  # if one failed: how the same fails without the connector, see `control`
    stuck: tuple[Unfinished, ...] = ()  # requests that did not end in time
    logged: tuple[str, ...] = ()  # exceptions that engines wrote to their logs in the subject's run
    calls: tuple[HookCall, ...] = ()  # the last ones of P and D
    usage: tuple[Usage, Usage] | None = None  # of P and D after everything has ended and both were polled
    released: Release | None = None  # the wait for that
    kept_before: bool = False  # whether P or D kept something of earlier scenarios
    request_s: float = 0.0  # for which requests were waited at most
    noise: float = 0.0  # largest difference of log-probabilities between two runs of the oracle
    tolerance: float = 0.0
    tolerance_source: str = ""
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def refused(self) -> bool:
        """Whether a request ended with an error: the connector gave its load up."""
        return any(r.got is not None and r.got.finish == "error" for r in self.requests)

    @property
    def declined(self) -> bool:
        """Whether the connector refused requests cleanly.

        No engine has failed, no request is stuck, and in D's cache no row, no state and no block of others is
        wrong.
        """
        wrong = any((r.rows and r.rows.wrong) or r.state_wrong or r.changed_blocks for r in self.requests)
        return self.refused and not (self.failed or self.stuck or wrong)


def logprob_distance(a: Generated, b: Generated) -> float:
    """Largest difference of log-probabilities at any position up to the first at which the tokens differ."""
    worst = 0.0
    for x, y, s, t in zip(a.logprobs, b.logprobs, a.tokens, b.tokens, strict=False):
        worst = max(worst, float(np.abs(x - y).max()))
        if s != t:
            break
    return worst


@dataclass(frozen=True)
class OutputDifference:
    """How far one answer is from another."""

    largest: float  # difference of log-probabilities, up to `position`
    position: int | None  # first generated token that is wrong; None: the answers agree
    sentence: str = ""


def first_difference(got: Generated, want: Generated, tolerance: float) -> OutputDifference:
    """The first place where `got` differs from `want` by more than the tolerance.

    A token may differ only where both choices are equally good within the tolerance.
    """
    largest = 0.0
    if len(got.tokens) != len(want.tokens):
        return OutputDifference(
            largest,
            min(len(got.tokens), len(want.tokens)),
            f"{len(got.tokens)} tokens instead of {len(want.tokens)}",
        )
    for i, (x, y, s, t) in enumerate(zip(got.logprobs, want.logprobs, got.tokens, want.tokens, strict=True)):
        distance = float(np.abs(x - y).max())
        largest = max(largest, distance)
        if distance > tolerance:
            worst = int(np.abs(x - y).argmax())
            return OutputDifference(
                largest,
                i,
                f"generated token {i}: log-probabilities differ by up to {distance:.3g} (token id {worst}: "
                f"{x[worst]:.4f}, with the oracle {y[worst]:.4f})",
            )
        if s != t:
            if abs(float(y[s] - y[t])) > 2 * tolerance:
                return OutputDifference(
                    largest, i, f"generated token {i} is {s}, with the oracle {t}, at equal log-probabilities"
                )
            break  # a tie: both are right, and what follows cannot be compared
    return OutputDifference(largest, None)


def generated(outputs: Sequence[Output]) -> Generated:
    """What the outputs of a request add up to."""
    return Generated(
        tokens=tuple(token for o in outputs for token in o.tokens),
        finish=next((o.finish for o in outputs if o.finish), None),
        logprobs=tuple(logprobs for o in outputs for logprobs in o.logprobs),
    )


def compared(
    observed: RequestObservation, source: Snapshot | None, target: Snapshot | None
) -> RequestObservation:
    """Compare D's cache with P's: the tokens that D's next forward reads and that D did not compute. Nothing
    is compared without a snapshot of each.

    Tokens of D's own prefix cache are left out: D has loaded them for an earlier request, or has computed
    them itself, with its own tensor parallel size, and so not bit for bit as P has. Of a group with a window
    only the window is compared.
    """
    if source is None or target is None:
        return observed
    position, due = target.tokens, []
    for group in target.groups:
        first = max(observed.decode.local_tokens, position - group.window + 1 if group.window else 0)
        if group.kind == "attention":
            due += [Due(layer, first, position, group.block_size, group.window) for layer in group.layers]
    given = observed.decode.external_tokens > 0 and position > 0
    state_bytes, wrong = compare_state(source.state, target.state, POISON) if given else (0, [])
    return replace(
        observed,
        rows=compare_rows(tuple(due), source.rows, target.rows, target.present, POISON),
        state_bytes=state_bytes,
        state_wrong=tuple(wrong),
        state_tokens=(source.tokens, position),
        changed_blocks=target.changed,
    )


def with_state(source: Snapshot | None, oracle: Snapshot) -> Snapshot | None:
    """P's KV after the prompt, with the state that the oracle handed over: a store loads an earlier one."""
    return source and msgspec.structs.replace(source, state=oracle.state, tokens=oracle.tokens)


def has_kv_before(source: Snapshot, token: int) -> bool:
    """Whether a snapshot has every row that is read when `token` is computed."""
    return all(
        source.present[name][max(0, token - group.window + 1) if group.window else 0 : token].all()
        for group in source.groups
        if group.kind == "attention"
        for name in group.layers
    )
