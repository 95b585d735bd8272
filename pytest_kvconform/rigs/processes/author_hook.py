"""A function of the connector's author, called in a process of its own.

Only children of the zygote import code of an author: it may import vLLM, hang, or end its process.
"""

from __future__ import annotations

import contextlib
import json
import os
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pytest_kvconform.result import Blocked
from pytest_kvconform.rigs.processes.child import ChildProcess
from pytest_kvconform.rigs.processes.logs import printable
from pytest_kvconform.rigs.processes.zygote import function_named

SERVE = "pytest_kvconform.rigs.processes.author_hook:serve"
CALL_S = 20.0  # for one call of the function
_LONGEST = 160  # characters of a value in a sentence
# (address of the zygote, name of the function) -> its process, or why it is of no use
_serving: dict[tuple[str, str], ChildProcess | str] = {}


def call(address: str, target: str, *arguments: Any) -> dict[str, Any] | None:
    """Call "module:function" in a child of the zygote, the same one for all calls.

    Returns kv_transfer_params, or None. Raises Blocked with one sentence for a function that cannot be
    imported, raises, hangs, or returns anything else. It is not called again then.
    """
    process = _serving.get((address, target)) or _start(address, target)
    if isinstance(process, ChildProcess):
        try:
            process.connection.send(arguments)
            kind, answer = process.receive(CALL_S)
        except TimeoutError:
            kind, answer = "failed", f"did not return within {CALL_S:.0f} s"
        except (EOFError, OSError):
            kind, answer = "failed", f"ended its process; its last lines: {' | '.join(process.last_lines())}"
        if kind == "returned":
            returned: dict[str, Any] | None = answer
            return returned
        process.end()
        process = _serving[address, target] = f"the hand-over {target} {answer}"
    raise Blocked(process)


def require(address: str, target: str) -> None:
    """Import the function in a child. Raises Blocked if it is not there."""
    try:
        call(address, target)
    finally:
        end(address)


def _start(address: str, target: str) -> ChildProcess | str:
    process = ChildProcess(address, f"handover-{os.getpid()}-{len(_serving)}", SERVE, target, CALL_S)
    _serving[address, target] = process
    return process


def end(address: str) -> None:
    """End the processes of all functions, and forget them."""
    for key in [key for key in _serving if key[0] == address]:
        if isinstance(process := _serving.pop(key), ChildProcess):
            process.end()


def serve(connection: Connection, target: str) -> None:
    """Call the function with what the connection brings, in a child."""
    while True:
        try:
            arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send(("returned", call_here(target, *arguments)))
        except Blocked as blocked:
            connection.send(("failed", str(blocked).partition(f"{target} ")[2]))


def call_here(target: str, *arguments: Any) -> dict[str, Any] | None:
    """Call "module:function" in this process, which is a child of the zygote. See `call`.

    Without arguments it is only imported.
    """
    module = target.partition(":")[0]
    try:
        function = function_named(target)
    except ModuleNotFoundError as error:
        raise Blocked(f"the hand-over {target} is not there: no module {error.name!r}") from None
    except AttributeError:
        raise Blocked(f"the hand-over {target} is not there: {module} has no such function") from None
    except Exception as error:
        raise Blocked(f"the hand-over {target} cannot be imported: {_words(error)}") from None
    try:
        returned = function(*arguments) if arguments else None
    except (Exception, SystemExit) as error:
        raise Blocked(f"the hand-over {target} raised {_words(error)}") from None
    with contextlib.suppress(TypeError, ValueError):  # it is no JSON
        if returned is None or isinstance(returned, dict):
            plain: dict[str, Any] | None = json.loads(
                json.dumps(returned)
            )  # as the way through HTTP makes it
            return plain
    raise Blocked(
        f"the hand-over {target} returned {printable(repr(returned))[:_LONGEST]}: expected "
        "kv_transfer_params, a dict that JSON can hold, or None"
    )


def _words(error: BaseException) -> str:
    """An exception in one line, with its place."""
    text = printable(" ".join(str(error).split()))[:_LONGEST]
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {text} ({Path(last.filename).name}:{last.lineno})"
