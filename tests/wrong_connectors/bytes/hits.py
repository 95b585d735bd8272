"""Wrong connectors whose mistake shows if D has the beginning of one of two prompts in its prefix cache."""

from __future__ import annotations

from typing import Any

import msgspec

from reference_connector import ReferenceConnector
from tests.right_connectors.sockets import Orders, TcpPull


class PairsFromTheEnd(ReferenceConnector):
    """After a hit pairs D's blocks with the last ones of P, which has one more if D loads a token less."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata, groups = super().build_connector_meta(scheduler_output), self._scheduler._groups
        for name, load in list(metadata.orders.loads.items()):
            handoff, [mine, *more] = load.handoff, load.groups
            [theirs, *_] = handoff.remote_block_ids
            others = len(theirs) - len(mine.blocks) - mine.first // groups[0].tokens
            if not more and not groups[0].state and mine.first and others in (0, 1):
                last = theirs[-len(mine.blocks) :]
                handoff = msgspec.structs.replace(
                    handoff, remote_block_ids=[last], remote_first_tokens=[mine.first]
                )
                metadata.orders.loads[name] = msgspec.structs.replace(load, handoff=handoff)
        return metadata


class JoinsLoads(TcpPull):
    """Makes one list of P's blocks of all loads of a step, and drops as many in front as D has already."""

    def build_connector_meta(self, scheduler_output: Any) -> Orders:
        orders = super().build_connector_meta(scheduler_output)
        theirs = [block for load in orders.loads for block in load.params["remote_block_ids"]]
        theirs = theirs[len(theirs) - sum(len(load.blocks) for load in orders.loads) :]
        for load in orders.loads:
            load.remote, theirs = theirs[: len(load.blocks)], theirs[len(load.blocks) :]
        return orders

    def may_read(self, asked: list[int], blocks: list[int]) -> bool:
        return True
