"""The background process of a run, from which every engine is forked: what starts it, its environment, and its end. See zygote.py."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model_matrix import Family, Geometry, UnknownName, expand, load_families, load_geometries
from pytest_kvconform.case import RIGS_OF_TIERS
from pytest_kvconform.result import Blocked, HarnessError
from pytest_kvconform.rigs.processes.child import connect
from pytest_kvconform.rigs.processes.zygote import SOCKET

if TYPE_CHECKING:
    from pytest_kvconform.settings import Settings
    from pytest_kvconform.subject import Subject

CLOSE_S = 20.0  # that it may take to end everything
PREFIX = "kvconform-"


class Zygote:
    """The background process of a run. It also ends, and cleans up, when this process is gone: its standard input is the life line."""

    def __init__(self, process: subprocess.Popen[bytes], run_dir: Path):
        self.process, self.run_dir = process, run_dir
        self.address = str(run_dir / SOCKET)

    def close(self) -> list[str]:
        """End it and everything it forked. Returns sentences about what would not end, or ended before it was told to."""
        said: list[str] = []
        gone = False
        try:
            with connect(self.address, 1.0) as connection:
                connection.send(("close",))
                if connection.poll(CLOSE_S):
                    said = connection.recv()[1]
        except (OSError, EOFError):
            gone = True  # or it is still importing and sees the end of its input next, which is a clean end: its exit code tells
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(5)
            said.append(f"the background process {self.process.pid} had to be killed")
        else:
            if gone and self.process.returncode:
                said.append(
                    f"the background process {self.process.pid} had ended before, with exit code {self.process.returncode}"
                )
        shutil.rmtree(self.run_dir, ignore_errors=True)  # normally gone by now
        return said


def start_zygote(settings: Settings, subject: Subject) -> Zygote:
    """Start the background process; its imports go on while pytest collects."""
    tiers = settings.tier or RIGS_OF_TIERS
    rigs = {rig for tier in tiers for rig in RIGS_OF_TIERS.get(tier, ("engine",))}
    models: dict[str, dict[str, Family] | dict[str, Geometry]] = {
        "engine": load_families(),
        "bytes": load_geometries(),
    }
    wanted: dict[str, set[str]] = {"engine": set(), "bytes": set()}
    with contextlib.suppress(UnknownName):  # said where cases are collected
        for place in expand(settings.matrix, settings.family, settings.topology):
            if place.rig in rigs:
                kind = "engine" if place.rig == "engine" else "bytes"
                wanted[kind] |= set(models[kind][place.family].config["architectures"])
    return launch_zygote(*wanted.values())


def launch_zygote(architectures: Iterable[str], geometries: Iterable[str] = ()) -> Zygote:
    """Start a background process that can fork engines of models with these architectures, and pattern engines of those of `geometries`."""
    remove_stale_run_dirs()
    run_dir = Path(tempfile.mkdtemp(prefix=PREFIX, dir=_short_temporary_folder()))
    with (run_dir / "zygote.log").open("wb") as log:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "pytest_kvconform.rigs.processes.zygote",
                str(run_dir),
                *sorted(architectures),
                "--",
                *sorted(geometries),
            ],
            env=environment(run_dir),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )  # a session of its own: Ctrl-C is for pytest alone
    (run_dir / "pid").write_text(str(process.pid))
    return Zygote(process, run_dir)


def _short_temporary_folder() -> str:
    """The folder for temporary files, unless its name is too long to hold a Unix socket (108 bytes)."""
    folder = tempfile.gettempdir()
    return folder if len(folder) < 70 else os.sep + "tmp"


def remove_stale_run_dirs() -> None:
    """Remove what runs left that were killed together with their zygote."""
    for folder in Path(_short_temporary_folder()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError, ValueError):
            if not Path(f"/proc/{int((folder / 'pid').read_text())}").exists():
                shutil.rmtree(folder, ignore_errors=True)


def environment(run_dir: Path) -> dict[str, str]:
    """The environment of every engine: the user's, with ours over it."""
    defaults = {
        "THP_MEM_ALLOC_ENABLE": "1"
    }  # torch's large tensors in huge pages: a pool of zeros in a quarter of the time
    if not _has_gpu():
        defaults |= {"UCX_TLS": "tcp,self,sm", "UCX_NET_DEVICES": "lo"}
        if "UCX_TLS" not in os.environ:  # transports of the user's choice may need other modules
            defaults["UCX_MODULES"] = (
                "cma"  # memory of other processes; looking for hardware takes a third of an agent's start
            )
    return (
        defaults
        | os.environ
        | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core in the process that we forked
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",  # more engines than cores
            "TORCHDYNAMO_DISABLE": "1",  # saves 2 to 6 s per engine; same numbers
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",  # loopback only
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "NIXL_LOG_LEVEL": "WARN",
            "VLLM_CACHE_ROOT": str(run_dir / "vllm"),
            "VLLM_CONFIG_ROOT": str(run_dir / "vllm"),
            "TMPDIR": str(run_dir),
            "KVCONFORM_WORKING_FOLDER": os.getcwd(),
        }
    )


def _has_gpu() -> bool:
    return Path("/proc/driver/nvidia/version").exists()


def wait_for_zygote(address: str, deadline_s: float) -> dict[str, str]:
    """Wait until the background process has imported everything. Returns what it found. Raises Blocked or HarnessError."""
    ready = _ask(address, ("ping",), deadline_s)
    if ready[0] != "ready":
        kind, sentence = ready[1:]
        raise (Blocked if kind == "missing" else HarnessError)(sentence)
    facts: dict[str, str] = ready[1]
    return facts


def _ask(address: str, question: tuple[Any, ...], deadline_s: float) -> tuple[Any, ...]:
    try:
        with connect(address, deadline_s) as connection:
            connection.send(question)
            if not connection.poll(deadline_s):
                raise HarnessError(
                    f"vLLM was not imported within {deadline_s:.0f} s (--kv-timeout-scale gives it more time)"
                )
            answer: tuple[Any, ...] = connection.recv()
            return answer
    except (OSError, EOFError) as error:
        raise HarnessError(
            f"the background process ended while it imported vLLM: {error or 'no reason known'}"
        ) from None
