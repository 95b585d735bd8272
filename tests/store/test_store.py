"""Profile store: a right store passes, every wrong one is found and named, and what cannot run here says why."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from pytest_kvconform.plan import make_plan
from pytest_kvconform.result import Blocked, Finding, NotApplicable, Violation
from pytest_kvconform.rigs.bench import (
    Bench,
    SubjectFacts,
    Zygote,
    launch_zygote,
    probe_subject,
)
from pytest_kvconform.rigs.context import transfer_config
from pytest_kvconform.settings import BadSetting, Settings
from pytest_kvconform.subject import resolve
from pytest_kvconform.suite.bytes import _stores
from tests.juries import importable_from, must_be_installed

HERE = Path(__file__).parent
CELL = "llama3_1_8b-P1D1.b16"
MODULES = {f"bytes/{name}" for name in ("start", "handover", "pool", "blocks")}


@dataclass
class Said:
    """What the cases of one cell said, by the last words of their ids: "attention_kv_arrives[n55]"."""

    passed: set[str] = field(default_factory=set)
    failed: dict[str, Finding] = field(default_factory=dict)
    blocked: dict[str, str] = field(default_factory=dict)
    declined: dict[str, str] = field(default_factory=dict)  # NOT-APPLICABLE
    moved: int = 0


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    must_be_installed()
    with importable_from(HERE):
        zygote = launch_zygote([], ["LlamaForCausalLM", "KimiLinearForCausalLM"])
        yield zygote
        assert zygote.close() == []


@pytest.fixture(scope="module")
def run_cases(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Said]:
    """run_cases("Right", "n55 hit1") -> what each case says about a store of stores.py, or about one of vLLM's."""
    facts: list[
        SubjectFacts
    ] = []  # of one class for all: where vLLM runs, and that it does not inherit SupportsHMA

    def run(name: str, variants: str = "", cell: str = CELL) -> Said:
        folder = tmp_path_factory.mktemp("saved")
        own = not name.endswith("Connector")
        settings = Settings(
            connector=f"stores:{name}" if own else name,
            config=f'{{"kv_connector_extra_config": {{"shared_storage_path": "{folder}"}}}}' if own else "",
            profile="store" if own else "",
            tier=("bytes",),
            family=(cell.partition("-")[0],),
            matrix="full" if cell.endswith("x64") else "quick",
        )
        facts[:] = facts or [probe_subject(zygote.address, resolve(settings), 120.0)]
        mine = msgspec.structs.replace(facts[0], name=name)
        bench, said = Bench(zygote.address, resolve(settings), settings, mine, lambda sentence: None), Said()
        try:
            for planned in make_plan(settings, ()).asked:
                wanted = planned.variant is None or not variants or str(planned.variant) in variants.split()
                if cell in (str(planned.cell), planned.cell.family) and planned.module in MODULES and wanted:
                    word = planned.case.name + (f"[{planned.variant}]" if planned.variant else "")
                    try:
                        bench.use(planned.cell)
                        said.moved += planned.case.body(bench, planned.variant).bytes_moved
                        said.passed.add(word)
                    except Violation as error:
                        said.failed[word] = error.finding
                    except Blocked as error:
                        said.blocked[word] = str(error)
                    except NotApplicable as error:
                        said.declined[word] = str(error)
        finally:
            bench.close()
        return said

    return run


def test_a_right_store_passes_every_case(run_cases: Callable[..., Said]) -> None:
    said = run_cases("Right")
    assert (said.failed, said.blocked) == ({}, {})
    assert set(said.declined) == {f"attention_kv_arrives[{n}]" for n in ("n2", "n15", "n16", "hit3")}
    assert set(said.declined.values()) == {_stores.SMALL}
    assert (
        said.moved > 10_000_000
        and "d_computes_only_missing_tokens[n17]" in said.passed
        and "attention_kv_arrives[preempted_on_d]" in said.passed
    )


@pytest.mark.parametrize("cell", ["llama3_1_8b-P1D2.b16", "llama3_1_8b-P1D1.b16x64"])
def test_a_miss_on_an_unlike_engine_is_right(run_cases: Callable[..., Said], cell: str) -> None:
    said = run_cases("Right", "n2 n49 n55 n211", cell)
    assert (said.failed, said.blocked) == ({}, {})
    assert _stores.UNLIKE in said.declined.values() and "engines_start" in said.passed
    assert not said.moved


@dataclass(frozen=True)
class Wrong:
    """One mistake, and all that the cases say about it."""

    name: str
    fails: str  # the only cases that fail
    says: str  # pattern: a phrase of the diagnosis
    variants: str = "n55"

    def __str__(self) -> str:
        return self.name


WRONG = [
    Wrong("NeverSaves", "d_computes_only_missing_tokens", "announced nothing of a prompt that was saved"),
    Wrong(
        "AnnouncesLess",
        "d_computes_only_missing_tokens",
        "announced less than the whole blocks that were saved",
    ),
    Wrong("LoadsNothing", "attention_kv_arrives", "no byte of .* was written"),
    Wrong(
        "LoadsLateByOne", "attention_kv_arrives", r"blocks are mixed up \(0 holds 2, 1 holds 0, 2 holds 1\)"
    ),
    Wrong(
        "WrongLayer",
        "attention_kv_arrives",
        r"layers\.0\.self_attn\.attn holds rows of model\.layers\.1\.self_attn\.attn",
    ),
    Wrong("SwapsPlanes", "attention_kv_arrives", "K and V are exchanged"),
    Wrong("CountsTokens", "attention_kv_arrives", "the store takes one prompt for another", "n55 reused"),
    Wrong("FirstBlockOnly", "attention_kv_arrives", "rows of another request", "two_at_once"),
    Wrong(
        "OverwritesHits",
        "rest_of_d_pool_is_unchanged",
        r"wrote outside its own blocks: block \d+ holds tokens 0-15",
        "hit1",
    ),
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_a_wrong_store_fails_in_one_sentence(run_cases: Callable[..., Said], wrong: Wrong) -> None:
    said = run_cases(wrong.name, wrong.variants)
    assert {word.partition("[")[0] for word in said.failed} == {wrong.fails}
    assert re.search(wrong.says, next(iter(said.failed.values())).diagnosis)


def test_vllms_example_needs_nothing_but_its_name(run_cases: Callable[..., Said]) -> None:
    said = run_cases("ExampleConnector", "n17 n55 hit1")
    assert set(said.failed) == {"d_computes_only_missing_tokens[n17]", "rest_of_d_pool_is_unchanged[hit1]"}
    assert "attention_kv_arrives[n55]" in said.passed and said.moved


def test_a_family_that_vllm_does_not_start_without_hma(run_cases: Callable[..., Said]) -> None:
    said = run_cases("ExampleConnector", cell="kimi_linear_48b")
    assert (said.passed, said.failed, said.blocked) == (set(), {}, {})
    (reason,) = set(said.declined.values())
    assert reason.startswith(
        "ExampleConnector does not inherit SupportsHMA, and without it vLLM starts no model with states: ValueError: "
    )


def test_what_needs_a_gpu_is_blocked_with_the_reason(run_cases: Callable[..., Said]) -> None:
    said = run_cases("OffloadingConnector")
    assert (said.passed, said.failed, said.declined) == (set(), {}, {})
    (reason,) = set(said.blocked.values())
    assert reason.startswith("OffloadingConnector does not start where vLLM runs on cpu: ")
    assert reason.endswith("CPU Offloading is currently only supported on CUDA-alike and XPU GPUs")


def test_engines_with_tiny_models_know_no_stores(run_cases: Callable[..., Said], zygote: Zygote) -> None:
    settings = Settings(connector="ExampleConnector", tier=("engine",), family=("llama",))
    facts = SubjectFacts(name="", module="", file="", supports_hma=False, vllm="0.32.0", device="cpu")
    bench = Bench(zygote.address, resolve(settings), settings, facts, lambda sentence: None)
    with pytest.raises(
        Blocked, match=r"^hand-over 'none' is declared, and the engine tier knows only 'handoff' so far$"
    ):
        bench.use(make_plan(settings, ()).asked[0].cell)


def test_what_is_known_of_vllms_own_stores() -> None:
    subject = resolve(Settings(connector="ExampleConnector"))
    assert (subject.profile, subject.handover) == ("store", "none")
    config = transfer_config(subject, "P", "cpu", folder="here")
    assert (config["kv_role"], config["kv_connector_extra_config"]) == (
        "kv_both",
        {"shared_storage_path": "here"},
    )
    theirs = '{"kv_role": "kv_consumer", "kv_connector_extra_config": {"shared_storage_path": "there"}}'
    config = transfer_config(
        resolve(Settings(connector="ExampleConnector", config=theirs)), "P", "cpu", folder="here"
    )
    assert (config["kv_role"], config["kv_connector_extra_config"]) == (
        "kv_consumer",
        {"shared_storage_path": "there"},
    )
    assert resolve(Settings(connector="NixlConnector")).profile == "p2p"


def test_a_store_hands_nothing_over() -> None:
    with pytest.raises(BadSetting, match="a store hands nothing over"):
        resolve(Settings(connector="stores:Right", profile="store", handover="handoff"))
