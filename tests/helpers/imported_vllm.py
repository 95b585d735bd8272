"""A process that has imported vLLM, and forks zygotes from itself: each is ready in a second or two.

    python tests/helpers/imported_vllm.py SOCKET HIDDEN

HIDDEN: features of the CPU that vLLM takes for missing, with commas between them.

A connection to SOCKET carries one request: the standard input and the log of a zygote as file descriptors,
and (its command, environment and working folder), pickled. The answer is ("pid", pid), and
("ended", exit code) when the zygote has ended; or ("refused", why) if a zygote that imports vLLM by itself
could differ from a fork.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import pickle
import select
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from pytest_kvconform.rigs.launch import CLOSE_S, ENGINE_MODULES, GEOMETRY_MODULES
from pytest_kvconform.rigs.processes import linux, zygote
from pytest_kvconform.rigs.processes.linux import become_subreaper, die_with_parent
from pytest_kvconform.rigs.vllm_setup import overrides, preload
from pytest_kvconform.rigs.vllm_setup.optional_packages import mend_imports

REAP_S = 0.05  # between two looks at which zygotes have ended
MESSAGE = 1 << 20  # bytes of a request, at most
# Beginnings of the names of variables that libraries may read while they are imported or loaded.
EARLY = tuple(
    "VLLM_ UCX_ NIXL_ GLOO_ CUDA_ NVIDIA_ OMP_ KMP_ MKL_ ONEDNN_ DNNL_ ATEN_ THP_ TORCH_ PYTORCH_ TRITON_ "
    "NUMBA_ HF_HOME HF_HUB_ TRANSFORMERS_ RAY_ HOME PATH LD_PRELOAD LANG LC_".split()
)
# What reads these keeps a folder of this process, which serves as well.
MAY_DIFFER = {"VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT"}
AT_START = dict(os.environ)


def import_vllm(hidden: Sequence[str]) -> None:
    """Import what `preload` imports, and change nothing but what it changes before its imports."""
    gc.disable()
    mend_imports()
    import torch

    overrides.hide_cpu_features(hidden)
    torch.set_num_threads(1)
    preload._import_engine()
    preload._import_scheduler()
    for module in (*ENGINE_MODULES, *GEOMETRY_MODULES):
        importlib.import_module(module)
    gc.enable()
    gc.freeze()
    linux.collapse_into_huge_pages()


def why_not(command: Sequence[str], variables: Mapping[str, str], folder: str, hidden: Sequence[str]) -> str:
    """Why a fork of this process could differ from the zygote of this command; "" if it could not."""
    if sorted(json.loads(command[-1])["hidden"]) != sorted(hidden):
        return "it hides other features of the CPU"
    differ = {
        name
        for name in AT_START.keys() | variables.keys()
        if name.startswith(EARLY) and name not in MAY_DIFFER
        # a client that has imported vLLM itself has the variables that imports set
        if variables.get(name) not in (AT_START.get(name), os.environ.get(name))
    }
    if differ:
        return f"other variables: {', '.join(sorted(differ))}"
    hides = {name for one in [folder, *folders_of(variables)] for name in hidden_by(one)}
    return f"a folder of its path hides {', '.join(sorted(hides))}" if hides else ""


def folders_of(variables: Mapping[str, str]) -> list[str]:
    """The folders of PYTHONPATH."""
    return [folder for folder in variables.get("PYTHONPATH", "").split(os.pathsep) if folder]


def hidden_by(folder: str) -> set[str]:
    """Modules that this process has imported, and that another process would import from the folder."""
    try:
        paths = list(Path(folder).iterdir())
    except OSError:
        return set()
    names = {path.name.partition(".")[0] for path in paths if path.suffix in (".py", ".so")}
    names |= {path.name for path in paths if (path / "__init__.py").exists()}
    elsewhere = {
        name
        for name in names & sys.modules.keys()
        if not (getattr(sys.modules[name], "__file__", None) or "").startswith(os.path.join(folder, ""))
    }
    return elsewhere | (names & {"sitecustomize", "usercustomize"})


def become_zygote(command: Sequence[str], variables: dict[str, str], folder: str, files: list[int]) -> int:
    """Be the zygote of the command, as if Python had been started anew. Returns its exit code."""
    die_with_parent()
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    source, log = files
    for number, file in ((0, source), (1, log), (2, log)):
        os.dup2(file, number)
    for file in files:
        os.close(file)
    os.chdir(folder)
    imports_have_set = dict(os.environ.items() - AT_START.items())
    os.environ.clear()
    os.environ.update(variables | imports_have_set)
    old = folders_of(AT_START)
    sys.path[:] = [folder, *folders_of(variables), *(one for one in sys.path if one not in old)]
    sys.modules["__main__"] = zygote  # what Python's multiprocessing imports in the processes that it starts
    importlib.invalidate_caches()
    tempfile.tempdir = None  # Python would go on with the folder that it has found first
    linux.collapse_into_huge_pages = lambda: 0  # of what this process shares it would make copies
    return zygote.main(Path(command[-3]), command[-2], json.loads(command[-1]))


def fork(sockets: Iterable[socket.socket], *request: Any) -> int:
    """Fork a zygote, which has none of the sockets. Returns its pid."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        for one in sockets:
            one.close()
        code = become_zygote(*request)
    except BaseException:
        traceback.print_exc()
    finally:
        leave(code)


def leave(code: int) -> NoReturn:
    """End a fork without what this process would do at its own end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def serve(listener: socket.socket, hidden: Sequence[str]) -> None:
    """Fork zygotes until standard input ends."""
    clients: dict[int, socket.socket] = {}  # by pid
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(0, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in selector.select(REAP_S)}
            reap(clients)
            if 0 in ready:
                return end(clients)
            if listener in ready:
                client = listener.accept()[0]
                if pid := answer([listener, client, *clients.values()], client, hidden):
                    clients[pid] = client
                else:
                    client.close()


def answer(sockets: Iterable[socket.socket], client: socket.socket, hidden: Sequence[str]) -> int:
    """Answer a request. Returns the pid of the zygote; 0: there is none."""
    client.settimeout(10)
    if has_hung_up(client):  # it has waited long enough, and its zygote imports vLLM by itself
        return 0
    try:
        message, files, _, _ = socket.recv_fds(client, MESSAGE, 2)
        try:
            command, variables, folder = pickle.loads(message)
            if why := why_not(command, variables, folder, hidden):
                os.write(files[1], f"not forked from imported_vllm.py: {why}\n".encode())
                client.sendall(pickle.dumps(("refused", why)))
                return 0
            pid = fork(sockets, command, variables, folder, files)
        finally:
            for file in files:
                os.close(file)
        client.sendall(pickle.dumps(("pid", pid)))
    except (OSError, EOFError, pickle.UnpicklingError):  # the client has ended
        return 0
    return pid


def has_hung_up(client: socket.socket) -> bool:
    """Whether the other side of a connection is closed."""
    poll = select.poll()
    poll.register(client, select.POLLHUP)
    return bool(poll.poll(0))


def reap(clients: dict[int, socket.socket]) -> None:
    """Reap what has ended, orphans of zygotes too, and tell the clients of zygotes their exit codes."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        if client := clients.pop(pid, None):
            with client:
                try:
                    client.sendall(pickle.dumps(("ended", os.waitstatus_to_exitcode(status))))
                except OSError:
                    continue  # it has ended, too


def end(clients: dict[int, socket.socket]) -> None:
    """Let zygotes end, whose standard input ends at the same time. Kill what is left after their time."""
    deadline = time.monotonic() + CLOSE_S
    while left := linux.descendants_of(os.getpid()):
        if time.monotonic() > deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return
        time.sleep(REAP_S)
        reap(clients)


def main(address: str, hidden: Sequence[str]) -> None:
    """Import vLLM and serve; the folder of the socket is removed in the end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    become_subreaper()
    sys.path.pop(0)  # the folder of this file
    folder = Path(address).parent
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(address)
            listener.listen(8)
            with zygote.watched(folder):
                import_vllm(hidden)
            serve(listener, hidden)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2].split(",") if sys.argv[2] else [])
