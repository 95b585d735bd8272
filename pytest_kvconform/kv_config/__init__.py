"""KVTransferConfigs as objects: merged, with connectors inside, and with the keys that the suite sets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from pytest_kvconform.subject import Subject

EXTRA, CHILDREN = "kv_connector_extra_config", "connectors"
# The fake connector of the rigs, with which the subject is inside MultiConnector.
FAKE = {
    "kv_connector": "FakeConnector",
    "kv_connector_module_path": "pytest_kvconform.rigs.vllm_setup.stand_ins.fake_connector",
}
SAME_ENGINE = "same-engine"
STORES = ("store", SAME_ENGINE)  # profiles
BIDIRECTIONAL = "bidirectional"  # the feature: D keeps KV for the next turn, and P loads it
# Seconds for which D keeps KV for a next turn where no case has one: what D keeps is free again soon.
TURN_S = 0.05


class Child(msgspec.Struct, frozen=True, kw_only=True):
    """One connector inside another one, see `Subject`."""

    connector: str
    module: str | None = None
    profile: str = "p2p"
    folder: str = ""
    lease: str = ""
    turn_lease: str = ""
    load_timeout: str = ""

    @property
    def is_store(self) -> bool:
        """Whether it saves KV and loads it later, and hands nothing over."""
        return self.profile in STORES


def merge_config(config: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the user's object merged over the defaults, key by key, including kv_connector_extra_config."""
    extra = defaults.get(EXTRA, {}) | config.get(EXTRA, {})
    return defaults | config | ({EXTRA: extra} if extra else {})


def inside_multi_connector(config: dict[str, Any], fake: str) -> dict[str, Any]:
    """MultiConnector's object, with that of a connector in it, and the fake connector. `fake`: "first" or
    "last", its place.
    """
    own = ("kv_connector", "kv_connector_module_path", EXTRA)
    whole = {key: value for key, value in config.items() if key not in own}
    # MultiConnector gives its children its own engine_id, and raises if one has it already
    child = {key: value for key, value in config.items() if key != "engine_id"}
    other = FAKE | {"kv_role": config["kv_role"]}
    children = [other, child] if fake == "first" else [child, other]
    return whole | {"kv_connector": "MultiConnector", EXTRA: {CHILDREN: children}}


def with_folder(config: Any, ours: str, own: str) -> Any:
    """The same configuration with another folder of the suite, also in connectors inside."""
    if isinstance(config, dict):
        return {key: with_folder(value, ours, own) for key, value in config.items()}
    if isinstance(config, list):
        return [with_folder(value, ours, own) for value in config]
    inside = isinstance(config, str) and (config == ours or config.startswith(f"{ours}/"))
    return own + config.removeprefix(ours) if inside else config


def keys_of_suite(
    one: Subject | Child, folder: str, lease_s: float, load_s: float = 0.0, turn_s: float = 0.0
) -> dict[str, Any]:
    """What the suite configures of a connector, beside or inside another one."""
    extra: dict[str, Any] = {}
    if one.module is None and one.connector.startswith("Nixl"):
        extra["num_threads"] = 0  # of UCX, per agent; its default of 4 is for many cores
    if one.folder and folder:
        extra[one.folder] = folder
    if one.lease and lease_s and not one.lease.startswith("$"):
        extra[one.lease] = lease_s
    if one.turn_lease and turn_s:
        extra[one.turn_lease] = turn_s
    if one.load_timeout and load_s:
        extra[one.load_timeout] = load_s
    return {EXTRA: extra} if extra else {}
