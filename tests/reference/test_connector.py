"""The memory layout, the options, and the calls of NIXL."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pytest_kvconform.rigs.vllm_setup.optional_packages import mend_imports
from reference_connector.options import BadOption, Options, read_options
from reference_connector.plan import Runs
from reference_connector.transport import Memory, Transport, TransportError
from tests.helpers.fixtures import ROOT

LINES = 2400  # of the whole reference connector


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (None, None),
        (SimpleNamespace(is_hybrid=False, use_mla=False), "BHLNC"),
        # with a draft whose layers have heads BHLNC cannot be had
        (
            SimpleNamespace(is_hybrid=False, use_mla=True),
            "BLHNC",
        ),
        (SimpleNamespace(is_hybrid=True, use_mla=False), "LBHNC"),
        (SimpleNamespace(is_hybrid=True, use_mla=True), "LBHNC"),
    ],
)
def test_the_layout_with_the_longest_runs(model: Any, layout: str | None) -> None:
    mend_imports()
    from reference_connector import ReferenceConnector

    assert ReferenceConnector.get_required_kvcache_layout(SimpleNamespace(model_config=model)) == layout


def test_no_option_is_required() -> None:
    assert read_options({}) == Options()


def test_given_options_are_used() -> None:
    options = read_options({"kv_lease_duration": 6, "side_channel_port": 0, "backends": ["UCX", "LIBFABRIC"]})
    assert (options.kv_lease_duration, options.backends) == (6.0, ("UCX", "LIBFABRIC"))


@pytest.mark.parametrize(
    ("extra", "name"),
    [
        ({"kv_lease_duration": 0}, "kv_lease_duration"),
        ({"kv_lease_duration": "30"}, "kv_lease_duration"),
        ({"kv_lease_duration": float("nan")}, "kv_lease_duration"),
        ({"transfer_timeout": -1}, "transfer_timeout"),
        ({"side_channel_port": 65536}, "side_channel_port"),
        ({"side_channel_host": 7}, "side_channel_host"),
        ({"num_threads": 1.5}, "num_threads"),
        ({"backends": "UCX"}, "backends"),
        ({"lease": 30}, "no option 'lease'; there are kv_lease_duration"),
        ({"peers": "10.0.0.0/8"}, "peers"),
        ({"bidirectional_kv_xfer": True}, "is NixlConnector's: KV goes from P to D only"),
        ({"enforce_handshake_compat": False}, "is NixlConnector's: allow_different lists"),
    ],
)
def test_a_wrong_option_is_named(extra: dict[str, Any], name: str) -> None:
    with pytest.raises(BadOption, match=name) as raised:
        read_options(extra)
    assert "\n" not in str(raised.value)


def test_a_buffer_on_another_device_is_refused() -> None:
    mend_imports()
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from reference_connector import ReferenceConnector

    transfer = SimpleNamespace(kv_connector_extra_config={}, kv_buffer_device="cuda")
    config = SimpleNamespace(
        kv_transfer_config=transfer, parallel_config=SimpleNamespace(pipeline_parallel_size=2)
    )
    with pytest.raises(ValueError, match=r"kv_buffer_device is cuda, and KV is on cpu$"):
        ReferenceConnector(config, KVConnectorRole.WORKER, None)


def test_statistics_reach_prometheus() -> None:
    mend_imports()
    from functools import partial

    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

    from reference_connector import ReferenceConnector

    registry = CollectorRegistry()
    types = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    metrics = ReferenceConnector.build_prom_metrics(
        SimpleNamespace(kv_transfer_config=None), types, ["engine"], {0: ["0"], 1: ["1"]}
    )
    data = ReferenceConnector.build_kv_connector_stats().data
    numbers = {name: 2 for name in data if isinstance(data[name], int)}
    metrics.observe(data | numbers | {"seconds": [0.5], "bytes": [4096], "descriptors": [7, 8]}, 1)

    def value(name: str, engine: str = "1") -> float | None:
        return registry.get_sample_value(f"vllm:reference_{name}", {"engine": engine})

    assert (value("xfer_time_seconds_sum"), value("bytes_transferred_sum")) == (0.5, 4096)
    assert value("num_descriptors_count") == 2 and value("num_descriptors_count", "0") == 0
    for name in ("failed_transfers", "failed_handshakes", "failed_notifications", "late_reads"):
        assert value(f"num_{name}_total") == 2
    assert value("num_kv_expired_reqs_total") == 2


def test_multi_connector_finds_the_class_by_its_name() -> None:
    mend_imports()
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    from reference_connector import ReferenceConnector

    assert KVConnectorFactory.get_connector_class_by_name("ReferenceConnector") is ReferenceConnector
    sent = ReferenceConnector.build_kv_connector_stats().to_dict()
    rebuilt = MultiConnector.build_kv_connector_stats({"ReferenceConnector": sent})
    assert list(rebuilt.reduce()) == ["ReferenceConnector"]


def test_every_statistic_is_logged_and_a_metric() -> None:
    mend_imports()
    from reference_connector.statistics import COUNTERS, HISTOGRAMS, ReferenceStats
    from reference_connector.worker import no_stats

    assert {*COUNTERS, *HISTOGRAMS} == set(no_stats())
    assert len(ReferenceStats(no_stats()).reduce()) == 5 + len(COUNTERS)


class Agent:
    """A NIXL agent that cannot release some of its memory."""

    def __init__(self) -> None:
        self.registered: list[Any] = []
        self.asked: list[Any] = []

    def register_memory(self, pieces: Any, kind: str) -> str:
        self.registered.append(kind)
        return kind

    def deregister_memory(self, descriptors: str) -> None:
        self.registered.remove(descriptors)
        if descriptors == "DRAM":
            raise RuntimeError("NIXL_ERR_BACKEND")

    def get_xfer_descs(self, rows: Any, kind: str) -> tuple[str, Any]:
        assert rows.flags.c_contiguous and rows.dtype == np.int64
        return kind, rows.tolist()

    def initialize_xfer(self, operation: str, here: Any, there: Any, peer: str) -> None:
        self.asked = [operation, *here, *there, peer]


def test_close_releases_the_rest_if_nixl_raises() -> None:
    agent = Agent()
    transport = object.__new__(Transport)
    transport._agent, transport._registered = agent, []
    transport.register([Memory(0, 8), Memory(8, 8, ("VRAM", 1))])
    assert agent.registered == ["DRAM", "VRAM"]
    transport.close()
    assert not agent.registered
    assert not hasattr(transport, "_agent"), "its threads and sockets end with it"


def test_a_read_is_rows_of_address_length_device() -> None:
    agent = Agent()
    transport = object.__new__(Transport)
    transport._agent = agent
    transport.prepare("p", Runs(*np.array([[10, 20], [30, 40], [5, 6]])), ("VRAM", 2), ("DRAM", 0))
    assert agent.asked == ["READ", "VRAM", [[10, 5, 2], [20, 6, 2]], "DRAM", [[30, 5, 0], [40, 6, 0]], "p"]


@pytest.mark.parametrize(("state", "done"), [("DONE", True), ("PROC", False), ("ERR", None)])
def test_the_state_of_a_read(state: str, done: bool | None) -> None:
    transport = object.__new__(Transport)
    transport._agent = SimpleNamespace(check_xfer_state=lambda handle: state)
    if done is None:
        with pytest.raises(TransportError, match="the state of the transfer is ERR"):
            transport.done(None)
    else:
        assert transport.done(None) is done


def test_the_connector_is_read_in_an_hour() -> None:
    files = sorted((ROOT / "reference_connector").rglob("*.py"))
    assert len(files) > 10
    assert sum(len(file.read_text("utf-8").splitlines()) for file in files) <= LINES
