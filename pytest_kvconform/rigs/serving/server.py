"""A handle on each process of the chain: the servers P and D, and the router."""

from __future__ import annotations

import errno
import os
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pytest_kvconform import extras
from pytest_kvconform.result import Blocked, HarnessError, ProcessKilled
from pytest_kvconform.rigs.cluster.pairs import note_missing
from pytest_kvconform.rigs.context import RunContext
from pytest_kvconform.rigs.engine.handle import WORKER_KILLED, EngineFailed
from pytest_kvconform.rigs.processes.child import ChildProcess, ForkRefused
from pytest_kvconform.rigs.processes.cores import Deadline
from pytest_kvconform.rigs.processes.ports import free_port
from pytest_kvconform.rigs.serving.messages import Prompt, ServerSpec
from pytest_kvconform.rigs.serving.metrics import (
    Counters,
    Refused,
    Uncounted,
    Unreachable,
    get,
    read_block_size,
    read_counters,
    read_moved,
)

LOOK_S = 0.1  # between two looks at a process that starts
ROUTER = "router"
ANSWER_S = 20.0  # for /metrics and /v1/models, on an idle machine
VERSION = re.compile(r"\d[\w.+!-]{0,60}", re.ASCII)  # of a package
# vLLM's own sentence about an engine core that ended; the cause is logged before it
_FOLLOWS = ("Engine core initialization failed", "EngineDeadError")
WANTS_KEY = (401, 403)  # codes of HTTP for a request without a key, or with a wrong one
NO_SUCH_PATH = (404, 405)  # a router need not have each path
Read = TypeVar("Read")


class Endpoint:
    """An OpenAI-compatible server that runs somewhere."""

    def __init__(
        self, role: str, url: str, answer_s: float = ANSWER_S, headers: Mapping[str, str] | None = None
    ):
        """`answer_s`: seconds for an answer about itself. `headers`: of each question about it."""
        self.role, self.url, self._answer_s = role, url.rstrip("/"), answer_s
        self._headers = headers or {}

    def healthy(self, seconds: float) -> bool:
        """Whether the server answers."""
        try:
            get(f"{self.url}/health", seconds, self._headers)
        except Unreachable:
            return False
        return True

    def require_answers(self, paths_needed: bool = True) -> None:
        """Raise Blocked unless the server answers, and takes the key. vLLM asks for it below /v1 alone.

        `paths_needed`: whether it must have the paths which a server of vLLM has.
        """
        for path in ("/health", "/v1/models"):
            try:
                get(f"{self.url}{path}", self._answer_s, self._headers)
            except Refused as refused:
                if refused.code in WANTS_KEY:
                    raise Blocked(self._key_is_wrong(refused)) from None
                if paths_needed or refused.code not in NO_SUCH_PATH:
                    raise Blocked(f"the {self.role} cannot be asked: {refused}") from None
            except Unreachable as error:
                raise Blocked(f"the {self.role} cannot be asked: {error}") from None

    def _key_is_wrong(self, refused: Refused) -> str:
        sent = f"refuses the key that was sent ({', '.join(self._headers)})"
        return (
            f"the {self.role} {sent if self._headers else 'wants a key, and none was sent'}: {refused}; set "
            "OPENAI_API_KEY in the environment, or --kv-header, to what it wants"
        )

    def require_asked_by_our_router(self, key: str) -> None:
        """Raise Blocked if a vllm-router that is started here cannot ask the server.

        It sends no header but the key, and with /health not even this.
        """
        for path, headers in (("/health", {}), ("/v1/models", {"Authorization": f"Bearer {key}"})):
            try:
                get(f"{self.url}{path}", self._answer_s, headers)
            except Refused as refused:
                if refused.code in WANTS_KEY:
                    raise Blocked(
                        f"vllm-router cannot ask the {self.role}: {refused}, and it sends a key with "
                        "questions alone, and no other header: give --kv-router-url, of a router that does"
                    ) from None

    def _metrics(self, read: Callable[[str], Read]) -> Read:
        """What is read from the server's /metrics. Raises Unreachable, and Uncounted as a whole sentence."""
        url = f"{self.url}/metrics"
        text = get(url, self._answer_s, self._headers)
        try:
            return read(text)
        except Uncounted as lacks:
            raise Uncounted(f"{url} of the {self.role} {lacks}") from None

    def counters(self) -> Counters:
        """What the server has counted. Raises Unreachable and Uncounted."""
        return self._metrics(read_counters)

    def moved(self) -> dict[str, int]:
        """The connector's own metrics of bytes that it moved. Raises Unreachable and Uncounted."""
        return self._metrics(read_moved)

    def block_size(self) -> int:
        """The tokens of a block of its KV cache. Raises Unreachable and Uncounted."""
        return self._metrics(read_block_size)

    def version(self) -> str:
        """The version of vLLM that the server tells; "": it tells none. Raises Unreachable."""
        try:
            text = get(f"{self.url}/version", self._answer_s, self._headers)
            version = msgspec.json.decode(text, type=dict[str, Any]).get("version")
        except msgspec.DecodeError:
            return ""
        return version if isinstance(version, str) and VERSION.fullmatch(version) else ""

    def model(self) -> str:
        """The name under which the server serves its model. Raises Unreachable."""
        try:
            text = get(f"{self.url}/v1/models", self._answer_s, self._headers)
            names = [one["id"] for one in msgspec.json.decode(text)["data"]]
        except (msgspec.DecodeError, KeyError, TypeError):
            names = []
        if not names:
            raise Unreachable(f"{self.url}/v1/models names no model")
        return str(names[0])

    def require_alive(self) -> None:
        """Raise EngineFailed if the process of the server has ended. Nothing is known of a foreign one."""

    def end(self) -> None:
        """End the process of the server, if it is ours."""


class LocalProcess(Endpoint):
    """A server or a router in a child of the zygote."""

    def __init__(self, context: RunContext, role: str, name: str, target: str, argument: Any, port: int):
        super().__init__(role, f"http://127.0.0.1:{port}", answer_seconds(context))
        self.context, self.name, self.port = context, name, port
        self.started = False  # it has answered
        try:
            self.process = ChildProcess(context.address, name, target, argument, context.deadlines.start)
        except ForkRefused as refused:
            raise HarnessError(str(refused)) from None

    def require_alive(self) -> None:
        """Raise EngineFailed if the process has ended: its connection carries nothing but its end."""
        if self.process.connection.poll(0):
            raise self.failure("died" if self.started else "refused")

    def failure(self, how: str, seconds: float = 0.0) -> EngineFailed:
        """Tell how the process failed, and end it. Raises ProcessKilled, HarnessError or Blocked instead, if
        the machine is to blame, or lacks something.

        `how`: "died", "refused" (to start), or "hung" after `seconds`.
        """
        causes = self.causes() if self.started else self.reasons_of_start()
        log, status = self.process.last_lines(), self.process.end(gone=how != "hung")
        if how != "hung" and status is not None and status >= 0 and os.WIFSIGNALED(status):
            if os.WTERMSIG(status) == 9:
                raise ProcessKilled(f"the {self.role}", self.process.pid)
            causes.append(f"signal {os.WTERMSIG(status)}")
            how = "died"  # which is no refusal
        if any(WORKER_KILLED in one.partition(":")[0] for one in causes):
            raise ProcessKilled(f"a rank of the {self.role}", self.process.pid)
        cause = f": {causes[0]}" if causes else ""
        if os.strerror(errno.EADDRINUSE) in f"{cause} {log}" and (port := self._taken_port()):
            raise HarnessError(
                f"the {self.role} could not start: port {port} of this machine was taken by another process "
                "after it had been chosen; run it again"
            )
        if any(os.strerror(errno.ENOSPC) in one for one in causes):
            raise HarnessError(
                f"the {self.role} failed{cause}; free space in {Path(self.process.address).parent}"
            )
        if not self.started:
            self.note_missing(causes)
        words = {"hung": f"did not answer within {seconds:.0f} s", "refused": "did not start"}.get(
            how, "ended"
        )
        kind, _, message = (causes or [""])[0].partition(": ")
        sentence, reason = f"the {self.role} {words}{cause}", cause.removeprefix(": ")
        return EngineFailed(
            self.role, how, sentence, log, reason=reason, kind=kind.rpartition(".")[2], message=message
        )

    def note_missing(self, causes: Sequence[str]) -> None:
        """Raise Blocked if a cause of a failed start is that this environment lacks something."""

    def reasons_of_start(self) -> list[str]:
        """The exception for which the process did not start, or none: it has survived earlier ones."""
        reason = self.process.reason_of_start()
        return [reason] if reason else self.causes()[-1:]

    def causes(self) -> list[str]:
        """The exceptions that the process has logged, without those that only follow from others."""
        return [one for one in self.process.exceptions(0) if not any(word in one for word in _FOLLOWS)]

    def _taken_port(self) -> int:
        """The port of this process on which another one listens by now; 0: none."""
        for port in self._ports():
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(("127.0.0.1", port))
                except OSError:
                    return port
        return 0

    def _ports(self) -> Sequence[int]:
        return (self.port,)

    def end(self) -> None:
        self.process.end()


class Server(LocalProcess):
    """One vLLM server."""

    def __init__(self, context: RunContext, spec: ServerSpec, name: str):
        self.spec = spec
        target = "pytest_kvconform.rigs.serving.server_process:serve"
        super().__init__(context, f"server {spec.role}", name, target, spec, spec.port)

    def prompts(self) -> tuple[Prompt, ...]:
        """Where the prompts of all requests so far came from, in the order of their first tokens."""
        try:
            lines = Path(self.spec.records).read_bytes().splitlines()
            return tuple(msgspec.json.decode(line, type=Prompt) for line in lines)
        except FileNotFoundError:  # no request yet
            return ()
        except (OSError, msgspec.DecodeError) as error:
            raise HarnessError(
                f"{self.spec.records}, which the {self.role} writes, is torn: {error}"
            ) from None

    def note_missing(self, causes: Sequence[str]) -> None:
        if self.spec.kv_transfer_config is not None:
            note_missing(self.context, [(one.partition(":")[0], one) for one in causes])

    def _ports(self) -> Sequence[int]:
        channels = [int(port) for name, port in self.spec.environment.items() if name.endswith("_PORT")]
        return (self.port, *channels)


class Router(LocalProcess):
    """vllm-router between P and D."""

    def __init__(
        self,
        context: RunContext,
        prefill: Sequence[str],
        decode: str,
        connector: str,
        name: str,
        key: str = "",
    ):
        """`prefill`: P's address, and its bootstrap port if it has one; `decode`: D's address; `connector`: a
        word of the router's --kv-connector; `key`: with which it asks them.
        """
        require_packages(*extras.ROUTER)
        port = free_port()
        arguments = (
            "--vllm-pd-disaggregation",
            *("--prefill", *prefill, "--decode", decode, "--kv-connector", connector),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())),
            *("--policy", "round_robin", "--disable-retries", "--log-level", "warning"),
        )
        target = "pytest_kvconform.rigs.serving.server_process:route"
        super().__init__(context, ROUTER, name, target, (arguments, key), port)


def wait_until_healthy(processes: Sequence[LocalProcess], seconds: float) -> None:
    """Wait until all of them answer. Raises EngineFailed if one ends, or does not answer in time."""
    waiting = list(processes)
    deadline = Deadline(seconds, [one.process.pid for one in waiting])
    while waiting:
        for one in list(waiting):
            one.require_alive()
            if one.healthy(1.0):
                one.started = True
                waiting.remove(one)
        if waiting and deadline.over():
            raise waiting[0].failure("hung", seconds)
        if waiting:
            time.sleep(LOOK_S)


def bearer_key(headers: Mapping[str, str]) -> str:
    """The key in headers that are sent as OpenAI's clients send it; "": none."""
    by_name = {name.casefold(): value for name, value in headers.items()}
    kind, _, key = by_name.get("authorization", "").partition(" ")
    return key if kind == "Bearer" else ""


def answer_seconds(context: RunContext) -> float:
    """Seconds for a server's answer about itself. It counts seconds of the clock, so a loaded machine has
    more of them.
    """
    return ANSWER_S * context.slow * max(1.0, context.settings.timeout_scale)


def require_packages(*modules: str) -> None:
    """Raise Blocked unless these packages of the extra `accuracy` are installed."""
    if lacks := " and ".join(extras.not_installed(modules)):
        raise Blocked(f"the accuracy tier needs {lacks}, not installed here: pip install '{extras.EXTRA}'")
