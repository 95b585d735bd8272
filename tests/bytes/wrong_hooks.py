"""Connectors with one mistake each in hooks of vLLM's second model runner, in the way of statistics, in block
tables that they keep themselves, or in windows.

All of them are vLLM's NixlConnector, or ReferenceConnector, but for what the first sentence of their
docstring says.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from reference_connector import ReferenceConnector
from tests.engine.wrong_connectors import Groups, Right

__all__ = [
    "BuildsNoMetrics",
    "ClipsEachWindow",
    "CountsAlone",
    "CountsDown",
    "CountsFailures",
    "CountsLoads",
    "CountsLoadsEverywhere",
    "DividesByNothing",
    "EndsTheFrontEnd",
    "EndsWithTheForward",
    "FollowsTheFirst",
    "ForgetsAtCapture",
    "ForgetsToRebuild",
    "HandsOverWhatRuns",
    "LoadsWhatRuns",
    "LogsAlone",
    "NamesItsArgument",
    "NumbersItsKeys",
    "RebuildsWhatItBuilt",
    "RecordsNothing",
    "RegistersWhenBuilt",
    "SendsAPath",
    "StopsAtWarmUp",
    "SumsUpToAnother",
    "WantsTuples",
]

# ---- hooks of the second model runner ----


class LoadsWhatRuns(Right):
    """Takes the requests that run, which start_load_kv gets by name, for those that are to be loaded."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        for name in kwargs.get("request_ids", ()):
            metadata.reqs_to_recv[name]
        super().start_load_kv(forward_context, **kwargs)


class ForgetsAtCapture(Right):
    """After the capture of CUDA graphs it has forgotten all, the registered memory too: it loads nothing."""

    captured = False

    def reset_capture_state(self) -> None:
        self.captured = True

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self.captured:
            self._get_connector_metadata().reqs_to_recv.clear()
        super().start_load_kv(forward_context, **kwargs)


class StopsAtWarmUp(Right):
    """Its thread ends when vLLM has no connector, as during warm-up, and without it nothing is loaded."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def watch(self) -> None:
        while has_kv_transfer_group():
            time.sleep(0.001)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if not self.thread.is_alive():
            self._get_connector_metadata().reqs_to_recv.clear()
        super().start_load_kv(forward_context, **kwargs)


class EndsWithTheForward(Right):
    """Takes finish_forward for the end of the step: loads that start after it find no metadata."""

    def finish_forward(self) -> None:
        self.clear_connector_metadata()


class HandsOverWhatRuns(Right):
    """Hands over what ran in the last step that was scheduled: with a step in flight P's request did not."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        self.running = set(scheduler_output.num_scheduled_tokens)
        return super().build_connector_meta(scheduler_output)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        ended = super().request_finished_all_groups(request, block_ids)
        return ended if request.request_id in self.running else (False, None)


# ---- statistics ----


class Count(KVConnectorStats):
    """Counts loads."""

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        return type(self)({"loads": self.data["loads"] + other.data["loads"]})

    def is_empty(self) -> bool:
        return not self.data.get("loads")

    def reduce(self) -> dict[str, int | float]:
        return {"Loads": self.data["loads"]}


class LoadsCounter(KVConnectorPromMetrics):
    """One counter for each engine."""

    step = 1

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any):
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter = self._counter_cls(name="vllm:test_loads", documentation="loads", labelnames=labelnames)
        self.counters = {engine: counter.labels(*values) for engine, values in per_engine_labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        self.counters[engine_idx].inc(self.step * transfer_stats_data["loads"])


class CountsLoads(Right):
    """No mistake: it counts loads, and reports them in the step in which they end."""

    stats: type[Count] = Count
    metrics: type[LoadsCounter] = LoadsCounter
    loads = 0

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        found = super().get_transfer_results(finished_req_ids)
        self.loads += len(found.finished_recving)
        return found

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        loads, self.loads = self.loads, 0
        return self.stats(self.reported(loads)) if loads else None

    def reported(self, loads: int) -> dict[Any, Any]:
        return {"loads": loads}

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return cls.stats(data or {"loads": 0})

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> KVConnectorPromMetrics | None:
        return cls.metrics(*args)


class FailuresCounter(LoadsCounter):
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        self.counters[engine_idx].inc(transfer_stats_data["failures"])


class CountsFailures(CountsLoads):
    """No mistake: it logs how many loads there were, and its metrics count those that failed."""

    metrics = FailuresCounter

    def reported(self, loads: int) -> dict[Any, Any]:
        return {"loads": loads, "failures": 0}


class Silent(LoadsCounter):
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        pass


class RecordsNothing(CountsLoads):
    """Its metrics take no statistics."""

    metrics = Silent


class SendsAPath(CountsLoads):
    """Reports the path of its store, which is no msgpack."""

    def reported(self, loads: int) -> dict[Any, Any]:
        return {"loads": loads, "store": Path("/store")}


class NumbersItsKeys(CountsLoads):
    """Reports by rank, with numbers for keys."""

    def reported(self, loads: int) -> dict[Any, Any]:
        return {"loads": loads, 0: loads}


class WantsTuples(CountsLoads):
    """Reports (start, end), of which msgpack makes a list."""

    def reported(self, loads: int) -> dict[Any, Any]:
        return {"loads": loads, "times": (1.0, 2.0)}

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        assert data is None or isinstance(data["times"], tuple)
        return super().build_kv_connector_stats(data)


class Rate(Count):
    def reduce(self) -> dict[str, int | float]:
        return {"Failures per load": 1 / (self.data["loads"] - self.data["loads"])}


class DividesByNothing(CountsLoads):
    """Divides by a number that is 0 if no load has failed."""

    stats = Rate


class Down(LoadsCounter):
    step = -1


class CountsDown(CountsLoads):
    """Counts down with a Prometheus counter, which only goes up."""

    metrics = Down


class ForgetsToRebuild(CountsLoads):
    """Collects statistics and has no build_kv_connector_stats."""

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return None


class RebuildsWhatItBuilt(CountsLoads):
    """Rebuilds statistics with what its constructor has set up, and the front end builds no connector."""

    known: type[Count] | None = None

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        type(self).known = Count

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        assert cls.known is not None
        return cls.known(data or {"loads": 0})


class EndsTheFrontEnd(CountsLoads):
    """Ends the process in which statistics are rebuilt."""

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        os._exit(1)


class BuildsNoMetrics(CountsLoads):
    """Its metrics have a name that Prometheus does not take."""

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> KVConnectorPromMetrics | None:
        raise ValueError("Invalid metric name: vllm:loads per second")


# ---- statistics inside MultiConnector ----


class CountsLoadsEverywhere(CountsLoads):
    """No mistake: it counts loads, and registers itself when its module is imported."""


class RegistersWhenBuilt(CountsLoads):
    """Registers itself in its constructor, and the front end builds no connector."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        register(type(self))


class LogsAlone(CountsLoadsEverywhere):
    """Registers itself, and has no metrics."""

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> KVConnectorPromMetrics | None:
        return None


class NamesItsArgument(CountsLoadsEverywhere):
    """Has another name for the argument of build_kv_connector_stats. Only MultiConnector names it."""

    @classmethod
    def build_kv_connector_stats(cls, stats: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return super().build_kv_connector_stats(stats)


class Total(Count):
    """A sum of counts."""

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        return Total({"loads": self.data["loads"] + other.data["loads"]})


class SumsUpToAnother(CountsLoadsEverywhere):
    """Adds statistics up to an object of another class, to which statistics can be added."""

    class stats(Count):
        def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
            return Total(self.data).aggregate(other)


class CountsAlone(CountsLoadsEverywhere):
    """Reports statistics only if the engine has no other connector."""

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return super().get_kv_connector_stats() if get_kv_transfer_group() is self else None


def register(kind: type) -> None:
    """Register a class under its name, unless it is."""
    with contextlib.suppress(ValueError):
        KVConnectorFactory.register_connector(kind.__name__, kind.__module__, kind.__name__)


for _one in (CountsLoadsEverywhere, LogsAlone, NamesItsArgument, SumsUpToAnother, CountsAlone):
    register(_one)


# ---- block tables ----


class FollowsTheFirst(Right):
    """Follows block tables from step to step, and adds the new blocks of the first running request to all."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.tables = dict[str, list[int]]()

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        for new in scheduler_output.scheduled_new_reqs:
            self.tables[new.req_id] = list(new.block_ids[0])
        running = scheduler_output.scheduled_cached_reqs
        for name in running.req_ids:
            self.tables[name] += (running.new_block_ids[0] or [[]])[0]
        return super().build_connector_meta(scheduler_output)

    def request_finished_all_groups(self, request: Any, block_ids: Groups) -> Any:
        return super().request_finished_all_groups(request, (self.tables.pop(request.request_id),))


class ClipsEachWindow(ReferenceConnector):
    """Loads the window alone of all layers that have one, also where vLLM keeps all their tokens."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            specs = [group.kv_cache_spec for group in kv_cache_config.transfer_groups]
            self._scheduler._groups = tuple(
                replace(group, window=getattr(spec, "sliding_window", None) or 0)
                for group, spec in zip(self._scheduler._groups, specs, strict=True)
            )
