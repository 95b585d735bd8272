"""Scheduler halves with one mistake each about params, hits, ends and neighbours; and what a right one has that vLLM's own has not.

Hosts import this module under its full name; nothing here is imported by the tests themselves.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlConnector
from vllm.v1.kv_cache_interface import MambaSpec

from tests.store import stores

Answer = tuple[int | None, bool]
Ended = tuple[bool, dict[str, Any] | None]
TEXTS = ("remote_engine_id", "remote_request_id", "remote_host")
NUMBERS = ("remote_port", "tp_size")


class Right(NixlConnector):
    """vLLM's NixlConnector, which looks at params before it relies on them."""

    def on_new_request(self, request: Any) -> None:
        params = request.kv_transfer_params
        if params and params.get("do_remote_decode"):
            request.kv_transfer_params = self.question(params)
        elif params and params.get("do_remote_prefill") and not self.usable(params):
            request.kv_transfer_params = None
        super().on_new_request(request)

    def question(self, params: dict[str, Any]) -> dict[str, Any]:
        """What of the params that ask P is of any use: D has kept nothing of an earlier turn."""
        return {"do_remote_decode": True}

    def usable(self, params: dict[str, Any]) -> bool:
        """Whether there is something to read, from somewhere."""
        return self.addressed(params) and self.blocks_named(params.get("remote_block_ids"))

    def addressed(self, params: dict[str, Any]) -> bool:
        texts = all(isinstance(params.get(key), str) and params[key] for key in TEXTS)
        return texts and all(type(params.get(key)) is int for key in NUMBERS)

    def blocks_named(self, groups: Any) -> bool:
        if not isinstance(groups, list) or not all(isinstance(group, list) for group in groups):
            return False
        ids = [block for group in groups for block in group]
        return bool(ids) and all(type(block) is int for block in ids)

    @property
    def half(self) -> Any:
        """The scheduler half."""
        return self.connector_scheduler


def handed_over(request: Any) -> bool:
    """Whether a request of D comes with what P returned and has not been loaded."""
    return bool((request.kv_transfer_params or {}).get("do_remote_prefill"))


class SureLater(Right):
    """No mistake: it does not know at once how much P has."""

    asked = 0

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        self.asked += handed_over(request)
        unsure = handed_over(request) and self.asked % 3
        return (None, False) if unsure else super().get_num_new_matched_tokens(request, num_computed_tokens)


# ---- params --------------------------------------------------------------------------------------------------------------------


class AnswersStrangers(Right):
    """Returns params for every request that has any."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        keeps, params = super().request_finished_all_groups(request, block_ids)
        return keeps, {
            "served_by": self.half.engine_id
        } if params is None and request.kv_transfer_params else params


class NamesStrangers(Right):
    """Tells its workers of every request."""

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self.half._reqs_in_batch.add(request.request_id)


class TrustsAddresses(Right):
    """Does not look where P is until it is asked to load."""

    def addressed(self, params: dict[str, Any]) -> bool:
        return isinstance(params.get("remote_engine_id"), str) and isinstance(
            params.get("remote_request_id"), str
        )


class TrustsGroups(Right):
    """Takes a list of groups for a list of blocks."""

    def blocks_named(self, groups: Any) -> bool:
        return bool(groups) and super().blocks_named([*groups, [1]] if isinstance(groups, list) else groups)


class TrustsNames(Right):
    """Takes whatever comes for the name of an engine."""

    def addressed(self, params: dict[str, Any]) -> bool:
        name = params.get("remote_engine_id")
        return super().addressed(params | {"remote_engine_id": "name"} if name is not None else params)


class RemembersTheUnusable(Right):
    """Keeps a list of requests whose params led nowhere."""

    def usable(self, params: dict[str, Any]) -> bool:
        good = super().usable(params)
        if not good:
            self.half.refused = [*getattr(self.half, "refused", []), self.named]
        return good

    def on_new_request(self, request: Any) -> None:
        self.named = str(request.request_id) if handed_over(request) else ""
        super().on_new_request(request)
        self.named = ""


class WantsEveryKey(Right):
    """Hands over only if the question has all the keys that a router usually sends."""

    def question(self, params: dict[str, Any]) -> dict[str, Any]:
        return super().question(params) if "remote_host" in params else {}


class ReadsInOrder(Right):
    """Takes the third value for the blocks."""

    def usable(self, params: dict[str, Any]) -> bool:
        return super().usable(params) and params["remote_block_ids"] == list(params.values())[2]


class ServesOnce(Right):
    """Two requests with one answer of P are one to it."""

    def usable(self, params: dict[str, Any]) -> bool:
        seen = self.half.__dict__.setdefault("seen", set())
        if super().usable(params) and params["remote_request_id"] not in seen:
            seen.add(params["remote_request_id"])
            return True
        return False

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        if connector_output.finished_recving:
            self.half.__dict__.get("seen", set()).clear()


class TakesTurns(Right):
    """Announces what D may have kept of an earlier turn, whether or not it will be loaded."""

    def question(self, params: dict[str, Any]) -> dict[str, Any]:
        return dict(params)


# ---- hits and ends -------------------------------------------------------------------------------------------------------------


class SilentWithoutALoad(Right):
    """Has nothing to load, and so nothing to say."""

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if handed_over(request) and not num_external_tokens:
            request.kv_transfer_params["do_remote_prefill"] = False
            return
        super().update_state_after_alloc(request, blocks, num_external_tokens)


class StopsEarly(Right):
    """Loads one block less where D has some already."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        count, parked = super().get_num_new_matched_tokens(request, num_computed_tokens)
        size = self._vllm_config.cache_config.block_size
        return (count - size, parked) if num_computed_tokens and count > size else (count, parked)


class LeavesStatesOut(Right):
    """Loads no state where D has blocks of attention."""

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if request.request_id not in self.half._reqs_need_recv:
            return
        request, ids, counts, waits = self.half._reqs_need_recv[request.request_id]
        if any(counts) and ids:
            specs = [group.kv_cache_spec for group in self._kv_cache_config.kv_cache_groups]
            ids = tuple(
                [] if isinstance(spec, MambaSpec) else list(group)
                for spec, group in zip(specs, ids, strict=True)
            )
            self.half._reqs_need_recv[request.request_id] = request, ids, counts, waits


class LoadsTheLastToken(Right):
    """D does not know that P stops before the last token."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        count, parked = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return (request.num_tokens - num_computed_tokens, parked) if count else (count, parked)


class KeepsWhatLoads(Right):
    """Keeps the blocks of a request that is aborted while it loads, a second time."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        keeps, params = super().request_finished_all_groups(request, block_ids)
        loaded = (request.kv_transfer_params or {}).get("_remote_blocks_processed")
        return keeps or bool(loaded and request.status.name == "FINISHED_ABORTED"), params


class ForgetsTheOthers(Right):
    """Announces nothing to the next request when one was aborted."""

    dropping = False

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        self.dropping = request.status.name == "FINISHED_ABORTED"
        return super().request_finished_all_groups(request, block_ids)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        if self.dropping and handed_over(request):
            self.dropping, request.kv_transfer_params = False, None
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


class SilentAtTheEnd(Right):
    """A request that was never admitted ends, and P is not told."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        answer = super().request_finished_all_groups(request, block_ids)
        if (found := self.half._reqs_need_recv.get(request.request_id)) is not None and not found[3]:
            del self.half._reqs_need_recv[request.request_id]
        return answer


# ---- neighbours ----------------------------------------------------------------------------------------------------------------


class LoadsByBlocks(Right):
    """Loads into whatever blocks it is shown."""

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens or int(handed_over(request)))


class ActsWhenAsked(Right):
    """Takes its own answer for an order."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        answer = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if handed_over(request):
            request.kv_transfer_params["do_remote_prefill"] = None
        return answer

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if (request.kv_transfer_params or {}).get("do_remote_prefill", "") is None:
            request.kv_transfer_params["do_remote_prefill"] = True
        super().update_state_after_alloc(request, blocks, num_external_tokens)


class KeepsStrangers(Right):
    """P keeps the blocks of requests that ask for nothing."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        keeps, params = super().request_finished_all_groups(request, block_ids)
        return keeps or (
            self._vllm_config.kv_transfer_config.is_kv_producer and request.kv_transfer_params is None
        ), params


class KnowsEveryReport(Right):
    """Counts on reports about its own requests only."""

    kept: frozenset[str] = frozenset()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        keeps, params = super().request_finished_all_groups(request, block_ids)
        if keeps:
            self.kept |= {request.request_id}
        return keeps, params

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        sent = frozenset(connector_output.finished_sending or ())
        assert sent <= self.kept, "nobody has kept these blocks"
        self.kept -= sent


class ReusesTheDict(Right):
    """Returns one dict, with new values each time."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.answer: dict[str, Any] = {}

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        keeps, params = super().request_finished_all_groups(request, block_ids)
        if params is not None:
            self.answer.update(params)
        return keeps, None if params is None else self.answer

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        if connector_output.finished_sending:
            self.answer.pop("remote_request_id", None)


class IsTheOnlyOne(Right):
    """Publishes only if the engine has no other connector."""

    def get_handshake_metadata(self) -> Any:
        return super().get_handshake_metadata() if get_kv_transfer_group() is self else None


# ---- stores --------------------------------------------------------------------------------------------------------------------


class OwnFolder:
    """What a case has saved is none of another one's."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self._storage_path += f"/{os.getpid()}"


class Store(OwnFolder, stores.Right):
    """No mistake."""


class Silent(Store):
    """Announces nothing, whatever it has saved."""

    def found(self, request: Any) -> int:
        return 0


class LooksUpOtherTokens(Store):
    """Looks a prompt up under one token less, and loads it under all."""

    def found(self, request: Any) -> int:
        tokens = torch.tensor(request.prompt_token_ids[:-1])
        return self.whole(tokens) if self.saved(tokens[: self.whole(tokens)]) else 0

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        self.known[request.request_id] = request
        return self.found(request) - num_computed_tokens, False


class AnnouncesTheRest(Store):
    """Takes a prompt whose first block is saved for saved, and loads what it finds."""

    def found(self, request: Any) -> int:
        tokens = torch.tensor(request.prompt_token_ids)
        return self.whole(tokens) if self.saved(tokens[: self._block_size]) else 0

    def read(self, layer: str, tokens: torch.Tensor, layers: list[str]) -> torch.Tensor:
        found = super().read(layer, tokens[: self._block_size], layers)
        return found.repeat(-(-len(tokens) // len(found)), 1, 1)


class CountsTokens(OwnFolder, stores.CountsTokens):
    """Prompts of one length are the same to it."""


class CountsQuestions(Store):
    """Reserves a block for each question."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        self.asked = getattr(self, "asked", 0) + 1
        found, parked = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return max(0, found - self._block_size * (self.asked % 2)), parked
