"""The command itself, in a process and a folder of its own, and what it leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.helpers import warm_zygotes
from tests.helpers.case_runner import CONFIG, HIDDEN
from tests.helpers.fixtures import ROOT

MARK = "PYTEST_KVCONFORM_TEST"  # environment variable by which the processes of a run are known
LEAVE_S = 8.0  # everything has to be gone by then
END_S = 240.0


class Command:
    """One run of `pytest --kv-connector=...`, begun at once. `cold`: its zygote imports vLLM by itself."""

    def __init__(self, folder: Path, *arguments: str, cold: bool = False):
        warm_zygotes.start()
        self.folder, self.mark = folder, f"{os.getpid()}-{time.monotonic_ns()}"
        # a short name: see `launch._short_temporary_folder`
        self.temporary = Path(tempfile.mkdtemp(prefix="kvt-"))
        self.shared_memory = set(os.listdir("/dev/shm"))
        self.forks = set(warm_zygotes.descendants())
        keep = {
            name: value
            for name, value in os.environ.items()
            if name == "KVCONFORM_CACHE_DIR"
            or not (name.startswith(("KVCONFORM_", "PYTEST_")) or name in ("CI", "GITHUB_STEP_SUMMARY"))
        }
        with (folder / "output").open("wb") as output:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider"),
                    *(() if cold else ("-p", "warm_zygotes")),
                    *arguments,
                ],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # a shell that starts a command in the background lets it ignore SIGINT
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
                env=keep
                | ({"KVCONFORM_HIDE_CPU": ",".join(HIDDEN)} if HIDDEN else {})
                | {
                    MARK: self.mark,
                    "TMPDIR": str(self.temporary),
                    "PYTHONPATH": os.pathsep.join(
                        [str(ROOT), str(folder), os.environ.get("PYTHONPATH", ""), str(warm_zygotes.HERE)]
                    ),
                },
            )

    def wait(self) -> Command:
        """Let it come to its end."""
        self.process.wait(END_S)
        return self

    def wait_for(self, word: str, seconds: float = END_S) -> None:
        """Until the word was printed, by pytest or by an engine."""
        deadline = time.monotonic() + seconds
        while word not in self.text and not any(word in text for text in self._logs()):
            assert self.process.poll() is None, f"it ended before it said {word!r}:\n{self.text}"
            assert time.monotonic() < deadline, (
                f"it did not say {word!r} within {seconds:.0f} s:\n{self.text}"
            )
            time.sleep(0.02)

    def _logs(self) -> Iterator[str]:
        # unlike pathlib it does not mind a folder that goes meanwhile
        for top, _, names in os.walk(self.temporary):
            for name in names:
                with contextlib.suppress(OSError):
                    if name.endswith(".log"):
                        yield Path(top, name).read_text("utf-8", "replace")

    def send(self, number: signal.Signals) -> None:
        """Send a signal to pytest alone."""
        self.process.send_signal(number)

    # ---- output and report ----------------------------------------------------------------------------

    @property
    def code(self) -> int:
        return int(self.process.returncode)

    @property
    def text(self) -> str:
        return (self.folder / "output").read_text("utf-8", "replace")

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @property
    def report(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "kv-report" / "report.json").read_bytes()))

    @property
    def word(self) -> str:
        return str(self.report["verdict"]["word"])

    @property
    def outcomes(self) -> dict[str, str]:
        return {result["id"]: result["outcome"] for result in self.report["results"]}

    # ---- leftovers ----------------------------------------------------------------------------

    def processes(self) -> dict[int, str]:
        """Living processes of the run and their command lines.

        They have the run's mark in their environment, wherever they are in the process tree. Of a fork Linux
        shows the environment of the process that forked it: those forks are the run's that are new.
        """
        found = {
            pid: "forked from imported_vllm.py" for pid in warm_zygotes.descendants() if pid not in self.forks
        }
        for process in (Path("/proc", name) for name in filter(str.isdigit, os.listdir("/proc"))):
            with contextlib.suppress(OSError):  # it has ended while it was looked at
                environment = (process / "environ").read_bytes()
                state = (process / "stat").read_bytes().rpartition(b")")[2].split()[0]
                if f"{MARK}={self.mark}".encode() in environment.split(b"\0") and state not in (b"Z", b"X"):
                    found[int(process.name)] = (process / "cmdline").read_bytes().decode(errors="replace")
        return found

    def left(self) -> list[str]:
        """Sentences about what is still there some seconds after the end."""
        deadline = time.monotonic() + LEAVE_S
        while (said := self._left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return said

    def _left(self) -> list[str]:
        processes = [f"process {pid}: {line}" for pid, line in self.processes().items()]
        new = sorted(set(os.listdir("/dev/shm")) - self.shared_memory)
        # those of test_leaving.py, which another process may run meanwhile
        new = [name for name in new if not name.startswith("segment-of-a-store-")]
        shared = of_nobody([f"/dev/shm/{name}" for name in new])
        files = [
            os.path.join(top, name)
            for top, folders, names in os.walk(self.temporary)
            for name in sorted([*folders, *names])
            if not os.path.relpath(os.path.join(top, name), self.temporary).startswith("pytest-of-")
        ]
        cores = [str(path.relative_to(self.folder)) for path in sorted(self.folder.glob("core*"))]
        return [*processes, *shared, *files, *cores]  # a port ends with its process


def of_nobody(files: list[str]) -> list[str]:
    """Files that no living process has mapped: other programs may use shared memory meanwhile."""
    maps = ""
    for name in filter(str.isdigit, os.listdir("/proc")) if files else ():
        try:
            maps += Path(f"/proc/{name}/maps").read_text("utf-8", "replace")
        except OSError:
            continue
    return [file for file in files if file not in maps]


Run = Callable[..., Command]  # of a connector and more arguments of the command


def arguments(spec: str, *more: str) -> list[str]:
    """The options of a short run: one family, one topology."""
    config = (
        ()
        if spec == "NixlConnector" or any(one.startswith("--kv-config") for one in more)
        else (f"--kv-config={CONFIG}",)
    )
    cell = (
        ()
        if any(one.startswith("--kv-family") for one in more)
        else ("--kv-family=llama", "--kv-topology=P1D1")
    )
    tier = () if any(one.startswith("kv::") for one in more) else ("--kv-tier=engine",)
    return [f"--kv-connector={spec}", *config, *cell, *tier, *more]
