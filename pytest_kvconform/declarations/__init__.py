"""Our declarations of connectors that vLLM registers: <registered name>.toml in this folder."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import msgspec

from pytest_kvconform.kv_config import EXTRA
from pytest_kvconform.services import Service
from pytest_kvconform.services.reading import read_services


class BundledDeclaration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of them. See `Subject` for the keys."""

    profile: str = "p2p"
    handover: str = ""
    folder: str = ""
    lease: str = ""
    turn_lease: str = ""
    load_granularity: int = 0
    min_load: int = 0
    remembers: int = 0
    save_delay: float = 0.0
    asks_worker: bool = False
    requires_device: str = ""
    # key of kv_connector_extra_config -> its values for which that device is required, the default first;
    # with another value a class of the user's moves the bytes
    required_for: dict[str, list[str]] = {}
    stand_in: str = ""
    packages: dict[str, str] = {}
    exempt: str = ""
    config: dict[str, Any] = {}  # fields of KVTransferConfig that it needs to start
    # feature -> key of kv_connector_extra_config that turns it on; without that key `features` holds
    turned_on_by: dict[str, str] = {}
    services: dict[str, Any] = {}  # as in a user's declaration
    features: dict[str, Any]

    def configured(self, config: dict[str, Any]) -> BundledDeclaration:
        """Return the declaration of a connector with this configuration."""
        extra = config.get(EXTRA, {})
        on = {name: True for name, key in self.turned_on_by.items() if extra.get(key)}
        return msgspec.structs.replace(self, features=self.features | on)

    def device_for(self, config: dict[str, Any]) -> str:
        """Return the device without which the worker half cannot run with this configuration; "": none."""
        extra = config.get(EXTRA, {})
        own = any(extra.get(key, values[0]) not in values for key, values in self.required_for.items())
        return "" if own else self.requires_device

    def services_for(
        self, name: str, config: dict[str, Any], theirs: tuple[Service, ...] = ()
    ) -> tuple[Service, ...]:
        """Return our services, without those that the user brings. `name`: of the connector.

        The user brings a service if `theirs` has one of the name, if his environment or one of `theirs` sets
        a variable that would lead engines to ours, or if neither his configuration nor a service of ours that
        is left leads there.
        """
        variables = {*os.environ, *(variable for one in theirs for variable in one.engine_environment)}
        left = [
            one
            for one in read_services(self.services, f"{name}.toml: services")
            if one.name not in {their.name for their in theirs}
            and not one.engine_environment.keys() & variables
        ]
        text = json.dumps(config) + "".join(
            msgspec.json.encode(one).decode() for one in left if one.engine_environment
        )
        return tuple(one for one in left if one.engine_environment or f"{{services.{one.name}." in text)


@functools.cache
def bundled_declarations() -> dict[str, BundledDeclaration]:
    """Return registered name -> our declaration."""
    return {
        path.stem: msgspec.toml.decode(path.read_bytes(), type=BundledDeclaration)
        for path in sorted(Path(__file__).parent.glob("*.toml"))
    }
