"""Wrong uses of the workers' reports: update_connector_output, get_finished_count, reset_cache."""

from __future__ import annotations

from typing import Any

from .right import Ended, Right


class ForgetsLateLoads(Right):
    """Gives a load up after some steps, and drops the report of its end."""

    steps = 0

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        self.steps += 1
        metadata: Any = super().build_connector_meta(scheduler_output)
        self.notes |= dict.fromkeys(metadata.reqs_to_recv, self.steps)
        return metadata

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        for name in list(connector_output.finished_recving or ()):
            if self.steps - self.notes.pop(name, self.steps) > 5:
                connector_output.finished_recving.remove(name)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        self.notes.pop(request.request_id, None)
        return super().request_finished_all_groups(request, block_ids)


class OneRankReports(Right):
    """Right: one rank reports for all. The workers of these cases are the suite's."""

    def get_finished_count(self) -> int | None:
        return 1


class CountsAPeer(Right):
    def get_finished_count(self) -> int | None:
        return 3


class KnowsEveryLoad(Right):
    """Looks a report up as if none could come twice, or late."""

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens:
            self.notes[request.request_id] = True

    def update_connector_output(self, connector_output: Any) -> None:
        for name in connector_output.finished_recving or ():
            del self.notes[name]
        super().update_connector_output(connector_output)


class WantsASet(Right):
    def update_connector_output(self, connector_output: Any) -> None:
        for name in connector_output.finished_recving:
            self.half._stop_heartbeat(name)


class CannotReset(Right):
    def reset_cache(self) -> bool | None:
        if self.half._heartbeat_req_engine:
            raise RuntimeError("a load is under way")
        return True


class ForgetsAtReset(KnowsEveryLoad):
    """Drops at a reset what it noted about loads that are under way."""

    def update_connector_output(self, connector_output: Any) -> None:
        mine = [name for name in connector_output.finished_recving or () if name.startswith("cmpl-D")]
        for name in mine:
            del self.notes[name]
        Right.update_connector_output(self, connector_output)

    def reset_cache(self) -> bool | None:
        self.notes.clear()
        return True
