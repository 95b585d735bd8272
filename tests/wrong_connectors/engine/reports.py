"""Wrong reports of the worker half, and wrong answers of the scheduler half."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from reference_connector import ReferenceConnector

from .reads import Reads
from .right import Groups, Right

# ---- when it says that it has read ----


class ReportsEarly(Right):
    """Reports a load as finished in the step in which it begins, and reads one step later."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.waiting, self.early = dict[str, Any](), set[str]()
        super().register_kv_caches(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        begun = {name: meta for name, meta in self.loads().items() if any(meta.local_block_ids)}
        self._connector_metadata.reqs_to_recv = self.waiting | {
            name: meta for name, meta in self.loads().items() if name not in begun
        }
        self.waiting = begun
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        results.finished_recving = results.finished_recving - self.early | set(self.waiting) - self.early
        self.early |= set(self.waiting)
        return results


class NeverFinishes(Right):
    """Reads everything and never reports it."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        results.finished_recving.clear()
        return results


class ReportsTwice(Right):
    """Reports every load in two steps, one after the other."""

    last: frozenset[str] = frozenset()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        new = frozenset(results.finished_recving)
        results.finished_recving |= self.last
        self.last = new
        return results


class KeepsBlocks(Right):
    """P never says that D has read, so that its blocks stay until the lease runs out, or longer."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        results.finished_sending.clear()
        return results


class TellsNobodyOfAborts(Right):
    """Breaks no MUST. D does not notify P of a request that it aborts before it has a block, so that P keeps
    the blocks until its lease ends.
    """

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        loads = {name: meta for name, meta in self.loads().items() if any(meta.local_block_ids)}
        self._connector_metadata.reqs_to_recv = loads
        super().start_load_kv(forward_context, **kwargs)


class TellsNobodyOfHits(ReferenceConnector):
    """Breaks no MUST, either: the same of a request for which D has nothing to load."""

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        half, name = self._scheduler, request.request_id
        if not num_external_tokens and name in half._handoffs and name not in half._loading:
            del half._leases[half._handoffs.pop(name).lease]
        super().update_state_after_alloc(request, blocks, num_external_tokens)


# ---- what the scheduler halves say ----


class RecomputesQuietly(Right):
    """D announces nothing, and computes the whole prompt."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False


class AnnouncesLess(Reads):
    """D announces one whole block less than P has, and reads what it announced."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        count, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        size = self._vllm_config.cache_config.block_size
        less = ((count or 0) - 1) // size * size - size
        return (less, is_async) if less > 0 else (count, is_async)

    def choose(self, ours: list[int], theirs: list[int]) -> tuple[list[int], list[int]]:
        return ours, theirs[: len(ours)]


class AnnouncesMore(Right):
    """D announces one token more than the prompt has."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        count, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return (count + 1, is_async) if count else (count, is_async)


class NoHandover(Right):
    """P returns no parameters for D."""

    def request_finished_all_groups(
        self, request: Any, block_ids: Groups
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None


class BacksOff(Right):
    """No mistake: P stops one token before the end of the prompt, and D loads one token less.

    That is what upstream does for state layers alone. It repairs sliding windows, so this one conforms where
    NixlConnector does not.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        if self.connector_scheduler is not None:
            self.connector_scheduler._prefill_backoff = lambda: 1


class NoTruncation(Right):
    """P computes the whole prompt, and D announces one token less: P's state has seen a token too many."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        if self.connector_scheduler is not None:
            self.connector_scheduler._truncate_request_for_prefill = lambda request: None
