"""What vLLM can use of a hook's answer: values with a truth, and params that reach D."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable
from typing import Any

import msgspec


def unpacked(answer: Any) -> Any:
    """Return an answer that vLLM unpacks as a tuple, if it has parts: `a, b = answer` takes a list, too."""
    return tuple(answer) if isinstance(answer, Iterable) else answer


def why_no_truth(answer: Any) -> str:
    """Return in words why vLLM cannot test the truth of an answer, or "".

    A method and a coroutine are always true, so they are no answers.
    """
    if callable(answer):
        return "is a method and no property"
    if inspect.isawaitable(answer):
        return "is a coroutine"
    try:
        bool(answer)
    except Exception as error:
        return f"is {answer!r}: {type(error).__name__}: {error}"
    return ""


def kept(answer: Any) -> bool:
    """Return whether the first value of request_finished asks to keep the blocks.

    Raises TypeError where Scheduler._free_request does: it combines the value with a bool by `|=`.
    """
    return bool(False | (answer or False))


def params_after_the_way(params: dict[str, Any]) -> dict[str, Any]:
    """Return P's params as they reach D: by msgpack from the engine to the API server (EngineCoreOutput),
    and by JSON to the client and on to D. Raises TypeError or ValueError if one of the two refuses them.
    """
    at_server = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=dict[str, Any])
    found: dict[str, Any] = json.loads(json.dumps(at_server, allow_nan=False))
    return found
