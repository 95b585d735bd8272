"""Wrong answers of get_num_new_matched_tokens, and wrong loads after update_state_after_alloc."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlConnector

from .right import Answer, Ended, Right, loads

# ---- answers of get_num_new_matched_tokens ----


class AnswersFractions(Right):
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        count, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return (float(count), is_async) if count else (count, is_async)


class AnswersAlone(Right):
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        return super().get_num_new_matched_tokens(request, num_computed_tokens)[0]


class FallsBelowZero(Right):
    """P's blocks are counted in whole ones, and D has more than that."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        count, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return (count - 16, is_async) if num_computed_tokens and count else (count, is_async)


class RemembersTheAnswer(Right):
    """Gives its first answer again, whatever D has by then."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        name = request.request_id
        if name not in self.notes:
            self.notes[name] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return self.notes[name]

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.notes.pop(request.request_id, None)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        self.notes.pop(request.request_id, None)
        return super().request_finished_all_groups(request, block_ids)


class AnnouncesMore(Right):
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        count, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return (count + 1, is_async) if count else (count, is_async)


class ForgetsTheHit(Right):
    """Announces the whole prompt, whatever D has."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        return super().get_num_new_matched_tokens(request, 0)


class NothingComesLater(Right):
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        count, _ = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return count, loads(request)


class LoadsWhenAsked(Right):
    """Orders a load when it is asked, into the last blocks of the pool."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        count, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if count and request.request_id not in self.half._reqs_need_recv:
            last = [block.block_id for block in self._kv_cache_manager.block_pool.blocks[-4:]]
            self.half._reqs_need_recv[request.request_id] = (request, (last,), (0,), True)
        return count, is_async


class AnswersOnce(Right):
    """Uses the params up in get_num_new_matched_tokens, before update_state_after_alloc."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        count, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if count and self.notes.setdefault(request.request_id, 0):
            return 0, False
        self.notes[request.request_id] = 1
        return count, is_async

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        self.notes.pop(request.request_id, None)
        return super().request_finished_all_groups(request, block_ids)


class AnswersLess(AnswersOnce):
    """Announces one token less each time it is asked."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        count, is_async = NixlConnector.get_num_new_matched_tokens(self, request, num_computed_tokens)
        if not count:
            return count, is_async
        self.notes[request.request_id] = self.notes.get(request.request_id, -1) + 1
        return max(1, count - self.notes[request.request_id]), is_async


class AnswersAgain(Right):
    """Announces what P had after it has loaded it."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        left = request.num_prompt_tokens - num_computed_tokens
        return (left, left > 0) if loads(request) else (0, False)


class LoadsFreedBlocks(Right):
    """Loads what P had each time that it is asked, also after a load has ended, well or not."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        if loads(request):
            request.kv_transfer_params["do_remote_prefill"] = True
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


class NeverSure(Right):
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        return (
            (None, False)
            if loads(request)
            else super().get_num_new_matched_tokens(request, num_computed_tokens)
        )


# ---- loads after update_state_after_alloc ----


class LoadsByBlocks(Right):
    """Loads into all blocks that update_state_after_alloc names, also with zero tokens."""

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
