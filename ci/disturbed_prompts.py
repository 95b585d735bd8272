"""The prompts of a soak (soak.py), and what is to happen to each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from pytest_kvconform.rigs.bytes.messages import ByteRequest, shared_owners
from pytest_kvconform.rigs.engine.messages import ON_D, ON_P, PREFILL
from pytest_kvconform.rigs.scenario import VOCABULARY

LONGEST, TOGETHER = 200, 4  # tokens; prompts a round
UNDISTURBED = {"undisturbed": 1.0}
FATES = {
    "undisturbed": 0.68,
    "in chunks on P": 0.08,
    "preempted on P": 0.04,
    "preempted on D": 0.05,
    "aborted on P": 0.03,
    "aborted on D": 0.06,
    "loaded while P sleeps": 0.02,
    "never fetched": 0.02,
    "fetched too late": 0.02,
}
MAY_FAIL = ("loaded while P sleeps", "fetched too late")  # the lease may be over


@dataclass
class Handover:
    """One prompt that is handed over: its fate, and its request on P or on D."""

    fate: str
    request: ByteRequest  # on P, and from P's answer on: on D
    excused: bool  # whether D may end it with an error
    due: float = 0.0  # when D is to fetch it

    def answered(self, params: dict[str, Any] | None) -> None:
        """Turn the request on P into a request on D, with P's kv_transfer_params."""
        # A request that is preempted must still be running then.
        max_tokens = 2 if self.fate == "preempted on D" else 1
        id = self.request.id.replace(ON_P, ON_D)
        self.request = msgspec.structs.replace(
            self.request, id=id, max_tokens=max_tokens, kv_transfer_params=params, watch=True
        )


def prompts(random: np.random.Generator, number: int, fates: Mapping[str, float]) -> list[Handover]:
    """The prompts of one round, of which some begin alike. `fates`: what may happen, and how likely."""
    count, salt = int(random.integers(1, TOGETHER + 1)), f"round-{number}"
    ids, same = (
        random.choice(VOCABULARY, size=(count, LONGEST)),
        random.integers(-LONGEST, LONGEST, size=count),
    )
    made = [
        (*ids[0, : max(0, same[i])].tolist(), *ids[i].tolist())[: random.integers(2, LONGEST)]
        for i in range(count)
    ]
    chosen = random.choice(list(fates), size=count, p=list(fates.values())).tolist()
    # numbers are written into the rows: those of the last 64 rounds differ
    first = number * TOGETHER % 256
    more: dict[str, Any] = {"max_tokens": 1, "kv_transfer_params": PREFILL, "salt": salt}
    return [
        Handover(
            fate,
            ByteRequest(
                id=f"{salt}-{i}-{ON_P}", tokens=made[i], owners=owners + first, number=first + i, **more
            ),
            excused=fate in MAY_FAIL,
        )
        for i, (fate, owners) in enumerate(zip(chosen, shared_owners(made), strict=True))
    ]
