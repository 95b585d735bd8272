"""The connectors inside one that contains others, as vLLM's MultiConnector does.

A connector contains others if `connectors` of its kv_connector_extra_config is a list of KVTransferConfigs.
What our declaration of a registered one says holds inside, too: what it needs to start, its folder, its
lease. The profile of the run decides which children it judges: stores, or those that hand over.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from pytest_kvconform import features
from pytest_kvconform.declaration import Declaration
from pytest_kvconform.declarations import BundledDeclaration, bundled_declarations
from pytest_kvconform.kv_config import BIDIRECTIONAL, CHILDREN, EXTRA, STORES, Child, merge_config

# Features that are asked of every child, judged or not: all get the same layers and the same requests.
OF_ALL = frozenset(
    "full-attention mla sliding-window mamba-state mla-and-state mla-and-gqa speculative-draft preemption "
    "abort".split()
)


def children_of(config: dict[str, Any], declared: Declaration) -> tuple[Child, ...]:
    """Return the connectors inside one with this configuration, in their order.

    `declared`: by the user; its keys for leases and loads are those of connectors of which we have no
    declaration.
    """
    found = []
    for one in _configs(config):
        known = _declaration(one) or BundledDeclaration(
            lease=declared.lease, turn_lease=declared.turn_lease, features={BIDIRECTIONAL: True}
        )
        found.append(
            Child(
                connector=one["kv_connector"],
                module=one.get("kv_connector_module_path"),
                profile=known.profile,
                folder=known.folder,
                lease=known.lease,
                turn_lease=known.turn_lease if known.features.get(BIDIRECTIONAL) is True else "",
                load_timeout="" if _declaration(one) else declared.load_timeout,
            )
        )
    return tuple(found)


def completed_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with what our declarations of the children need to start."""
    if not (given := _configs(config)):
        return config
    whole = [merge_config(one, ours.config) if (ours := _declaration(one)) else one for one in given]
    return config | {EXTRA: config[EXTRA] | {CHILDREN: whole}}


def together(whole: BundledDeclaration, config: dict[str, Any], profile: str) -> BundledDeclaration:
    """Return the declaration of a connector with the children of this configuration.

    `whole`: what is declared of it beside its children. `profile`: of the run, "": that of the children.
    """
    pairs = [(one, _declaration(one)) for one in _configs(config)]
    known = [ours for _, ours in pairs if ours]
    if not known:
        return whole
    alone = all(ours and ours.profile in STORES for _, ours in pairs)
    profile = profile or (_one(ours.profile for ours in known) or STORES[0] if alone else "p2p")
    judged = [ours for ours in known if (ours.profile in STORES) == (profile in STORES)]
    return msgspec.structs.replace(
        whole,
        profile=profile,
        handover="" if profile in STORES else _one(ours.handover for ours in judged),
        load_granularity=max((ours.load_granularity for ours in judged), default=0),
        min_load=max((ours.min_load for ours in judged), default=0),
        remembers=max((ours.remembers for ours in judged), default=0),
        save_delay=max((ours.save_delay for ours in judged), default=0.0),
        asks_worker=any(ours.asks_worker for ours in judged),
        requires_device=_one(ours.device_for(one) for one, ours in pairs if ours),
        stand_in=_one(ours.stand_in for ours in known),
        packages={module: where for ours in known for module, where in ours.packages.items()},
        services={name: table for ours in known for name, table in ours.services.items()},
        exempt=_one(ours.exempt for ours in known),
        features=(_features(known, judged) if len(known) == len(pairs) else {}) | whole.features,
    )


def _features(known: Sequence[BundledDeclaration], judged: Sequence[BundledDeclaration]) -> dict[str, Any]:
    """What children support together: what one of them does not support is unsupported."""
    found: dict[str, Any] = {}
    for name in features.load():
        some = known if name in OF_ALL else judged
        if all(name in ours.features for ours in some):  # a nested MultiConnector is silent on most
            found[name] = next((why for ours in some if (why := ours.features[name]) is not True), True)
    return found


def _configs(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The KVTransferConfigs of the children; []: there are none."""
    given = config.get(EXTRA, {}).get(CHILDREN)
    are = isinstance(given, list) and all(
        isinstance(one, dict)
        and isinstance(one.get("kv_connector"), str)
        and isinstance(one.get(EXTRA, {}), dict)
        for one in given
    )
    return given if are else []


def _declaration(config: dict[str, Any]) -> BundledDeclaration | None:
    """Our declaration of a child; None: we have none."""
    own = config.get("kv_connector_module_path")
    ours = None if own else bundled_declarations().get(config["kv_connector"])
    return ours and ours.configured(config)


def _one(values: Iterable[str]) -> str:
    """The first that is not empty; "" if all are."""
    return next(filter(None, values), "")
