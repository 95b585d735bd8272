"""Start and end of the zygote (fork server): its command, its environment, the wait until it is ready."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from model_matrix import UnknownName, expand, load_families, load_geometries
from model_matrix.cells import MODELS, RIGS_OF_TIERS
from model_matrix.variants import EAGLE
from pytest_kvconform import extras
from pytest_kvconform.result import Blocked, HarnessError
from pytest_kvconform.rigs.processes.child import GONE
from pytest_kvconform.rigs.processes.cores import Deadline
from pytest_kvconform.rigs.processes.place import connect
from pytest_kvconform.rigs.processes.zygote import READY, SOCKET
from pytest_kvconform.rigs.vllm_setup.compat import environment_without_gpu

if TYPE_CHECKING:
    from pytest_kvconform.settings import Settings

PRELOAD = "pytest_kvconform.rigs.vllm_setup.preload:preload"
LIGHT_PRELOAD = "pytest_kvconform.rigs.serving.preload:preload_without_vllm"
# Modules of the rigs that the zygote imports after vLLM, in this order, so that no fork imports them again.
ENGINE_MODULES = ("pytest_kvconform.rigs.engine.model_engine", "pytest_kvconform.rigs.canary.teacher")
GEOMETRY_MODULES = (
    "pytest_kvconform.rigs.bytes.process",
    "pytest_kvconform.rigs.bytes.worker",
    "pytest_kvconform.rigs.cluster.byte_bench",
    "pytest_kvconform.rigs.bytes.faulty.peer",
    "pytest_kvconform.rigs.scheduler.host",
    "pytest_kvconform.rigs.scheduler.fake_connector",
    "pytest_kvconform.rigs.scheduler.store_engine",
)
STAND_IN = "pytest_kvconform.rigs.vllm_setup.stand_ins.install:install"
POISON = "pytest_kvconform.rigs.bytes.pool_memory:make_poison"  # once, for every engine of the run
SERVING_PRELOAD = "pytest_kvconform.rigs.serving.preload:preload"
CLOSE_S = 20.0  # for the zygote to end everything
LOOK_S = 0.5  # between two looks at how long the zygote has waited for a core
PREFIX = "kvconform-"
ANSWER_S = 20.0  # for a zygote that has imported everything to answer


class Zygote:
    """The zygote of a run, as pytest's process sees it.

    The zygote also ends, and removes `run_dir`, when this process is gone: its standard input is the life
    line.
    """

    def __init__(self, process: subprocess.Popen[bytes], run_dir: Path):
        self.process, self.run_dir = process, run_dir
        self.address = str(run_dir / SOCKET)

    def close(self) -> list[str]:
        """End the zygote and everything it forked.

        Returns sentences about processes that did not end as asked.
        """
        problems: list[str] = []
        watched = os.getpid(), self.process.pid
        # As long as it imports it answers nothing, and ends at once when its input ends.
        unreachable = not (self.run_dir / READY).exists()
        if not unreachable:
            try:
                with connect(self.address, 1.0) as connection:
                    connection.send(("close",))
                    deadline = Deadline(CLOSE_S, watched, look=True)
                    while not (answered := connection.poll(LOOK_S)) and not deadline.over():
                        pass
                    problems = connection.recv()[1] if answered else []
            except (OSError, EOFError):  # it has ended: its exit code tells
                unreachable = True
        assert self.process.stdin is not None
        self.process.stdin.close()
        deadline = Deadline(CLOSE_S, watched, look=True)
        while (code := self._exit_code(LOOK_S)) is None and not deadline.over():
            pass
        if code is None:
            self.process.kill()
            self._exit_code(CLOSE_S)
            problems.append(f"the zygote {self._words} had to be killed")
        elif code and unreachable:
            problems.append(f"the zygote {self._words} had ended before, with exit code {code}")
        shutil.rmtree(self.run_dir, ignore_errors=True)  # normally gone by now
        return problems

    def _exit_code(self, seconds: float) -> int | None:
        """The exit code, within so many seconds. None: it has not ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(seconds)
        return None

    @property
    def _words(self) -> str:
        return f"(process {self.process.pid}, from which engines are forked)"


def start_zygote(settings: Settings, variables: Mapping[str, str] = {}) -> Zygote:
    """Start the zygote with the models of the cells that the settings select.

    The zygote imports vLLM while pytest collects cases. `variables`: of the environment, which a declaration
    gives the engines.
    """
    if settings.deployed:
        return launch_zygote((), preload=LIGHT_PRELOAD)
    tiers = settings.tier or RIGS_OF_TIERS
    rigs = {rig for tier in tiers for rig in RIGS_OF_TIERS.get(tier, ("engine",))}
    wanted: dict[str, set[str]] = {"engine": set(), "bytes": set()}
    with contextlib.suppress(UnknownName):  # reported where cases are collected
        for place in expand(settings.matrix, settings.family, settings.topology):
            if place.rig in rigs:
                if place.rig in MODELS:
                    wanted["engine"] |= load_families()[place.family].architectures
                    if place.rig == "engine":  # cases about the end of engines start some without a model
                        wanted["bytes"] |= _architectures_like(place.family)
                else:
                    wanted["bytes"] |= load_geometries()[place.family].architectures
                    if place.rig == "scheduler":  # some engines speculate
                        wanted["bytes"].add(EAGLE)
    more = [SERVING_PRELOAD] if "serving" in rigs and not extras.not_installed(extras.LM_EVAL) else []
    if settings.stand_in:
        more.append(STAND_IN)
    return launch_zygote(wanted["engine"], wanted["bytes"], settings.hide_cpu, more, variables=variables)


def _architectures_like(family: str) -> set[str]:
    """The architectures of geometries of this family, and of llama, with which engines are compared."""
    like = [one for one in load_geometries().values() if one.family in (family, "llama")]
    return {architecture for one in like for architecture in one.architectures}


def launch_zygote(
    architectures: Iterable[str],
    geometries: Iterable[str] = (),
    hidden: Iterable[str] = (),
    more: Iterable[str] = (),
    preload: str = PRELOAD,
    variables: Mapping[str, str] = {},
    whole: Mapping[str, str] | None = None,
) -> Zygote:
    """Start a zygote that can fork engines of these model architectures.

    `architectures`: engines with checkpoints. `geometries`: architectures of engines without a model.
    `hidden`: features of the CPU that vLLM and torch are not to use. `more`: further functions
    to call in the zygote, which import what engines need. `preload`: the function that imports everything.
    `variables`: of the environment of every engine; they win over the user's. `whole`: the whole
    environment, in place of one that is made.
    """
    remove_stale_run_dirs()
    run_dir = Path(tempfile.mkdtemp(prefix=PREFIX, dir=short_temporary_folder()))
    arguments = {
        "architectures": sorted(architectures),
        "geometries": sorted(geometries),
        "hidden": sorted(hidden),
    }
    modules, functions = [*ENGINE_MODULES], [*more]
    if arguments["geometries"]:
        modules, functions = [*modules, *GEOMETRY_MODULES], [*functions, POISON]
    command = [
        sys.executable,
        "-m",
        "pytest_kvconform.rigs.processes.zygote",
        str(run_dir),
        preload,
        json.dumps(arguments | {"modules": modules, "functions": functions}),
    ]
    with (run_dir / "zygote.log").open("wb") as log:
        of_engines = environment(run_dir, variables) | limits_of_kernels(arguments["hidden"])
        process = _begin(command, of_engines if whole is None else whole, log)
    (run_dir / "pid").write_text(str(process.pid))
    return Zygote(process, run_dir)


def launch_another(
    address: str,
    geometries: Iterable[str],
    hidden: Iterable[str] = (),
    more: Iterable[str] = (),
) -> Zygote:
    """Start a zygote with the environment of one that runs, for engines without a model.

    Temporary files of both are in the folder of the first one, where P and D may meet. `address`: of the
    first one. Otherwise see `launch_zygote`. Raises HarnessError if the first one is gone.
    """
    try:
        with connect(address, 1.0) as connection:
            connection.send(("environment",))
            if not connection.poll(ANSWER_S):
                raise EOFError
            first: dict[str, str] = connection.recv()[1]
    except (OSError, EOFError):
        raise HarnessError(GONE) from None
    return launch_zygote((), geometries, hidden, more, whole=first)


def _begin(command: list[str], variables: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start the zygote's process. Its session is its own: Ctrl-C is for pytest alone."""
    return subprocess.Popen(
        command, env=variables, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
    )


def short_temporary_folder() -> str:
    """The folder for temporary files, unless its name is too long to hold a Unix socket (108 bytes)."""
    folder = tempfile.gettempdir()
    return folder if len(folder) < 70 else os.sep + "tmp"


def remove_stale_run_dirs() -> None:
    """Remove the folders of runs that were killed together with their zygote."""
    for folder in Path(short_temporary_folder()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError, ValueError):
            if not Path(f"/proc/{int((folder / 'pid').read_text())}").exists():
                shutil.rmtree(folder, ignore_errors=True)


def environment(run_dir: Path, declared: Mapping[str, str] = {}) -> dict[str, str]:
    """The environment of every engine.

    It has defaults, then the user's environment, then what the declaration gives engines, then what every
    engine must have.
    """
    # torch's large tensors in huge pages: a pool of zeros in a quarter of the time
    defaults = {"THP_MEM_ALLOC_ENABLE": "1"}
    if not _has_gpu():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            defaults |= environment_without_gpu(importlib.metadata.version("vllm"))
        defaults |= {"UCX_TLS": "tcp,self,sm", "UCX_NET_DEVICES": "lo"}
        if "UCX_TLS" not in os.environ:  # transports of the user's choice may need other modules
            # Memory of other processes alone: looking for hardware takes a third of an agent's start.
            defaults["UCX_MODULES"] = "cma"
    required = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core runs in the forked process itself
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
        "VLLM_API_KEY": "",  # servers that are started here are asked without one
        "NO_PROXY": (direct := _with_loopback(os.environ.get("NO_PROXY", os.environ.get("no_proxy", "")))),
        "no_proxy": direct,
        "VLLM_LOGGING_LEVEL": "WARNING",
        "NIXL_LOG_LEVEL": "WARN",
        "VLLM_CACHE_ROOT": str(run_dir / "vllm"),
        "VLLM_CONFIG_ROOT": str(run_dir / "vllm"),
        "TMPDIR": str(run_dir),
        "KVCONFORM_WORKING_FOLDER": os.getcwd(),
    }
    return {**defaults, **os.environ, **declared, **required}


def _with_loopback(no_proxy: str) -> str:
    """The hosts that are not asked through a proxy, with this machine among them."""
    return ",".join([*filter(None, [no_proxy]), "127.0.0.1", "localhost"])


def limits_of_kernels(hidden: Collection[str]) -> dict[str, str]:
    """The environment in which the kernels of torch and oneDNN use none of the hidden features of the CPU."""
    isa = {"avx512": "AVX2", "avx512_bf16": "AVX512_CORE_VNNI", "amx_tile": "AVX512_CORE_FP16"}
    most = next((isa[name] for name in isa if name in hidden), "")
    torch = {"ATEN_CPU_CAPABILITY": "avx2"} if "avx512" in hidden else {}
    return ({"ONEDNN_MAX_CPU_ISA": most} if most else {}) | torch


def _has_gpu() -> bool:
    return Path("/proc/driver/nvidia/version").exists()


def wait_for_zygote(address: str, deadline_s: float) -> dict[str, str]:
    """Wait until the zygote has imported everything.

    Returns its facts about vLLM. Raises Blocked or HarnessError.
    """
    answer = _ask(address, ("ping",), deadline_s)
    if answer[0] != "ready":
        kind, sentence = answer[1:]
        raise (
            Blocked(sentence)
            if kind == "missing"
            else HarnessError(f"vLLM could not be imported: {sentence}")
        )
    facts: dict[str, str] = answer[1]
    return facts


def _ask(address: str, question: tuple[Any, ...], deadline_s: float) -> tuple[Any, ...]:
    try:
        with connect(address, deadline_s) as connection:
            connection.send(question)
            deadline = Deadline(deadline_s, [int((Path(address).parent / "pid").read_text())], look=True)
            while not connection.poll(LOOK_S):
                if deadline.over():
                    raise HarnessError(
                        f"vLLM was not imported within {deadline_s:.0f} s (--kv-timeout-scale gives it more "
                        "time)"
                    )
            answer: tuple[Any, ...] = connection.recv()
            return answer
    except (OSError, EOFError) as error:
        raise HarnessError(
            "the zygote (the process that engines are forked from) ended while it imported vLLM: "
            f"{error or 'no reason known'}"
        ) from None
