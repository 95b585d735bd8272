"""The starter's connector, but P writes the file in the steps that compute the prompt.

So P keeps no block after the end of a request, and has nothing to report: vLLM asserts on reports of requests
that it does not know any more.
"""

from __future__ import annotations

import dataclasses
import uuid
from importlib.resources import files
from typing import Any

# The starter is a text, so that nobody imports it.
exec((files("pytest_kvconform") / "starter/files/connector.py.txt").read_text(), globals())
Copy: Any = globals()["Copy"]
StarterConnector: Any = globals()["StarterConnector"]


class FreesAtOnce(StarterConnector):
    """Returns params and False."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.prompts: dict[str, Any] = {}  # request of P -> its file, and its blocks so far

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        if (request.kv_transfer_params or {}).get("do_remote_decode"):
            self.prompts[request.request_id] = Copy(uuid.uuid4().hex, [])
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        cached = scheduler_output.scheduled_cached_reqs
        more = [(new.req_id, new.block_ids) for new in scheduler_output.scheduled_new_reqs]
        more += list(zip(cached.req_ids, cached.new_block_ids, strict=True))
        for name, blocks in more:
            if name in self.prompts:
                self.prompts[name].blocks += blocks[0] if blocks else []
                self.orders.saves[name] = dataclasses.replace(self.prompts[name])
        return super().build_connector_meta(scheduler_output)

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        _, params = super().request_finished(request, block_ids)
        self.orders.saves.pop(request.request_id, None)
        prompt = self.prompts.pop(request.request_id, None)
        return False, params and params | {"file": prompt.file}

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._alone("saves", forward_context)

    def wait_for_save(self) -> None:
        self._alone("loads", None)

    def _alone(self, without: str, forward_context: Any) -> None:
        """Run the starter's hook with orders of one kind."""
        orders = self._get_connector_metadata()
        held = getattr(orders, without)
        setattr(orders, without, {})
        super().start_load_kv(forward_context)
        setattr(orders, without, held)

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        return None, super().get_finished(finished_req_ids)[1]
