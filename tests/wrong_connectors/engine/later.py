"""Mistakes after which vLLM fails outside of any hook, so that no stack shows the connector."""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

from .right import Right


class ReportsStrangers(Right):
    """Reports a request as loaded that D does not know: vLLM's scheduler raises when it looks it up."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        if results.finished_recving:
            results.finished_recving.add("nobody")
        return results


class AnnouncesTooMuch(Right):
    """Announces more tokens than the prompt has: vLLM's scheduler raises when it adds them up."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens, later = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return (tokens + 1000 if tokens else tokens), later


class EndsFromThread(Right):
    """A thread that a load has started ends the process, while vLLM's main thread is anywhere."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self.loads():
            threading.Timer(0.05, os._exit, (9,)).start()
        super().start_load_kv(forward_context, **kwargs)


class KeepsInterpreter(Right):
    """A thread that a load has started calls native code that never gives the interpreter back."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self.loads():
            threading.Thread(target=ctypes.PyDLL(None).sleep, args=(1000,), daemon=True).start()
        super().start_load_kv(forward_context, **kwargs)
