"""Live engines for one case, each in a process of its own as in a deployment.

`start_engine` alone loads torch and vLLM: cases import this module.
"""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from pytest_kvconform.case_outcome import end_of, error_of
from pytest_kvconform.kv_config.turn_lease import why_kept_for_later
from pytest_kvconform.rigs.engine.messages import ON_D
from pytest_kvconform.rigs.engine.router import transfer_id_of
from pytest_kvconform.rigs.processes.cores import Deadline
from pytest_kvconform.rigs.processes.linux import die_with_parent
from pytest_kvconform.rigs.scheduler.live import ends
from pytest_kvconform.rigs.scheduler.live.config import LiveSpec, live_config

if TYPE_CHECKING:
    from pytest_kvconform.rigs.scheduler.live.engine import LiveEngine
    from pytest_kvconform.rigs.scheduler.rig import Rig

ALONE_S = 0.02  # for which a step of P lasts before D steps, too
SETTLE_STEPS = 400  # of every engine without progress, in which requests must come to their end
STEPPING = "stepping"  # in place of a method: wait for some seconds, then step until the next message


class RemoteEngine:
    """A `LiveEngine` in a forked process. Its methods are called there; what they raise is raised here.

    A connector may load within a step, and need steps of its peer for that. So `peer`, the engine of this
    process, steps while a step of this one lasts, and `stepping` is the other way round.
    """

    def __init__(self, rig: Rig, spec: LiveSpec):
        self.rig, self.spec = rig, spec
        self.process = f"the process of {spec.role}'s engine"
        self.peer: LiveEngine | None = None
        config = live_config(rig, spec)
        self._line, theirs = Pipe()
        if (pid := os.fork()) == 0:
            self._line.close()
            _serve(rig, spec, config, theirs)
        theirs.close()
        self.pid = pid
        try:
            self._answer("__init__")
        except BaseException:
            self.end()
            raise

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._send(name, args, kwargs)
            return self._answer(name)

        return call

    def add(
        self, prompt: Iterable[int], owner: int, params: Mapping[str, Any] | None = None, **more: Any
    ) -> Any:
        """`LiveEngine.add`. A function of the author has made the params in this process, and they may be
        in words of its own: so their transfer id goes with them.
        """
        self._send("add", (prompt, owner, params), more | {"transfer_id": transfer_id_of(params)})
        return self._answer("add")

    @contextlib.contextmanager
    def stepping(self, after_s: float = 0.0) -> Iterator[None]:
        """Let the engine step for as long as the block lasts, but for its first seconds."""
        self._send(STEPPING, (after_s,), {})
        yield
        self.name()  # the call ends it, and raises what the engine has raised

    def end(self) -> None:
        """End the process, whatever it is doing. It has closed the connector before, unless it failed."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self._line.close()

    def _send(self, name: str, args: Any, kwargs: Any) -> None:
        with contextlib.suppress(OSError):  # the process has ended, as `_answer` finds
            self._line.send((name, args, kwargs))

    def _answer(self, name: str) -> Any:
        """What the engine has answered to a call. Raises what it has raised. Waits without a deadline: the
        scheduler host process judges the engine if the case is late.
        """
        hook = self.rig.host.hook
        with hook.judging(self.pid, self.process):
            if self.peer is None or name != "step" or self._line.poll(ALONE_S):
                return self._received(name)
            # when its own step is over, it goes on: the peer may load within a step, too
            loads = self.peer.side.scheduler.has_requests()
            with self.stepping() if loads else contextlib.nullcontext():
                while not self._line.poll(ALONE_S):
                    with hook.beside():
                        self.peer.side.step()
                return self._received(name)

    def _received(self, name: str) -> Any:
        try:
            word, value = self._line.recv()
        except (EOFError, OSError):
            raise ends.end(self.rig, self.pid, self.process, f"{self.process} ended in `{name}`") from None
        if word == "returned":
            return value
        raise error_of(value)


def start_engine(rig: Rig, spec: LiveSpec, config: Any) -> LiveEngine:
    """Start a live engine in this process. `config`: of `live_config`."""
    from pytest_kvconform.rigs.scheduler.live.engine import LiveEngine

    return LiveEngine(rig, spec, config)


def _serve(rig: Rig, spec: LiveSpec, config: Any, line: Connection) -> None:
    """Run a live engine: answer each (method, arguments) until the line is closed. Ends the process."""
    die_with_parent()
    engine: Any = None
    try:
        while True:
            try:
                if engine is None:
                    engine = start_engine(rig, spec, config)
                    answer: tuple[str, Any] = "returned", None
                else:
                    name, args, kwargs = line.recv()
                    if name == STEPPING:  # this process waits: a hook of the other may keep Python's lock
                        over = line.poll(*args)
                        while not (over or line.poll()):
                            with rig.host.hook.beside():
                                engine.step()
                        continue
                    answer = "returned", getattr(engine, name)(*args, **kwargs)
                line.send(answer)  # pickled before a byte is sent
            except EOFError:
                break
            except BaseException as error:
                traceback.print_exc()
                line.send(("raised", end_of(error)))
                if engine is None:
                    break
    finally:
        os._exit(0)


@dataclass
class Live:
    """The engines of a case: P computes first, D loads. Of a store both are one engine."""

    rig: Rig
    p: Any
    d: Any
    others: tuple[Any, ...] = ()
    keeps: bool = False  # a store has held blocks for longer than it may, see `await_saves`
    aborted: set[str] = field(default_factory=set)  # P's requests of which D aborted the load

    @property
    def store(self) -> bool:
        """Whether there is one engine: a store, which loads what it has saved itself."""
        return self.p is self.d

    @property
    def engines(self) -> tuple[Any, ...]:
        return (self.p, *self.others) if self.store else (self.p, self.d, *self.others)

    def settle(self, done: Callable[[], bool], what: str) -> None:
        """Step all engines in turn until `done()`. Raises Violation of the case's rule after a
        deadline without any change of a request's status.

        Where every request has ended, saves may be under way: the case's deadline does not count these waits.
        """
        limit, steps = self.rig.settle_s, 0
        before: list[dict[str, str]] | None = None
        pids = [os.getpid(), *(engine.pid for engine in self.engines if isinstance(engine, RemoteEngine))]
        deadline = Deadline(limit, pids)
        while not done():
            steps += 1
            saving = before is not None and not any(before)
            with self.rig.wait(deadline.left()) if saving else contextlib.nullcontext():
                for engine in self.engines:
                    engine.step()
                now = [engine.statuses() for engine in self.engines]
            if now != before:
                before, deadline, steps = now, Deadline(limit, pids), 0
            elif deadline.over() and steps > (SETTLE_STEPS // 5 if self.rig.waited else SETTLE_STEPS):
                waiting = [f"{id} is {status}" for found in now for id, status in found.items()]
                keeping = " and ".join(e.spec.role for e in self.engines if e.kept()) or "an engine"
                self.rig.waited_for = what
                raise self.rig.violation(
                    "",
                    f"{what} did not come to their end: "
                    f"{', '.join(waiting[:4]) or f'{keeping} keeps blocks'}, and nothing has changed for "
                    f"{limit:g} s" + ", after another case had waited longer in vain" * self.rig.waited,
                    diagnosis=self._why_d_keeps(limit) if not waiting else "",
                )

    def _why_d_keeps(self, waited_s: float) -> str:
        """Why requests of D keep blocks, if they do so for later ones, and no other does; "": otherwise.

        Raises Blocked as `why_kept_for_later`.
        """
        keeping = [engine for engine in self.engines if engine.kept() - self.aborted]
        if not keeping or not all(one.do(_keeps_for_later) for one in keeping):
            return ""
        return why_kept_for_later(self.rig.subject, self.rig.host.spec.transfer["D"], waited_s)

    def check(self) -> int:
        """Raise Violation of the case's rule if KV that was loaded is wrong. Returns compared tokens."""
        total = 0
        for engine in self.engines:
            wrong, compared = engine.verdict()
            if wrong:
                raise self.rig.violation("", wrong[0], differs="; ".join(wrong[1:3]))
            total += compared
        return total


def _keeps_for_later(engine: LiveEngine) -> bool:
    """Whether an engine keeps blocks of D's requests alone, with which it returned kv_transfer_params."""
    ends = {id: engine.side.results.get(id) for id in engine.kept()}
    return all(id.endswith(f"-{ON_D}") and end and end.params for id, end in ends.items())


def step_together(engine: LiveEngine, others: Sequence[RemoteEngine]) -> None:
    """Let each engine step while a step of another one lasts: that of this process and the others."""
    engine.beside = [one.stepping for one in others]
    for one in others:
        one.peer = engine


@contextlib.contextmanager
def live_engines(
    rig: Rig, p: LiveSpec | None = None, d: LiveSpec | None = None, *more: LiveSpec, apart: bool = False
) -> Iterator[Live]:
    """Start P and D, of a store one engine unless `apart`, and further engines. End them whatever happens."""
    first = p or LiveSpec("P")
    if rig.subject.is_store and not apart:
        engine = start_engine(rig, first, live_config(rig, first))
        try:
            yield Live(rig, engine, engine)
        finally:
            engine.close()
        return
    remote: list[RemoteEngine] = []
    own = d or LiveSpec("D", engine=1, port=1)
    try:
        for spec in (first, *more):  # forked before this process has threads of a connector
            remote.append(RemoteEngine(rig, spec))
        engine = start_engine(rig, own, live_config(rig, own))
        step_together(engine, remote)
        yield Live(rig, remote[0], engine, tuple(remote[1:]))
        engine.close()
        for one in remote:
            one.close()
    finally:
        for one in remote:
            one.end()
