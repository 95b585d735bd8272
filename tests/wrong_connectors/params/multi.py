"""Wrong behaviour beside another connector in MultiConnector."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from .right import Answer, Ended, Right, handed_over


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


class GivesUpWhatOthersLoad(Right):
    """Reports a load as failed that it has announced, and that another connector makes."""

    given: frozenset[str] = frozenset()

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if handed_over(request) and not num_external_tokens:
            self.given |= {request.request_id}
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata = super().build_connector_meta(scheduler_output)
        metadata.given, self.given = self.given, frozenset()
        return metadata

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        found = super().get_transfer_results(finished_req_ids)
        found.failed_recving |= self._get_connector_metadata().given
        return found


class ListsFailedBlocks(Right):
    """Returns a list where nothing has failed."""

    def get_block_ids_with_load_errors(self) -> Any:
        return list(super().get_block_ids_with_load_errors())


class ClosesTheGroup(Right):
    """Closes the worker half that vLLM knows, which is MultiConnector where there is one."""

    def shutdown(self) -> None:
        if self.connector_worker is not None and has_kv_transfer_group():
            get_kv_transfer_group().connector_worker.shutdown()
        super().shutdown()


class EndsTheProcess(Right):
    """Ends its process when it is shut down."""

    def shutdown(self) -> None:
        super().shutdown()
        raise SystemExit(0)
