"""Hooks of the scheduler half that raise, end the process, hang or wait."""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from typing import Any

from vllm.v1.request import RequestStatus

from .right import Answer, Ended, Right, loads


class RaisesAtTheEnd(Right):
    """Looks up what only a request that was loaded has."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        if request.status == RequestStatus.FINISHED_ABORTED:
            raise KeyError(request.request_id)
        return super().request_finished_all_groups(request, block_ids)


class Exits(Right):
    def on_new_request(self, request: Any) -> None:
        if loads(request):
            sys.exit("no such peer")


class DiesOf(Right):
    """Ends the process when P has handed a request over."""

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if loads(request):
            self.die()
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def die(self) -> None:
        raise NotImplementedError


class Crashes(DiesOf):
    def die(self) -> None:
        faulthandler._sigsegv()


class PrintsAndAborts(DiesOf):
    def die(self) -> None:
        os.write(2, bytes(range(256)) * 4)
        os.abort()


class LeavesAtOnce(DiesOf):
    def die(self) -> None:
        os._exit(0)


class KnowsLoads(Right):
    """`notes` has the loads that have begun and were not reported."""

    waited = 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens:
            self.notes[request.request_id] = True

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        for name in connector_output.finished_recving or ():
            self.notes.pop(name, None)


class WaitsForWorkers(KnowsLoads):
    """Has patience for nine steps of a load, and then waits for a worker's report."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        self.waited = self.waited + 1 if self.notes else 0
        if self.waited in (10, 11):
            time.sleep(1.2)
        return super().build_connector_meta(scheduler_output)


class OneAtATime(KnowsLoads):
    """Lets no other request begin while one is loaded."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        if self.notes:
            return None, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


class StandsStill(DiesOf):
    def die(self) -> None:
        while True:
            time.sleep(1)
