"""The closed list of features, and which cases require which of them."""

from __future__ import annotations

import pytest

from pytest_kvconform import features, plan
from pytest_kvconform.declaration import block_to_paste, undeclared
from pytest_kvconform.result import Cell
from pytest_kvconform.rigs.scenario import NEVER, STATUS, Faults, Prompt, Scenario, Transfer
from pytest_kvconform.settings import Settings

NAMES = (
    "full-attention mla sliding-window mamba-state mla-and-state mla-and-gqa prefix-hit "
    "state-prefix-hit tp-heterogeneous "
    "block-size-heterogeneous layout-heterogeneous speculative-draft load-failure-recompute "
    "load-failure-fail preemption abort lease "
    "peer-restart bidirectional multi-connector"
).split()
PROMPTS = (Prompt((5, 6, 7)),)


def test_the_list_is_closed():
    assert list(features.load()) == NAMES
    for name, feature in features.load().items():
        assert feature.meaning[-1] not in ".!", name
        assert set(feature.facts) <= features.CELL_FACTS | features.VARIANT_FACTS, name
        assert feature.facts or feature.rules, name


def test_every_glob_is_for_a_case_of_the_suite(monkeypatch):
    monkeypatch.setattr(plan, "version", lambda *names: "0.33.0")  # rules of the newest minor, too
    tiers = ("interface", "protocol", "bytes")
    planned = plan.make_plan(Settings(tier=tiers, matrix="full"), ()).selected
    for name, feature in features.load().items():
        assert all(any(features.matches(glob, one.case.rule) for one in planned) for glob in feature.rules), (
            name
        )
        assert all(any(features.matches(glob, one.id) for one in planned) for glob in feature.cases), name


def test_every_fact_is_asked_for():
    asked = {fact for feature in features.load().values() for fact in feature.facts}
    assert asked == features.CELL_FACTS | features.VARIANT_FACTS


@pytest.mark.parametrize(
    ("cell", "facts"),
    [
        (("llama", "P1D1"), "full-attention"),
        (("gemma3", "P1D2"), "full-attention sliding-window tp-differs"),
        (("gpt_oss", "P2D2"), "full-attention sliding-window"),
        (("qwen3_5", "P1D1"), "full-attention state"),
        (("kimi_linear", "P1D2"), "mla state tp-differs"),
        (("kimi_k2_5_eagle3", "P2D2"), "mla full-attention draft-model"),
        (("llama_mla_eagle3", "P1D2"), "mla full-attention draft-model tp-differs"),
        (("llama3_1_8b", "P1D1", "b16"), "full-attention"),
        (("llama3_1_8b", "P2D1", "b16x64"), "full-attention tp-differs block-size-differs"),
        (("llama3_1_8b", "P1D1", "hnd_nhd"), "full-attention layout-differs"),
        (("llama3_1_8b", "P1D1", "fp8"), "full-attention"),
        (("gemma3_1b", "P1D1", "b16"), "full-attention sliding-window"),
        (("deepseek_v3", "P1D1", "b16"), "mla"),
        (("kimi_linear_48b", "P1D1", "mla64"), "mla state"),
        (("kimi_k2_5_eagle3", "P2D2", "b16"), "mla full-attention draft-model"),
    ],
)
def test_facts_of_cells(cell, facts):
    assert features.cell_facts(Cell(*cell)) == set(facts.split())


@pytest.mark.parametrize(
    ("variant", "facts"),
    [
        (None, ""),
        ("n63", ""),
        (Scenario("n3", PROMPTS), ""),
        (Scenario("hit", (Prompt((5, 6, 7), warm=2),)), "prefix-hit"),
        (Scenario("abort_waiting", PROMPTS, abort="waiting"), "abort"),
        (Transfer("preempted", PROMPTS, preempt="P"), "preemption"),
        (Transfer("failed", PROMPTS, faults=(Faults(fail=STATUS),), fails=True), "failed-load-fail"),
        (
            Transfer("failed", PROMPTS, faults=(Faults(fail=STATUS),), fails=True, policy="recompute"),
            "failed-load-recompute",
        ),
        (Transfer("slow", PROMPTS, faults=(Faults(hold=3),), policy="recompute"), ""),
        (Transfer("not_notified", PROMPTS, faults=(Faults(notifications=NEVER),)), ""),
    ],
)
def test_facts_of_what_a_case_does(variant, facts):
    assert set(features.variant_facts(variant)) == set(facts.split())


def test_what_cases_of_the_suite_need():
    needs = {
        planned.id: features.required_features(planned)
        for planned in plan.make_plan(Settings(tier=("engine", "bytes")), ()).selected
    }
    assert needs["kv::engine/bytes::attention_kv_arrives[gemma3-P1D2-partial_hit]"] == (
        "full-attention",
        "sliding-window",
        "prefix-hit",
        "tp-heterogeneous",
    )
    assert needs["kv::bytes/transport_faults::every_request_ends[llama3_1_8b-P1D1.b16-failed]"] == (
        "full-attention",
        "load-failure-fail",
    )
    assert needs["kv::bytes/transport_faults::all_blocks_are_freed[llama3_1_8b-P1D1.b16-not_notified]"] == (
        "full-attention",
        "lease",
    )
    assert needs["kv::bytes/pool::attention_kv_arrives[qwen3_5_35b_a3b-P2D2.b16-hit1]"] == (
        "full-attention",
        "mamba-state",
        "prefix-hit",
        "state-prefix-hit",
    )
    assert all(needs.values())  # no case is about nothing


def test_a_feature_selects_the_cases_that_need_it():
    chosen = plan.make_plan(Settings(tier=("engine",), feature=("abort", "state-prefix-hit")), ()).selected
    assert {str(planned.variant) for planned in chosen} == {
        "abort_prefill",
        "abort_waiting",
        "abort_loading",
        "partial_hit",
        "second_turn",
        "full_hit",
    }
    hits = {planned.cell.family for planned in chosen if "hit" in str(planned.variant)}
    turns = {planned.cell.family for planned in chosen if str(planned.variant) == "second_turn"}
    assert hits == {"qwen3_5"}
    assert turns == {"qwen3_5", "kimi_linear"}


def test_a_declaration_need_not_name_an_optional_feature():
    optional = {name for name, one in features.load().items() if one.optional}
    assert optional == {"bidirectional"}
    declared = {name: "" for name in features.load() if name not in optional}
    assert undeclared(declared) == () and block_to_paste(declared) == ""
    del declared["abort"]
    assert undeclared(declared) == ("abort",)
    assert "bidirectional" in block_to_paste(declared)  # what has to be added anyhow is all that there is
