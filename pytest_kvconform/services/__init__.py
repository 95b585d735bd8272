"""Services: servers that a connector needs. A run starts each once, and ends it.

| module | what it has |
|---|---|
| here | `Service`, the record of one service, and the placeholders in its texts |
| `reading` | the tables `[tool.kvconform.services.NAME]` of a declaration, read and checked |
| `engine_values` | `{engine.port}` and `{engine.host}` in a connector's configuration: each engine's own |

The placeholders `{port}`, `{port.NAME}` and `{folder}` in a table mean the service's own, and
`{services.NAME.port}` those of any service. The processes are in `rigs/services.py` and
`rigs/processes/guard.py`.

This room imports the standard library, msgspec and `pytest_kvconform.settings`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

READY = "tcp://127.0.0.1:{port}"  # the readiness check of a service that declares none
DEADLINE_S = 60.0  # until a service is ready, if it declares no deadline
# `${HOME}` is a variable of a shell, and `{"a": 1}` is JSON: neither is a placeholder.
_PLACEHOLDER = re.compile(r"(?<!\$)\{([A-Za-z][\w.-]*)\}")
_OWN = re.compile(r"(?P<what>port|folder)(?:\.(?P<which>[\w-]+))?")
_OF_ANY = re.compile(r"services\.(?P<service>[\w-]+)\.(?P<what>port|folder)(?:\.(?P<which>[\w-]+))?")

# (service, "port" or "folder", name of a further port or "") -> what stands there
PlaceOf = Callable[[str, str, str], int | str]


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """One service, as declared: its texts may have placeholders."""

    name: str
    command: tuple[str, ...]
    # how to see that it is ready: "tcp://HOST:PORT", "http://HOST:PORT/PATH", or "line:TEXT" of its output
    ready: str = READY
    deadline: float = DEADLINE_S  # seconds until it is ready, times --kv-timeout-scale
    environment: dict[str, str] = {}  # of the service
    engine_environment: dict[str, str] = {}  # of the engines and of the connector in them
    files: dict[str, str] = {}  # name -> text; they are in the folder of the service before it starts


class BadPlaceholder(ValueError):
    """There is nothing that a placeholder means. The message is one sentence without its place."""


def fill(value: Any, place_of: PlaceOf, own: str = "") -> Any:
    """Return a value of JSON with its placeholders filled in. A text that is one port becomes a number.

    `own`: the service whose table has the value. Elsewhere (""), only words that begin with `services.` are
    placeholders. Raises BadPlaceholder.
    """
    return replace(value, _PLACEHOLDER, lambda found: _meaning(found, place_of, own))


def replace(value: Any, pattern: re.Pattern[str], meaning: Callable[[re.Match[str]], int | str]) -> Any:
    """Return a value of JSON with what matches replaced, in texts. A text that is one match becomes its
    meaning.
    """
    if isinstance(value, dict):
        return {key: replace(inner, pattern, meaning) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(replace(inner, pattern, meaning) for inner in value)
    if not isinstance(value, str):
        return value
    if whole := pattern.fullmatch(value):
        return meaning(whole)
    return pattern.sub(lambda found: str(meaning(found)), value)


def fill_text(text: str, place_of: PlaceOf, own: str = "") -> str:
    """Return a text with its placeholders filled in. Raises BadPlaceholder."""
    return _PLACEHOLDER.sub(lambda found: str(_meaning(found, place_of, own)), text)


def _meaning(found: re.Match[str], place_of: PlaceOf, own: str) -> int | str:
    if not own and not found[1].startswith("services."):
        return found[0]
    words = (_OWN.fullmatch(found[1]) if own else None) or _OF_ANY.fullmatch(found[1])
    if words is None or (words["what"] == "folder" and words["which"]):
        mine = "{port}, {port.NAME}, {folder}, " if own else ""
        raise BadPlaceholder(
            f"{found[0]} is no placeholder; there are {mine}{{services.NAME.port}}, "
            "{services.NAME.port.NAME} and {services.NAME.folder}"
        )
    return place_of(words.groupdict().get("service") or own, words["what"], words["which"] or "")
