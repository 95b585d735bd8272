"""Connectors whose scheduler half makes one mistake each: vLLM's NixlConnector, and one line too few or too many."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from types import MappingProxyType
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlConnector
from vllm.v1.request import RequestStatus

Answer = tuple[int | None, bool]
Ended = tuple[bool, dict[str, Any] | None]


class Right(NixlConnector):
    """No mistake."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.notes: dict[str, Any] = {}  # by request

    @property
    def half(self) -> Any:
        """The scheduler half."""
        return self.connector_scheduler


def loads(request: Any) -> bool:
    """Whether P has handed the request over."""
    return bool((request.kv_transfer_params or {}).get("remote_block_ids"))


def prefills(request: Any) -> bool:
    return bool((request.kv_transfer_params or {}).get("do_remote_decode"))


class SureLater(Right):
    """No mistake: it does not know at once how much P has."""

    asked = 0

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        self.asked += 1
        return (
            (None, False)
            if self.asked % 3
            else super().get_num_new_matched_tokens(request, num_computed_tokens)
        )


# ---- what it answers -----------------------------------------------------------------------------------------------------------


class AnswersFractions(Right):
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        count, parked = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return (float(count), parked) if count else (count, parked)


class AnswersAlone(Right):
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        return super().get_num_new_matched_tokens(request, num_computed_tokens)[0]


class FallsBelowZero(Right):
    """P's blocks are counted in whole ones, and D has more than that."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        count, parked = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return (count - 16, parked) if num_computed_tokens and count else (count, parked)


class AnnouncesMore(Right):
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        count, parked = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return (count + 1, parked) if count else (count, parked)


class ForgetsTheHit(Right):
    """Announces the whole prompt, whatever D has."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        return super().get_num_new_matched_tokens(request, 0)


class NothingComesLater(Right):
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        count, _ = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return count, loads(request)


class AnswersOnce(Right):
    """Takes the params when it is asked, and not when it is told."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        count, parked = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if count and self.notes.setdefault(request.request_id, 0):
            return 0, False
        self.notes[request.request_id] = 1
        return count, parked

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        self.notes.pop(request.request_id, None)
        return super().request_finished_all_groups(request, block_ids)


class AnswersLess(AnswersOnce):
    """Every question costs a token."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        count, parked = NixlConnector.get_num_new_matched_tokens(self, request, num_computed_tokens)
        if not count:
            return count, parked
        self.notes[request.request_id] = self.notes.get(request.request_id, -1) + 1
        return max(1, count - self.notes[request.request_id]), parked


class AnswersAgain(Right):
    """Announces what P had, also when it is gone."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        left = request.num_prompt_tokens - num_computed_tokens
        return (left, left > 0) if loads(request) else (0, False)


class NeverSure(Right):
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        return (
            (None, False)
            if loads(request)
            else super().get_num_new_matched_tokens(request, num_computed_tokens)
        )


# ---- what it makes of blocks ----------------------------------------------------------------------------------------------------


class LoadsByBlocks(Right):
    """Loads into whatever blocks it is shown."""

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, max(1, num_external_tokens))


class LoadsTwice(Right):
    """Loads once more when the request is admitted with what it has loaded."""

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if loads(request) and not num_external_tokens:
            request.kv_transfer_params["do_remote_prefill"] = True
        super().update_state_after_alloc(request, blocks, max(num_external_tokens, int(loads(request))))


class Chooses(Right):
    """A load into blocks that `choose` picks: its argument is one KV cache group, block by block."""

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens and (queued := self.half._reqs_need_recv.get(request.request_id)):
            chosen = tuple([block.block_id for block in self.choose(group)] for group in blocks.blocks)
            self.half._reqs_need_recv[request.request_id] = (queued[0], chosen, *queued[2:])

    def choose(self, group: Any) -> Any:
        raise NotImplementedError


class DropsTheLastBlock(Chooses):
    def choose(self, group: Any) -> Any:
        return [block for block in group if block.block_hash is None][:-1]


class LoadsIntoNeighbours(Chooses):
    def choose(self, group: Any) -> Any:
        pool = self._kv_cache_manager.block_pool.blocks
        return [pool[min(block.block_id + 1, len(pool) - 1)] for block in group if block.block_hash is None]


# ---- what it does to requests ----------------------------------------------------------------------------------------------------


class CutsPlainPrompts(Right):
    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)
        if not request.kv_transfer_params and request.num_prompt_tokens > 1:
            cut(request)


class CutsAgain(Right):
    """Cuts P's prompt when it is asked: after a preemption once more."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        if prefills(request) and request.num_prompt_tokens > 1 and request.num_preemptions:
            cut(request)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


def cut(request: Any) -> None:
    del request.prompt_token_ids[-1:], request._all_token_ids[-1:]
    request.num_prompt_tokens -= 1


class ComputesAhead(Right):
    """Writes to what is the scheduler's."""

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)
        if loads(request):
            request.num_computed_tokens = request.num_tokens


# ---- what it tells its workers ---------------------------------------------------------------------------------------------------


class TellsADict(Right):
    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return vars(super().build_connector_meta(scheduler_output))


class TellsALock(Right):
    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata: Any = super().build_connector_meta(scheduler_output)
        metadata.lock = threading.Lock()
        return metadata


class TakesTheEnds(Right):
    """Takes over the set of requests that have ended."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        scheduler_output.finished_req_ids.clear()
        return super().build_connector_meta(scheduler_output)


class RepeatsLoads(Right):
    """The loads of a step stand in the next one, too."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata: Any = super().build_connector_meta(scheduler_output)
        again, self.notes = self.notes, dict(metadata.reqs_to_recv)
        metadata.reqs_to_recv = again | metadata.reqs_to_recv
        return metadata


class RepeatsSends(Right):
    """What is to be sent is told until it is sent."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata: Any = super().build_connector_meta(scheduler_output)
        self.notes |= metadata.reqs_to_send
        metadata.reqs_to_send = dict(self.notes)
        return metadata

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        for name in connector_output.finished_sending or ():
            self.notes.pop(name, None)


class ReusesTheList(Right):
    """One list for every step, filled anew: that of the step before changes with it."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata: Any = super().build_connector_meta(scheduler_output)
        self.blocks: list[int] = getattr(self, "blocks", [])
        self.blocks[:] = [
            b for request in scheduler_output.scheduled_new_reqs for group in request.block_ids for b in group
        ]
        metadata.blocks = self.blocks
        return metadata


# ---- how it ends requests --------------------------------------------------------------------------------------------------------


class AnswersParamsAlone(Right):
    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        return super().request_finished_all_groups(request, block_ids)[1]


class KeepsByNumber(Right):
    """Says how many groups it keeps."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        kept, params = super().request_finished_all_groups(request, block_ids)
        return len(block_ids) if kept else 0, params


class Adds(Right):
    """Adds something to P's params."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        kept, params = super().request_finished_all_groups(request, block_ids)
        return kept, self.add(params) if params else params

    def add(self, params: dict[str, Any]) -> Any:
        raise NotImplementedError


class AddsASet(Adds):
    def add(self, params: dict[str, Any]) -> Any:
        return params | {"ranks": {0, 1}}


class AddsNumberedKeys(Adds):
    def add(self, params: dict[str, Any]) -> Any:
        return params | {"ranks": {0: "host", 1: "host"}}


class AddsProtection(Adds):
    def add(self, params: dict[str, Any]) -> Any:
        return MappingProxyType(params)


class Remembers(Right):
    """Never forgets a request that was aborted."""

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)
        self.notes[request.request_id] = True

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        if request.status != RequestStatus.FINISHED_ABORTED:
            self.notes.pop(request.request_id, None)
        return super().request_finished_all_groups(request, block_ids)


class HoldsABlock(Right):
    """Takes a block of every prefill for itself."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        if prefills(request) and block_ids[0]:
            pool = self._kv_cache_manager.block_pool
            pool.touch([pool.blocks[block_ids[0][0]]])
        return super().request_finished_all_groups(request, block_ids)


class KeepsTheAborted(Right):
    """Hands over whatever P has, also of a request that was given up."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        if prefills(request) and request.status in (
            RequestStatus.FINISHED_ABORTED,
            RequestStatus.FINISHED_ERROR,
        ):
            super().request_finished_all_groups(request, block_ids)
            return any(block_ids), None
        return super().request_finished_all_groups(request, block_ids)


class HandsOverOldBlocks(Right):
    """Returns the blocks that the request was given first."""

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self.notes.setdefault(request.request_id, blocks.get_block_ids())

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        first = self.notes.pop(request.request_id, block_ids)
        kept, params = super().request_finished_all_groups(request, block_ids)
        return kept, params | {"remote_block_ids": first} if params else params


class GivesBlocksAway(Right):
    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        return False, super().request_finished_all_groups(request, block_ids)[1]


class HidesErrors(Right):
    """A request that failed is said to have stopped."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        if request.status == RequestStatus.FINISHED_ERROR:
            request.status = RequestStatus.FINISHED_STOPPED
        return super().request_finished_all_groups(request, block_ids)


class FreesTheCancelled(Right):
    """Gives back the blocks of an aborted request by itself, and does not wait for its load."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        if loads(request) and request.status == RequestStatus.FINISHED_ABORTED:
            self._kv_cache_manager.free(request)
        return super().request_finished_all_groups(request, block_ids)


# ---- how it takes reports --------------------------------------------------------------------------------------------------------


class ForgetsLateLoads(Right):
    """A load that takes more than some steps is given up, and its end told to nobody."""

    steps = 0

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        self.steps += 1
        metadata: Any = super().build_connector_meta(scheduler_output)
        self.notes |= dict.fromkeys(metadata.reqs_to_recv, self.steps)
        return metadata

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        for name in list(connector_output.finished_recving or ()):
            if self.steps - self.notes.pop(name, self.steps) > 5:
                connector_output.finished_recving.remove(name)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        self.notes.pop(request.request_id, None)
        return super().request_finished_all_groups(request, block_ids)


class CountsOneRank(Right):
    def get_finished_count(self) -> int | None:
        return 1


class CountsAPeer(Right):
    def get_finished_count(self) -> int | None:
        return 3


class KnowsEveryLoad(Right):
    """Looks a report up as if none could come twice, or late."""

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens:
            self.notes[request.request_id] = True

    def update_connector_output(self, connector_output: Any) -> None:
        for name in connector_output.finished_recving or ():
            del self.notes[name]
        super().update_connector_output(connector_output)


class WantsASet(Right):
    def update_connector_output(self, connector_output: Any) -> None:
        for name in connector_output.finished_recving:
            self.half._stop_heartbeat(name)


class CannotReset(Right):
    def reset_cache(self) -> bool | None:
        if self.half._heartbeat_req_engine:
            raise RuntimeError("a load is under way")
        return True


# ---- how it fails -----------------------------------------------------------------------------------------------------------------


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
