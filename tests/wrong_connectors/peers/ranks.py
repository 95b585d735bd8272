"""Wrong reports of single ranks."""

from __future__ import annotations

from collections import Counter
from typing import Any

from .right import Right


class Ranks(Right):
    """`change` sees what a rank reports before vLLM does."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        self.change(results, finished_req_ids)
        return results

    @property
    def rank(self) -> int:
        return self.connector_worker.tp_rank

    def change(self, results: Any, finished: set[str]) -> None:
        raise NotImplementedError


class RankZeroReports(Ranks):
    """Right: rank 0 reports what every rank has done. Each step the ranks tell each other."""

    def get_finished_count(self) -> int | None:
        return 1

    def change(self, results: Any, finished: set[str]) -> None:
        import torch.distributed
        from vllm.distributed import get_tp_group

        group = get_tp_group()
        for field in ("finished_sending", "finished_recving"):
            done, told = vars(self).setdefault(field, Counter()), [()] * group.world_size
            torch.distributed.all_gather_object(told, tuple(getattr(results, field)), group.cpu_group)
            done.update(name for names in told for name in names)
            named = {name for name, count in done.items() if count == group.world_size}
            for name in named:
                del done[name]
            setattr(results, field, named if group.rank_in_group == 0 else set())


class RankZeroAlone(Ranks):
    """Rank 0 reports for all what it has done itself, and the others report nothing."""

    def get_finished_count(self) -> int | None:
        return 1

    def change(self, results: Any, finished: set[str]) -> None:
        if self.rank:
            results.finished_sending.clear()
            results.finished_recving.clear()


class CountsOneRank(Ranks):
    """Both ranks report, and get_finished_count speaks of one."""

    def get_finished_count(self) -> int | None:
        return 1

    def change(self, results: Any, finished: set[str]) -> None:
        pass


class RepeatsItself(Ranks):
    """Rank 1 says twice that it has received something."""

    said: frozenset[str] = frozenset()

    def change(self, results: Any, finished: set[str]) -> None:
        before, self.said = self.said, frozenset(results.finished_recving if self.rank == 1 else ())
        results.finished_recving |= before


class KeepsBlocks(Ranks):
    """No rank of P says that blocks were read: P keeps them for ever."""

    def change(self, results: Any, finished: set[str]) -> None:
        results.finished_sending.clear()


class ForgetsToSay(Ranks):
    """Rank 1 does not say that it has received the second request."""

    count = 0

    def change(self, results: Any, finished: set[str]) -> None:
        self.count += len(results.finished_recving)
        if self.rank == 1 and self.count == 2 and results.finished_recving:
            results.finished_recving.clear()


class NamesWhatItGaveUp(Ranks):
    """Reports a request that was aborted before it was scheduled as received."""

    given_up: frozenset[str] = frozenset()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.given_up = frozenset(
            name
            for name, meta in self._connector_metadata.reqs_to_recv.items()
            if not any(meta.local_block_ids)
        )
        super().start_load_kv(forward_context, **kwargs)

    def change(self, results: Any, finished: set[str]) -> None:
        results.finished_recving |= self.given_up
        self.given_up = frozenset()


class NamesEveryEnd(Ranks):
    """P reports every request that has ended as sent."""

    def change(self, results: Any, finished: set[str]) -> None:
        if self.kv_transfer_config.kv_role == "kv_producer":
            results.finished_sending |= finished - self.connector_worker._reqs_to_send.keys()


class RepeatsFailures(Right):
    """Gives failed blocks again in every step."""

    failed: frozenset[int] = frozenset()

    def get_block_ids_with_load_errors(self) -> set[int]:
        self.failed = self.failed | super().get_block_ids_with_load_errors()
        return set(self.failed)


class NeedsForward(Right):
    """Begins every fourth load of an engine in wait_for_layer_load."""

    count, computing = 0, False

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.computing = True

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        wanted = self._connector_metadata.reqs_to_recv
        held = self.__dict__.setdefault("held", {})
        self.count += len(wanted)
        if self.count == 4 and wanted:
            held |= wanted
            wanted.clear()
        if self.computing:
            wanted |= held
            held.clear()
        self.computing = False
        super().start_load_kv(forward_context, **kwargs)


class ForgetsAborted(Ranks):
    """Does not report a load whose request was aborted."""

    gone: frozenset[str] = frozenset()

    def change(self, results: Any, finished: set[str]) -> None:
        self.gone = self.gone | (finished & self.connector_worker._recving_metadata.keys())
        results.finished_recving -= self.gone


class DropsAborted(Ranks):
    """Reports a load whose request was aborted at once, and lets its transfers go on."""

    gone: frozenset[str] = frozenset()

    def change(self, results: Any, finished: set[str]) -> None:
        aborted = finished & self.connector_worker._recving_metadata.keys()
        results.finished_recving -= self.gone
        results.finished_recving |= aborted
        self.gone = self.gone | aborted


class WaitsForTheDrain(Right):
    """D keeps the blocks of a request that is aborted before its first token until its ranks report its load,
    although they have.
    """

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self.__dict__.setdefault("loaded", set()).add(request.request_id)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        kept, params = super().request_finished_all_groups(request, block_ids)
        loaded = request.request_id in self.__dict__.get("loaded", ())
        return kept or (loaded and not request.num_output_tokens), params


class SilentAtTheEnd(Right):
    """Does not notify P when a request ends that was never scheduled."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        answer = super().request_finished_all_groups(request, block_ids)
        orders = self.connector_scheduler._reqs_need_recv
        if not orders.get(request.request_id, (None, [0]))[1]:
            del orders[request.request_id]
        return answer


class SilentWithoutALoad(Right):
    """Has nothing to load, and so nothing to say."""

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        params = request.kv_transfer_params or {}
        if params.get("do_remote_prefill") and not num_external_tokens:
            params["do_remote_prefill"] = False
            return
        super().update_state_after_alloc(request, blocks, num_external_tokens)
