"""Statistics of a worker, on their way to vLLM's log and to Prometheus: vLLM's hooks for both."""

from functools import partial
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from reference_connector.worker import no_stats

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 5)
# Name in `no_stats` -> name of the metric, what it is, upper ends of buckets. The last words of a name and
# the buckets are those of NixlConnector's metrics.
HISTOGRAMS = {
    "seconds": ("xfer_time_seconds", "Seconds from the order of a load to its last byte", SECONDS),
    "bytes": ("bytes_transferred", "Bytes of a load, on one rank", [2**n for n in range(11, 35, 2)]),
    "descriptors": ("num_descriptors", "Runs of bytes of a load", [10, 30, 100, 300, 1000, 4000, 20000]),
}
COUNTERS = {
    "failed_loads": ("num_failed_transfers", "Loads that failed, on one rank"),
    "failed_handshakes": ("num_failed_handshakes", "Handshakes with peers that failed"),
    "failed_notifications": ("num_failed_notifications", "Notifications that peers did not get"),
    "expired_leases": ("num_kv_expired_reqs", "Requests of P whose lease was over before D had read them"),
    "late_reads": ("num_late_reads", "Loads of D that failed since P's lease was over when they ended"),
}


class ReferenceStats(KVConnectorStats):
    """`data`: what a worker counts, see `no_stats` in worker.py."""

    def reset(self) -> None:
        self.data = no_stats()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        return ReferenceStats({name: self.data[name] + other.data[name] for name in self.data})

    def reduce(self) -> dict[str, int | float]:
        """Totals and averages over all loads, with the names and units that vLLM logs."""
        loads, seconds = len(self.data["seconds"]), sum(self.data["seconds"])
        megabytes = sum(self.data["bytes"]) / 2**20
        return {
            "Loads": loads,
            "Avg load time (ms)": round(1e3 * seconds / max(loads, 1), 3),
            "Avg MB per load": round(megabytes / max(loads, 1), 3),
            "Throughput (MB/s)": round(megabytes / seconds, 3) if seconds else 0.0,
            "Avg number of descriptors": round(sum(self.data["descriptors"]) / max(loads, 1), 1),
            **{name.replace("_", " ").capitalize(): self.data[name] for name in COUNTERS},
        }

    def is_empty(self) -> bool:
        return not any(self.data.values())


class ReferenceMetrics(KVConnectorPromMetrics):
    """Metrics vllm:reference_*, one of each for each engine of the front end."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._metrics: dict[str, dict[int, Any]] = {}  # name in `no_stats` -> engine -> metric
        for key, (name, text, *buckets) in (HISTOGRAMS | COUNTERS).items():
            kind = partial(self._histogram_cls, buckets=buckets[0]) if buckets else self._counter_cls
            metric = kind(f"vllm:reference_{name}", text, labelnames=self._labelnames)
            engines = self.per_engine_labelvalues.items()
            self._metrics[key] = {engine: metric.labels(*values) for engine, values in engines}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record what `ReferenceStats.data` has, of one engine."""
        for name in HISTOGRAMS:
            for value in transfer_stats_data[name]:
                self._metrics[name][engine_idx].observe(value)
        for name in COUNTERS:
            self._metrics[name][engine_idx].inc(transfer_stats_data[name])
