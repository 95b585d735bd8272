"""A right store that loads between steps in one engine, and stores with a mistake about aborts."""

from __future__ import annotations

import time
from typing import Any

from tests.right_connectors.stores import InMemory, LooksUpInTheBackground, Part, WholeBlocks


class InMemoryBetweenSteps(LooksUpInTheBackground, InMemory):
    """No mistake: it has what it saves in the memory of its process, and loads it in a thread."""


class TakesAWhile(LooksUpInTheBackground):
    """No mistake: a load is under way for some steps."""

    def load(self, parts: list[Part]) -> None:
        time.sleep(0.2)
        super().load(parts)


class ForgetsAbortedLoads(TakesAWhile):
    """Reports no load of a request that has ended meanwhile, so that vLLM keeps its blocks."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        for id in finished_req_ids:
            self.loading.pop(id, None)
        return super().get_finished(finished_req_ids)


class ForgetsAbortedLoadsInMemory(ForgetsAbortedLoads, InMemoryBetweenSteps):
    """The same, in one engine."""


class AbortsTheOthers(TakesAWhile):
    """Reports no load that was under way when a request ended that was loading."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if finished_req_ids & self.loading.keys():
            self.loading = {id: one for id, one in self.loading.items() if id in finished_req_ids}
        return super().get_finished(finished_req_ids)


class ExpectsBlocks(WholeBlocks):
    """Takes for granted that a request which ends has been scheduled."""

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        del self.tables[request.request_id]
        return super().request_finished(request, block_ids)
