"""Connectors of the hand-over rendezvous, each with one mistake. The right one is `designs.Rendezvous`."""

from __future__ import annotations

from typing import Any

from tests.right_connectors.designs import Rendezvous, _transfer


class Right(Rendezvous):
    """No mistake. Transfer ids come again in each test of a module, so each class has a folder of its own."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.folder = self.folder.with_name(f"rendezvous-{type(self).__name__}")
        self.folder.mkdir(exist_ok=True)


class MeetsTheNewest(Right):
    """D takes what P has published last, whatever the transfer id."""

    def answer(self, transfer: str) -> Any:
        if super().answer(transfer) is None:
            return None
        published = [file for file in self.folder.iterdir() if not file.name.startswith(".")]
        return super().answer(max(published, key=lambda file: file.stat().st_mtime_ns).name)


class NeedsTheId(Right):
    """P takes for granted that a request to hand over has a transfer id."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        if (request.kv_transfer_params or {}).get("do_remote_decode"):
            self.folder.joinpath(request.kv_transfer_params["transfer_id"])
        return super().request_finished_all_groups(request, block_ids)


class TrustsTheProxy(Right):
    """D announces a load for do_remote_prefill alone, and orders none without a transfer id."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        params = request.kv_transfer_params
        asked = isinstance(params, dict) and params.get("do_remote_prefill") is True
        if asked and not _transfer(request, "do_remote_prefill"):
            return request.num_tokens - num_computed_tokens, True
        return super().get_num_new_matched_tokens(request, num_computed_tokens)
