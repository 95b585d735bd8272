"""Handles on engines in processes of their own.

Every call has a deadline. A process that dies or hangs raises EngineFailed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from pytest_kvconform.result import Finding, HarnessError, HookCall, ProcessKilled
from pytest_kvconform.rigs.engine.messages import (
    EngineFacts,
    Leftovers,
    Request,
    Snapshot,
    Step,
    Trace,
    Usage,
)
from pytest_kvconform.rigs.missing import waits_for_server
from pytest_kvconform.rigs.processes.child import GONE, ChildProcess, ForkRefused, leave
from pytest_kvconform.rigs.processes.cores import Deadline
from pytest_kvconform.rigs.processes.hangs import CallDeadline, hook_of
from pytest_kvconform.rigs.processes.place import Place
from pytest_kvconform.rigs.processes.stacks import COLLECTING, Frame
from pytest_kvconform.rigs.processes.zygote import LIVED
from pytest_kvconform.rigs.vllm_setup.hooks import IN_STACKS

LEAVE_S = 10.0  # for engines to shut down
SUITE = "the suite"  # who says what no engine has logged
# classes of vllm_setup.forked_executor: a rank is gone, and SIGKILL ended it
WORKER_DIED, WORKER_KILLED = "WorkerDied", "WorkerKilled"


class EngineFailed(Exception):
    """An engine died, hung, refused to start or raised. `how` is one of died, hung, refused, raised.

    `stack` is for people. `frames` are those of the exception, or of the threads that died or hung. `waits`:
    it hung, and waited for a server. `reason`: the exception for which it did not start, "ValueError: sizes
    differ", and `kind` its class; "": none is known. `message`: that of the exception. `finding`: of one that
    is a Violation.
    """

    def __init__(
        self,
        role: str,
        how: str,
        sentence: str,
        log: tuple[str, ...] = (),
        stack: tuple[str, ...] = (),
        frames: tuple[Frame, ...] = (),
        waits: bool = False,
        reason: str = "",
        kind: str = "",
        message: str = "",
        finding: Finding | None = None,
    ):
        super().__init__(sentence)
        self.role, self.how, self.sentence, self.log, self.stack = role, how, sentence, log, stack
        self.frames, self.waits = frames, waits
        self.reason, self.kind, self.message, self.finding = reason, kind, message, finding
        self.engine = role  # the name of the engine; a cluster may have several of one role

    @property
    def refusal(self) -> str:
        """Why the engine refused to start; "" if it did not refuse, or gave no reason.

        A refusal is a clean end, right for what the connector does not support.
        """
        # a rank that is gone has refused nothing
        clean = self.how == "refused" and self.message and self.kind not in (WORKER_DIED, WORKER_KILLED)
        return self.reason if clean else ""

    @property
    def declined(self) -> bool:
        """Whether the engine refused to start and gave a reason."""
        return bool(self.refusal)


class EngineHandle:
    """A handle on one engine process.

    Methods are those of `engine.process.EngineProcess`. Every call raises EngineFailed if the process cannot
    answer.
    """

    target = ""  # "module:function" that the zygote calls in the child

    def __init__(
        self,
        place: str | Place,
        name: str,
        spec: Any,
        deadline_s: float,
        start_s: float,
        hung_in: set[Frame] | None = None,
    ):
        """`place`: of the zygote, or its address on this machine. `hung_in`: the hooks in which engines have
        hung; the handle adds to it. None: one of its own.
        """
        self.spec, self.role, self.deadline_s = spec, spec.role, deadline_s
        self.hung_in = set() if hung_in is None else hung_in
        try:
            self.process = ChildProcess(place, name, self.target, spec, start_s)
        except ForkRefused as refused:
            raise EngineFailed(name, "refused", str(refused)) from None
        self.start_s = start_s
        self.keeps = False  # of P: earlier engines of the cell have kept something, see release.py
        self.kept: tuple[Usage, Usage] | None = None  # of P: what P and D are known to keep, see release.py
        self.note = ""  # why the engine cannot reach a peer by the params of its requests, since `begin_log`
        self.own: Callable[[Frame], bool] = lambda frame: False  # whether a frame is code of the connector
        self.dead, self.asked = False, True  # asked: a call is pending; the first is its start

    def wait_ready(self) -> EngineFacts:
        """Wait until the engine has started."""
        self.facts: EngineFacts = self._answer("start", self.start_s)
        return self.facts

    def send(self, name: str, *arguments: Any) -> None:
        """Call a method without waiting, so that two engines can work at once; `answer` waits."""
        self.process.mark()
        self.asked = True
        try:
            self.process.connection.send((name, arguments))
        except OSError:
            self._died(name)

    def answer(self, name: str, deadline_s: float = 0.0) -> Any:
        """Wait for the answer to a call; 0: for as long as for any call."""
        return self._answer(name, deadline_s or self.deadline_s)

    def answered(self) -> bool:
        """Whether an answer, or the end of the process, can be read without waiting."""
        return self.process.connection.poll(0)

    def take_answer(self, name: str) -> Any:
        """The answer to a call, which has arrived."""
        return self.wait_ready() if name == "start" else self.answer(name)

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a method and wait for its answer."""
        self.send(name, *arguments)
        return self.answer(name)

    def add(self, request: Request) -> None:
        self.note_unreachable(request)
        self.call("add", request)

    def note_unreachable(self, request: Request) -> None:
        """Note what keeps the engine from reaching the peer that the params of a request name."""
        self.note = self.note or self.process.place.unreachable(request.kv_transfer_params)

    def step(self, seconds: float = 0.0) -> Step:
        return self.call("step", seconds)

    def abort(self, request_id: str) -> None:
        self.call("abort", request_id)

    def trace(self, request_id: str) -> Trace:
        return self.call("trace", request_id)

    def poison(self, keep_cache: bool = False) -> int:
        """Fill unowned blocks with poison, see `EngineProcess.poison`."""
        return self.call("poison", keep_cache)

    def usage(self) -> Usage:
        return self.call("usage")

    def budget(self, tokens: int, each: int = 0) -> None:
        """Let a step compute at most this many tokens, and at most `each` of one prompt; 0: as configured."""
        self.call("budget", tokens, each)

    def shutdown(self) -> Leftovers:
        """Shut the engine down and return what its process still has. The process itself ends with `end`."""
        return self.call("shutdown")

    def leave(self) -> bool:
        """Let the engine shut down and end, without waiting: see `leave_all`. False: it cannot, or has.

        An engine that has not answered a call may hang.
        """
        if self.dead or self.asked:
            return False
        self.dead = True
        try:
            self.process.connection.send(("leave", ()))
        except OSError:
            return False
        return True

    def end(self) -> None:
        """Kill the process, whatever it does."""
        self.dead = True
        self.process.end()

    def begin_log(self) -> int:
        """Forget the note of the hand-over before. Returns the length of the log now, for `logged`."""
        self.note = ""
        return self.process.position()

    def _last_lines(self) -> tuple[str, ...]:
        """The last lines of the log, and the note."""
        return (*self.process.last_lines(), *_notes([self]))

    def call_deadline(self, seconds: float, pids: Sequence[int] = ()) -> Deadline:
        """The deadline of a call that begins now. `pids`: other processes that have to make progress."""
        return CallDeadline(seconds, self.process, IN_STACKS, self.hung_in, pids)

    def _answer(self, name: str, deadline_s: float) -> Any:
        deadline = self.call_deadline(deadline_s)
        try:
            kind, *rest = self.process.receive(deadline)
        except TimeoutError:
            self.fail_as_hung(name, deadline)
        except (EOFError, OSError):
            self._died(name)
        self.asked = False
        if kind == "ok":
            return rest[0]
        if rest[0] == WORKER_KILLED:
            raise ProcessKilled(f"a rank of the engine {self.process.name}", self.process.pid)
        how, what = ("refused", "did not start: ") if name == "start" else ("raised", "raised ")
        kind, message, frames, finding = rest
        frames = (*frames, *self.process.last_stacks())  # the latter of a rank that died
        stack = self.process.stack(IN_STACKS)
        where = _where(stack, message) or (self._own_place(frames) if name == "start" else f" in {name}")
        reason = f"{kind}{where}{f': {message}' if message else ''}"
        said = self._last_lines(), _lines(stack), frames, False, reason, kind, message, finding
        raise EngineFailed(self.role, how, f"{self.role} {what}{reason}", *said)

    def _own_place(self, frames: Iterable[Frame]) -> str:
        """ " in __init__ (file.py:12)": the innermost frame of the connector's own code; "" without one."""
        return next((_in(frame) for frame in frames if self.own(frame)), "")

    def _died(self, name: str) -> NoReturn:
        self.dead = True
        status = self.process.end(gone=True)
        if status is None:
            raise HarnessError(GONE)
        if status == LIVED:
            how = "closed its connection to the suite"
        elif os.WIFSIGNALED(status):
            how = f"was killed by {signal.Signals(os.WTERMSIG(status)).name}"
        else:
            how = f"left with exit code {os.WEXITSTATUS(status)}"
        if status == signal.SIGKILL:
            raise ProcessKilled(f"the engine {self.process.name}", self.process.pid)
        stack = self.process.stack(IN_STACKS)
        sentence = f"{self.role} {how}{_where(stack) or f' in {name}'}"
        lines, frames = self._last_lines(), self.process.last_stacks()
        raise EngineFailed(self.role, "died", sentence, lines, _lines(stack), frames)

    def fail_as_hung(self, name: str, deadline: Deadline) -> NoReturn:
        """End the engine, which has not answered a call by its deadline."""
        self.dead, seconds = True, deadline.passed()
        hook = hook_of(self.process, IN_STACKS)
        again = ", where another engine has hung" if hook in self.hung_in else ""
        self.hung_in.update([hook] if hook else [])
        stack, in_del = self.process.stack(IN_STACKS), self.process.place_of_del()
        if hook and COLLECTING not in in_del:  # any hook may happen to collect garbage
            in_del = ""
        self.process.end()
        frames = self.process.last_stacks()
        where = in_del or _hook(stack) or self._own_place(frames) or _where(stack) or f" in {name}"
        raise EngineFailed(
            self.role,
            "hung",
            f"{self.role} did not answer within {seconds:.0f} s{where}{again}",
            self._last_lines(),
            _lines(stack),
            frames,
            any(map(waits_for_server, self.process.stacks_of_ends())),
        )


def logged(logs: Sequence[tuple[EngineHandle, int]]) -> tuple[str, ...]:
    """What engines have logged since their `begin_log`: "P: " or "D: ", and an exception.

    Last, since the last one explains a failure: "the suite: ", and why an engine cannot reach its peer.
    """
    said = [f"{e.role}: {line}" for e, since in logs for line in e.process.exceptions(since)]
    return (*said, *_notes(engine for engine, _ in logs))


def _notes(engines: Iterable[EngineHandle]) -> tuple[str, ...]:
    return tuple(f"{SUITE}: {engine.note}" for engine in engines if engine.note)


def hook_calls(*engines: EngineHandle) -> tuple[HookCall, ...]:
    """The last calls of hooks in the engines that can still answer, since the last question."""
    found: list[HookCall] = []
    for engine in dict.fromkeys(engines):
        with contextlib.suppress(EngineFailed):
            found += [] if engine.dead or engine.asked else engine.call("hook_calls")
    return tuple(found)


def leave_all(engines: Sequence[EngineHandle], folder: str = "") -> None:
    """End engines as an operator does: by vLLM's shutdown, with which a connector signs off.

    Nobody waits for it: the next engines start meanwhile. Those that have failed are killed, as is what has
    not ended after LEAVE_S. `folder`: removed in the end.
    """
    leaving = [engine for engine in engines if engine.leave()]
    for engine in engines:
        if engine not in leaving:
            engine.end()
    if leaving:
        leave([engine.process for engine in leaving], LEAVE_S, folder)
    elif folder:
        shutil.rmtree(folder, ignore_errors=True)


class ModelEngineHandle(EngineHandle):
    """A handle on one engine with a model, see `engine.model_engine.ModelEngineProcess`."""

    target = "pytest_kvconform.rigs.engine.model_engine:serve"

    def pop_snapshot(self, request_id: str) -> Snapshot | None:
        """The snapshot of a watched request, once; None if no forward has read loaded KV."""
        return self.call("pop_snapshot", request_id)


def _where(stack: tuple[Frame, ...], message: str = "") -> str:
    """ " in start_load_kv (file.py:12)": the innermost frame that is a hook of the connector interface.

    Without such a frame, and without a `message` that would explain the exception, where it was raised.
    """
    return _hook(stack) or ("" if message or not stack else _in(stack[0]))


def _hook(stack: tuple[Frame, ...]) -> str:
    """ " in start_load_kv (file.py:12)": the innermost frame that is a hook; "" without one."""
    return next((_in(frame) for frame in stack if frame[2] in IN_STACKS), "")


def _in(frame: Frame) -> str:
    file, line, name = frame
    return f" in {name} ({Path(file).name}:{line})"


def _lines(stack: tuple[Frame, ...]) -> tuple[str, ...]:
    return tuple(f"{Path(file).name}:{line} in {name}" for file, line, name in stack[:6])
