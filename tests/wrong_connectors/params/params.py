"""Wrong uses of kv_transfer_params."""

from __future__ import annotations

from typing import Any

from .right import Answer, Right, handed_over


class HandsStrangersOver(Right):
    """Hands every request over, also one that asks for nothing."""

    def on_new_request(self, request: Any) -> None:
        if not handed_over(request) and self._vllm_config.kv_transfer_config.is_kv_producer:
            request.kv_transfer_params = {"do_remote_decode": True}
        super().on_new_request(request)


class LoadsByTransferId(Right):
    """Takes the transfer id of another connector for one of its own."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        if "transfer_id" in (request.kv_transfer_params or {}) and not num_computed_tokens:
            return 16, True
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


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


class RemembersLoads(Right):
    """Keeps the requests that have loaded, by number: few of those whose params are corrupted."""

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            loaded = getattr(self.half, "loaded", {})
            self.half.loaded = {**loaded, len(loaded): str(request.request_id)}
        super().update_state_after_alloc(request, blocks, num_external_tokens)


class WantsEveryKey(Right):
    """Hands over only if the question has all the keys that a router usually sends."""

    def question(self, params: dict[str, Any]) -> dict[str, Any]:
        return super().question(params) if "remote_host" in params else {}


class ReadsInOrder(Right):
    """Takes the third value for the blocks."""

    def usable(self, params: dict[str, Any]) -> bool:
        return super().usable(params) and params["remote_block_ids"] == list(params.values())[2]


class MovesBlocks(Right):
    """Loads a block less, and from other blocks, if a router has added a key."""

    moved = False

    def on_new_request(self, request: Any) -> None:
        params = request.kv_transfer_params
        self.moved = handed_over(request) and "trace" in params
        if self.moved:
            other = [[block + 40 for block in group] for group in params["remote_block_ids"]]
            request.kv_transfer_params = params | {"remote_block_ids": other}
        super().on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        tokens, asynchronous = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return (tokens - 16 if tokens and self.moved else tokens), asynchronous


class OrdersOnce(Right):
    """Two requests with one answer of P are one to it: it announces both and loads one."""

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if handed_over(request) and num_external_tokens:
            seen = self.half.__dict__.setdefault("seen", set())
            if (name := request.kv_transfer_params["remote_request_id"]) in seen:
                return
            seen.add(name)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        if connector_output.finished_recving:
            self.half.__dict__.get("seen", set()).clear()


class TakesTurns(Right):
    """Announces what D may have kept of an earlier turn, whether or not it will be loaded."""

    def question(self, params: dict[str, Any]) -> dict[str, Any]:
        return dict(params)
