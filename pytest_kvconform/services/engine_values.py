"""Values of each engine's own in the configuration of a connector: `{engine.port}`, `{engine.port.NAME}` and
`{engine.host}`, its address.

The configuration is that of every engine. So a port in it, or in a URL of it, would be that of all engines on
this machine at once: MooncakeStoreConnector's lookup_rpc_port names the socket on which its two halves meet.
"""

from __future__ import annotations

import re
from typing import Any

from pytest_kvconform.services import replace
from pytest_kvconform.settings import BadSetting

MOST = 3  # so many different ones: the rigs have a few ports for each engine
_PLACEHOLDER = re.compile(r"(?<!\$)\{engine\.([\w.-]*)\}")
_PORT = re.compile(r"port(?:\.[\w-]+)?")
_HOST = "host"


def names_of_ports(config: Any) -> list[str]:
    """Return "port" and "port.NAME", as the placeholders in a configuration name them, each once."""
    found: list[str] = []

    def note(match: re.Match[str]) -> str:
        if match[1] not in (*found, _HOST):
            found.append(match[1])
        return match[0]

    replace(config, _PLACEHOLDER, note)
    return found


def check_engine_values(config: Any, place: str) -> None:
    """Raise BadSetting for a placeholder that means nothing, and for too many ports."""
    names = names_of_ports(config)
    if wrong := next((name for name in names if not _PORT.fullmatch(name)), None):
        raise BadSetting(
            f"{place}: {{engine.{wrong}}} is no placeholder; there are {{engine.port}}, "
            "{engine.port.NAME} and {engine.host}"
        )
    if len(names) > MOST:
        raise BadSetting(
            f"{place}: it names {len(names)} ports of an engine ({', '.join(names)}); it can have {MOST}"
        )


def fill_engine(config: Any, first: int, host: str) -> Any:
    """Return a configuration with the ports of one engine filled in, `first` and those after it, and its
    address.
    """
    names = names_of_ports(config)
    return replace(
        config, _PLACEHOLDER, lambda match: host if match[1] == _HOST else first + names.index(match[1])
    )
