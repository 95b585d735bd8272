"""GPUs of this machine, leased to one process at a time by file locks.

Each GPU has a lock file in the user's folder for runtime files. A lock ends with the process that holds it,
however that process ends. Workers of pytest-xdist and other runs of this user see the same files.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import filelock
import platformdirs

from pytest_kvconform.result import Blocked
from pytest_kvconform.rigs.processes.cores import Deadline

VISIBLE = "CUDA_VISIBLE_DEVICES"
ASK_S = 20.0  # for nvidia-smi
LOOK_S = 0.5  # between two looks at GPUs that others hold


class Gpu(NamedTuple):
    """One GPU that CUDA shows to this user."""

    word: str  # of CUDA_VISIBLE_DEVICES
    uuid: str  # the same however the GPU is named; of its lock file


class Lease:
    """GPUs that this process alone uses, until it gives them back or ends."""

    def __init__(self, held: dict[Gpu, filelock.BaseFileLock]):
        self._held = held

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs, in the order of the machine."""
        return tuple(self._held)

    def give_back(self) -> None:
        """Let others have the GPUs."""
        for lock in self._held.values():
            lock.release()


def gpus_here() -> tuple[Gpu, ...]:
    """The GPUs that CUDA shows: those of $CUDA_VISIBLE_DEVICES, or all that nvidia-smi lists."""
    listed = _listed()
    words = os.environ.get(VISIBLE)
    if words is None:
        return listed
    chosen: dict[str, Gpu] = {}
    for word in (one.strip() for one in words.split(",")):
        if word in ("", "-1"):  # CUDA looks at no word behind it
            break
        named = [gpu for gpu in listed if gpu.word == word or gpu.uuid.startswith(word)]
        gpu = Gpu(word, named[0].uuid if named else word)
        chosen.setdefault(gpu.uuid, gpu)
    return tuple(chosen.values())


def shown(gpus: Iterable[Gpu]) -> dict[str, str]:
    """The environment variables that show these GPUs alone to a process, numbered as nvidia-smi does."""
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", VISIBLE: ",".join(gpu.word for gpu in gpus)}


def require(count: int, gpus: Sequence[Gpu], what: str) -> None:
    """Raise Blocked unless there are so many GPUs. `what` needs them, in words."""
    if len(gpus) < count:
        has = f"has {len(gpus)}" if gpus else "has none"
        raise Blocked(f"{what} needs {count} GPUs, one for each rank, and this machine {has}")


def lease(count: int, gpus: Sequence[Gpu], what: str, seconds: float) -> Lease:
    """Wait until `count` of these GPUs are free, and hold them.

    Processes queue: while one that needs many waits, no other takes those that become free, and no two that
    hold a part of what they need wait for each other. Raises Blocked if there are fewer GPUs, or if they are
    not free in time; OSError if lock files cannot be written.
    """
    require(count, gpus, what)
    folder = _folder_of_locks()
    deadline = Deadline(seconds)
    queue = _wait(folder, "queue", deadline)
    held: dict[Gpu, filelock.BaseFileLock] = {}
    try:
        while queue is not None:
            for gpu in gpus:
                if len(held) < count and gpu not in held and (lock := _try(folder, f"gpu-{gpu.uuid}")):
                    held[gpu] = lock
            if len(held) == count:
                return Lease({gpu: held[gpu] for gpu in gpus if gpu in held})
            if deadline.over():
                break
            time.sleep(LOOK_S)
    except BaseException:
        Lease(held).give_back()
        raise
    finally:
        if queue is not None:
            queue.release()
    Lease(held).give_back()
    raise Blocked(
        f"{what} needs {count} of the {len(gpus)} GPUs of this machine, and other runs held them for "
        f"{seconds:.0f} s"
    )


def _folder_of_locks() -> Path:
    """The user's folder for runtime files, or one in the folder for temporary files. Raises OSError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is none is no concern of the user
        return platformdirs.user_runtime_path("pytest-kvconform", ensure_exists=True)


def _wait(folder: Path, name: str, deadline: Deadline) -> filelock.BaseFileLock | None:
    """Hold a lock as soon as it is free; None if it is not in time."""
    while (lock := _try(folder, name)) is None and not deadline.over():
        time.sleep(LOOK_S)
    return lock


def _try(folder: Path, name: str) -> filelock.BaseFileLock | None:
    """Hold a lock, if nobody else does."""
    lock = filelock.FileLock(folder / f"{name}.lock", thread_local=False)
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        return None
    return lock


def _listed() -> tuple[Gpu, ...]:
    """All GPUs that nvidia-smi lists; none where there is no nvidia-smi, or no driver."""
    if (tool := shutil.which("nvidia-smi")) is None:
        return ()
    try:
        done = subprocess.run(
            [tool, "--query-gpu=index,uuid", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=ASK_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    rows = [[word.strip() for word in line.split(",")] for line in lines if "," in line]
    return tuple(Gpu(index, uuid) for index, uuid in rows)
