"""Connectors whose proxy has words of its own: right ones, beside `designs.ByRoom`, and wrong ones."""

from __future__ import annotations

from typing import Any

from tests.right_connectors import answers
from tests.right_connectors.designs import ByRoom, InTheRoom
from tests.wrong_connectors.handovers import rendezvous


class Right(ByRoom, rendezvous.Right):
    """No mistake."""


class LoadsAgain(Right, answers.LoadsAgain):
    """No mistake: D loads again after a preemption, and notifies P when its request has ended."""


class NeedsARank(Right):
    """No mistake: a request is handed over with all words of its own proxy, and with none of vLLM's."""

    def seen(self, request: Any) -> Any:
        params = request.kv_transfer_params
        whole = isinstance(params, dict) and {"rank", "warm"} <= params.keys()
        strange = not whole or "remote_block_ids" in params
        return _plain(request) if strange else super().seen(request)


def _plain(request: Any) -> InTheRoom:
    """The request as one that is not handed over."""
    view = InTheRoom(request)
    vars(view)["kv_transfer_params"] = None
    return view


class NeedsTheNull(Right):
    """P hands nothing over without a key whose value is null, and lets D know."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        params = request.kv_transfer_params
        if not isinstance(params, dict) or params.get("part") != "gives" or "note" in params:
            return super().request_finished_all_groups(request, block_ids)
        self.publish(params["room"], {})
        return False, None


class CountsTheKeys(Right):
    """D finds its own keys only if no other connector has any."""

    def seen(self, request: Any) -> Any:
        params = request.kv_transfer_params
        return super().seen(request) if isinstance(params, dict) and len(params) == 2 else _plain(request)


class OneDict(Right):
    """P returns one dict for all requests."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        keep, _ = super().request_finished_all_groups(request, block_ids)
        return keep, vars(self).setdefault("one", {})


class MeetsTheNewest(ByRoom, rendezvous.MeetsTheNewest):
    """D takes what P has published last, whatever the room."""


class SilentWithoutALoad(Right):
    """D has nothing to load, and so does not notify P."""

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if not num_external_tokens and (handoff := self._scheduler._handoffs.pop(request.request_id, None)):
            del self._scheduler._leases[handoff.lease]
        super().update_state_after_alloc(request, blocks, num_external_tokens)


class LoadsFreedBlocks(Right):
    """D loads what P had each time that it is asked, also after it has notified P."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.met: dict[str, Any] = {}

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self.met[request.request_id] = self._scheduler._handoffs[request.request_id]
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if handoff := self.met.pop(request.request_id, None):
            self._scheduler.hold(request.request_id, handoff)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


class ShortensAView(Right):
    """P's request does not see that its prompt was shortened, and never ends."""

    def seen(self, request: Any) -> Any:
        return _Apart(request)


class _Apart(InTheRoom):
    def __setattr__(self, name: str, value: Any) -> None:
        vars(self)[name] = value
