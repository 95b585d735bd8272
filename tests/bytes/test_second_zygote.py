"""P and D of two zygotes: what is right only among forks of one process is found."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from pytest_kvconform.result import HarnessError
from pytest_kvconform.rigs import launch, second_zygote
from pytest_kvconform.rigs.launch import Zygote
from pytest_kvconform.rigs.second_zygote import SecondZygote
from pytest_kvconform.settings import Settings
from tests.helpers import warm_zygotes
from tests.helpers.case_runner import HIDDEN, CaseRunner, CellRun
from tests.helpers.rings import night

LLAMA, APART = "llama3_1_8b", "apart"
ARRIVES, LOADS = "attention_kv_arrives[n55]", "d_computes_only_missing_tokens[n55]"


@pytest.fixture(scope="module")
def another(case_runner: CaseRunner) -> Iterator[Zygote]:
    """A second zygote for all tests of this file. Forks of one process share the salt."""
    with patch.object(launch, "_begin", warm_zygotes._begin_cold):
        zygote = launch.launch_another(case_runner.zygote.address, ["LlamaForCausalLM"])
    yield zygote
    assert zygote.close() == []


@pytest.mark.parametrize(
    ("connector", "setup", "failed"),
    [
        night("tests.right_connectors.sockets:TcpPull", APART, set()),
        ("ReferenceConnector", APART, set()),
        ("Right", APART, set()),
        ("tests.wrong_connectors.bytes.names:HashesModel", APART, {LOADS, "all_blocks_are_freed[n55]"}),
        ("tests.wrong_connectors.bytes.names:HashesModel", "b16", set()),
        ("tests.right_connectors.stores:WholeBlocks", APART, set()),
        ("tests.wrong_connectors.bytes.names:HashesKeys", APART, {LOADS}),
        ("tests.wrong_connectors.bytes.names:HashesKeys", "b16", set()),
    ],
)
def test_what_a_hash_says_in_another_interpreter(
    monkeypatch: pytest.MonkeyPatch,
    run_cases: Callable[..., CellRun],
    another: Zygote,
    tmp_path: Path,
    connector: str,
    setup: str,
    failed: set[str],
) -> None:
    if os.environ.get("PYTHONHASHSEED", "random") != "random":
        failed = set()  # it gives both zygotes one salt
    shared = SimpleNamespace(address=another.address, close=list)
    monkeypatch.setattr(second_zygote, "launch_another", lambda *_: shared)
    how = {}
    if connector.endswith(("WholeBlocks", "HashesKeys")):
        extra = {"kv_connector_extra_config": {"shared_storage_path": str(tmp_path)}}
        how = {"profile": "store", "config": json.dumps(extra)}
    run = run_cases(connector, LLAMA, setup=setup, variants="n55", matrix="full", **how)
    assert run.failed == failed, run.reasons
    assert not failed or run.findings[LOADS].diagnosis.endswith("unless PYTHONHASHSEED is set")
    assert failed or run.outcomes[ARRIVES] == run.outcomes[LOADS] == "PASS"


def test_who_draws_the_names_of_agents_has_one_name_for_two(run_cases: Callable[..., CellRun]) -> None:
    run = run_cases("tests.wrong_connectors.bytes.names:DrawsNames", LLAMA, variants="n55", matrix="full")
    assert run.verdict.word == "VIOLATES", run.reasons
    assert run.failed & {"completes[n55]", ARRIVES, LOADS}


def test_the_second_zygote_ends_with_the_bench(case_runner: CaseRunner) -> None:
    said: list[str] = []
    second = SecondZygote(case_runner.zygote.address, Settings(connector="x", hide_cpu=HIDDEN), said.append)
    first, again = second.place(LLAMA), second.place(LLAMA)
    assert first == again and len(said) == 1
    folder = Path(first.address).parent
    assert folder.exists() and folder != case_runner.zygote.run_dir
    assert second.close() == [] and not folder.exists()


def test_a_second_zygote_that_does_not_start_is_not_waited_for_again(tmp_path: Path) -> None:
    said: list[str] = []
    second = SecondZygote(str(tmp_path / "zygote.sock"), Settings(connector="x"), said.append)
    for _ in range(2):
        with pytest.raises(HarnessError, match="gone"):
            second.place(LLAMA)
    assert len(said) == 1 and second.close() == []
