"""Reading of `[tool.kvconform.services.NAME]`: each mistake is one sentence that names its place."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from pytest_kvconform.services import DEADLINE_S, READY, BadPlaceholder, Service, fill, fill_text
from pytest_kvconform.settings import BadSetting
from pytest_kvconform.settings.parsers import did_you_mean, parse_factor, parse_text
from pytest_kvconform.settings.tables import refuse_unknown

VARIABLES = ("environment", "engine_environment")
KEYS = ("command", "ready", "deadline", *VARIABLES, "files")
_NAME = re.compile(r"[A-Za-z][\w-]{0,31}")
_FILE = re.compile(r"[A-Za-z0-9_][\w.-]{0,63}")
LINE = "line:"
_EXPECTED = "expected tcp://HOST:PORT, http://HOST:PORT/PATH or line:TEXT"


def read_services(table: Any, place: str) -> tuple[Service, ...]:
    """Return the services of a table, in its order. Raises BadSetting."""
    if not isinstance(table, Mapping) or not all(isinstance(row, Mapping) for row in table.values()):
        raise BadSetting(f"{place}: expected a table for each service, got {table!r}")
    for name in table:
        if not _NAME.fullmatch(name):
            raise BadSetting(f"{place}.{name}: a name has letters, digits, - and _, 32 at most")
    return tuple(_service(name, row, f"{place}.{name}", [*table]) for name, row in table.items())


def _service(name: str, row: Mapping[str, Any], place: str, names: list[str]) -> Service:
    refuse_unknown(row, KEYS, place)
    command = row.get("command")
    if not isinstance(command, list) or not command or not all(isinstance(one, str) for one in command):
        raise BadSetting(
            f'{place}.command: expected a list of texts such as ["server", "--port", "{{port}}"], '
            f"got {command!r}"
        )
    variables = {key: _environment(row.get(key, {}), f"{place}.{key}") for key in VARIABLES}
    files = _files(row.get("files", {}), f"{place}.files")
    told = " ".join([*command, *variables["environment"].values(), *files.values()])
    if "ready" not in row and "{port}" not in told:
        raise BadSetting(
            f"{place}.ready: is missing, and neither command, environment nor files have {{port}}"
        )
    try:
        texts = [parse_text(one) for one in command]
        deadline = parse_factor(row.get("deadline", DEADLINE_S))
        ready = parse_text(row.get("ready", READY))
    except ValueError as error:
        raise BadSetting(f"{place}: {error}") from None
    service = Service(
        name=name, command=tuple(texts), ready=ready, deadline=deadline, files=files, **variables
    )
    for key in ("command", "ready", *VARIABLES, "files"):
        check_placeholders(getattr(service, key), names, f"{place}.{key}", name)
    filled = fill_text(ready, lambda *place: 1 if place[1] == "port" else "/f", name)
    if not (filled.startswith(LINE) and filled[len(LINE) :].strip()) and address_of(filled) is None:
        raise BadSetting(f"{place}.ready: {_EXPECTED}, got {ready!r}")
    return service


def _environment(table: Any, place: str) -> dict[str, str]:
    if not isinstance(table, Mapping) or not all(isinstance(text, str) for text in table.values()):
        raise BadSetting(f"{place}: expected a table of texts, got {table!r}")
    if wrong := next((key for key in table if not key or "=" in key or "\0" in key + table[key]), None):
        raise BadSetting(f"{place}: {wrong!r} is no variable of an environment")
    return dict(table)


def _files(table: Any, place: str) -> dict[str, str]:
    if not isinstance(table, Mapping) or not all(isinstance(text, str) for text in table.values()):
        raise BadSetting(f"{place}: expected a table of texts, got {table!r}")
    if wrong := next((name for name in table if not _FILE.fullmatch(name)), None):
        raise BadSetting(f"{place}: {wrong!r} is no name of a file: letters, digits, -, _ and dots")
    return dict(table)


def address_of(ready: str) -> tuple[str, int] | None:
    """Return (host, port) of a readiness check over the network; None for any other text."""
    try:
        parts = urlsplit(ready)
        port = parts.port or (80 if parts.scheme == "http" else 0)
    except ValueError:  # a port that is no number
        return None
    if parts.scheme not in ("tcp", "http") or not parts.hostname or not port:
        return None
    return parts.hostname, port


def check_placeholders(value: Any, names: list[str], place: str, own: str = "") -> None:
    """Raise BadSetting for a placeholder that means nothing. `names`: of all services."""

    def place_of(service: str, what: str, which: str) -> int:
        if service not in names:
            there = f"; there are {', '.join(names)}" if names else "; none is declared"
            raise BadPlaceholder(f"there is no service {service!r}{did_you_mean(service, names) or there}")
        return 1

    try:
        fill(value, place_of, own)
    except BadPlaceholder as error:
        raise BadSetting(f"{place}: {error}") from None
