"""In a rank: what the connector's worker half is asked and what it answers, as vLLM's own code asks it.

The aggregator of vLLM (distributed/kv_transfer/kv_connector/utils.py, KVOutputAggregator) adds the reports of ranks up; here each rank's
own are noted before.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from pytest_kvconform.rigs.peers import faulty_nixl
from pytest_kvconform.rigs.peers.messages import Report, Watched

Names = tuple[str, ...]


class Watch:
    """Stands around the hooks of one worker half. They are called with what they were called with, and their answers are passed on."""

    def __init__(self, connector: Any, rank: int):
        self.rank, self.steps, self.idle_steps, self.asked = rank, 0, 0, 0
        self.computing = False
        self.reports: list[Report] = []
        self.loads: list[tuple[float, float]] = []
        self.said: tuple[Names, Names, Names] = ((), (), ())
        for name in ("bind_connector_metadata", "wait_for_layer_load", "start_load_kv"):
            setattr(connector, name, getattr(self, f"_{name}")(getattr(connector, name)))
        for name in ("get_transfer_results", "get_block_ids_with_load_errors"):
            setattr(connector, name, getattr(self, f"_{name}")(getattr(connector, name)))

    def _bind_connector_metadata(self, hook: Any) -> Any:
        def bind_connector_metadata(metadata: Any) -> None:
            self.steps, self.computing = self.steps + 1, False
            hook(metadata)

        return bind_connector_metadata

    def _wait_for_layer_load(self, hook: Any) -> Any:
        def wait_for_layer_load(layer_name: str) -> None:
            self.computing = True
            hook(layer_name)

        return wait_for_layer_load

    def _start_load_kv(self, hook: Any) -> Any:
        def start_load_kv(*args: Any, **kwargs: Any) -> None:
            started = time.monotonic()
            try:
                hook(*args, **kwargs)
            finally:
                self.loads.append((started, time.monotonic() - started))

        return start_load_kv

    def _get_transfer_results(self, hook: Any) -> Any:
        def get_transfer_results(finished_req_ids: set[str]) -> Any:
            results = hook(finished_req_ids)
            self.said = (
                _sorted(results.finished_sending),
                _sorted(results.finished_recving),
                _sorted(results.failed_recving),
            )
            return results

        return get_transfer_results

    def _get_block_ids_with_load_errors(self, hook: Any) -> Any:
        def get_block_ids_with_load_errors() -> set[int]:
            blocks = hook()
            self.asked, self.idle_steps = self.asked + 1, self.idle_steps + (not self.computing)
            if any(self.said) or blocks:
                self.reports.append(
                    Report(self.steps, *self.said, tuple(sorted(blocks or ())), not self.computing)
                )
            self.said = ((), (), ())
            return blocks

        return get_block_ids_with_load_errors

    def watched(self) -> Watched:
        loads = np.array(self.loads, dtype=np.float64).reshape(-1, 2)
        return Watched(self.rank, tuple(self.reports), self.steps, self.idle_steps, self.asked, loads)


def _sorted(ids: set[str] | None) -> Names:
    return tuple(sorted(ids or ()))


_watches: list[Watch] = []


def install(worker: Any) -> None:
    """Watch the connector of this rank from now on."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    _watches.append(Watch(get_kv_transfer_group(), worker.rank))


def watched(worker: Any) -> Watched:
    """What was seen in this rank."""
    return _watches[-1].watched()


def let_go(worker: Any) -> None:
    """Begin the transfers that `faulty_nixl` holds in this rank."""
    faulty_nixl.let_go()
