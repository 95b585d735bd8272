"""The way of a connector's statistics to the log and to Prometheus, with vLLM's own code.

The engine core sends each SchedulerStats to the front end as msgpack (v1/engine/core.py:
process_output_sockets). The front end, a process that builds no connector, rebuilds the connector's
statistics, adds them up, logs them and records them in Prometheus (v1/metrics/loggers.py: LoggingStatLogger,
PrometheusStatLogger; distributed/kv_transfer/kv_connector/v1/metrics.py). vLLM is imported inside functions
only.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from pytest_kvconform.result import first_line
from pytest_kvconform.rigs.processes.cores import Deadline
from pytest_kvconform.rigs.processes.linux import die_with_parent

TIMES = 3  # that the front end gets the statistics, so that it has something to add up, and to a sum
ANSWER_S = 10.0  # for the front end to log and record what one transfer has reported
HOOKS = ("get_kv_connector_stats", "build_kv_connector_stats", "build_prom_metrics")
UNREGISTERED, UNMEASURED = "unregistered", "unmeasured"  # see `Lack`


@dataclass(frozen=True)
class Lack:
    """What MultiConnector's front end did not find of a class within it, so that it raised.

    `what`: UNREGISTERED: the class, in KVConnectorFactory; UNMEASURED: its Prometheus metrics.
    """

    what: str
    name: str  # of the class
    error: str  # that it raised, with the line


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
    # where the subject is within MultiConnector: names of the classes that reported, and what each lacks
    children: tuple[str, ...] = ()
    lacks: tuple[Lack, ...] = ()


class StatisticsPath:
    """The way of the statistics of one engine: the part of its engine core, and its front end.

    To be made before the connector is built in this process: the front end is a fork of it.
    """

    def __init__(self, config: Any, mended: bool = False):
        """`config`: the VllmConfig. `mended`: whether the front end goes on where that of MultiConnector
        raises over a class that is not registered, or has no metrics.
        """
        self._sent: list[bytes] = []  # each as the output thread of the engine core sends it
        self._reported, self._failed = 0, Stage()
        self._front_end = FrontEnd(config, mended) if _has_statistics(config) else None

    def watch(self, scheduler: Any) -> None:
        """Take from now on what vLLM's scheduler makes of each step: `Scheduler.make_stats`."""
        make_stats = scheduler.make_stats

        def watched(spec: Any = None, kv_connector_stats: Any = None, *args: Any, **kwargs: Any) -> Any:
            if kv_connector_stats:
                self._note(kv_connector_stats)
            return make_stats(spec, kv_connector_stats, *args, **kwargs)

        scheduler.make_stats = watched

    def _note(self, stats: Any) -> None:
        self._reported += 1
        if (sent := self._failed.run("msgpack", lambda: _encode(stats.to_dict()))) is not None:
            self._sent.append(sent)

    def trace(self) -> StatisticsTrace:
        """Let the front end log and record what was taken since the last call."""
        sent, reported, failed = self._sent, self._reported, self._failed
        self._sent, self._reported, self._failed = [], 0, Stage()
        if failed.name or self._front_end is None:
            return StatisticsTrace(reported, failed.name, failed.error)
        return replace(self._front_end.ask(sent * TIMES), reported=reported)

    def close(self) -> None:
        """End the front end."""
        if self._front_end is not None:
            self._front_end.close()
            self._front_end = None


class FrontEnd:
    """The front end, as the process of the engine sees it: a process of its own."""

    def __init__(self, config: Any, mended: bool):
        self._line, theirs = Pipe()
        if (pid := os.fork()) == 0:
            self._line.close()
            _serve(_Loggers(config, mended), theirs)
        theirs.close()
        self._pid = pid
        self._ended = ""

    def ask(self, sent: Sequence[bytes]) -> StatisticsTrace:
        """What the front end made of these messages."""
        deadline = Deadline(ANSWER_S, (self._pid,))
        with contextlib.suppress(OSError, EOFError):
            if not self._ended:
                self._line.send(sent)
            while not self._ended:
                if self._line.poll(max(0.01, deadline.left())):
                    found: StatisticsTrace = self._line.recv()
                    return found
                if deadline.over():
                    self._ended = f"TimeoutError: no answer within {ANSWER_S:g} s"
                    os.kill(self._pid, signal.SIGKILL)
        self._ended = self._ended or "EOFError: the process ended"
        return StatisticsTrace(stage="the front end", error=self._ended)

    def close(self) -> None:
        """End the process, wherever it is."""
        self._line.close()
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


def _serve(loggers: _Loggers, line: Connection) -> NoReturn:
    """Answer each list of messages with a StatisticsTrace, until the engine is gone. Ends the process."""
    die_with_parent()
    try:
        while True:
            line.send(loggers.trace(line.recv()))
    except EOFError:
        pass
    except BaseException:
        traceback.print_exc()  # to the log: the engine finds that this process has ended
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


class Stage:
    """The first stage of the way that has raised; no later one runs."""

    def __init__(self) -> None:
        self.name = self.error = ""

    def run(self, name: str, function: Callable[[], Any]) -> Any:
        """What a stage returns; None if it or an earlier one has raised."""
        if self.name:
            return None
        try:
            return function()
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            own = [frame.name for frame in frames if frame.name in _STAGES]
            self.name, self.error = own[-1] if own else name, _text(error)
            return None


# Functions of a connector in a stack, which name the stage of its statistics better.
_STAGES = ("aggregate", "reduce", "is_empty")


def _text(error: Exception) -> str:
    """An exception, with the line that raised it."""
    text = first_line(error, 160)
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{last.filename.rpartition('/')[2]}:{last.lineno}"
    return f"{type(error).__name__}{f': {text}' if text else ''} ({where})"


class _Loggers:
    """What LoggingStatLogger and PrometheusStatLogger have of a connector, in the front end's process."""

    def __init__(self, config: Any, mended: bool):
        self._config, self._mended = config, mended
        self._logging: Any = None
        self._prometheus: Any = None
        self._names: tuple[str, ...] = ()
        self._lacks: list[Lack] = []

    def trace(self, sent: Sequence[bytes]) -> StatisticsTrace:
        """Log and record these messages."""
        stage, rebuilt, lines, children = Stage(), True, list[str](), set[str]()
        stage.run("build_prom_metrics", self._start)
        for one in sent:
            if payload := stage.run("msgpack", functools.partial(_decode, one)):
                children |= payload.keys()
                rebuilt &= self._observe(stage, payload)
        stage.run("log", lambda: self._logging.log(log_fn=lambda text, *args: lines.append(text % args)))
        samples = 0 if stage.name or not sent else self._count_samples() or self._count_with_ones(sent)
        return StatisticsTrace(
            stage=stage.name,
            error=stage.error,
            rebuilt=rebuilt,
            line="; ".join(lines)[:400],
            metrics=self._names,
            samples=samples,
            children=tuple(sorted(children)) if self._mended else (),
            lacks=tuple(self._lacks),
        )

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

    def _observe(self, stage: Stage, payload: dict[str, Any]) -> bool:
        """What the two loggers do with statistics. Returns whether they were rebuilt."""
        log, record = self._logging.observe, self._prometheus.observe
        stage.run(
            "build_kv_connector_stats", lambda: self._run_mended(UNREGISTERED, payload, lambda: log(payload))
        )
        stage.run("Prometheus", lambda: self._run_mended(UNMEASURED, payload, lambda: record(payload, 0)))
        return bool(stage.name) or self._logging.transfer_stats_accumulator is not None

    def _run_mended(self, lack: str, payload: dict[str, Any], observe: Callable[[], None]) -> None:
        """Run a stage. If MultiConnector raises for want of something, note and add it, and run it again."""
        try:
            observe()
        except Exception as error:
            mend = {UNREGISTERED: self._register, UNMEASURED: self._measure}[lack]
            if not self._mended or not (names := mend(payload)):
                raise
            self._lacks += [Lack(lack, name, _text(error)) for name in names]
            observe()

    def _register(self, payload: dict[str, Any]) -> list[str]:
        """Register the classes within MultiConnector that are not. Returns their names."""
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

        within = MultiConnector._get_connector_classes_and_configs(self._config)
        classes = {kind.__name__: kind for kind, _ in within}
        registry = KVConnectorFactory._registry
        found = [name for name in payload if name in classes and name not in registry]
        registry.update({name: functools.partial(classes.get, name) for name in found})
        return found

    def _measure(self, payload: dict[str, Any]) -> list[str]:
        """Give metrics to the classes within MultiConnector that have none. Returns their names."""
        metrics = self._prometheus.prom_metrics._prom_metrics
        found = [name for name in payload if name not in metrics]
        metrics.update(dict.fromkeys(found, _NoMetrics()))
        return found

    def _count_with_ones(self, sent: Sequence[bytes]) -> int:
        """Samples that are not 0 if what the statistics count as 0 had happened once, as a failed load."""
        for one in sent:
            with contextlib.suppress(Exception):  # no connector has reported this
                self._prometheus.observe(_with_ones(_decode(one)), 0)
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


class _NoMetrics:
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take statistics of a connector without metrics."""


def _has_statistics(config: Any) -> bool:
    """Whether the class of the connector has a hook of statistics of its own."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    kind = KVConnectorFactory.get_connector_class(config.kv_transfer_config)
    return any(
        getattr(getattr(kind, hook, None), "__func__", getattr(kind, hook, None))
        is not getattr(getattr(KVConnectorBase_V1, hook), "__func__", getattr(KVConnectorBase_V1, hook))
        for hook in HOOKS
    )


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
