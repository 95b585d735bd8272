"""Connectors with one mistake each in the way of statistics, alone or inside MultiConnector.

All of them are vLLM's NixlConnector, but for what the first sentence of their docstring says.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from tests.wrong_connectors.engine import Right

__all__ = [
    "BuildsNoMetrics",
    "CountsAlone",
    "CountsDown",
    "CountsFailures",
    "CountsLoads",
    "CountsLoadsEverywhere",
    "DividesByNothing",
    "EndsTheFrontEnd",
    "ForgetsToRebuild",
    "LogsAlone",
    "NamesItsArgument",
    "NumbersItsKeys",
    "RebuildsWhatItBuilt",
    "RecordsNothing",
    "RegistersWhenBuilt",
    "SendsAPath",
    "SumsUpToAnother",
    "WantsTuples",
]


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


# ---- inside MultiConnector ----


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
