"""What this environment lacks: a package, a server, a configuration or a GPU, told by an exception.

A connector that does not start because of it has made no mistake, and its cases cannot run here. Any other
exception of a start is the connector's. An exception is given as the name of its class and its message, since
it comes from another process.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

_MODULE = re.compile(r"No module named '(?P<top>\w+)")
_ABSENT = re.compile(r"\bnot (?:installed|available)\b|\binstall\b", re.IGNORECASE)
_LIBRARY = re.compile(r"(?P<name>lib[\w.+-]+): cannot open shared object file")
_GPU = re.compile(
    r"no nvidia driver|not compiled with cuda|no cuda gpus|no cuda-capable|cuda driver version|libcuda|"
    r"cuda is not available|no hip gpus|no (?:gpu|rdma device|infiniband)|"
    r"'_EventPlaceholder' object",  # vLLM's torch.cuda.Event without CUDA (v1/worker/cpu)
    re.IGNORECASE,
)
_SERVER = re.compile(
    r"connection refused|(?:failed|unable) to connect|(?:could not|cannot) connect|connect\w* timed out",
    re.IGNORECASE,
)
_VARIABLE = re.compile(r"\b(?P<name>[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)\b")
_UNSET = re.compile(
    r"environment variable|env(?:ironment)? var|\bunset\b|not set\b|(?:must|should) be set", re.IGNORECASE
)
_CONFIGURATION = re.compile(
    r"(?:must|has to|needs to) be configured[.!]?$|\bis not configured\b", re.IGNORECASE
)
_FILE = re.compile(r"No such file or directory: '(?P<path>[^']+\.(?:json|ya?ml|toml|conf|cfg|ini|env))'")
_IMPORTS = ("ImportError", "ModuleNotFoundError")
# modules of this project, in which an engine, its ranks and its front end wait for each other
_OURS = str(Path(__file__).parents[1]) + os.sep
# Files of the modules in which a process waits for a server, innermost frames of a stack.
_WAITING = ("socket.py", "poll.py", "connection.py", "connectionpool.py", "_channel.py", "_socket.py")


def what_is_missing(kind: str, message: str, own: str = "", packages: Mapping[str, str] = {}) -> str:
    """Return in one sentence what to install, start or configure; "" if the exception is a mistake.

    `kind`: class of the exception. `own`: the connector's module: what it lacks of its own is a mistake.
    `packages`: module -> where to get it.
    """
    text = " ".join(message.split())[:200]
    if kind in _IMPORTS and (found := _MODULE.search(text)):
        top = found["top"]
        if top == own.partition(".")[0]:
            return ""
        return f"the package {top} is not installed here ({packages.get(top) or f'pip install {top}'})"
    if _GPU.search(text):
        return f"it needs a device that this machine lacks: {text}"
    if found := _LIBRARY.search(text):
        return f"the library {found['name']} is not installed here: {text}"
    if kind in (*_IMPORTS, "RuntimeError") and _ABSENT.search(text):
        return f"a package is not installed here: {text}"
    if kind == "ConnectionRefusedError" or _SERVER.search(text):
        return f"no server answers; start it, or configure its address: {text}"
    if found := _FILE.search(text):
        return f"there is no file {found['path']}: write this configuration"
    if (kind == "KeyError" and _VARIABLE.fullmatch(text.strip("'"))) or _UNSET.search(text):
        for found in _VARIABLE.finditer(text):
            if found["name"] not in os.environ:
                return f"the environment variable {found['name']} is not set: {text}"
    if _CONFIGURATION.search(text):
        return f"its configuration lacks something; add it to --kv-config or to the environment: {text}"
    return ""


def waits_for_server(stack: Iterable[tuple[str, int, str]]) -> bool:
    """Whether a process that hangs waits for an answer over the network.

    Processes of the suite that wait for each other do not. `stack`: (file, line, function) of each frame, the
    innermost first.
    """
    files = [(file, Path(file).name) for file, *_ in stack]
    waits_in = next((file for file, name in files if name not in _WAITING), "")
    return not waits_in.startswith(_OURS) and any(name in _WAITING for _, name in files[:3])
