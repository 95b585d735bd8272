"""P and D that share no Python: what is right only among forks of one process is found."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from pytest_kvconform.rigs import launch, other_python
from pytest_kvconform.rigs.launch import Zygote
from pytest_kvconform.rigs.other_python import OtherPython
from tests.helpers import warm_zygotes
from tests.helpers.case_runner import CaseRunner, CellRun

LLAMA, APART = "llama3_1_8b", "apart"
ARRIVES, LOADS = "attention_kv_arrives[n55]", "d_computes_only_missing_tokens[n55]"


@pytest.fixture(scope="module")
def another(case_runner: CaseRunner) -> Iterator[Zygote]:
    """A second Python for all tests of this file: forks of one process share the salt."""
    with patch.object(launch, "_begin", warm_zygotes._begin_cold):
        zygote = launch.launch_another(case_runner.zygote.address, ["LlamaForCausalLM"])
    yield zygote
    assert zygote.close() == []


@pytest.mark.parametrize(
    ("connector", "setup", "failed"),
    [
        ("tests.right_connectors.sockets:TcpPull", APART, set()),
        ("ReferenceConnector", APART, set()),
        ("Right", APART, set()),
        ("tests.bytes.hashed:HashesModel", APART, {LOADS, "all_blocks_are_freed[n55]"}),
        ("tests.bytes.hashed:HashesModel", "b16", set()),
        ("tests.right_connectors.stores:WholeBlocks", APART, set()),
        ("tests.bytes.hashed:HashesKeys", APART, {LOADS}),
        ("tests.bytes.hashed:HashesKeys", "b16", set()),
    ],
)
def test_what_a_hash_says_in_another_python(
    monkeypatch: pytest.MonkeyPatch,
    run_cases: Callable[..., CellRun],
    another: Zygote,
    tmp_path: Path,
    connector: str,
    setup: str,
    failed: set[str],
) -> None:
    shared = SimpleNamespace(address=another.address, close=list)
    monkeypatch.setattr(other_python, "launch_another", lambda *_: shared)
    how = {}
    if connector.endswith(("WholeBlocks", "HashesKeys")):
        extra = {"kv_connector_extra_config": {"shared_storage_path": str(tmp_path)}}
        how = {"profile": "store", "config": json.dumps(extra)}
    run = run_cases(connector, LLAMA, setup=setup, variants="n55", matrix="full", **how)
    assert run.failed == failed, run.reasons
    assert not failed or run.findings[LOADS].diagnosis.endswith(
        "share no Python here: hash() of a text differs"
    )
    assert failed or run.outcomes[ARRIVES] == run.outcomes[LOADS] == "PASS"


def test_the_second_python_ends_with_the_bench(case_runner: CaseRunner) -> None:
    said: list[str] = []
    other = OtherPython(case_runner.zygote.address, 1.0, said.append)
    first, second = other.place(LLAMA), other.place(LLAMA)
    assert first == second and len(said) == 1
    folder = Path(first.address).parent
    assert folder.exists() and folder != case_runner.zygote.run_dir
    assert other.close() == [] and not folder.exists()
