"""What a connector declares, and what the suite makes of it."""

from __future__ import annotations

import datetime
import importlib.util
import re
import tomllib
from pathlib import Path

import msgspec
import pytest

from pytest_kvconform import cli, declaration, features, subject
from pytest_kvconform.apply_declaration import Criteria, apply_declaration, feature_results
from pytest_kvconform.result import CaseResult, Evidence, Finding, Outcome
from pytest_kvconform.settings import BadSetting, Settings
from pytest_kvconform.verdict import decide_verdict
from tests.small_suite.runs import declare

ALL = dict.fromkeys(features.load(), "")
WHY = "same size on both sides only"
UNEQUAL = {"tp-heterogeneous": WHY}


def row_of(run, name: str) -> dict:
    [row] = [row for row in run.report["verdict"]["features"] if row["name"] == name]
    return row


# ---- declared and observed -----------------------------------------------------------------------------------------------------


def test_what_is_unsupported_and_refused_is_not_applicable(kv, capsys):
    run = kv(unsupported=UNEQUAL, deeds={"arrive(*P1D2-n95*": "stands on a refusal", "*P1D2*": "refuse"})
    assert (run.code, run.word) == (0, "CONFORMS")
    refused = {name: outcome for name, outcome in run.outcomes.items() if "P1D2" in name}
    assert len(refused) == 5
    assert set(refused.values()) == {"NOT-APPLICABLE"}
    row = row_of(run, "tp-heterogeneous")
    assert (row["declared"], row["observed"], row["reason"], row["rule"], row["cases"]) == (
        "unsupported",
        "refused",
        WHY,
        "",
        5,
    )
    assert row_of(run, "sliding-window")["observed"] == "works"
    assert any(
        line.split()[:3] == ["unsupported", "refused", "1:"] and line.endswith(" tp-heterogeneous")
        for line in run.lines
    )
    [result] = [result for result in run.report["results"] if result["id"].endswith("window[gemma3-P1D2]")]
    assert result["case_outcome"] == "FAIL"
    assert result["reason"].startswith(
        f"tp-heterogeneous is declared unsupported ({WHY}), and was refused: P did not start for"
    )
    capsys.readouterr()
    assert cli.main(["verify", str(run.path)]) == 0


def test_what_is_unsupported_and_works_is_a_warning(kv):
    run = kv(unsupported=UNEQUAL)
    assert (run.code, run.word) == (0, "CONFORMS")
    assert {outcome for name, outcome in run.outcomes.items() if "P1D2" in name} == {"NOT-APPLICABLE"}
    hidden = f"hidden ability: tp-heterogeneous is declared unsupported ({WHY}), and it works"
    assert (row_of(run, "tp-heterogeneous")["rule"], row_of(run, "tp-heterogeneous")["sentence"]) == (
        "KV-DECLARE-002",
        hidden,
    )
    assert any(line.startswith(f"  KV-DECLARE-002: {hidden}"[:70]) for line in run.lines)


def test_what_is_unsupported_and_works_fails_a_claim(kv):
    run = kv("--kv-claim", unsupported=UNEQUAL)
    assert (run.code, run.word) == (1, "VIOLATES")
    failed = {name for name, outcome in run.outcomes.items() if outcome == "FAIL"}
    assert failed == {
        name for name in run.outcomes if "P1D2" in name and "hello" not in name
    }  # hello moves nothing, and shows nothing
    assert "4 cases break the rule KV-DECLARE-002" in run.text


@pytest.mark.parametrize("deed", ["violate", "violate otherwise"])
def test_what_is_unsupported_and_goes_wrong_fails(kv, capsys, deed):
    run = kv(unsupported=UNEQUAL, deeds={"arrive(*P1D2-n95*": deed, "*P1D2*": "refuse"})
    assert (run.code, run.word) == (1, "VIOLATES")
    assert [name for name, outcome in run.outcomes.items() if outcome == "FAIL"] == [
        "engine/bytes::arrive[gemma3-P1D2-n95]"
    ]
    assert "VIOLATES: 1 case breaks the rule KV-DECLARE-003" in run.lines
    assert row_of(run, "tp-heterogeneous")["rule"] == "KV-DECLARE-003"
    assert any(line.startswith("happened   tp-heterogeneous is declared unsupported") for line in run.lines)
    assert any(
        "FAILED kv::engine/bytes::arrive[gemma3-P1D2-n95] - KV-DECLARE-003" in line for line in run.lines
    )
    capsys.readouterr()
    assert cli.main(["verify", str(run.path)]) == 0


def test_what_is_supported_and_refused_fails(kv):
    run = kv(deeds={"*P1D2*": "refuse"})
    assert (run.code, run.word) == (1, "VIOLATES")
    assert {outcome for name, outcome in run.outcomes.items() if "P1D2" in name} == {"FAIL"}
    assert "VIOLATES: 5 cases break 3 rules: KV-ANSWER-001, KV-BYTES-001, KV-BYTES-002" in run.lines
    row = row_of(run, "tp-heterogeneous")
    assert (row["declared"], row["observed"], row["rule"]) == ("supported", "refused", "KV-DECLARE-001")
    assert any(
        line.startswith("  KV-DECLARE-001: tp-heterogeneous is declared as supported; it was refused")
        for line in run.lines
    )
    assert row_of(run, "sliding-window")["rule"] == ""  # it works where the sizes are equal


def test_what_could_not_run_shows_nothing_about_a_declaration(kv):
    run = kv(unsupported=UNEQUAL, deeds={"*P1D2*": "blocked"})
    assert (run.code, run.word) == (10, "INCOMPLETE")
    assert {outcome for name, outcome in run.outcomes.items() if "P1D2" in name} == {"BLOCKED"}
    assert row_of(run, "tp-heterogeneous")["observed"] == "blocked"


def test_everything_unsupported_is_not_green(kv):
    run = kv(unsupported=dict.fromkeys(features.load(), "not yet"), deeds={"*": "refuse"})
    assert (run.code, run.word) == (10, "INCOMPLETE")
    assert any("no case passed" in line for line in run.lines)


# ---- what is missing -----------------------------------------------------------------------------------------------------------


def block_of(run) -> str:
    start = next(
        n
        for n, line in enumerate(run.lines)
        if line.startswith("=") and "to declare in pyproject.toml" in line
    )
    end = next(n for n, line in enumerate(run.lines) if n > start and line.startswith("="))
    return "\n".join(run.lines[start + 1 : end])


def test_without_a_declaration_everything_runs_and_the_block_to_paste_is_printed(kv, pytester):
    run = kv(undeclared=True)
    assert (run.code, run.word) == (10, "INCOMPLETE")
    assert set(run.outcomes.values()) == {"PASS"}
    assert len(run.outcomes) == 13
    assert (
        "INCOMPLETE: 19 features are not declared (full-attention, mla, sliding-window, mamba-state, ...)"
        in run.text
    )
    assert set(tomllib.loads(block_of(run))["tool"]["kvconform"]["features"]) == set(features.load())
    pytester.makepyprojecttoml(block_of(run))
    run = kv(undeclared=True)
    assert (run.code, run.word) == (0, "CONFORMS")
    assert "to declare" not in run.text
    assert run.report["subject"]["features"] == ALL


def test_what_is_missing_is_added_to_the_table(kv, pytester):
    pytester.makepyprojecttoml(
        "[tool.kvconform.features]\nmla = true\ntp-heterogeneous = {unsupported = 'later'}"
    )
    run = kv(undeclared=True)
    assert run.code == 10
    assert "17 features are not declared" in run.text
    lines = block_of(run).splitlines()
    assert lines[0] == "# add to [tool.kvconform.features]"
    assert not any(line.startswith(("mla ", "tp-heterogeneous ", "[")) for line in lines)
    pytester.makepyprojecttoml((pytester.path / "pyproject.toml").read_text() + "\n" + "\n".join(lines))
    assert kv(undeclared=True).code == 0


def test_a_violation_outranks_a_missing_declaration(kv):
    assert kv(undeclared=True, deeds={"window*": "violate"}).word == "VIOLATES"


def test_a_table_belongs_to_the_connector_that_it_names(kv, pytester):
    pytester.makepyprojecttoml(
        "[tool.kvconform]\nconnector = 'theirs:Other'\nhandover = 'none'\n[tool.kvconform.features]\nmla = true"
    )
    run = kv(undeclared=True)
    assert "19 features are not declared" in run.text
    assert run.report["subject"]["handover"] == "handoff"


# ---- reading -------------------------------------------------------------------------------------------------------------------


def read(tmp_path, text: str) -> declaration.Declaration:
    (tmp_path / "d.toml").write_text(text)
    return declaration.read(declaration.read_file(tmp_path / "d.toml", "d.toml"), "d.toml")


def test_a_file(tmp_path):
    said = read(tmp_path, "profile = 'store'\n[features]\nmla = true\nabort = {unsupported = ' not  yet '}")
    assert (said.profile, said.features, said.known) == ("store", {"mla": "", "abort": "not yet"}, ())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[feature]\nmla = true", "d.toml: feature: there is no such key (did you mean features?)"),
        (
            "[features]\nmla-and-gqo = true",
            "d.toml: features.mla-and-gqo: there is no such feature (did you mean mla-and-gqa?)",
        ),
        (
            "[features]\nzzz = true",
            "d.toml: features.zzz: there is no such feature; there are full-attention, mla, ",
        ),
        (
            "[features]\nmla = 'yes'",
            "d.toml: features.mla: expected true or { unsupported = \"why\" }, got 'yes'",
        ),
        ("[features]\nmla = false", 'features.mla: expected true or { unsupported = "why" }, got False'),
        ("[features]\nmla = 1", 'features.mla: expected true or { unsupported = "why" }, got 1'),
        ("[features]\nmla = {unsupported = ' '}", "features.mla: expected true or"),
        (
            "[features]\nmla = {unsuported = 'a'}",
            "d.toml: features.mla.unsuported: there is no such key (did you mean unsupported?)",
        ),
        ("features = 3", "d.toml: features: expected a table of features, got 3"),
        ("profile = 'stor'", "d.toml: profile: expected p2p or store, got 'stor' (did you mean store?)"),
        ("handover = ['none']", "d.toml: handover: expected handoff or rendezvous or none, got ['none']"),
        ("known = 3", "d.toml: known: expected a list of tables ([[known]]), got 3"),
        ("= 3", "d.toml: "),
        ("a = " + "[" * 5000, "d.toml: "),
    ],
)
def test_a_mistake_names_the_key(tmp_path, text, says):
    with pytest.raises(BadSetting) as caught:
        read(tmp_path, text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_mistake_in_pyproject_is_one_sentence(kv, pytester):
    pytester.makepyprojecttoml("[tool.kvconform.features]\nslidng-window = true")
    run = kv(undeclared=True)
    assert run.code == 4
    says = "pyproject.toml: tool.kvconform.features.slidng-window: there is no such feature (did you mean sliding-window?)"
    assert f"ERROR: {says}" in run.text
    assert "Traceback" not in run.text


# ---- rows of the table ---------------------------------------------------------------------------------------------------------


def result(outcome: Outcome, *needs: str, refused: bool = False, moved: int = 1) -> CaseResult:
    given = {
        Outcome.PASS: {"evidence": Evidence(looked_at=1, unit="bytes", bytes_moved=moved)},
        Outcome.FAIL: {"finding": Finding(rule="KV-A-001", happened="it happened")},
    }
    name = f"kv::engine/bytes::case[llama-P1D1-{needs}-{outcome}-{refused}]"
    return CaseResult(
        id=name,
        rule="KV-A-001",
        outcome=outcome,
        features=needs,
        refused=refused,
        **given.get(outcome, {"reason": "why"}),
    )


PASS, FAIL, BLOCKED = Outcome.PASS, Outcome.FAIL, Outcome.BLOCKED


@pytest.mark.parametrize(
    ("why", "results", "observed", "rule"),
    [
        ("", [result(PASS, "mla")], "works", ""),
        ("", [result(PASS, "mla"), result(FAIL, "mla", refused=True)], "works", ""),
        ("", [result(PASS, "mla"), result(FAIL, "mla")], "fails", ""),
        ("", [result(FAIL, "mla", refused=True)], "refused", "KV-DECLARE-001"),
        ("", [result(BLOCKED, "mla", refused=True)], "refused", "KV-DECLARE-001"),
        ("", [result(BLOCKED, "mla")], "blocked", ""),
        ("", [result(PASS, "mla", moved=0)], "not looked at", ""),
        ("", [result(PASS, "abort", moved=0)], "not looked at", ""),
        ("", [], "not looked at", ""),
        ("why", [result(FAIL, "mla", refused=True)], "refused", ""),
        ("why", [result(PASS, "mla")], "works", "KV-DECLARE-002"),
        ("why", [result(PASS, "mla", moved=0), result(FAIL, "mla", refused=True)], "refused", ""),
        ("why", [result(PASS, "mla"), result(FAIL, "mla")], "fails", "KV-DECLARE-003"),
        ("why", [], "not looked at", ""),
        (None, [result(PASS, "mla")], "works", ""),
    ],
)
def test_observed(why, results, observed, rule):
    criteria = Criteria(features=ALL | {"mla": why} if why is not None else {})
    [row] = [
        row
        for row in feature_results([apply_declaration(one, criteria) for one in results], criteria)
        if row.name == "mla"
    ]
    assert (row.observed, row.rule) == (observed, rule)
    assert row.declared == {"": "supported", None: "undeclared"}.get(why, "unsupported")


def test_an_ability_of_the_case_itself_needs_no_bytes():
    criteria = Criteria(features=ALL | {"abort": "why"})
    [row] = [
        row
        for row in feature_results([result(PASS, "abort", "mla", moved=0)], criteria)
        if row.name == "abort"
    ]
    assert (row.observed, row.rule) == ("works", "KV-DECLARE-002")


def test_one_feature_is_not_blamed_for_another():
    criteria = Criteria(features=ALL | {"tp-heterogeneous": "why"})
    results = [result(FAIL, "mla", "tp-heterogeneous"), result(PASS, "mla")]
    rows = {
        row.name: row.observed
        for row in feature_results([apply_declaration(one, criteria) for one in results], criteria)
    }
    assert (rows["mla"], rows["tp-heterogeneous"]) == ("works", "fails")
    criteria = Criteria(features=ALL | {"tp-heterogeneous": "why", "layout-heterogeneous": "why"})
    results = [result(FAIL, "mla", "tp-heterogeneous", "layout-heterogeneous", refused=True)]
    rows = {
        row.name: row.observed
        for row in feature_results([apply_declaration(one, criteria) for one in results], criteria)
    }
    assert (rows["mla"], rows["tp-heterogeneous"], rows["layout-heterogeneous"]) == (
        "not looked at",
        "refused",
        "refused",
    )


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("outcome", list(Outcome))
@pytest.mark.parametrize("why", ["", "why"])
def test_settling_twice_changes_nothing(outcome, refused, why):
    entry = declaration.KnownFailure(
        case="kv::*", issue="https://e.org/1", expires=datetime.date(2100, 1, 1), reason="r"
    )
    for known in ((), (entry,)):
        for claim in (False, True):
            criteria = Criteria(features=ALL | {"mla": why}, known=known, claim=claim)
            once = apply_declaration(result(outcome, "mla", refused=refused), criteria)
            assert apply_declaration(once, criteria) == once
            verdict = decide_verdict([once], [once.id], (), criteria)
            assert verdict == decide_verdict([apply_declaration(once, criteria)], [once.id], (), criteria)
            assert verdict.counts == {once.outcome.value: 1}


# ---- declarations of ours ------------------------------------------------------------------------------------------------------

HERE = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM's source")


@HERE
def test_every_connector_of_vllm_has_a_declaration_of_ours():
    names = subject.registered()
    assert names is not None
    assert set(subject.bundled_declarations()) == set(names)


@pytest.mark.parametrize("name", sorted(subject.bundled_declarations()))
def test_a_declaration_of_ours_is_whole(name):
    known = subject.bundled_declarations()[name]
    assert set(declaration.read_features(known.features, name)) == set(features.load())
    text = (Path(subject.__file__).with_name("declarations") / f"{name}.toml").read_text()
    assert text.startswith("# vLLM 0.32, ")
    assert list(known.features) == list(features.load())
    assert (known.handover == "rendezvous") <= (known.profile == "p2p")
    assert msgspec.json.encode(known)


@HERE
@pytest.mark.parametrize("name", sorted(subject.bundled_declarations()))
def test_a_declaration_of_ours_names_files_of_vllm(name):
    folder = Path(importlib.util.find_spec("vllm").submodule_search_locations[0])
    text = (Path(subject.__file__).with_name("declarations") / f"{name}.toml").read_text()
    source = text.splitlines()[0].removeprefix("# vLLM 0.32, ")
    file = re.split("[:;,]", source)[0]
    assert (folder / file).exists(), file
    module = subject.registered()[name].replace(".", "/").removeprefix("vllm/")
    assert module.rpartition("/")[0] in source.replace("nixl/", "nixl") or module in source


def test_what_the_user_says_wins_over_ours(tmp_path, monkeypatch):
    monkeypatch.setattr(subject, "registered", lambda: {"NixlConnector": "m"})
    path = declare(tmp_path / "d.toml", {"mla": "mine"})
    path.write_text("[features]\nmla = { unsupported = 'mine' }")
    found = subject.resolve(Settings(connector="NixlConnector", declare=str(path)))
    assert found.features["mla"] == "mine"
    assert found.features["full-attention"] == ""
    assert set(found.features) == set(features.load())


MISSING = {
    "LMCacheConnectorV1": "LMCacheConnectorV1 needs the package lmcache, which is not installed here (pip install lmcache)",
    "MooncakeConnector": "MooncakeConnector needs the package mooncake, which is not installed here (pip install mooncake-transfer-engine)",
    "FlexKVConnectorV1": "FlexKVConnectorV1 needs the package flexkv, which is not installed here (FlexKV, by its own instructions)",
    "HF3FSKVConnector": "HF3FSKVConnector needs the package hf3fs_fuse, which is not installed here (the client of 3FS; without it",
    "MoRIIOConnector": "MoRIIOConnector needs the package mori, which is not installed here (MoRI, which is for ROCm)",
    "DecodeBenchConnector": "DecodeBenchConnector has no part in this suite: it fills D's cache with made-up values",
    "ExampleHiddenStatesConnector": "ExampleHiddenStatesConnector has no part in this suite: it saves the hidden states",
}


@pytest.mark.parametrize("name", MISSING)
def test_what_cannot_run_here_says_so_in_one_sentence(kv, monkeypatch, name):
    find = importlib.util.find_spec
    missing = ("lmcache", "mooncake", "flexkv", "hf3fs_fuse", "mori")
    monkeypatch.setattr(
        subject.importlib.util,
        "find_spec",
        lambda module, *rest: None if module in missing else find(module, *rest),
    )
    run = kv(f"--kv-connector={name}", plain=True, undeclared=True)
    assert (run.code, run.word) == (10, "INCOMPLETE")
    assert set(run.outcomes.values()) == {"BLOCKED"}
    assert any(
        line.startswith(f"INCOMPLETE: 13 of 13 cases could not run here: {MISSING[name]}")
        for line in run.lines
    ), run.text
    assert run.log == []  # nothing was started
