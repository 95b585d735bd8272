"""The probe of the connector's class: what runs in the child process that rigs/probe_subject.py starts.

The connector's modules are imported here and in engines, and nowhere else.
"""

from __future__ import annotations

import difflib
import inspect
import traceback
from multiprocessing.connection import Connection
from typing import Any

from pytest_kvconform.result import first_line


def probe(connection: Connection, config: dict[str, Any]) -> None:
    """Send ("ok", facts) or ("bad", sentence). `config` holds the fields of vLLM's KVTransferConfig."""
    try:
        answer: tuple[str, Any] = ("ok", _look(config))
    except _Bad as error:
        answer = ("bad", str(error))
    except BaseException as error:  # code of the subject ran: it can raise anything, SystemExit included
        traceback.print_exc()
        answer = ("bad", f"{type(error).__name__}: {_first_line(error)}{_where(error)}")
    connection.send(answer)


class _Bad(Exception):
    pass


def _look(config: dict[str, Any]) -> dict[str, Any]:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    names = [name for name in inspect.signature(KVTransferConfig).parameters if name != "self"]
    for key in config:
        if key not in names:
            near = difflib.get_close_matches(key, names, 1)
            raise _Bad(
                f"--kv-config: vLLM's KVTransferConfig has no field {key!r}"
                + (f" (did you mean {near[0]}?)" if near else "")
            )
    try:
        transfer = KVTransferConfig(**config)
    except ValueError as error:  # pydantic's, with one line per field
        raise _Bad(f"--kv-config: {' '.join(str(error).split())[:300]}") from None
    name, module = config["kv_connector"], config["kv_connector_module_path"]
    if module is not None:
        # before vLLM looks, whose complaints are about something else
        _check(_import(module, name), f"{module}:{name}")
    try:
        found = KVConnectorFactory.get_connector_class(transfer)
        # as vLLM decides it for this configuration (config/vllm.py); MultiConnector asks its children
        supports_hma = KVConnectorFactory.supports_hma_config(transfer)
    except ValueError as error:
        raise _Bad(f"vLLM's factory refuses it: {error}") from None
    try:
        inspect.signature(found).bind("vllm_config", "role", "kv_cache_config")  # as create_connector does
    except TypeError as error:
        raise _Bad(
            f"vLLM's factory calls {found.__name__}(vllm_config, role, kv_cache_config), and Python refuses "
            f"it: {error}"
        ) from None
    return {
        "name": found.__name__,
        "module": found.__module__,
        "file": inspect.getsourcefile(found) or "",
        "supports_hma": supports_hma,
    }


def _check(found: Any, spec: str) -> None:
    """Raise _Bad unless it is a connector's class, of which objects can be made."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    if not (inspect.isclass(found) and issubclass(found, KVConnectorBase_V1)):
        raise _Bad(f"{spec} is no subclass of vLLM's KVConnectorBase_V1")
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise _Bad(f"{found.__name__} does not implement {', '.join(missing)}")


def _import(module: str, name: str) -> Any:
    """Import the module and return the class.

    Raises _Bad with a sentence for each way in which that fails.
    """
    import importlib

    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(f"{error.name}.")):
            places = "(looked in the current folder and in this Python's packages)"
            raise _Bad(f"there is no module {error.name!r} {places}") from None
        raise _Bad(f"importing {module} failed: no module named {error.name!r}{_where(error)}") from None
    except BaseException as error:
        traceback.print_exc()
        raise _Bad(
            f"importing {module} failed: {type(error).__name__}: {_first_line(error)}{_where(error)}"
        ) from None
    if not hasattr(imported, name):
        near = difflib.get_close_matches(name, dir(imported), 1)
        raise _Bad(f"module {module} has no class {name!r}" + (f" (did you mean {near[0]}?)" if near else ""))
    return getattr(imported, name)


def _first_line(error: BaseException) -> str:
    return first_line(error, 200)


def _where(error: BaseException) -> str:
    """ " (connector.py:12)": the innermost frame that is neither Python's import machinery nor ours."""
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if not f.filename.startswith("<")
        and f.filename != __file__
        and not f.filename.endswith("importlib/__init__.py")
    ]
    return f" ({frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno})" if frames else ""
