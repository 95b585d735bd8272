"""The way of a connector's statistics to the log and to Prometheus, with vLLM's own code.

The engine core sends each SchedulerStats to the front end as msgpack (v1/engine/core.py:
process_output_sockets). The front end rebuilds the connector's statistics, adds them up, logs them and
records them in Prometheus (v1/metrics/loggers.py: LoggingStatLogger, PrometheusStatLogger; distributed/
kv_transfer/kv_connector/v1/metrics.py). vLLM is imported inside functions only.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pytest_kvconform.result import first_line

AGAIN = 2  # times that the front end gets the last statistics, so that it has something to add up


@dataclass(frozen=True)
class StatisticsTrace:
    """What became of the statistics that one engine reported."""

    reported: int = 0  # steps whose output had statistics of the connector
    stage: str = ""  # where the first exception was raised: "msgpack", "reduce", ...; "": nowhere
    error: str = ""  # that exception, with the line that raised it
    rebuilt: bool = True  # whether build_kv_connector_stats returned something for all of them
    line: str = ""  # what was logged
    metrics: tuple[str, ...] = ()  # names of the connector's Prometheus metrics
    # of these metrics that are not 0. If all are 0, zeros of the statistics count as ones: see `_with_ones`.
    samples: int = 0


class StatisticsPath:
    """The front end's part for one engine, kept in the engine's own process.

    It takes what vLLM's scheduler makes of each step: `Scheduler.make_stats`.
    """

    def __init__(self, config: Any, scheduler: Any):
        self._config = config
        self._sent: list[bytes] = []  # each as the output thread of the engine core sends it
        self._reported, self._stage, self._error = 0, "", ""
        self._logging: Any = None
        self._prometheus: Any = None
        self._names: tuple[str, ...] = ()

        make_stats = scheduler.make_stats

        def watched(spec: Any = None, kv_connector_stats: Any = None, *args: Any, **kwargs: Any) -> Any:
            if kv_connector_stats:
                self._note(kv_connector_stats)
            return make_stats(spec, kv_connector_stats, *args, **kwargs)

        scheduler.make_stats = watched

    def _note(self, stats: Any) -> None:
        self._reported += 1
        if (sent := self._run("msgpack", lambda: _encode(stats.to_dict()))) is not None:
            self._sent.append(sent)

    def trace(self) -> StatisticsTrace:
        """Let the front end log and record what was taken since the last call."""
        rebuilt, line, samples = True, "", 0
        self._run("build_prom_metrics", self._start)
        if self._sent and not self._stage:
            self._sent += self._sent[-1:] * (AGAIN - 1)
            for sent in self._sent:
                rebuilt &= self._observe(sent)
            lines: list[str] = []
            self._run("log", lambda: self._logging.log(log_fn=lambda text, *args: lines.append(text % args)))
            line = "; ".join(lines)
            samples = self._count_samples() or self._count_with_ones()
        found = StatisticsTrace(
            self._reported, self._stage, self._error, rebuilt, line[:400], self._names, samples
        )
        self._sent, self._reported, self._stage, self._error = [], 0, "", ""
        return found

    def _run(self, stage: str, function: Callable[[], Any]) -> Any:
        if self._stage:
            return None
        try:
            return function()
        except Exception as error:
            text = first_line(error, 160)
            frames = traceback.extract_tb(error.__traceback__)
            own = [frame.name for frame in frames if frame.name in _STAGES]
            where = f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}"
            self._stage = own[-1] if own else stage
            self._error = f"{type(error).__name__}{f': {text}' if text else ''} ({where})"
            return None

    def _start(self) -> None:
        if self._logging is not None:
            return
        from prometheus_client import REGISTRY
        from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm

        before = {metric.name for metric in REGISTRY.collect()}
        labels = ["model_name", "engine"]
        self._logging = KVConnectorLogging(self._config.kv_transfer_config)
        self._prometheus = KVConnectorProm(self._config, labels, {0: ["model", "0"]})
        self._names = tuple(sorted({metric.name for metric in REGISTRY.collect()} - before))

    def _observe(self, sent: bytes) -> bool:
        """What LoggingStatLogger and PrometheusStatLogger do with it. Returns whether it was rebuilt."""
        if not (payload := self._run("msgpack", lambda: _decode(sent))):
            return True
        self._run("build_kv_connector_stats", lambda: self._logging.observe(payload))
        self._run("Prometheus", lambda: self._prometheus.observe(payload, 0))
        return bool(self._stage) or self._logging.transfer_stats_accumulator is not None

    def _count_with_ones(self) -> int:
        """Samples that are not 0 if what the statistics count as 0 had happened once, as a failed load."""
        for sent in self._sent:
            with contextlib.suppress(Exception):  # no connector has reported this
                self._prometheus.observe(_with_ones(_decode(sent)), 0)
        return self._count_samples()

    def _count_samples(self) -> int:
        from prometheus_client import REGISTRY

        return sum(
            sample.value != 0
            for metric in REGISTRY.collect()
            if metric.name in self._names
            for sample in metric.samples
            if not sample.name.endswith("_created")
        )


# Functions of a connector in a stack, which name the stage of its statistics better.
_STAGES = ("aggregate", "reduce", "is_empty")


def _with_ones(value: Any) -> Any:
    """The same statistics with 1 for each 0, and with [1.0] for each empty list."""
    if isinstance(value, dict):
        return {key: _with_ones(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_with_ones(inner) for inner in value] or [1.0]
    return 1 if type(value) in (int, float) and not value else value


def _encode(payload: Any) -> bytes:
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.serial_utils import MsgpackEncoder

    stats = SchedulerStats(kv_connector_stats=payload)
    [sent] = MsgpackEncoder().encode(EngineCoreOutputs(scheduler_stats=stats))
    return bytes(sent)


def _decode(sent: bytes) -> Any:
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.serial_utils import MsgpackDecoder

    return MsgpackDecoder(EngineCoreOutputs).decode(sent).scheduler_stats.kv_connector_stats
