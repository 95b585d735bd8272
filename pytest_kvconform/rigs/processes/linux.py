"""Facts about processes from Linux (/proc, prctl): children, sessions, shared memory, threads, sockets; and
huge pages, for a process whose forks are to be quick.

With them the zygote leaves nothing behind, whatever a connector starts.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import threading
from pathlib import Path

DEADLY = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
SHARED_MEMORY = "/dev/shm/"
LISTS_CHILDREN = os.path.exists(f"/proc/self/task/{os.getpid()}/children")  # not in every kernel
PF_EXITING = 0x4  # linux/sched.h
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
MOST_LISTS = 8  # of a process whose threads come and go all the time
_HUGE = 1 << 21  # bytes of a huge page on x86-64 and on ARM with pages of 4 KiB
# MADV_COLLAPSE of linux/mman.h, since Linux 6.1; it works where huge pages are not enabled for everybody too.
_COLLAPSE = 25


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def become_subreaper() -> None:
    """Let orphaned descendants become children of this process instead of init: it can find and end them."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Let Linux send this process SIGKILL when its parent process ends, however the parent ends."""
    parent = os.getppid()
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died between the fork and the line above
        os._exit(1)


def write_stack_at_death() -> None:
    """Let this process write its Python stack to stderr, and nothing else, if a deadly signal ends it.

    A library beside vLLM (tvm_ffi) has handlers, too. They write a stack of native code with symbols, which
    takes seconds, and some processes end there with SIGABRT.
    """
    faulthandler.disable()
    for deadly in DEADLY:
        signal.signal(deadly, signal.SIG_DFL)
    faulthandler.enable()


def _stat(pid: int) -> tuple[int, int, str]:
    """(parent, session, state) of a process; zeros if the process is gone."""
    try:
        words = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0, 0, "X"
    return int(words[1]), int(words[3]), words[0].decode()


def has_gone(pid: int) -> bool:
    """Whether a process has ended, or waits to be reaped."""
    return _stat(pid)[2] in "ZX"


def is_ending(pid: int) -> bool:
    """Whether a process has begun to end, or has ended. It has begun before its sockets are closed."""
    try:
        words = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return True
    return words[0] in (b"Z", b"X") or bool(int(words[6]) & PF_EXITING)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def children_of(pid: int) -> list[int]:
    """Pids of the children of a process, zombies included."""
    return [p for p in _pids() if _stat(p)[0] == pid]


def children_but_pythons() -> dict[int, str]:
    """The children of this process but for those of Python's multiprocessing.

    Returns pid -> "4711 python", or "4711 lscpu as a zombie" of one that has ended and was not waited for.

    Python starts one resource tracker for a process (with the first piece of shared memory) and one fork
    server, and ends neither before the process ends. What the fork server has started counts instead of it.
    """
    tracker = getattr(sys.modules.get("multiprocessing.resource_tracker"), "_resource_tracker", None)
    server = getattr(sys.modules.get("multiprocessing.forkserver"), "_forkserver", None)
    tracks, serves = getattr(tracker, "_pid", None), getattr(server, "_forkserver_pid", None)
    found = children_of(os.getpid())
    if serves in found:
        found += children_of(serves)
    return {pid: _described(pid) for pid in found if pid not in (tracks, serves)}


def _described(pid: int) -> str:
    with contextlib.suppress(OSError):
        program = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
        return f"{pid} {program}" + " as a zombie" * (_stat(pid)[2] == "Z")
    return str(pid)


def descendants_of(pid: int) -> list[int]:
    """Pids of all living descendants of a process."""
    found, todo = [], [pid]
    while todo:
        children = children_of(todo.pop())
        found += children
        todo += children
    return [p for p in found if _stat(p)[2] not in "ZX"]


def _listed_children(pid: int) -> list[int]:
    """Pids of the children of a process as Linux lists them, without a look at every process of the machine.

    A child may be missing if another one is reaped at the same time (man 5 proc_pid_task).
    """
    found: list[int] = []
    with contextlib.suppress(OSError):  # the process has ended
        for task in tasks(pid):
            with contextlib.suppress(OSError):  # the thread has ended
                found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_bytes().split())
    return found


def session_pids(session: int) -> list[int]:
    """Pids of the living processes of a session, among the descendants of this process."""
    found, todo = [], _listed_children(os.getpid()) if LISTS_CHILDREN else descendants_of(os.getpid())
    while todo:
        pid = todo.pop()
        _, of_session, state = _stat(pid)
        if of_session == session and state not in "ZX":
            found.append(pid)
        if LISTS_CHILDREN:
            todo += _listed_children(pid)
    return found


def kill_session(session: int) -> None:
    """Send SIGKILL to every process of a session. Each child of the zygote leads a session.

    Processes that are gone are no error.
    """
    for pid in session_pids(session):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def shared_memory_of(session: int) -> set[str]:
    """Files in /dev/shm that the processes of a session have mapped or open."""
    return open_shared_memory(session_pids(session))


def open_shared_memory(pids: list[int] | None = None) -> set[str]:
    """Files in /dev/shm that these processes have mapped or open (None: all processes)."""
    found = mapped_shared_memory(pids)
    for pid in _pids() if pids is None else pids:
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    if (file := os.readlink(f"/proc/{pid}/fd/{fd}")).startswith(SHARED_MEMORY):
                        found.add(file)
    return {file for file in found if os.path.exists(file)}


def mapped_shared_memory(pids: list[int] | None = None) -> set[str]:
    """Files in /dev/shm that these processes have mapped (None: all processes), without removed files."""
    found: set[str] = set()
    for pid in _pids() if pids is None else pids:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
            found |= {line[line.index(SHARED_MEMORY) :] for line in lines if SHARED_MEMORY in line}
    return {file for file in found if os.path.exists(file)}


def tasks(pid: int) -> set[str]:
    """Ids of the threads of a process. Raises OSError if the process has ended.

    Linux may leave a living thread out of a list that it makes while another thread ends
    (fs/proc/base.c, next_tid). Such a list names the thread that ended, and the next list does not. So two
    equal lists lack no living thread. After MOST_LISTS the last two are joined, which may name one that has
    ended.
    """
    ids: list[set[str]] = []
    while len(ids) < 2 or (ids[-1] != ids[-2] and len(ids) < MOST_LISTS):
        ids.append(set(os.listdir(f"/proc/{pid}/task")))
    return ids[-1] | ids[-2]


def threads() -> dict[str, str]:
    """Id -> name of every thread of this process, native threads included.

    A thread may take its name some time after its start.
    """
    # Names in Python first: Linux has the program's name for most threads.
    python = {str(thread.native_id): thread.name for thread in threading.enumerate()}
    found = {}
    for task in tasks(os.getpid()):
        with contextlib.suppress(OSError):
            found[task] = python.get(task) or _name_of(task)
    return found


def _name_of(task: str) -> str:
    """The name that Linux has for a thread: 15 bytes at most, perhaps with a half character at the end."""
    return Path(f"/proc/self/task/{task}/comm").read_bytes().decode("utf-8", "replace").strip()


def listening_sockets(pid: int) -> tuple[str, ...]:
    """Addresses on which a process listens for TCP: "127.0.0.1:5600"."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(fd)
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = []
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == "0A" and words[9] in inodes:  # 0A: TCP_LISTEN (include/net/tcp_states.h)
                    host, port = words[1].split(":")
                    address = (
                        ".".join(str(b) for b in bytes.fromhex(host)[::-1]) if len(host) == 8 else "[::]"
                    )
                    found.append(f"{address}:{int(port, 16)}")
    return tuple(sorted(found))


def collapse_into_huge_pages() -> int:
    """Turn private anonymous memory into huge pages where it fills them.

    Returns how many were made, 0 where the kernel cannot make any.

    A forked child that writes to a huge page copies 4 KiB of it, as before: the kernel splits the child's
    page table entry, not the page.
    """
    libc, made = ctypes.CDLL(None), 0
    libc.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        addresses, rights, _, _, inode, *_ = line.split()
        if rights != "rw-p" or inode != "0":
            continue
        start, end = (int(word, 16) for word in addresses.split("-"))
        for at in range(-(-start // _HUGE) * _HUGE, end - _HUGE + 1, _HUGE):
            made += not libc.madvise(at, _HUGE, _COLLAPSE)
    return made
