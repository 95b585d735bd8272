"""Right scheduler halves: they check kv_transfer_params before they use them. Wrong ones change them."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlConnector

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
