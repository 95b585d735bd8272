"""Levels of the verdict: which case counts for which, what each shows, and who notices an edit."""

from __future__ import annotations

import json

import msgspec
import pytest

from pytest_kvconform import cli, features, plan, rules
from pytest_kvconform.apply_declaration import Criteria
from pytest_kvconform.report import document
from pytest_kvconform.result import LEVELS, CaseResult, Outcome, last_level
from pytest_kvconform.settings import Settings
from pytest_kvconform.verdict import decide_verdict

from .test_verdict import result

SUPPORTED = dict.fromkeys(features.load(), "")


def words(results, **more) -> dict[str, str]:
    return {one.name: one.word for one in decide_verdict(results, **more).levels}


def of(level: str, outcome: str = "PASS", **more) -> CaseResult:
    return msgspec.structs.replace(result(Outcome(outcome), **more), level=level)


# ---- which case counts for which level -------------------------------------------------------------------


def test_every_rule_and_every_feature_is_in_one_level():
    assert {rule.level for rule in rules.load().values()} == {"core", "hybrid", "resilient", "accurate"}
    assert {feature.level for feature in features.load().values()} == set(LEVELS) - {"accurate"}


@pytest.mark.parametrize("level", ["", "bytes"])
def test_a_rule_without_a_level_is_a_defect_of_the_suite(tmp_path, level):
    text = 'sentence = "S."\nstrength = "SHOULD"\nsince = "0.9"\nsource = "s"\ndone = "D."\n'
    (tmp_path / "a.toml").write_text(f"[KV-A-001]\n{text}" + (f'level = "{level}"' if level else ""))
    with pytest.raises(rules.BadRules, match="level"):
        rules.load(tmp_path)


def test_the_last_level_counts():
    assert last_level(["core"]) == "core"
    assert last_level(["heterogeneous", "core", "hybrid"]) == "heterogeneous"
    assert last_level(["resilient", "heterogeneous"]) == "resilient"
    assert last_level(reversed(LEVELS)) == "accurate"


def test_levels_of_cases_of_the_suite():
    """A rule about bytes is in four levels, by cell and variant. A rule about faults is in one."""
    planned = plan.make_plan(Settings(matrix="full", rule=("KV-BYTES-001", "KV-FAIL-001")), ()).selected
    levels, known = {one.id: one.level for one in planned}, rules.load()
    case = "kv::bytes/pool::attention_kv_arrives"
    assert levels[f"{case}[llama3_1_8b-P1D1.b16-n17]"] == "core"
    assert levels[f"{case}[gemma3_1b-P1D1.b16-n17]"] == "hybrid"
    assert levels[f"{case}[gemma3_1b-P1D2.b16-n17]"] == "heterogeneous"
    assert levels[f"{case}[llama3_1_8b-P1D2.b16-n17]"] == "heterogeneous"
    faults = "kv::bytes/transport_faults::attention_kv_arrives[llama3_1_8b-P1D1.b16"
    assert (levels[f"{faults}-slow]"], levels[f"{faults}-failed]"]) == ("core", "resilient")
    assert {one.level for one in planned if one.case.rule == "KV-FAIL-001"} == {"resilient"}
    assert {known[name].level for name in ("KV-FAIL-002", "KV-FAIL-007")} == {"core"}  # slow is no fault


# ---- the verdict of each level ---------------------------------------------------------------------------


def test_a_resilient_violation_leaves_core_conforming(kv):
    run = kv(deeds={"window*": "violate"})
    assert (run.code, run.word) == (1, "VIOLATES")
    assert "level core           CONFORMS  3✓" in run.lines
    assert "level resilient      VIOLATES  2✗" in run.lines
    assert {one["name"]: one["word"] for one in run.report["verdict"]["levels"]} == {
        "core": "CONFORMS",
        "hybrid": "CONFORMS",
        "heterogeneous": "CONFORMS",
        "resilient": "VIOLATES",
        "accurate": "NOT-RUN",
    }


@pytest.mark.parametrize(
    ("outcome", "word"),
    [("FAIL", "VIOLATES"), ("HARNESS", "HARNESS"), ("BLOCKED", "INCOMPLETE"), ("KNOWN", "CONFORMS-EXCEPT")],
)
@pytest.mark.parametrize("level", LEVELS)
def test_an_outcome_counts_for_its_level_and_for_the_run(level, outcome, word):
    results = [*map(of, LEVELS), of(level, outcome)]
    assert decide_verdict(results).word == word
    assert words(results) == {**dict.fromkeys(LEVELS, "CONFORMS"), level: word}


def test_a_level_without_a_case_that_applies():
    assert words([of("core"), of("hybrid", "NOT-APPLICABLE"), of("hybrid", "NOT-APPLICABLE")]) == {
        **dict.fromkeys(LEVELS, "NOT-RUN"),
        "core": "CONFORMS",
        "hybrid": "NOT-APPLICABLE",
    }


def test_each_level_needs_moved_bytes_of_its_own():
    assert words([of("core"), of("hybrid", moved=0)])["hybrid"] == "INCOMPLETE"


def test_a_level_whose_hand_overs_did_not_apply_needs_no_moved_bytes():
    """A store may support no fault that the tiers with bytes inject, and survive those of the others."""
    asked = of("resilient", module="protocol/params", moved=0)
    assert words([of("core"), asked, of("resilient", "NOT-APPLICABLE")])["resilient"] == "CONFORMS"
    assert words([of("core"), asked, of("resilient", moved=0)])["resilient"] == "INCOMPLETE"


def test_a_feature_of_another_suite_has_no_level():
    declared = SUPPORTED | {"telepathy": ""}
    assert words([of("core")], criteria=Criteria(features=declared))["core"] == "CONFORMS"


def test_a_selected_case_without_a_result_counts_for_every_level_that_ran():
    one = of("core")
    found = words([one, of("hybrid", "FAIL")], expected=[one.id, "kv::engine/bytes::lost[llama-P1D1]"])
    assert (found["core"], found["hybrid"], found["accurate"]) == ("INCOMPLETE", "VIOLATES", "NOT-RUN")


def test_a_trouble_counts_for_every_level_that_ran():
    found = words([of("core"), of("hybrid")], troubles=["process 17 would not end"])
    assert (found["core"], found["hybrid"], found["accurate"]) == ("HARNESS", "HARNESS", "NOT-RUN")


def test_a_feature_that_is_not_declared_counts_where_a_case_needs_it():
    declared = {name: "" for name in SUPPORTED if name != "mla"}
    results = [of("core", features=("mla",)), of("hybrid", features=("sliding-window",))]
    found = words(results, criteria=Criteria(features=declared))
    assert (found["core"], found["hybrid"]) == ("INCOMPLETE", "CONFORMS")


def test_a_feature_that_no_case_could_test_counts_for_its_own_level():
    untested = {"features": ("abort",), "outcome": "NOT-APPLICABLE"}
    results = [of("core"), of("core", **untested), of("resilient"), of("resilient", **untested)]
    found = words(results, criteria=Criteria(features=SUPPORTED))
    assert (found["core"], found["resilient"]) == ("INCOMPLETE", "CONFORMS")


def test_a_claim_that_leaves_cases_out_has_no_level():
    criteria = Criteria(features=SUPPORTED, claim=True, left_out=1)
    assert words([of("core")], criteria=criteria)["core"] == "INCOMPLETE"


# ---- verify ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda report: report["verdict"]["levels"][3].update(word="CONFORMS"),
            "verdict.levels of the report",
        ),
        (lambda report: report["verdict"]["levels"][0].update(counts={"PASS": 9}), "verdict.levels of the"),
        (lambda report: report["verdict"]["levels"].pop(), "verdict.levels of the report does not follow"),
        (lambda report: report["verdict"].pop("levels"), "verdict.levels of the report does not follow"),
        (
            lambda report: one(report, "window[gemma3-P1D1]").update(level="hybrid"),
            "window[gemma3-P1D1]: level",
        ),
        (lambda report: one(report, "window[gemma3-P1D1]").pop("level"), "window[gemma3-P1D1]: level of the"),
    ],
)
def test_verify_sees_a_level_that_was_edited(kv, capsys, change, says):
    path = kv(deeds={"window*": "violate"}).path
    assert cli.main(["verify", str(path)]) == 0
    raw = json.loads(path.read_bytes())
    change(raw)
    path.write_text(json.dumps(raw))
    capsys.readouterr()
    assert cli.main(["verify", str(path)]) == 1
    assert says in capsys.readouterr().out


def one(report: dict, name: str) -> dict:
    return next(result for result in report["results"] if result["id"].endswith(name))


def test_a_report_of_a_suite_without_levels_is_verified(kv, capsys):
    path = kv().path
    raw = json.loads(path.read_bytes())
    raw["suite"] = "2026.1"
    del raw["verdict"]["levels"], raw["day"], raw["digest"], raw["manifest"], raw["commits"]
    for result_ in raw["results"]:
        del result_["level"]
    for row in raw["verdict"]["features"]:  # such a suite did not ask why no case looked at a feature
        row["observed"] = {"not selected": "not looked at"}.get(row["observed"], row["observed"])
    path.write_text(json.dumps(raw))
    assert document.read(path).verdict.levels == ()
    assert cli.main(["verify", str(path)]) == 0


# ---- what a person asks ----------------------------------------------------------------------------------


def test_levels_are_listed(capsys):
    assert cli.main(["list", "levels"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(LEVELS)
    assert cli.main(["explain", "KV-LEASE-001"]) == 0
    assert ", level resilient" in capsys.readouterr().out
