"""`kvconform verify` finds edits of a report, also where all that follows from the edit was recomputed."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_kvconform import cli
from pytest_kvconform.apply_declaration import apply_again
from pytest_kvconform.report import consistency, document, older
from pytest_kvconform.report.digest import digest
from pytest_kvconform.result import CaseResult, Cell, Finding, Outcome
from pytest_kvconform.settings import Settings
from pytest_kvconform.subject import Subject
from tests.small_suite.runs import TODAY, declare, impossible

YESTERDAY, TOMORROW = (TODAY + datetime.timedelta(days=days) for days in (-1, 1))
UNEQUAL = {"tp-heterogeneous": "one size only"}
KNOWN = """[[known]]
case = "kv::engine/bytes::window[gemma3-*]"
issue = "https://example.org/issues/57"
reason = "the first key is lost"
expires = {}
vllm = "{}"
"""


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a report, and make of it what the suite itself would make of the change."""
    raw = json.loads(path.read_bytes())
    change(raw)
    report = msgspec.convert(raw, document.Report)
    results = tuple(apply_again(result, document.criteria_of(report)) for result in report.results)
    report = msgspec.structs.replace(report, results=results)
    path.write_bytes(
        document.encode(msgspec.structs.replace(report, verdict=document.recompute_verdict(report)))
    )


def seal(path: Path, raw: dict[str, Any]) -> None:
    """Write a report with the digest that it would have, so that only what does not follow is found."""
    path.write_text(json.dumps(raw | {"digest": digest(raw)}))


def verified(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    capsys.readouterr()
    code = cli.main(["verify", str(path)])
    return code, capsys.readouterr().out.splitlines()


def one(report: dict[str, Any], name: str) -> dict[str, Any]:
    [found] = [result for result in report["results"] if result["id"].endswith(name)]
    return found


# ---- known failures ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expires", "versions", "change", "says"),
    [
        (
            YESTERDAY,
            ">=0.1",
            {"state": "open"},
            "known[0] is open in the report, but its last day and its versions of vLLM make it expired",
        ),
        (
            TODAY,
            "<0.1",
            {"state": "open"},
            "known[0] is open in the report, but its last day and its versions of vLLM make it other-vllm",
        ),
        (
            TODAY,
            ">=0.1",
            {"state": "expired"},
            "known[0] is expired in the report, but its last day and its versions of vLLM make it open",
        ),
        (
            YESTERDAY,
            ">=0.1",
            {"state": "open", "day": None},
            f"known[0] was applied on no day, but today is {TODAY}",
        ),
        (
            TOMORROW,
            ">=0.1",
            {"day": "2999-01-01"},
            f"known[0] was applied on 2999-01-01, but today is {TODAY}",
        ),
    ],
)
def test_the_state_of_a_known_failure(kv, pytester, capsys, expires, versions, change, says):
    declare(pytester.path / "known.toml", {}, KNOWN.format(expires, versions))
    path = kv("--kv-declare=known.toml", undeclared=True, deeds={"window*": "violate"}).path
    assert verified(path, capsys)[0] == 0
    edit(path, lambda report: report["subject"]["known"][0].update(change))
    assert verified(path, capsys) == (1, [f"subject.{says}"])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda subject: subject["known"][0].update(expires="2999-01-01"), "known: the entries differ from"),
        (lambda subject: subject["known"][0].update(case="kv::*"), "known: the entries differ from"),
        (lambda subject: subject.update(known=[]), "known: the entries differ from"),
        (lambda subject: subject["features"].update(mla="not yet"), "features: mla differs from"),
        (lambda subject: subject["features"].pop("abort"), "features: abort differs from"),
    ],
)
def test_settings_of_pyproject_are_in_the_report_twice(kv, pytester, capsys, change, says):
    text = declare(pytester.path / "d.toml", {}, KNOWN.format(TODAY, ">=0.1")).read_text()
    pytester.makepyprojecttoml(
        text.replace("[[known]]", "[[tool.kvconform.known]]").replace(
            "[features]", "[tool.kvconform.features]"
        )
    )
    path = kv(undeclared=True, deeds={"window*": "violate"}).path
    assert verified(path, capsys)[0] == 0
    edit(path, lambda report: change(report["subject"]))
    assert verified(path, capsys) == (1, [f"subject.{says} the settings of the report"])


@pytest.mark.parametrize(
    ("written", "undeclared"),
    [("", True), ("profile = 'store'", True), ("profile = 'store'", False)],  # False: --kv-declare, too
)
def test_the_profile_of_the_settings_is_that_of_the_subject(kv, pytester, capsys, written, undeclared):
    pytester.makepyprojecttoml(f"[tool.kvconform]\n{written}")
    path = kv(undeclared=undeclared, unsupported=impossible("store")).path
    assert verified(path, capsys)[0] == 0
    edit(path, lambda report: report["subject"].update(profile="same-engine"))
    assert verified(path, capsys) == (1, ["subject.profile differs from the settings of the report"])


def test_the_profile_of_a_declared_file_is_not_in_the_settings(kv, pytester, capsys):
    declare(pytester.path / "d.toml", impossible("same-engine"), "profile = 'same-engine'")
    path = kv("--kv-declare=d.toml", undeclared=True).path
    assert json.loads(path.read_bytes())["subject"]["profile"] == "same-engine"
    assert verified(path, capsys)[0] == 0


# ---- results -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("features", ["tp-heterogeneous"]),
        ("features", []),
        ("rule", "KV-BYTES-001"),
        ("cell", {"family": "llama", "topology": "P1D1"}),
    ],
)
def test_facts_of_a_case_in_a_report_are_checked(kv, capsys, key, value):
    path = kv(unsupported=UNEQUAL, deeds={"window(gemma3-P1D1*": "violate"}).path
    edit(path, lambda report: one(report, "window[gemma3-P1D1]").update({key: value}))
    assert verified(path, capsys) == (
        1,
        [f"kv::engine/bytes::window[gemma3-P1D1]: {key} of the result is not {key} of the case"],
    )


def test_a_failure_that_is_called_a_refusal(kv, capsys):
    path = kv(unsupported=UNEQUAL, deeds={"window(gemma3-P1D2*": "violate"}).path
    edit(path, lambda report: one(report, "window[gemma3-P1D2]").update(refused=True))
    assert document.read(path).verdict.word == "CONFORMS"
    said = (
        "kv::engine/bytes::window[gemma3-P1D2] is a refusal in the report, "
        "but its finding makes it no refusal"
    )
    assert verified(path, capsys) == (1, [said])


def test_a_refusal_that_is_called_none(kv, capsys):
    path = kv(unsupported=UNEQUAL, deeds={"window(gemma3-P1D2*": "refuse"}).path
    assert verified(path, capsys)[0] == 0
    edit(path, lambda report: one(report, "window[gemma3-P1D2]").update(refused=False))
    assert verified(path, capsys)[1][0].endswith(
        "is no refusal in the report, but its finding makes it a refusal"
    )


@pytest.mark.parametrize("outcome", ["PASS", "HARNESS"])
def test_only_what_did_not_pass_can_be_a_refusal(kv, capsys, outcome):
    path = kv(deeds={"window(gemma3-P1D2*": {"PASS": "pass", "HARNESS": "harness"}[outcome]}).path
    edit(path, lambda report: one(report, "window[gemma3-P1D2]").update(refused=True))
    assert verified(path, capsys)[0] == 1


@pytest.mark.parametrize("declined", ["", "ValueError: one size only"])
@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("other", ["", "D did not start: "])
def test_a_blocked_case_names_the_case_that_it_depends_on(declined: str, called: bool, other: str) -> None:
    """`other`: a later start failed, in a way of its own; the report may be true."""
    cell, sentence = Cell("llama", "P1D1"), "P did not start: ValueError: one size only"
    start = CaseResult(
        id="kv::engine/start::engines_start[llama-P1D1]",
        rule="KV-START-001",
        outcome=Outcome.FAIL,
        cell=cell,
        finding=Finding(rule="KV-START-001", happened=sentence, declined=declined),
        refused=bool(declined),
    )
    stands = CaseResult(
        id="kv::engine/bytes::arrive[llama-P1D1-n64]",
        rule="KV-BYTES-001",
        outcome=Outcome.BLOCKED,
        cell=cell,
        reason=f"depends on {start.id}: {other}{sentence}",
        depends_on=start.id,
        refused=called,
    )
    ids = [start.id, stands.id]
    report = document.make_report(
        Settings(connector="m:C"),
        Subject(spec="m:C", connector="C", module="m"),
        None,
        [start, stands],
        ids,
        ids,
        (),
    )
    assert len(consistency.inconsistencies(report)) == (not other and called != bool(declined))


def test_what_the_verdict_says_besides_its_word_is_compared_too(kv, capsys):
    path = kv().path
    raw = json.loads(path.read_bytes())
    raw["verdict"]["features"][0]["observed"] = "fails"
    seal(path, raw)
    assert verified(path, capsys) == (1, ["verdict.features of the report does not follow from its results"])


def test_declarations_of_another_suite_may_have_been_others(kv, pytester, capsys):
    text = declare(pytester.path / "d.toml", {}).read_text()
    pytester.makepyprojecttoml(text.replace("[features]", "[tool.kvconform.features]"))
    path = kv(undeclared=True).path
    edit(path, lambda report: report["subject"]["features"].update(abort="never tried"))
    assert verified(path, capsys)[0] == 1
    edit(path, lambda report: report.update(suite="2026.1"))
    assert verified(path, capsys)[0] == 0


# ---- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["seed", "min_load", "remembers"])
def test_a_setting_that_came_later_is_not_missed(setting, kv, capsys):
    path = kv().path
    raw = json.loads(path.read_bytes())
    del raw["settings"][setting]
    seal(path, raw)
    assert verified(path, capsys) == (
        1,
        [f"settings: {setting} is not both in the settings and in the manifest"],
    )
    del raw["manifest"]["settings"][setting]
    seal(path, raw | {"suite": "2026.1", "commits": {}})
    assert verified(path, capsys)[0] == 0


def test_malformed_settings(kv, capsys):
    path = kv().path
    good = path.read_text()
    for change, says in (
        (
            lambda settings: settings["matrix"].update(value="largest"),
            "$.settings.matrix: expected quick or full or nightly, got 'largest'",
        ),
        (lambda settings: settings.pop("declare"), "$.settings: declare is missing"),
    ):
        raw = json.loads(good)
        change(raw["settings"])
        path.write_text(json.dumps(raw))
        assert cli.main(["verify", str(path)]) == 2
        assert says in capsys.readouterr().err


@pytest.mark.parametrize("of_result", [True, False])
def test_a_feature_that_the_suite_does_not_know(of_result, kv, capsys):
    path = kv(deeds={"window*": "violate"}).path
    raw = json.loads(path.read_bytes())
    if of_result:
        one(raw, "window[gemma3-P1D1]")["features"].append("telepathy")
    else:
        raw["subject"]["features"]["telepathy"] = ""
    seal(path, raw)
    capsys.readouterr()
    assert cli.main(["verify", str(path)]) == 2
    assert capsys.readouterr().err.endswith("report.json: the suite has no feature 'telepathy'\n")


@pytest.mark.parametrize(
    ("reason", "depends_on"),
    [
        ("depends on kv::a/b::c[llama-P1D1-n1]: it died", "kv::a/b::c[llama-P1D1-n1]"),
        ("depends on kv::a/b::c: it died", "kv::a/b::c"),
        ("depends on KV-TURN-002: nothing came", "KV-TURN-002"),
        ("mla is declared unsupported (why), and the case depends on kv::a/b::c[x]", "kv::a/b::c[x]"),
        ("an engine of llama-P1D1 failed before: it died", "llama-P1D1"),
        ("no GPU here", ""),
    ],
)
def test_what_an_earlier_suite_wrote_into_the_reason_alone_is_read(reason: str, depends_on: str) -> None:
    blocked = CaseResult(id="kv::a/b::d", rule="KV-A-001", outcome=Outcome.BLOCKED, reason=reason)
    assert older.with_fields(blocked).depends_on == depends_on
    passed = msgspec.structs.replace(blocked, outcome=Outcome.PASS)
    assert older.with_fields(passed) == passed
