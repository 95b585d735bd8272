"""Record, in each rank, the calls of the connector's worker half and its answers.

vLLM's KVOutputAggregator (distributed/kv_transfer/kv_connector/utils.py) adds the reports of all ranks up;
the recorder keeps what each rank reported before that.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import numpy as np

from pytest_kvconform.result import repr_of
from pytest_kvconform.rigs.bytes.faulty.messages import RankObservation, RankReport
from pytest_kvconform.rigs.processes.cores import core_waits, lost, own_core_wait
from pytest_kvconform.rigs.tap import around
from pytest_kvconform.rigs.vllm_setup.worker import worker_half

Names = tuple[str, ...]


class WorkerRecorder:
    """Wraps hooks of one worker half. Arguments and answers are passed on unchanged."""

    def __init__(self, connector: Any, rank: int):
        self.rank, self.steps, self.idle_steps, self.load_error_polls = rank, 0, 0, 0
        self.computing = False
        self.reports: list[RankReport] = []
        self.start_load_kv_calls: list[tuple[float, float, float]] = []
        self.results: tuple[Names, Names, Names] = ((), (), ())  # of get_transfer_results, in this step
        for name in (
            "bind_connector_metadata",
            "wait_for_layer_load",
            "start_load_kv",
            "get_transfer_results",
            "get_block_ids_with_load_errors",
        ):
            around(connector, name, getattr(self, f"_{name}"))

    def _bind_connector_metadata(self, hook: Any, metadata: Any) -> None:
        self.steps, self.computing = self.steps + 1, False
        hook(metadata)

    def _wait_for_layer_load(self, hook: Any, layer_name: str) -> None:
        self.computing = True
        hook(layer_name)

    def _start_load_kv(self, hook: Any, *args: Any, **kwargs: Any) -> None:
        before, started, waited = _waits_of_others(), time.monotonic(), own_core_wait()
        try:
            hook(*args, **kwargs)
        finally:
            took = time.monotonic() - started - (own_core_wait() - waited)
            self.start_load_kv_calls.append((started, took, lost(before, _waits_of_others())))

    def _get_transfer_results(self, hook: Any, finished_req_ids: set[str]) -> Any:
        results = hook(finished_req_ids)
        self.results = (
            _sorted(results.finished_sending),
            _sorted(results.finished_recving),
            _sorted(results.failed_recving),
        )
        return results

    def _get_block_ids_with_load_errors(self, hook: Any) -> set[int]:
        blocks: set[int] = hook()
        idle = not self.computing
        self.load_error_polls, self.idle_steps = self.load_error_polls + 1, self.idle_steps + idle
        if any(self.results) or blocks:
            self.reports.append(RankReport(self.steps, *self.results, tuple(sorted(blocks or ())), idle))
        self.results = ((), (), ())
        return blocks

    def observation(self) -> RankObservation:
        calls = np.array(self.start_load_kv_calls, dtype=np.float64).reshape(-1, 3)
        return RankObservation(
            self.rank, tuple(self.reports), self.steps, self.idle_steps, self.load_error_polls, calls
        )


def _waits_of_others() -> dict[int, dict[str, float]]:
    """Seconds that each thread of this process but the caller's has waited for a core."""
    waits = core_waits([os.getpid()])
    waits[os.getpid()].pop(str(threading.get_native_id()), None)
    return waits


def _sorted(ids: set[str] | None) -> Names:
    """The names in an order, as plain texts: they go to another process."""
    return tuple(sorted(str(one) if isinstance(one, str) else repr_of(one) for one in ids or ()))


_recorders: list[WorkerRecorder] = []


def install(worker: Any) -> None:
    """Record the calls of this rank's worker half from now on."""
    _recorders.append(WorkerRecorder(worker_half(), worker.rank))


def observation(worker: Any) -> RankObservation:
    """What this rank has recorded."""
    return _recorders[-1].observation()


def keep_bytes(worker: Any) -> None:
    """Keep what this rank's pool holds now."""
    worker.memory.fetch()
    worker.kept = worker.memory.storage.copy()


def bytes_changed(worker: Any) -> int:
    """Return how many bytes of this rank's pool have changed since `keep_bytes`."""
    worker.memory.fetch()
    return int(np.count_nonzero(worker.kept != worker.memory.storage))
