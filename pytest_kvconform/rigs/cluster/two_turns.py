"""Two turns of a conversation on two byte engines: D hands over to P what it has of the first one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pytest_kvconform.kvspace.pools.sources import Source
from pytest_kvconform.rigs.bytes.messages import ByteRequest, token_after
from pytest_kvconform.rigs.cluster.engine import Engine, Steps
from pytest_kvconform.rigs.cluster.loop import watching
from pytest_kvconform.rigs.cluster.release import until_released
from pytest_kvconform.rigs.cluster.transfer import Received, TransferObservation, watched
from pytest_kvconform.rigs.cluster.turns import both, step_both, until_finished
from pytest_kvconform.rigs.context import Deadlines
from pytest_kvconform.rigs.engine.messages import ON_D, ON_P, Output, Trace, Usage
from pytest_kvconform.rigs.engine.router import decode_params, prefill_params
from pytest_kvconform.rigs.scenario import Transfer, tokens

OTHERS = 77  # seed of the tokens behind an answer
CHUNK = 16  # tokens that P computes in a step, where its request is preempted


@dataclass(frozen=True, kw_only=True)
class TurnObservation(TransferObservation):
    """All that was observed in two turns. `requests` has D's request of the first turn, and if there was one
    that of the second turn. P's request of the second turn is another one: `on_p`.
    """

    first: Trace | None = None  # D's request of the first turn, when it had ended
    answered: bool = False  # whether D returned kv_transfer_params for it
    kept: Usage | None = None  # what D held then; None: it was never looked at
    on_p: Received | None = None
    on_d: Source | None = None  # where D's rows lay, for the diagnosis of what P received
    asked: bool = False  # whether P got its request of the second turn
    gone: bool = True  # whether D had freed its blocks before that, and others had them: `Turn.late`
    preempted: bool = False  # whether P's request was preempted
    left: tuple[Usage, Usage] | None = None  # what P and D held when P had loaded, or its request was aborted
    left_s: float = 0.0  # for which that was waited at most
    after: Usage | None = None  # what P held when D had loaded the next turn; None: D did not


def observe_turns(
    p: Engine, d: Engine, transfer: Transfer, limits: Deadlines, ids: Callable[[], str]
) -> Steps:
    """Run both turns. A failure of an engine is part of the TurnObservation."""
    turns = _Turns(TurnObservation(transfer, p.facts, d.facts, request_s=limits.request), p, d, limits, ids())
    return (yield from watched(turns.observed, p, d, turns.run()))


def prompt_of_next_turn(transfer: Transfer) -> tuple[int, ...]:
    """The prompt of the second turn: that of the first one, D's answer, and new tokens; or an end of them."""
    turn, first = transfer.turn, transfer.prompts[0].tokens
    assert turn is not None
    spoken = first + tuple(token_after(len(first) + index) for index in range(turn.answer))
    return spoken + tokens(turn.more, seed=OTHERS) if turn.more > 0 else spoken[: len(spoken) + turn.more]


class _Turns:
    """The two turns of one transfer."""

    def __init__(self, observed: TurnObservation, p: Engine, d: Engine, limits: Deadlines, salt: str):
        assert observed.transfer.turn is not None
        self.observed, self.p, self.d, self.limits, self.salt = observed, p, d, limits, salt
        self.transfer, self.turn = observed.transfer, observed.transfer.turn
        self.prompts = self.transfer.prompts[0].tokens, prompt_of_next_turn(self.transfer)

    def run(self) -> Steps:
        """Both turns. Returns TurnObservation."""
        p, d = self.p, self.d
        yield from both(p, d, "poison")
        yield from d.call("reuse", self.transfer.reuse)  # from now on others get the blocks that D frees
        if not ((yield from self._prefill(0, None)) and (yield from self._decode(0, self.turn.answer))):
            return self.observed
        self._note(
            first=(yield from d.call("trace", self._name(0, ON_D))),
            answered=bool(self._returned(0, ON_D)),
            kept=(yield from d.call("usage")),
            on_d=(yield from d.call("source")),
        )
        if self.transfer.abort == "D" or not self.observed.answered:
            return (yield from self._released())
        if self.turn.late and not (yield from self._wait_until_gone()):
            return (yield from self._audited())
        if self.transfer.reuse:
            yield from self._step(self.limits.release, lambda: d.call("overwritten"))
        if self.turn.forgets:
            yield from self._forget()
        self._note(asked=True)
        went_on = yield from self._prefill(1, self._returned(0, ON_D))
        name = self._name(1, ON_P)
        end = self._end_of(p, name)
        self._note(
            on_p=Received(
                name="the request of the next turn",
                length=len(self.prompts[1]),
                prefill=(yield from d.call("trace", self._name(0, ON_D))),
                decode=(yield from p.call("trace", name)),
                finish=(end.finish or "") if end else "",
                checks=(yield from p.call("pop_checks", name)),
            )
        )
        if self.observed.stuck:
            return self.observed
        # D holds nothing once P has loaded what it wanted, and P keeps its blocks for D. If P's request was
        # aborted, P holds nothing: D may keep its blocks until its lease ends.
        yield from self._wait_until_free(d if went_on else p)
        left = (yield from p.call("usage")), (yield from d.call("usage"))
        self._note(left=left, left_s=self.limits.release)
        if not went_on:
            return (yield from self._audited())
        loads = end and end.finish != "error" and self._returned(1, ON_P)
        decoded = loads and (yield from self._decode(1, 1))
        if decoded and d.ends[self._name(1, ON_D)].output.finish != "error":  # else P may wait for its lease
            yield from self._wait_until_free(p)
            self._note(after=(yield from p.call("usage")))
        return (yield from self._audited())

    # ---- parts ---------------------------------------------------------------------------------------------

    def _prefill(self, turn: int, returned: dict[str, Any] | None) -> Steps:
        """Let P compute the prompt of a turn. Returns whether its request has come to its end."""
        p, name, zygote = self.p, self._name(turn, ON_P), self.p.handle.process.address
        params = prefill_params(p.spec.handover, f"{self.salt}-{turn}", self.d.spec, zygote, returned)
        if turn and self.transfer.preempt == "P":
            yield from p.call("budget", CHUNK, CHUNK)
        yield from p.add(self._request(turn, name, params, 1))
        if turn and self.transfer.abort == "P":
            yield from p.step_beside(self.d)
            yield from p.call("abort", name)
            return False
        if turn and self.transfer.preempt == "P":
            yield from self._preempt(name)
        return (yield from self._end(p, self.d, name))

    def _decode(self, turn: int, count: int) -> Steps:
        """Let D load the prompt of a turn from P, and generate `count` tokens. Returns as `_prefill`."""
        p, d, name, zygote = self.p, self.d, self._name(turn, ON_D), self.p.handle.process.address
        returned, spec = self._returned(turn, ON_P), p.spec
        params = decode_params(spec.handover, f"{self.salt}-{turn}", spec, returned, zygote)
        yield from d.add(self._request(turn, name, params, count))
        if not turn and self.transfer.abort == "D":
            deadline = watching(self.limits.request, p, d)
            while not (yield from d.step_beside(p)).outputs and not deadline.over():
                yield from p.call("step", 0.0)
            yield from d.call("abort", name)
            ended = True
        else:
            ended = yield from self._end(d, p, name)
        end = self._end_of(d, name)
        received = Received(
            name=f"the request of turn {turn + 1}",
            length=len(self.prompts[turn]),
            prefill=(yield from p.call("trace", self._name(turn, ON_P))),
            decode=(yield from d.call("trace", name)),
            finish=(end.finish or "") if end else "",
            checks=(yield from d.call("pop_checks", name)),
        )
        self._note(requests=(*self.observed.requests, received))
        return ended

    def _end(self, engine: Engine, peer: Engine, name: str) -> Steps:
        stuck = yield from until_finished(engine, peer, [name], watching(self.limits.request, engine, peer))
        self._note(stuck=stuck)
        return not stuck

    def _preempt(self, name: str) -> Steps:
        """Preempt P's request between two chunks, and let the prefix cache lose its blocks, as it does where
        another request needs them.
        """
        p, seconds = self.p, self.limits.request

        def computes() -> Steps:
            return (yield from p.call("trace", name)).first_computed >= 0

        def is_preempted() -> Steps:
            return (yield from p.call("trace", name)).status == "PREEMPTED"

        if (yield from self._step(seconds, computes)):
            yield from p.call("preempt", name)
        if (yield from self._step(seconds, is_preempted)):
            yield from p.call("poison")
            self._note(preempted=True)
        yield from p.call("budget", 0)

    def _wait_until_gone(self) -> Steps:
        """Wait until D has freed its blocks, and others have them. Returns whether they do."""
        d, name = self.d, self._name(0, ON_D)

        def is_gone() -> Steps:
            return not (yield from d.call("holds", name)) and (yield from d.call("overwritten"))

        gone = yield from self._step(self.limits.release, is_gone)
        self._note(gone=gone)
        return gone

    def _forget(self) -> Steps:
        """Let P's prefix cache lose the first turn: P has to hold nothing any more."""

        def is_empty() -> Steps:
            return not (yield from self.p.call("usage")).requests

        if (yield from self._step(self.limits.release, is_empty)):
            yield from self.p.call("poison")

    def _wait_until_free(self, engine: Engine) -> Steps:
        """Step both engines until one holds nothing, or until time is up."""

        def is_free() -> Steps:
            used: Usage = yield from engine.call("usage")
            return not used.requests and used.free_blocks == used.total_blocks

        yield from self._step(self.limits.release, is_free)

    def _released(self) -> Steps:
        """Wait until both hold nothing, where no hand-over follows."""
        found = yield from until_released(self.p, self.d, self.limits.release)
        self._note(usage=found.usage, released=found, left=found.usage, left_s=found.waited_s)
        return (yield from self._audited())

    def _audited(self) -> Steps:
        yield from self.d.call("reuse", False)
        self._note(audits=(yield from both(self.p, self.d, "audit")))
        return self.observed

    # ---- small things --------------------------------------------------------------------------------------

    def _step(self, seconds: float, done: Callable[[], Steps]) -> Steps:
        """Step both engines until `done()`, for so many seconds. Returns whether it came true in time."""
        return (yield from step_both(self.d, self.p, done, watching(seconds, self.p, self.d)))

    def _request(self, turn: int, name: str, params: dict[str, Any] | None, count: int) -> ByteRequest:
        prompt = self.prompts[turn]
        return ByteRequest(
            id=name,
            tokens=prompt,
            max_tokens=count,
            kv_transfer_params=params,
            salt=self.salt,
            watch=True,
            owners=np.zeros(len(prompt), dtype=int),
            number=0,
            either=bool(turn),
        )

    def _name(self, turn: int, side: str) -> str:
        return f"{self.salt}-{turn}-{side}"

    def _end_of(self, engine: Engine, name: str) -> Output | None:
        return engine.ends[name].output if name in engine.ends else None

    def _returned(self, turn: int, side: str) -> dict[str, Any] | None:
        end = self._end_of(self.p if side == ON_P else self.d, self._name(turn, side))
        return end.kv_transfer_params if end else None

    def _note(self, **found: Any) -> None:
        self.observed = replace(self.observed, **found)
