"""Two turns of a conversation on two byte engines: D hands over to P what it has of the first one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pytest_kvconform.kvspace.pools.sources import Source
from pytest_kvconform.rigs.bytes.handle import ByteEngineHandle
from pytest_kvconform.rigs.bytes.handover import (
    Received,
    TransferObservation,
    both,
    until_finished,
    watched,
)
from pytest_kvconform.rigs.bytes.messages import ByteRequest, token_after
from pytest_kvconform.rigs.context import Deadlines
from pytest_kvconform.rigs.engine.messages import ON_D, ON_P, Output, Trace, Usage
from pytest_kvconform.rigs.engine.release import until_released
from pytest_kvconform.rigs.engine.router import decode_params, prefill_params
from pytest_kvconform.rigs.processes.cores import Deadline
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
    transfer: Transfer, p: ByteEngineHandle, d: ByteEngineHandle, limits: Deadlines, ids: Callable[[], str]
) -> TurnObservation:
    """Run both turns. A failure of an engine is part of the observation."""
    empty = TurnObservation(transfer, p.facts, d.facts, request_s=limits.request)
    return watched(empty, p, d, lambda: _Turns(empty, p, d, limits, ids()).run())


def prompt_of_next_turn(transfer: Transfer) -> tuple[int, ...]:
    """The prompt of the second turn: that of the first one, D's answer, and new tokens; or an end of them."""
    turn, first = transfer.turn, transfer.prompts[0].tokens
    assert turn is not None
    spoken = first + tuple(token_after(len(first) + index) for index in range(turn.answer))
    return spoken + tokens(turn.more, seed=OTHERS) if turn.more > 0 else spoken[: len(spoken) + turn.more]


class _Turns:
    """The two turns of one transfer."""

    def __init__(
        self,
        observed: TurnObservation,
        p: ByteEngineHandle,
        d: ByteEngineHandle,
        limits: Deadlines,
        salt: str,
    ):
        assert observed.transfer.turn is not None
        self.observed, self.p, self.d, self.limits, self.salt = observed, p, d, limits, salt
        self.transfer, self.turn = observed.transfer, observed.transfer.turn
        self.prompts = self.transfer.prompts[0].tokens, prompt_of_next_turn(self.transfer)
        self.ends: dict[str, Output] = {}

    def run(self) -> TurnObservation:
        both(self.p, self.d, "poison")
        self.d.reuse(self.transfer.reuse)  # from now on others get the blocks that D frees
        if not (self._prefill(0, None) and self._decode(0, self.turn.answer)):
            return self.observed
        self._note(
            first=self.d.trace(self._name(0, ON_D)),
            answered=bool(self._returned(0, ON_D)),
            kept=self.d.usage(),
            on_d=self.d.source(),
        )
        if self.transfer.abort == "D" or not self.observed.answered:
            return self._released()
        if self.turn.late and not self._wait_until_gone():
            return self._audited()
        if self.transfer.reuse:
            self._step(Deadline(self.limits.release, self._watched), self.d.overwritten)
        if self.turn.forgets:
            self._forget()
        self._note(asked=True)
        went_on = self._prefill(1, self._returned(0, ON_D))
        name = self._name(1, ON_P)
        end = self.ends.get(name)
        self._note(
            on_p=Received(
                name="the request of the next turn",
                length=len(self.prompts[1]),
                prefill=self.d.trace(self._name(0, ON_D)),
                decode=self.p.trace(name),
                finish=(end.finish or "") if end else "",
                checks=self.p.pop_checks(name),
            )
        )
        if self.observed.stuck:
            return self.observed
        self._look_at_what_is_left(went_on)
        if not went_on:
            return self._audited()
        decoded = end and end.finish != "error" and self._returned(1, ON_P) and self._decode(1, 1)
        if decoded and self.ends[self._name(1, ON_D)].finish != "error":  # else P may wait for its lease
            self._wait_until_free(self.p)
            self._note(after=self.p.usage())
        return self._audited()

    # ---- parts ---------------------------------------------------------------------------------------------

    def _prefill(self, turn: int, returned: dict[str, Any] | None) -> bool:
        """Let P compute the prompt of a turn. Returns whether its request has come to its end."""
        name, handover = self._name(turn, ON_P), self.p.spec.handover
        zygote = self.p.process.address
        params = prefill_params(handover, f"{self.salt}-{turn}", self.d.spec, zygote, returned)
        if turn and self.transfer.preempt == "P":
            self.p.budget(CHUNK, CHUNK)
        self.p.add(self._request(turn, name, params, 1))
        if turn and self.transfer.abort == "P":
            self.p.step_beside(self.d)
            self.p.abort(name)
            return False
        if turn and self.transfer.preempt == "P":
            self._preempt(name)
        return self._end(self.p, self.d, name)

    def _decode(self, turn: int, count: int) -> bool:
        """Let D load the prompt of a turn from P, and generate `count` tokens. Returns as `_prefill`."""
        name, zygote = self._name(turn, ON_D), self.p.process.address
        returned, spec = self._returned(turn, ON_P), self.p.spec
        params = decode_params(spec.handover, f"{self.salt}-{turn}", spec, returned, zygote)
        self.d.add(self._request(turn, name, params, count))
        if not turn and self.transfer.abort == "D":
            deadline = Deadline(self.limits.request, self._watched)
            while not self.d.step_beside(self.p).outputs and not deadline.over():
                self.p.step()
            self.d.abort(name)
            ended = True
        else:
            ended = self._end(self.d, self.p, name)
        end = self.ends.get(name)
        received = Received(
            name=f"the request of turn {turn + 1}",
            length=len(self.prompts[turn]),
            prefill=self.p.trace(self._name(turn, ON_P)),
            decode=self.d.trace(name),
            finish=(end.finish or "") if end else "",
            checks=self.d.pop_checks(name),
        )
        self._note(requests=(*self.observed.requests, received))
        return ended

    def _end(self, engine: ByteEngineHandle, peer: ByteEngineHandle, name: str) -> bool:
        deadline = Deadline(self.limits.request, self._watched)
        stuck = until_finished(engine, peer, [name], self.ends, deadline)
        self._note(stuck=stuck)
        return not stuck

    def _preempt(self, name: str) -> None:
        """Preempt P's request between two chunks, and let the prefix cache lose its blocks, as it does where
        another request needs them.
        """
        deadline, p = Deadline(self.limits.request, self._watched), self.p
        if self._step(deadline, lambda: p.trace(name).first_computed >= 0):
            p.preempt(name)
        if self._step(deadline, lambda: p.trace(name).status == "PREEMPTED"):
            p.poison()
            self._note(preempted=True)
        p.budget(0)

    def _wait_until_gone(self) -> bool:
        """Wait until D has freed its blocks, and others have them. Returns whether they do."""
        deadline, name = Deadline(self.limits.release, self._watched), self._name(0, ON_D)
        gone = self._step(deadline, lambda: not self.d.holds(name) and self.d.overwritten())
        self._note(gone=gone)
        return gone

    def _forget(self) -> None:
        """Let P's prefix cache lose the first turn: P has to hold nothing any more."""
        deadline = Deadline(self.limits.release, self._watched)
        if self._step(deadline, lambda: not self.p.usage().requests):
            self.p.poison()

    def _look_at_what_is_left(self, went_on: bool) -> None:
        """Wait until D holds nothing: P has loaded what it wanted, and keeps its blocks for D. If P's request
        was aborted, wait until P holds nothing: D may keep its blocks until its lease ends.
        """
        self._wait_until_free(self.d if went_on else self.p)
        self._note(left=(self.p.usage(), self.d.usage()), left_s=self.limits.release)

    def _wait_until_free(self, engine: ByteEngineHandle) -> None:
        """Step both engines until one holds nothing, or until time is up."""
        deadline = Deadline(self.limits.release, self._watched)
        self._step(deadline, lambda: not (used := engine.usage()).requests and _is_free(used))

    def _released(self) -> TurnObservation:
        """Wait until both hold nothing, where no hand-over follows."""
        found = until_released(self.p, self.d, self.limits.release)
        self._note(usage=found.usage, released=found, left=found.usage, left_s=found.waited_s)
        return self._audited()

    def _audited(self) -> TurnObservation:
        self.d.reuse(False)
        self._note(audits=both(self.p, self.d, "audit"))
        return self.observed

    # ---- small things --------------------------------------------------------------------------------------

    def _step(self, deadline: Deadline, done: Any) -> bool:
        """Step both engines until `done()`. Returns whether it came true in time. Outputs are kept."""
        while not done():
            if deadline.over():
                return False
            for engine, peer in ((self.d, self.p), (self.p, self.d)):
                for output in engine.step_beside(peer).outputs:
                    if output.finish or output.kv_transfer_params:
                        self.ends[output.id] = output
        return True

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

    def _returned(self, turn: int, side: str) -> dict[str, Any] | None:
        end = self.ends.get(self._name(turn, side))
        return end.kv_transfer_params if end else None

    @property
    def _watched(self) -> Any:
        return tuple({self.p.process.watched, self.d.process.watched})

    def _note(self, **found: Any) -> None:
        self.observed = replace(self.observed, **found)


def _is_free(usage: Usage) -> bool:
    return usage.free_blocks == usage.total_blocks
