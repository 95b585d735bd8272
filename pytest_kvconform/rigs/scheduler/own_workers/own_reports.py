"""What a real worker half reports to the scheduler half of a side, and when vLLM's scheduler hears of it.

The scripted workers of a side return nothing from build_connector_worker_meta. A connector may wait for it:
get_num_new_matched_tokens answers None until its workers have said that something is there, or it holds
blocks in vLLM's pool until they have said that they are saved. A case that misses such reports runs again on
sides of one rank with a real worker half in a process of its own, see worker_beside.py. It takes every step
of the side, and its metadata is passed on in the step.

The case still decides when vLLM's scheduler hears that a load has ended, and whether it has failed: two
engines D may load what P keeps for one of them. `Side.step` waits until the worker has ended what the case
lets it report. What the worker has sent it reports at once. What nobody reads is sent when the lease ends: a
day passes for the worker then. What it does not report at all is reported for it.
"""

from __future__ import annotations

from typing import Any

from model_matrix.variants import few_layers
from pytest_kvconform.case_outcome import CaseEnd, error_of
from pytest_kvconform.result import NotApplicable
from pytest_kvconform.rigs.processes.cores import Deadline
from pytest_kvconform.rigs.scheduler.own_workers.worker_beside import DAY, Worker
from pytest_kvconform.rigs.scheduler.rig import Rig, Side
from pytest_kvconform.rigs.scheduler.steps import WorkerReport
from pytest_kvconform.rigs.scheduler.store_engine import slots_of

ALONE_S = 0.02  # for which a step of a side lasts before the other sides step, too
SOON_S = 0.1  # in which a worker reports what was read
NEXT_DAY_S = 1.0  # in which it reports on the next day what nobody has read


def start_side(rig: Rig, role: str, index: int, engine: Any, port: int, first: int, blocks: int) -> Side:
    """A side of one rank, with a real worker half of the first layers of the model.

    `engine`: the VllmConfig of the case. `port`: number of its port. `first`: the block id below those of the
    side, which has so many `blocks`. Raises Blocked if the worker half cannot run on this machine.
    """
    config = rig.host.single_rank_config(role, few_layers(rig.geometry))
    config.kv_transfer_config, config.scheduler_config = engine.kv_transfer_config, engine.scheduler_config
    assert rig.nursery is not None
    worker = rig.nursery.start(role, config, port, first + blocks + 1)
    config.cache_config = worker.cache_config
    side = Side(rig, role, index, config, worker.kv_config, first)
    side.worker = side.own = OwnReports(side, worker)
    publish = side.connector.set_xfer_handshake_metadata_pp_aware
    side.recorder.call("set_xfer_handshake_metadata", publish, worker.handshake)
    return side


class OwnReports:
    """The reports of the real worker half of a side. Called with a SchedulerOutput, the worker takes a step,
    and its KVConnectorOutput is returned.
    """

    def __init__(self, side: Side, worker: Worker):
        self.side, self._worker = side, worker
        self._received: set[str] = set()  # loads that the worker has ended
        self._passed: set[str] = set()  # loads that the last report ends
        self._given: set[str] = set()  # what was reported as sent for the worker

    def __call__(self, output: Any) -> Any:
        side, worker, hook = self.side, self._worker, self.side.rig.host.hook
        with hook.judging(worker.pid, worker.process):
            try:
                worker.line.send((output, slots_of(side, output)))
                while not worker.line.poll(ALONE_S):  # a connector may load within the step
                    with hook.beside():
                        side.rig.step_others(side)
                answer = worker.line.recv()
            except (OSError, EOFError):
                assert side.rig.nursery is not None
                raise side.rig.nursery.ended(worker, "a step") from None
        if isinstance(answer, CaseEnd):
            raise error_of(answer)
        return answer

    def wait_for(self, report: WorkerReport) -> None:
        """Step the side and the others until the worker has ended what this report of a case names."""
        rig, sent, received = self.side.rig, set(report.sent), set(report.received)
        soon, next_day = Deadline(SOON_S), Deadline(SOON_S + rig.scaled_seconds(NEXT_DAY_S))
        days = 1 if sent else 0
        for _ in rig.waits(Deadline(rig.settle_s)):
            left = sent & set(self.side.delayed_free_requests())
            if all(id in self._received or not self._waits(id) for id in received) and (
                not left or next_day.over()
            ):
                return
            if left and days and soon.over():
                days -= 1
                self.pass_a_day()
            self.side.take_step((WorkerReport(),))
            rig.step_others(self.side)

    def pass_a_day(self) -> None:
        """Let a day pass for the worker: leases end of what nobody reads."""
        self._worker.line.send(DAY)

    def merged(self, own: Any, scripted: Any) -> Any:
        """The KVConnectorOutput of a step: what the worker reports, and of loads what the case does.

        `own`, `scripted`: both KVConnectorOutput; None: the worker reports nothing.
        """
        if own is None:
            own = type(scripted)()
        self._received |= set(own.finished_recving or ())
        ends = self._passed = {id for id in scripted.finished_recving or () if self._waits(id)}
        kept = set(scripted.finished_sending or ()) & set(self.side.delayed_free_requests())
        own.finished_recving, own.failed_recving = set(ends) or None, scripted.failed_recving & ends
        own.invalid_block_ids = scripted.invalid_block_ids
        own.finished_sending = set(own.finished_sending or ()) - self._given | kept or None
        self._given |= kept
        self._received -= ends
        return own

    def require_held(self) -> None:
        """Raise NotApplicable if the scheduler half has ended another load than the report of the last step:
        no case can decide when.
        """
        calls = self.side.calls_of("update_connector_output")[-1:]
        if added := {id for call in calls for id in call.result["finished_recving"]} - self._passed:
            raise NotApplicable(
                f"update_connector_output ends the load of {min(added)} when the connector's own workers say "
                "so, and a case cannot hold that back"
            )

    def _waits(self, id: str) -> bool:
        """Whether vLLM's scheduler waits for the end of a load of this request."""
        return self.side.waits_for_remote_kv(id) or self.side.finished_while_loading(id)
