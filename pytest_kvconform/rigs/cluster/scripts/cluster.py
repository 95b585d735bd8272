"""`Cluster`: the engines of one case that is a script, by role, and what the script lets them do.

yield from cluster.start()  # P and D; of a store one engine
ids = yield from cluster.prefill(prompts)
found = yield from cluster.decode(prompts, ids)
yield from cluster.settle(lambda: cluster.ended(cluster.d, found), "requests of D")
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace

from pytest_kvconform.kv_config.turn_lease import why_kept_for_later
from pytest_kvconform.result import Cell, Finding, NotApplicable, Violation
from pytest_kvconform.rigs.bytes.messages import ByteRequest, Look, token_after
from pytest_kvconform.rigs.cluster.engine import ALONE_S, Engine, Steps
from pytest_kvconform.rigs.cluster.loop import nothing, pause, watching
from pytest_kvconform.rigs.cluster.scripts.failures import ended_by
from pytest_kvconform.rigs.cluster.scripts.sentences import OWNERS, wrong_kv
from pytest_kvconform.rigs.cluster.scripts.wanted import BLOCK, Wanted, spec_of
from pytest_kvconform.rigs.context import SHORTER, declared_addition
from pytest_kvconform.rigs.engine.handle import EngineFailed
from pytest_kvconform.rigs.engine.messages import ON_D, ON_P, Usage
from pytest_kvconform.rigs.engine.router import decode_params, prefill_params
from pytest_kvconform.rigs.scenario import tokens, with_other_tokens

if TYPE_CHECKING:
    from pytest_kvconform.rigs.cluster.scripts.bench import ScriptBench

__all__ = ["RELEASES", "Cluster", "Engine", "Steps", "Wanted"]  # what scripts import

SETTLE_S = 4.0  # without any change, after which nothing is expected any more
SETTLE_STEPS = 400  # of every engine without progress, in which requests must come to their end
RELEASES = "releases"  # of blocks: what a case has waited for in vain
IDLE_S = 0.001  # after a round in which no engine computed a token: transfers go on in the background


class Cluster:
    """The engines of one case: P computes first, D loads. Of a store both are one engine.

    Attributes: `engines`: all of them; `others`: those beside P and D; `looks`: engine -> what had become of
    its requests after its last step; `secret`: of the prompts of this case; `base`: the number in words of
    what the case calls request 0.
    """

    p: Engine
    d: Engine

    def __init__(self, bench: ScriptBench, cell: Cell, rule: str, secret: int, base: int):
        self.bench, self.cell, self.rule, self.secret, self.base = bench, cell, rule, secret, base
        self.context, self.subject = bench.context, bench.context.subject
        self.engines: tuple[Engine, ...] = ()
        self.others: tuple[Engine, ...] = ()
        self.looks: dict[Engine, Look] = {}
        self.keeps = False  # a store has held blocks for longer than it may, see `await_saves`
        self.aborted: set[str] = set()  # P's requests of which D aborted the load
        self.compared = 0  # tokens that were compared so far
        self.wrong: list[str] = []  # sentences about KV that is not what was computed
        self._transfer_ids: dict[str, str] = {}  # request of P -> transfer id
        self._prompts: dict[str, tuple[int, ...]] = {}  # request -> its prompt
        self.waited_for = ""  # what the case has waited for in vain

    # ---- engines -------------------------------------------------------------------------------------------

    def start(
        self,
        p: Wanted | None = None,
        d: Wanted | None = None,
        *more: Wanted,
        apart: bool = False,
        may_decline: str = "",
    ) -> Steps:
        """Start P and D, of a store one engine unless `apart`, and further engines, or take those that run.

        `may_decline`: what the connector may decline with a reason; raises NotApplicable then.
        """
        alone = self.subject.is_store and not apart
        first = p or Wanted("P")
        wanted = (first,) if alone else (first, d or Wanted("D"), *more)
        self.engines = self.bench.engines(self.cell, wanted)
        self.p, self.d, self.others = self.engines[0], self.engines[0 if alone else 1], self.engines[2:]
        calls = [(engine, engine.queue("poison")) for engine in self.engines]
        try:
            for engine, call in calls:
                yield from engine.answer(call)
        except EngineFailed as failed:
            if may_decline and failed.declined:
                reason = f"it declines {may_decline}: {failed.refusal}"
                raise NotApplicable(reason, refused=True) from None
            raise
        for engine in self.engines:
            self.looks[engine] = yield from engine.call("look")

    def start_again(self, engine: Engine) -> Steps:
        """Start an engine anew in the process of one that has ended (`end_engine`), as another one for its
        peer: with ports of its own.
        """
        spec, new = engine.spec, spec_of(Wanted(engine.role), self.context, self.cell, "", None)
        transfer = spec.kv_transfer_config | {"engine_id": str(uuid.uuid4())}
        if "kv_port" in transfer:
            transfer |= {"kv_port": new.kv_transfer_config["kv_port"]}
        environment = spec.environment | new.environment
        engine.handle.spec = replace(spec, kv_transfer_config=transfer, environment=environment)
        engine.handle.facts = yield from engine.call("start_engine", engine.spec)
        yield from engine.call("poison")

    @property
    def store(self) -> bool:
        """Whether there is one engine: a store, which loads what it has saved itself."""
        return self.p is self.d

    def block(self, engine: Engine) -> int:
        """Tokens of a block of an engine."""
        return engine.facts.block_size

    def step(self, engine: Engine, times: int = 1, alone_s: float = ALONE_S) -> Steps:
        """Take steps of an engine. The others step meanwhile, but for the first seconds of each."""
        for _ in range(times):
            step = yield from engine.step_beside(*self.engines, alone_s=alone_s)
            self.looks[engine] = step.look
        return bool(step.computed or step.outputs)

    # ---- requests ------------------------------------------------------------------------------------------

    def prompt(self, length: int, seed: int = 0) -> tuple[int, ...]:
        """A prompt that no other case has; prompts of different seeds differ at the first token.

        It is longer than `length` if the connector declares that it loads nothing of so short a prompt.
        """
        return with_other_tokens(tokens(length + declared_addition(self.subject, BLOCK), seed), self.secret)

    def add(
        self,
        engine: Engine,
        prompt: tuple[int, ...],
        owner: int,
        *,
        asks: bool = False,
        like: str = "",
        source: Engine | None = None,
        name: str = "",
        max_tokens: int = 1,
        embeds: bool = False,
        stop: bool = False,
        params: dict[str, Any] | None = None,
    ) -> Steps:
        """Hand a request to an engine. Returns its id.

        `owner`: number of the prompt, the same on every engine. `asks`: whether P is asked to hand it over.
        `like`: P's id of the request, whose KV is loaded from `source`; D's differs in its last word, as in a
        deployment. `name`: the words before it; "": those of `like`, or made here. `stop`: its first token is
        the end of the sequence. `params`: kv_transfer_params that it gets otherwise.
        """
        name = name or like.rpartition("-")[0] or f"cmpl-{self.context.next_name()}"
        id = f"{name}-{ON_D if like else ON_P}"
        if asks:
            peer = self.p if engine is self.d else self.d
            transfer_id = self._transfer_ids[id] = str(uuid.uuid4())  # P's answers may outlive a run
            params = prefill_params(engine.spec.handover, transfer_id, peer.spec, self.context.address)
        elif like and source is not None and not self.store:
            params = self.params(source, like)
        self._prompts[id], number = prompt, (self.base + owner) % OWNERS
        request = ByteRequest(
            id=id,
            tokens=prompt,
            max_tokens=max_tokens,
            kv_transfer_params=params,
            owners=np.full(len(prompt), number),
            number=number,
            either=source is not None and (source.role != "P" or engine.role != "D"),
            embeds=embeds,
            stop=(token_after(len(prompt)),) if stop else (),
        )
        yield from engine.add(request)
        self.looks[engine].statuses[id] = "WAITING"
        return id

    def params(self, p: Engine, id: str) -> dict[str, Any] | None:
        """The params of D's request for what P has computed. Raises NotApplicable if there are none."""
        returned = p.ends[id].output.kv_transfer_params if id in p.ends else None
        handover, transfer_id = p.spec.handover, self._transfer_ids.get(id, "")
        params = decode_params(handover, transfer_id, p.spec, returned, self.context.address)
        if params is None:
            what = "returns no kv_transfer_params for a request that asks for a hand-over"
            long = len(self._prompts.get(id, ())) > self.block(p)
            raise NotApplicable(
                f"{self.subject.connector} {what}", refused=long and not self.subject.is_store
            )
        return params

    def prefill(self, prompts: dict[int, tuple[int, ...]], p: Engine | None = None, **more: Any) -> Steps:
        """Let P compute prompts. Returns owner -> id. The engine of a store has saved all of them then, and
        its prefix cache is empty. `p`: another engine than P. `more`: of `add`.
        """
        p, ids = p or self.p, {}
        for owner, prompt in prompts.items():
            ids[owner] = yield from self.add(p, prompt, owner, asks=not self.store, **more)
        yield from self.settle(lambda: self.ended(p, ids.values()), "prefills")
        if self.store:
            yield from self.await_saves(p)
        return ids

    def decode(
        self,
        prompts: dict[int, tuple[int, ...]],
        prefills: dict[int, str],
        p: Engine | None = None,
        d: Engine | None = None,
        **more: Any,
    ) -> Steps:
        """Add these prompts to D with what P handed over. Returns their ids. `p`, `d`: other engines."""
        found = []
        for owner, prompt in prompts.items():
            like = prefills[owner]
            found.append(
                (yield from self.add(d or self.d, prompt, owner, source=p or self.p, like=like, **more))
            )
        return found

    def abort(self, engine: Engine, id: str) -> Steps:
        """Abort a request."""
        yield from engine.call("abort", id)
        self.looks[engine] = yield from engine.call("look")

    def ended(self, engine: Engine, ids: Iterable[str]) -> bool:
        """Whether these requests have ended."""
        look = self.looks[engine]
        return all(id in engine.ends or id not in look.statuses.keys() | look.kept for id in ids)

    def finish(self, engine: Engine, id: str) -> str:
        """The finish reason of a request; "": it goes on, or was aborted."""
        return (engine.ends[id].output.finish or "") if id in engine.ends else ""

    def announced(self, engine: Engine, ids: Iterable[str]) -> Steps:
        """Request -> tokens that were loaded for it, as the connector announced them."""
        found = {}
        for id in ids:
            found[id] = (yield from engine.call("trace", id)).external_tokens
        return found

    def await_saves(self, p: Engine) -> Steps:
        """Step the engine of a store until its prompts are saved, and empty its prefix cache. The store may
        hold blocks in vLLM's pool until its workers have saved them.
        """
        yield from self.settle(lambda: self.looks[p].idle, "saves")
        deadline = watching(0.0 if self.keeps else self.settle_s, p)
        while (keeps := bool((yield from self.left(p)))) and not deadline.over():
            yield from pause(IDLE_S)
        self.keeps = keeps
        deadline = watching(self.subject.save_delay, p)
        while not deadline.over():
            yield from self.step(p)
            yield from pause(IDLE_S)
        yield from p.call("evict_prefix_cache")

    def left(self, engine: Engine) -> Steps:
        """What is left on an engine on which every request has ended, in one sentence; "": nothing.

        Takes a step first, in which the connector notifies its workers of the ends.
        """
        yield from self.step(engine)
        usage: Usage = yield from engine.call("usage")
        if usage.requests:
            return f"the scheduler still knows {', '.join(usage.requests)}"
        missing = usage.total_blocks - usage.free_blocks
        return f"{missing} of {usage.total_blocks} blocks were not freed" if missing else ""

    # ---- waits and judgement -------------------------------------------------------------------------------

    @property
    def settle_s(self) -> float:
        """Seconds without any change after which nothing is expected any more."""
        waited = self.cell in self.bench.waited
        return self.context.scaled_seconds(SETTLE_S) * (SHORTER if waited else 1.0)

    def settle(
        self, done: Callable[[], bool], what: str, before_each: Callable[[], Steps] = nothing
    ) -> Steps:
        """Step all engines in turn until `done()`, and run `before_each` before each round. Raises Violation
        of the case's rule after a deadline without any change of a request's status.
        """
        limit, rounds = self.settle_s, 0
        most = SETTLE_STEPS // 5 if self.cell in self.bench.waited else SETTLE_STEPS
        before: list[dict[str, str]] | None = None
        whole = watching(2 * self.context.deadlines.call, *self.engines)  # whatever changes meanwhile
        deadline = watching(limit, *self.engines)
        while not done():
            rounds, busy = rounds + 1, False
            yield from before_each()
            for engine in self.engines:
                busy |= yield from self.step(engine)
            if not busy:
                yield from pause(IDLE_S)
            now = [self.looks[engine].statuses for engine in self.engines]
            if now != before and not whole.over():
                before, deadline, rounds = now, watching(limit, *self.engines), 0
            elif (deadline.over() and rounds > most) or whole.over():
                raise self._did_not_end(what, now, limit)

    def _did_not_end(self, what: str, now: list[dict[str, str]], limit: float) -> Exception:
        waiting = [f"{id} is {status}" for found in now for id, status in found.items()]
        keeping = " and ".join(e.role for e in self.engines if self.looks[e].kept) or "an engine"
        after = ", after another case had waited longer in vain" * (self.cell in self.bench.waited)
        self.waited_for = what
        return self.violation(
            "",
            f"{what} did not come to their end: "
            f"{', '.join(waiting[:4]) or f'{keeping} keeps blocks'}, and nothing has changed for {limit:g} s"
            + after,
            diagnosis=self._why_d_keeps(limit) if not waiting else "",
        )

    def _why_d_keeps(self, waited_s: float) -> str:
        """Why requests of D keep blocks, if they do so for later ones, and no other does; "": otherwise.

        Raises Blocked as `why_kept_for_later`.
        """
        keeping = [(one, look.kept) for one, look in self.looks.items() if look.kept - self.aborted]
        later = (
            id.endswith(f"-{ON_D}") and id in engine.ends and engine.ends[id].output.kv_transfer_params
            for engine, kept in keeping
            for id in kept
        )
        if not keeping or not all(later):
            return ""
        return why_kept_for_later(self.subject, self.d.spec.kv_transfer_config, waited_s)

    def check(self) -> Steps:
        """Raise Violation of the case's rule if KV that was loaded is wrong. Returns compared tokens."""
        yield from self.look_at_loads()
        if self.wrong:
            raise self.violation("", self.wrong[0], differs="; ".join(self.wrong[1:3]))
        return self.compared

    def look_at_loads(self) -> Steps:
        """Note what the checks of all loads so far have found."""
        for engine in self.engines:
            for check in (yield from engine.call("pop_checks")):
                self.compared += max(0, check.computed - check.local)
                if found := wrong_kv(check, self.base):
                    self.wrong.append(found)

    def ended_by(self, raised: Exception, starting: bool = False) -> Exception:
        """What the case raises: of an engine that has failed see failures.py, else what was raised."""
        if isinstance(raised, EngineFailed):
            return ended_by(raised, self.context, self.cell, starting)
        return raised

    def violation(self, rule: str, happened: str, differs: str = "", **more: Any) -> Violation:
        """A violation to raise; `rule` "": that of the case. `more`: of its Finding."""
        return Violation(Finding(rule=rule or self.rule, happened=happened, differs=differs, **more))
