"""Connectors in which D hands over to P for the next turn, with one mistake each: see the docstrings."""

from __future__ import annotations

from typing import Any

from vllm.v1.request import RequestStatus

from tests.wrong_connectors.turns.right import CopiesForTheNextTurn, KeepsForTheNextTurn

__all__ = ["CopiesForTheNextTurn", "KeepsForTheNextTurn"]
Kept = tuple[bool, dict[str, Any] | None]


class OfD(KeepsForTheNextTurn):
    """`reported`: what D reports as sent in place of what it should."""

    def start_worker(self, serves: bool) -> None:
        super().start_worker(serves)
        self.is_p = serves

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        before = dict(self.leases)
        found = super().get_transfer_results(finished_req_ids)
        if not self.is_p:
            found.finished_sending = self.reported(found.finished_sending, before)
        return found

    def reported(self, sent: set[str], leases: dict[str, Any]) -> set[str]:
        return sent


class MixesUpWhatItHasLoaded(KeepsForTheNextTurn):
    """P names the first one of the blocks last that it has loaded of D, when it hands them over to D."""

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> Kept:
        if "remote_num_tokens" in (request.kv_transfer_params or {}):
            block_ids = ([*block_ids[0][1:], block_ids[0][0]],)
        return super().request_finished_all_groups(request, block_ids)


class NamesWrongBlocks(KeepsForTheNextTurn):
    """D's params name its blocks in another order: the first one comes last."""

    def keep(self, request: Any, blocks: list[int]) -> Any:
        return super().keep(request, blocks[1:] + blocks[:1])


class FreesBeforeTheRead(OfD):
    """D returns where its blocks lie, and frees them at once."""

    def keep(self, request: Any, blocks: list[int]) -> Any:
        return False, super().keep(request, blocks)[1]

    def reported(self, sent: set[str], leases: dict[str, Any]) -> set[str]:
        return set()


class NeverFrees(OfD):
    """D never reports a request as sent: neither when P has read its blocks, nor when their lease is over."""

    def reported(self, sent: set[str], leases: dict[str, Any]) -> set[str]:
        return set()


class NeverFreesOnP(KeepsForTheNextTurn):
    """P never reports a request as sent: neither when D has read its blocks, nor when their lease is over."""

    def start_worker(self, serves: bool) -> None:
        super().start_worker(serves)
        self.is_p = serves

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        found = super().get_transfer_results(finished_req_ids)
        if self.is_p:
            found.finished_sending.clear()
        return found


class FreesAtTheLeaseAlone(OfD):
    """D does not hear that P has read its blocks, and frees them when their lease is over."""

    def answer(self, peer: Any, question: dict[str, Any]) -> None:
        if self.is_p or "done" not in question:
            super().answer(peer, question)


class FreesWhatIsReadAlone(OfD):
    """D has no lease: it frees its blocks when P has read them, and otherwise never."""

    def start_worker(self, serves: bool) -> None:
        super().start_worker(serves)
        if not serves:
            self.lease_s = 1e9


class GivesThePromptAlone(KeepsForTheNextTurn):
    """D hands over the tokens of the prompt, and none that it has generated."""

    def keep(self, request: Any, blocks: list[int]) -> Any:
        keeps, params = super().keep(request, blocks)
        return keeps, params | {"remote_num_tokens": request.num_prompt_tokens}


class KeepsAndReturnsNothing(KeepsForTheNextTurn):
    """D keeps its blocks until their lease is over, and tells no router how P finds them."""

    def keep(self, request: Any, blocks: list[int]) -> Any:
        return super().keep(request, blocks)[0], None


class HoldsWhatItHasLoaded(OfD):
    """P does not hear that D has read blocks of a request for which P had loaded itself, and frees them when
    their lease is over.
    """

    def start_worker(self, serves: bool) -> None:
        super().start_worker(serves)
        self.loaded = set[str]()

    def begin(self, load: Any) -> None:
        self.loaded.add(load.request)
        super().begin(load)

    def answer(self, peer: Any, question: dict[str, Any]) -> None:
        if not self.is_p or question.get("done") not in self.loaded:
            super().answer(peer, question)


class KeepsWhatWasAborted(KeepsForTheNextTurn):
    """D keeps the blocks of an aborted request, whose params vLLM drops, until their lease is over."""

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> Kept:
        found = super().request_finished_all_groups(request, block_ids)
        params = request.kv_transfer_params or {}
        if request.status == RequestStatus.FINISHED_ABORTED and params.get("do_remote_prefill"):
            return self.keep(request, list(block_ids[0]))
        return found


class AnnouncesAgain(KeepsForTheNextTurn):
    """P announces the same load whenever it is asked, and orders it once, as vLLM's NixlConnector."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        params = request.kv_transfer_params or {}
        if not params.get("remote_num_tokens"):
            return super().get_num_new_matched_tokens(request, num_computed_tokens)
        count = max(0, min(params["remote_num_tokens"], request.num_prompt_tokens) - num_computed_tokens)
        return count, count > 0


class PairsLastBlocks(KeepsForTheNextTurn):
    """P pairs its last blocks with D's last ones, also where D has more, as vLLM's NixlConnector."""

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        known = len(self.orders.loads)
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        for load in self.orders.loads[known:]:
            load.remote = load.params["remote_block_ids"][-len(load.blocks) :]


class ServesWhatIsGone(OfD):
    """D sends what is in the blocks that P asks for, whether it still keeps them or not."""

    def answer(self, peer: Any, question: dict[str, Any]) -> None:
        if not self.is_p and "request" in question and question["request"] not in self.leases:
            for layer in question["layers"]:
                self.send(peer, question["request"], layer, question["blocks"])
            peer.sendall(b"held")
            return
        super().answer(peer, question)
