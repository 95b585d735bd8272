"""How long D may keep blocks for the next turn of a conversation, and why it must not hold them any more."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pytest_kvconform.kv_config import BIDIRECTIONAL, CHILDREN, EXTRA
from pytest_kvconform.result import Blocked

if TYPE_CHECKING:
    from pytest_kvconform.subject import Subject

UNDECLARED = (
    "D keeps them for a later request: at the end of its own, request_finished returned True and "
    "kv_transfer_params, which a router may give P with the next turn of the conversation. Declare the "
    "feature bidirectional, and `turn_lease`, the key for the seconds after which D frees what nobody reads "
    "(docs/declare.md)"
)
OVER = "D keeps them for the next turn of a conversation, which did not come, and their lease of {} s is over"


def turn_lease_s(subject: Subject, config: dict[str, Any]) -> float:
    """Return the seconds for which D keeps what no next turn reads.

    `config`: the fields of D's KVTransferConfig. Infinity: no key for these seconds is declared.
    """
    inside = zip(subject.children, config[EXTRA][CHILDREN], strict=True) if subject.children else ()
    return max(
        (
            float(given.get(EXTRA, {}).get(one.turn_lease, math.inf))
            for one, given in ((subject, config), *inside)
            if one.turn_lease
        ),
        default=math.inf,
    )


def why_kept_for_later(subject: Subject, config: dict[str, Any], waited_s: float) -> str:
    """Return why D must not hold blocks after a wait, with which it has returned kv_transfer_params.

    `config`: the fields of D's KVTransferConfig. Raises Blocked if nobody knows for how long D may keep them,
    or if that is longer than the wait.
    """
    if subject.features.get(BIDIRECTIONAL):
        return UNDECLARED
    if (lease := turn_lease_s(subject, config)) > waited_s:
        raise Blocked(declare_turn_lease(lease))
    return OVER.format(f"{lease:.3g}")


def declare_turn_lease(lease_s: float) -> str:
    """Return why no case can wait until D frees what no next turn reads."""
    seconds = f" for {lease_s:.0f} s" if lease_s < math.inf else ""
    return (
        f"D may keep blocks of a request that has ended{seconds}, because it has returned kv_transfer_params "
        "for a later one: declare the feature bidirectional, and `turn_lease`, the key of "
        "kv_connector_extra_config for these seconds, and leave that key out of the configuration"
    )
