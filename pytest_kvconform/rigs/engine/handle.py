"""A handle on an engine in a process of its own. Every call has a deadline; a process that dies or hangs becomes a sentence."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pytest_kvconform.result import HarnessError
from pytest_kvconform.rigs.engine.messages import EngineFacts, Request, Snapshot, Step, Trace, Usage
from pytest_kvconform.rigs.processes.logs import exceptions_in

# The hooks of vLLM's KVConnectorBase_V1 (distributed/kv_transfer/kv_connector/v1/base.py): a stack that passes through one of them says
# where the connector was when its process died or stood still.
FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<name>\w+)')
STACK = re.compile(r"\(most recent call (first|last)\)")  # faulthandler, traceback
Frame = tuple[str, int, str]  # file, line, function
LOG_LINES = 12
GONE = "the background process, from which engines are forked, is gone; did somebody kill it, or the machine for want of memory?"


class EngineFailed(Exception):
    """An engine died, hung, refused to start or raised. `how` is one of died, hung, refused, raised."""

    def __init__(
        self, role: str, how: str, sentence: str, log: tuple[str, ...] = (), stack: tuple[str, ...] = ()
    ):
        super().__init__(sentence)
        self.role, self.how, self.sentence, self.log, self.stack = role, how, sentence, log, stack

    @property
    def refusal(self) -> str:
        """Why it refused to start; "" if it did not, or did not say why. A clean end, right for what the connector does not support."""
        said = self.sentence.partition("did not start: ")[2]
        clean = (
            self.how == "refused" and ": " in said and not said.startswith("WorkerDied")
        )  # a rank that is gone has refused nothing
        return said if clean else ""

    @property
    def declined(self) -> bool:
        """Whether it refused to start and said why."""
        return bool(self.refusal)


class Process:
    """A child of the zygote: a connection, a log, and an end with a deadline."""

    def __init__(self, address: str, name: str, target: str, argument: Any, deadline_s: float):
        self.address, self.name = address, name
        self.log = Path(address).parent / f"{name}.log"
        self.asked_at = 0  # length of the log when the last call was made: a stack that was written before says nothing about it
        try:
            self.connection = connect(address, 0.0)  # it is known to be up
            self.connection.send(("fork", name, target, argument))
            answer = self.receive(deadline_s)
        except (OSError, EOFError):
            raise HarnessError(GONE) from None
        if answer[0] != "pid":
            raise EngineFailed(name, "refused", answer[-1])
        self.pid: int = answer[1]

    def receive(self, deadline_s: float) -> Any:
        """The next message. EOFError: the process is gone; TimeoutError: it said nothing in time."""
        if not self.connection.poll(deadline_s):
            raise TimeoutError
        return self.connection.recv()

    def end(self) -> int | None:
        """Kill the process and everything it started. Returns its wait status. Can be called again."""
        try:
            with connect(self.address, 0.0) as connection:
                connection.send(("end", self.pid))
                return connection.recv()[1] if connection.poll(10.0) else None
        except (OSError, EOFError):
            return None  # the zygote is gone, and has taken its children along
        finally:
            self.connection.close()  # last, or the process would end by itself, and nobody see what it leaves

    def mark(self) -> None:
        """Look for stacks from here on."""
        self.asked_at = self.position()

    def position(self) -> int:
        """Length of the log now, in bytes."""
        try:
            return self.log.stat().st_size
        except OSError:
            return 0  # it has not written a word

    def exceptions(self, since: int) -> tuple[str, ...]:
        """Exceptions that the process logged after a position, see `logs.exceptions_in`."""
        try:
            text = self.log.read_bytes()[since:][-200_000:].decode("utf-8", "backslashreplace")
        except OSError:
            return ()
        return exceptions_in(text)

    def last_lines(self) -> tuple[str, ...]:
        """The end of what the process wrote. Bytes that are no text are shown as escapes."""
        try:
            text = self.log.read_bytes()[-20000:].decode("utf-8", "backslashreplace")
        except OSError:
            return ()
        lines = ["".join(c if c.isprintable() else "·" for c in line)[:160] for line in text.splitlines()]
        return tuple(lines[-LOG_LINES:])

    def stack(self) -> tuple[Frame, ...]:
        """The Python stack since the last call that says most, innermost frame first: the last one through a hook, or the last one.

        faulthandler writes one on a deadly signal and when it is asked for, and an exception that nobody catches is printed with one.
        """
        try:
            text = self.log.read_bytes()[self.asked_at :][-60000:].decode("utf-8", "backslashreplace")
        except OSError:
            return ()
        found: list[tuple[Frame, ...]] = []
        words = STACK.split(text)
        for order, frames in zip(words[1::2], words[2::2], strict=True):
            stack = tuple((m["file"], int(m["line"]), m["name"]) for m in FRAME.finditer(frames))
            found.append(stack if order == "first" else stack[::-1])
        return next(
            (stack for stack in reversed(found) if any(name in HOOKS for *_, name in stack)),
            found[-1] if found else (),
        )


def connect(address: str, deadline_s: float) -> Connection:
    """A connection to the zygote, which may still be starting."""
    deadline = time.monotonic() + deadline_s
    while True:
        raw = socket.socket(socket.AF_UNIX)
        try:
            raw.connect(address)
            return Connection(raw.detach())
        except OSError:
            raw.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


class EngineHandle:
    """One engine process. Methods mirror `engine_process.EngineProcess`; every one raises EngineFailed when the process cannot answer."""

    target = "pytest_kvconform.rigs.engine.process:serve"

    def __init__(self, address: str, name: str, spec: Any, deadline_s: float, start_s: float):
        self.role, self.deadline_s = spec.role, deadline_s
        self.process = Process(address, name, self.target, spec, start_s)
        self.start_s = start_s
        self.dead = False

    def wait_ready(self) -> EngineFacts:
        """Block until the engine is up."""
        self.facts: EngineFacts = self._answer("start", self.start_s)
        return self.facts

    def send(self, name: str, *arguments: Any) -> None:
        """Ask without waiting, so that two engines can work at once; `answer` waits."""
        self.process.mark()
        try:
            self.process.connection.send((name, arguments))
        except OSError:
            self._died(name)

    def answer(self, name: str) -> Any:
        return self._answer(name, self.deadline_s)

    def call(self, name: str, *arguments: Any) -> Any:
        self.send(name, *arguments)
        return self.answer(name)

    def add(self, request: Request) -> None:
        self.call("add", request)

    def step(self, seconds: float = 0.0) -> Step:
        return self.call("step", seconds)

    def abort(self, request_id: str) -> None:
        self.call("abort", request_id)

    def trace(self, request_id: str) -> Trace:
        return self.call("trace", request_id)

    def taken(self, request_id: str) -> Snapshot | None:
        return self.call("taken", request_id)

    def poison(self) -> int:
        return self.call("poison")

    def usage(self) -> Usage:
        return self.call("usage")

    def end(self) -> None:
        """Kill the process, whatever it does."""
        self.dead = True
        self.process.end()

    def _answer(self, name: str, deadline_s: float) -> Any:
        try:
            kind, *rest = self.process.receive(deadline_s)
        except TimeoutError:
            self._hung(name, deadline_s)
        except (EOFError, OSError):
            self._died(name)
        if kind == "ok":
            return rest[0]
        how, what = ("refused", "did not start: ") if name == "start" else ("raised", "raised ")
        stack, (kind, message) = self.process.stack(), rest
        where = _where(stack, message) or ("" if name == "start" else f" in {name}")
        raise EngineFailed(
            self.role,
            how,
            f"{self.role} {what}{kind}{where}{f': {message}' if message else ''}",
            self.process.last_lines(),
            _lines(stack),
        )

    def _died(self, name: str) -> None:
        self.dead = True
        status = self.process.end()
        if status is None:
            raise HarnessError(GONE)
        how = (
            f"was killed by {signal.Signals(os.WTERMSIG(status)).name}"
            if os.WIFSIGNALED(status)
            else (f"left with exit code {os.WEXITSTATUS(status)}")
        )
        stack = self.process.stack()
        sentence = f"{self.role} {how}{_where(stack) or f' in {name}'}"
        raise EngineFailed(self.role, "died", sentence, self.process.last_lines(), _lines(stack))

    def _hung(self, name: str, deadline_s: float) -> None:
        self.dead = True
        for pid in (self.process.pid, *_children(self.process.pid)):
            try:
                os.kill(pid, signal.SIGUSR1)  # write the Python stacks to the log
            except OSError:
                continue
            time.sleep(0.2)  # one after the other: they share the log
        stack = self.process.stack()
        self.process.end()
        raise EngineFailed(
            self.role,
            "hung",
            f"{self.role} did not answer within {deadline_s:.0f} s{_where(stack) or f' in {name}'}",
            self.process.last_lines(),
            _lines(stack),
        )


def _children(pid: int) -> list[int]:
    from pytest_kvconform.rigs.processes.linux import descendants_of

    return descendants_of(pid)


def _where(stack: tuple[Frame, ...], said: str = "") -> str:
    """ " in start_load_kv (file.py:12)": the innermost frame that is a hook of the connector interface.

    Without such a frame, and without a message `said` that would explain the exception, where it was raised.
    """
    hooks = [frame for frame in stack if frame[2] in HOOKS] or ([] if said else list(stack))
    if not hooks:
        return ""
    file, line, name = hooks[0]
    return f" in {name} ({Path(file).name}:{line})"


def _lines(stack: tuple[Frame, ...]) -> tuple[str, ...]:
    return tuple(f"{Path(file).name}:{line} in {name}" for file, line, name in stack[:6])


HOOKS = frozenset(
    """
    start_load_kv wait_for_layer_load save_kv_layer wait_for_save get_finished get_transfer_results get_block_ids_with_load_errors
    register_kv_caches set_host_xfer_buffer_ops handle_preemptions bind_connector_metadata clear_connector_metadata
    build_connector_worker_meta get_kv_connector_stats get_kv_connector_kv_cache_events get_handshake_metadata finish_forward
    get_num_new_matched_tokens update_state_after_alloc build_connector_meta request_finished request_finished_all_groups
    update_connector_output on_new_request bind_kv_cache_manager set_xfer_handshake_metadata_pp_aware set_xfer_handshake_metadata
    take_events has_pending_push_work reset_cache shutdown
    """.split()
)
