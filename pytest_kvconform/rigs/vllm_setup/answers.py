"""What vLLM can use of a hook's answer: values with a truth, params that reach D, and what pickle carries."""

from __future__ import annotations

import inspect
import json
import pickle
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from pytest_kvconform.result import first_line, message_of, repr_of

# field of a record that vLLM sends from its engine core to workers, or back -> the hook that has returned it
HOOK_OF_FIELD = {
    "kv_connector_metadata": "build_connector_meta",
    "kv_connector_stats": "get_kv_connector_stats",
    "kv_connector_worker_meta": "build_connector_worker_meta",
    "kv_cache_events": "get_kv_connector_kv_cache_events",
    "finished_sending": "get_transfer_results",
    "finished_recving": "get_transfer_results",
    "failed_recving": "get_transfer_results",
    "invalid_block_ids": "get_block_ids_with_load_errors",
}
# vLLM's base class -> the hook that returns an object of it
HOOK_OF_CLASS = {
    "KVConnectorHandshakeMetadata": "get_handshake_metadata",
    "KVConnectorMetadata": "build_connector_meta",
    "KVConnectorStats": "get_kv_connector_stats",
    "KVConnectorWorkerMetadata": "build_connector_worker_meta",
    "KVConnectorKVEvents": "get_kv_connector_kv_cache_events",
}
DEEP = 4  # records inside each other in a message


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
        return f"is {repr_of(answer)}: {type(error).__name__}: {message_of(error)}"
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


def params_at_router(params: dict[str, Any] | None) -> dict[str, Any] | None:
    """`params_after_the_way` of what an engine returns for a request. Raises TypeError, with the hook."""
    try:
        return None if params is None else params_after_the_way(params)
    except (TypeError, ValueError) as error:
        raise TypeError(
            "the kv_transfer_params of request_finished do not reach D: msgpack (v1/engine/core.py: "
            f"process_output_sockets) and JSON refuse them: {first_line(error, 160)}"
        ) from error


# ---- the way between an engine core and its workers --------------------------------------------------------


def hook_of(value: Any) -> str:
    """The hook that returns objects of a class of the connector; "": none."""
    names = (kind.__name__ for kind in type(value).__mro__)
    return next((HOOK_OF_CLASS[name] for name in names if name in HOOK_OF_CLASS), "")


def pickled(message: Any) -> bytes:
    """A message between an engine core and its workers, as vLLM sends it: pickle carries it, and cloudpickle
    only functions (distributed/device_communicators/shm_broadcast.py: MessageQueue.enqueue).

    Raises PicklingError, which names the object of the connector that does not survive, and its hook.
    """
    try:
        return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        hook, value = next(_lost(message), ("", message))
        of = f" of {hook}" if hook else ""
        raise pickle.PicklingError(
            f"a {type(value).__name__}{of} does not survive pickle, with which vLLM sends it between its "
            "engine core and its workers (v1/executor/multiproc_executor.py): "
            f"{type(error).__name__}: {first_line(error, 160)}"
        ) from error


def _lost(record: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """(hook, object) of each object of the connector in a message that does not survive pickle."""
    if isinstance(record, dict):
        parts = list(record.items())
    elif isinstance(record, list | tuple):
        parts = [("", one) for one in record]
    else:
        parts = list(getattr(record, "__dict__", {}).items())
    for name, value in parts:
        hook = HOOK_OF_FIELD.get(name, "") if isinstance(name, str) else ""
        if hook := hook or hook_of(value):
            try:
                pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
            except Exception:
                yield hook, value
        elif depth < DEEP:
            yield from _lost(value, depth + 1)


def that_travels(error: BaseException) -> BaseException:
    """The exception itself, or one with its name and its message if it does not survive pickle. vLLM sends
    the message alone (v1/executor/multiproc_executor.py: WorkerProc.enqueue_output).
    """
    import cloudpickle

    try:
        cloudpickle.loads(cloudpickle.dumps(error))
        return error
    except Exception:
        return type(type(error).__name__, (RuntimeError,), {})(message_of(error))
