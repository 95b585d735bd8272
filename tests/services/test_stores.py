"""A right store in a service conforms, and wrong ones are found, with the words that name the mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_kvconform.rigs.processes.ports import free_port
from tests.helpers.case_runner import CaseRunner, CellRun
from tests.helpers.fixtures import ROOT, importable_from, must_be_installed
from tests.small_suite.runs import declare, impossible

SERVER = Path(__file__).with_name("server.py")
MODULE = "tests.services.stores"
FAMILY = "llama3_1_8b"


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """The port of a server, as the suite would start it."""
    number = free_port()
    with subprocess.Popen(
        [sys.executable, str(SERVER), str(number)], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "listening\n"
        yield number
        server.kill()


def runner(tier: str) -> Iterator[CaseRunner]:
    must_be_installed()
    with importable_from(ROOT):
        runner = CaseRunner(MODULE, tier, (FAMILY,))
        yield runner
        assert runner.close() == []


@pytest.fixture(scope="module")
def byte_runner() -> Iterator[CaseRunner]:
    yield from runner("bytes")


@pytest.fixture(scope="module")
def scheduler_runner() -> Iterator[CaseRunner]:
    yield from runner("protocol")


def run(cases: CaseRunner, store: str, port: int, modules: tuple[str, ...], **more: object) -> CellRun:
    return cases.run(
        store,
        FAMILY,
        setup="b16",
        profile="store",
        config=json.dumps({"kv_connector_extra_config": {"port": port}}),
        only=lambda planned: planned.module.startswith(modules),
        **more,
    )


def test_a_right_store_in_a_service_conforms(tmp_path: Path) -> None:
    """The whole way: the suite starts the service, and the connector gets its port."""
    must_be_installed()
    service = f"""profile = "store"
[services.store]
command = {json.dumps([sys.executable, str(SERVER), "{port}"])}
deadline = 60.0
"""
    declare(declared := tmp_path / "declared.toml", impossible("store"), service)
    config = '{"kv_connector_extra_config": {"port": "{services.store.port}"}}'
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            f"--kv-connector={MODULE}:InAService",
            *(f"--kv-declare={declared}", f"--kv-config={config}", f"--kv-report={tmp_path / 'report'}"),
            *(f"--kv-family={FAMILY}", "--kv-topology=P1D1", "--kv-tier=protocol,bytes"),
            *("-k", "stores or ((pool or handover) and b16 and (n17 or n55 or reused))"),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=400,
    )
    report = json.loads((tmp_path / "report" / "report.json").read_bytes())
    outcomes = {result["id"]: result["outcome"] for result in report["results"]}
    assert ended.returncode == 0, ended.stdout
    assert report["verdict"]["word"] == "CONFORMS"
    assert set(outcomes.values()) == {"PASS"}
    assert len(outcomes) > 8


def test_keys_without_the_salt_are_found(scheduler_runner: CaseRunner, port: int) -> None:
    keys = ("protocol/stores/keys",)
    right = run(scheduler_runner, "InAService", port, keys, variants="salt")
    assert set(right.outcomes.values()) == {"PASS"}, right.findings
    found = run(scheduler_runner, "ForgetsTheSalt", port, keys, variants="salt")
    finding = found.findings["other_keys_match_nothing[salt]"]
    assert "were announced for a prompt with cache_salt='user 1', and the same" in finding.happened
    assert finding.diagnosis == "the store takes prompts that differ in their cache_salt for the same"


def test_hits_of_what_the_service_has_lost_are_found(byte_runner: CaseRunner, port: int) -> None:
    found = run(byte_runner, "TrustsItsIndex", port, ("bytes/pool",), variants="n55")
    finding = found.findings["attention_kv_arrives[n55]"]
    assert finding.rule == "KV-BYTES-001"
    assert "never written" in finding.happened + finding.differs


def test_a_wait_for_what_the_service_has_lost_is_found(byte_runner: CaseRunner, port: int) -> None:
    found = run(byte_runner, "WaitsForTheLost", port, ("bytes/handover",), variants="n55", scale=0.1)
    finding = found.findings["completes[n55]"]
    assert "D did not answer within" in finding.happened
    assert "stores.py" in str(finding)
