"""Right connectors pass every case of the engine tier, and the evidence tells what D had and what it got."""

from __future__ import annotations

import inspect
import json
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from model_matrix import load_families
from pytest_kvconform.result import Blocked, Violation
from pytest_kvconform.rigs.engine import ends
from pytest_kvconform.rigs.engine.messages import Leftovers, Usage
from pytest_kvconform.rigs.processes.linux import threads
from pytest_kvconform.suite._released_blocks import check_all_freed
from pytest_kvconform.suite.engine import shutdown
from pytest_kvconform.suite.engine._threads import _without_numbers
from tests.helpers.case_runner import CellRun

FEW = "n1 n63 n64 n65 two_at_once partial_hit abort_loading"
FEW_KIMI = "n1 n2 n129 two_at_once partial_hit second_turn abort_loading"
FEW_DRAFT = "n17 partial_hit chunked two_at_once abort_loading"
RIGHT = [
    ("PrintsBinary", "llama", "n1 n64 n200 two_at_once full_hit abort_waiting"),
    ("BacksOff", "gemma3", ""),
    ("Right", "qwen3_5", FEW),
    ("LayerWise", "qwen3_5", FEW),
    ("Right", "kimi_linear", FEW_KIMI),
    ("LayerWise", "kimi_linear", FEW_KIMI),
    ("Right", "kimi_k2_5_eagle3", FEW_DRAFT),
    ("LayerWise", "kimi_k2_5_eagle3", FEW_DRAFT),
    ("BacksOff", "kimi_k2_5_eagle3", FEW_DRAFT),
    # follows every request, and raises KeyError for one in a step about which no hook has told it before
    ("tests.right_connectors.designs:OwnCache", "llama", "n1 n33 two_at_once partial_hit abort_loading"),
    # its workers report each end that vLLM tells them
    ("tests.right_connectors.workers:HearsOfEnds", "llama", "n1 n33 two_at_once"),
]


@pytest.mark.parametrize(
    ("connector", "family", "variants"), RIGHT, ids=[f"{row[0]}-{row[1]}" for row in RIGHT]
)
def test_a_right_connector_passes_every_case(
    run_cases: Callable[..., CellRun], connector: str, family: str, variants: str
) -> None:
    run = run_cases(connector, family, variants=variants, matrix="full" if variants else "quick")
    assert all(any(name.endswith(f"[{variant}]") for name in run.outcomes) for variant in variants.split())
    assert set(run.outcomes.values()) == {"PASS"}
    assert (run.verdict.word, run.verdict.exit_code) == ("CONFORMS", 0)


@pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear"])
@pytest.mark.parametrize("topology", ["P1D1", "P2D1"])
def test_d_hits_whole_blocks_of_a_second_turn_and_gets_the_rest_and_the_state(
    run_cases: Callable[..., CellRun], family: str, topology: str
) -> None:
    run = run_cases("Right", family, topology, variants="second_turn", matrix="full")
    assert set(run.outcomes.values()) == {"PASS"}
    block = load_families()[family].block_size
    evidence = run.evidence["d_computes_only_missing_tokens[second_turn]"]
    assert evidence.notes["hit tokens"] == block
    assert evidence.notes["hit rate"] == round(block / (3 * block + 3), 3)
    assert evidence.external_tokens == 2 * block + 2
    arrived = (
        run.evidence[f"{name}[second_turn]"] for name in ("attention_kv_arrives", "recurrent_state_arrives")
    )
    assert evidence.notes["bytes pulled"] == sum(one.bytes_moved for one in arrived)


@pytest.mark.parametrize("leases", [True, False])
@pytest.mark.parametrize(
    ("connector", "variant", "rule"),
    [
        ("TellsNobodyOfAborts", "abort_waiting", "KV-ABORT-002"),
        ("TellsNobodyOfHits", "full_hit", "KV-HIT-001"),
    ],
)
def test_blocks_that_d_does_not_read_may_stay_until_the_lease_ends(
    run_cases: Callable[..., CellRun], connector: str, variant: str, rule: str, leases: bool
) -> None:
    """They break a SHOULD, and no other scenario finds them; without leases they are lost."""
    lease = leases or {"unsupported": "P keeps blocks for ever"}
    run = run_cases(
        connector,
        "llama",
        variants=f"n64 {variant} two_samples abort_loading",
        declared={"features": json.dumps({"lease": lease})},
        only=lambda planned: planned.case.name == "all_blocks_are_freed",
        scale=0.3,
    )
    found = {name: finding.rule for name, finding in run.findings.items()}
    assert found == {f"all_blocks_are_freed[{variant}]": rule if leases else "KV-BLOCKS-001"}
    assert set(run.outcomes.values()) == {"PASS", "FAIL"} and len(run.outcomes) == 4


@pytest.mark.parametrize("family", ["qwen3_5", "llama"])
def test_a_prompt_that_d_computes_beside_a_load_is_right(
    run_cases: Callable[..., CellRun], family: str
) -> None:
    run = run_cases(
        "tests.right_connectors.answers:ComputesWhenBusy",
        family,
        variants="two_at_once two_samples",
        only=lambda planned: planned.module == "engine/outputs",
    )
    assert set(run.outcomes.values()) == {"PASS"}, run.findings


def test_what_d_keeps_is_not_hidden_by_what_p_may_keep() -> None:
    usage = Usage(free_blocks=8, total_blocks=9, requests=("a",), group_requests=(("a",),), unfinished=True)
    with pytest.raises(Violation) as raised:
        check_all_freed({"P": usage, "D": usage}, None, 0, rule_of_p="KV-ABORT-002")
    assert raised.value.finding.rule == "KV-BLOCKS-001"
    assert "D still holds 1 of 9 blocks" in raised.value.finding.happened


def test_a_thread_that_takes_its_name_late_is_not_the_connector_s() -> None:
    """gloo's threads have the name of the process at first."""
    goes_on, noted = threading.Event(), threads()
    late, other = (threading.Thread(target=goes_on.wait, args=(9,), name=name) for name in ("late", "other"))
    late.start()
    before = ends.Before(threads=noted | {str(late.native_id): "pytest"})
    try:
        assert ends._left(before)[0] == ()
        other.start()
        assert ends._left(before)[0] == ("other",)
    finally:
        goes_on.set()


@pytest.mark.parametrize(("ports", "found"), [(("127.0.0.1:5",), True), ((), False)])
def test_a_port_is_found_although_nobody_knows_about_the_threads(
    monkeypatch: pytest.MonkeyPatch, ports: tuple[str, ...], found: bool
) -> None:
    """A thread of P may stay once for the process, and the hand-overs that would tell could not run."""

    def of_engines(*_: object) -> tuple[str, ...]:
        raise Blocked("not known")

    monkeypatch.setattr(shutdown, "of_engines", of_engines)
    monkeypatch.setattr(shutdown, "completed", lambda *_: None)
    ends = tuple(
        Leftovers(threads=threads, children=(), error="", frames=(), listening=listening)
        for threads, listening in ((("a",), ()), ((), ports))
    )
    bench: Any = SimpleNamespace(engine=SimpleNamespace(leftovers=lambda _: ends), cell=None)
    with pytest.raises(Violation if found else Blocked) as raised:
        inspect.unwrap(shutdown.no_threads_ports_or_processes_left)(bench, None)
    assert str(raised.value).startswith(
        "after shutdown D still has 1 listening ports" if found else "not known"
    )


def test_threads_with_names_of_their_own_have_one_name_without_numbers() -> None:
    names = ("recv-3f2a91bc-77d0", "recv-0e4ab1c2-9d31", "poller-1", "poller-12")
    assert [*map(_without_numbers, names)] == ["recv-N-N"] * 2 + ["poller-N"] * 2
