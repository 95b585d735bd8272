"""Connectors of the hand-over rendezvous, each with one mistake. The right one is `designs.Rendezvous`."""

from __future__ import annotations

from typing import Any

from tests.right_connectors.designs import Rendezvous, _transfer


class Right(Rendezvous):
    """No mistake."""


class MeetsTheNewest(Rendezvous):
    """D takes what P has published last, whatever the transfer id."""

    def answer(self, transfer: str) -> Any:
        if super().answer(transfer) is None:
            return None
        published = [file for file in self.folder.iterdir() if not file.name.startswith(".")]
        return super().answer(max(published, key=lambda file: file.stat().st_mtime_ns).name)


class ExpectsThatPIsReady(Rendezvous):
    """D computes the prompt itself if P has not published anything when D is asked."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if request.request_id in self.open:
            self.meet(self.open[request.request_id][0])
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


class TrustsTheProxy(Rendezvous):
    """D announces a load for do_remote_prefill alone, and orders none without a transfer id."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        params = request.kv_transfer_params
        asked = isinstance(params, dict) and params.get("do_remote_prefill") is True
        if asked and not _transfer(request, "do_remote_prefill"):
            return request.num_tokens - num_computed_tokens, True
        return super().get_num_new_matched_tokens(request, num_computed_tokens)
