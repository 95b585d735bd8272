"""P and D on two nodes: bytes cross between two addresses, and a connector that says 127.0.0.1 fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.rings import night

from .namespaces import ADDRESSES, PORT, Namespaces, two_nodes, why_not

ROOT = Path(__file__).parents[2]
HEAD = f"{ADDRESSES['a']}:{PORT}"  # Ray finds `auto` by processes and files of the whole machine
RUN_S = 600.0
CELL = "llama3_1_8b-P1D1.b16"
# A case, and how many bytes it moves at least: the byte tier has layers of Llama 3.1 8B, the engine tier of a
# tiny model.
ON_BYTES = f"kv::bytes/pool::attention_kv_arrives[{CELL}-n55]"
ON_ENGINES = "kv::engine/outputs::outputs_match_the_oracle[llama-P1D1-n63]"
CASES = {ON_BYTES: 1_000_000, ON_ENGINES: 10_000}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Namespaces]:
    if reason := why_not():
        pytest.skip(reason)
    with two_nodes() as made:
        yield made


@dataclass(frozen=True)
class Ended:
    """A run of pytest that has ended."""

    code: int
    text: str
    report: dict[str, Any]


def run(nodes: Namespaces, folder: Path, connector: str, *arguments: str) -> Ended:
    """Run cases on the two nodes; pytest runs in the namespace "a"."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--kv-connector={connector}"]
    declare = f"--kv-declare={ROOT / 'reference_connector' / 'declaration.toml'}"
    config = {"kv_connector_extra_config": {"key": "none"}}  # or it works on one machine alone
    done = subprocess.run(
        nodes.inside(
            "a", *command, declare, f"--kv-config={json.dumps(config)}", f"--kv-ray={HEAD}", *arguments
        ),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
    )
    report, text = folder / "kv-report" / "report.json", done.stdout + done.stderr
    assert report.exists(), text
    return Ended(done.returncode, text, json.loads(report.read_text()))


@pytest.mark.parametrize("case", [ON_BYTES, night(ON_ENGINES)])
def test_a_cell_conforms_and_its_bytes_cross_between_two_addresses(
    case: str, nodes: Namespaces, tmp_path: Path
) -> None:
    before = nodes.crossed()
    ended = run(nodes, tmp_path, "reference_connector:ReferenceConnector", case)
    assert ended.code == 0, ended.text
    [result] = ended.report["results"]
    moved = result["evidence"]["bytes_moved"]
    assert moved > CASES[case]
    assert nodes.crossed() - before >= moved


@pytest.mark.night
def test_a_connector_that_says_loopback_to_its_peer_fails_with_that_sentence(
    nodes: Namespaces, tmp_path: Path
) -> None:
    case = f"kv::bytes/handover::completes[{CELL}-n55]"
    ended = run(nodes, tmp_path, "tests.nodes.loopback_connector:SaysLoopback", case)
    assert ended.code == 1, ended.text
    [result] = ended.report["results"]
    assert result["rule"] == "KV-HANDOVER-001"
    told = result["finding"]["diagnosis"]
    assert told.startswith("kv_transfer_params name '127.0.0.1' (remote_host): on the node of D"), told
    assert told.endswith(tuple(f"its peer is on {address}" for address in ADDRESSES.values()))
