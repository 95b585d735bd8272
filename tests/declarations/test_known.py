"""Known failures need an issue and a last day, and a run always reports them."""

from __future__ import annotations

import datetime

import pytest

from pytest_kvconform import cli, declaration
from pytest_kvconform.declaration import KnownFailure, read_known
from pytest_kvconform.settings import BadSetting
from tests.small_suite.runs import TODAY, declare

ISSUE = "https://example.org/issues/57"
CASE = "kv::engine/bytes::window[gemma3-*]"


def entry(case: str = CASE, expires: datetime.date = TODAY, **more: str) -> str:
    """TOML of one entry."""
    rows = {"case": case, "issue": ISSUE, "reason": "the window's first key is lost", **more}
    return (
        "[[known]]\n"
        + "\n".join(f'{key} = "{value}"' for key, value in rows.items())
        + f"\nexpires = {expires}\n"
    )


@pytest.fixture
def known(kv, pytester):
    """known(entries, deeds=...): a run with a declaration that has these entries."""

    def run(entries: str, *arguments: str, deeds: dict[str, str] | None = None):
        path = declare(pytester.path / "known.toml", {}, entries)
        return kv(f"--kv-declare={path.name}", *arguments, deeds=deeds or {}, undeclared=True)

    return run


def test_a_known_failure_is_known_and_reported(known, capsys):
    run = known(entry(), "-v", deeds={"window*": "violate"})
    assert (run.code, run.word) == (0, "CONFORMS-EXCEPT")
    assert {name for name, outcome in run.outcomes.items() if outcome == "KNOWN"} == {
        "engine/bytes::window[gemma3-P1D1]",
        "engine/bytes::window[gemma3-P1D2]",
    }
    assert any(
        line.startswith("CONFORMS except 2 known failures: 11 cases passed, 8,000 bytes moved")
        for line in run.lines
    )
    assert f"the window's first key is lost ({ISSUE}, until {TODAY})" in run.text
    assert "11 passed, 2 known" in run.lines[-1]
    assert sum("KNOWN" in line and line.startswith("kv::") for line in run.lines) == 2
    capsys.readouterr()
    assert cli.main(["verify", str(run.path)]) == 0


def test_another_failure_stays_one(known):
    run = known(entry(), deeds={"window*": "violate", "arrive(llama*n16*": "violate"})
    assert (run.code, run.word) == (1, "VIOLATES")
    assert run.outcomes["engine/bytes::arrive[llama-P1D1-n16]"] == "FAIL"
    assert "VIOLATES: 1 case breaks the rule KV-BYTES-001" in run.lines


@pytest.mark.parametrize(
    ("deeds", "what"),
    [({}, "remove the entry"), ({"window*P1D1*": "violate"}, "let it match only cases that fail")],
)
def test_a_known_failure_that_passes_is_an_error(known, deeds, what):
    run = known(entry(), deeds=deeds)
    assert (run.code, run.word) == (10, "INCOMPLETE")
    assert (
        f"known.toml: known[0] ({CASE}) no longer fail, the first is kv::engine/bytes::window[gemma3-P1D"
        in run.text
    )
    assert run.text.count(what) == 1


def test_past_its_last_day_it_is_a_failure_again(known):
    yesterday = TODAY - datetime.timedelta(days=1)
    run = known(entry(expires=yesterday), deeds={"window*": "violate"})
    assert (run.code, run.word) == (1, "VIOLATES")
    assert any(
        line.startswith(f"known      it was a known failure until {yesterday}, which has expired")
        for line in run.lines
    )
    assert any(ISSUE in line for line in run.lines)


def test_past_its_last_day_it_is_an_error_although_nothing_fails(known):
    run = known(entry(expires=TODAY - datetime.timedelta(days=1)))
    assert (run.code, run.word) == (10, "INCOMPLETE")
    assert "expired on" in run.text
    assert ISSUE in run.text


@pytest.mark.parametrize("arguments", [(), ("--kv-tier=interface",), ("-n2",)])
def test_an_entry_that_matches_no_case_is_an_error(known, arguments):
    run = known(entry(case="kv::engine/bytes::windw[gemma3-P1D1]"), *arguments)
    assert run.code == 4
    hint = "(did you mean kv::engine/bytes::window[gemma3-P1D1]?)"
    says = "known.toml: known[0].case: no case of the suite is called 'kv::engine/bytes::windw[gemma3-P1D1]'"
    assert f"{says} {hint}" in run.text
    assert "Traceback" not in run.text


def test_an_entry_of_another_matrix_is_ignored(known):
    run = known(entry(case="kv::engine/bytes::arrive[llama-P1D2-n63]"))
    assert (run.code, run.word) == (0, "CONFORMS")
    run = known(entry(case="kv::engine/bytes::arrive[llama-P1D2-n63]"), "--kv-matrix=full")
    assert (run.code, run.word) == (10, "INCOMPLETE")


def test_an_entry_outside_the_selection_is_ignored(known):
    assert known(entry(), "--kv-family=llama").code == 0


def test_a_claim_has_none(known):
    run = known(entry(), "--kv-claim", deeds={"window*": "violate"})
    assert (run.code, run.word) == (10, "INCOMPLETE")
    assert "INCOMPLETE: a claim allows no known failures, but there are 2" in run.lines


@pytest.mark.parametrize(
    ("versions", "word"), [(">=0.32,<0.33", "CONFORMS-EXCEPT"), ("<0.32", "VIOLATES"), (">=0.33", "VIOLATES")]
)
def test_an_entry_is_for_the_versions_that_it_names(known, monkeypatch, versions, word):
    monkeypatch.setattr(declaration, "version", lambda *names: "0.32.0+cpu")
    assert known(entry(vllm=versions), deeds={"window*": "violate"}).word == word


def test_an_entry_for_another_version_need_not_fail(known, monkeypatch):
    monkeypatch.setattr(declaration, "version", lambda *names: "0.32.0")
    assert known(entry(vllm="<0.32")).code == 0


def test_pyproject_can_have_known_failures(kv, pytester):
    tomorrow = TODAY + datetime.timedelta(days=1)  # workers of pytest-xdist look at the clock themselves
    text = declare(pytester.path / "d.toml", {}, entry(expires=tomorrow)).read_text()
    pytester.makepyprojecttoml(
        text.replace("[[known]]", "[[tool.kvconform.known]]").replace(
            "[features]", "[tool.kvconform.features]"
        )
    )
    run = kv(undeclared=True, deeds={"window*": "violate"})
    assert (run.code, run.word) == (0, "CONFORMS-EXCEPT")
    run = kv("-n2", undeclared=True, deeds={"window*": "violate"})
    assert (run.code, run.word) == (0, "CONFORMS-EXCEPT")


def test_junit_has_the_reason(kv, pytester):
    import xml.etree.ElementTree as ET

    declare(pytester.path / "known.toml", {}, entry())
    kv("--kv-declare=known.toml", "--junitxml=junit.xml", undeclared=True, deeds={"window*": "violate"})
    suite = ET.parse(pytester.path / "junit.xml").getroot()[0]
    assert (suite.get("failures"), suite.get("skipped")) == ("0", "2")
    [skipped] = [case.find("skipped") for case in suite if case.get("name") == "window[gemma3-P1D1]"]
    assert skipped.get("message").startswith("the window's first key is lost")


GOOD = {"case": CASE, "issue": ISSUE, "expires": "2100-01-31", "reason": "r"}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            {key: value for key, value in GOOD.items() if key != "issue"},
            "p[0]: issue is missing; an entry needs case, issue, expires, reason",
        ),
        (GOOD | {"isue": "x"}, "p[0].isue: there is no such key (did you mean issue?)"),
        (GOOD | {"case": 3}, "p[0].case: expected a text, got 3"),
        (
            GOOD | {"case": "window"},
            "p[0].case: expected the id of a case or a glob of ids, kv::..., got 'window'",
        ),
        (GOOD | {"issue": "57"}, "p[0].issue: expected the URL of an issue, got '57'"),
        (GOOD | {"issue": "https://"}, "p[0].issue: expected the URL of an issue, got 'https://'"),
        (
            GOOD | {"expires": "31.1.2027"},
            "p[0].expires: expected a date such as 2027-01-31, got '31.1.2027'",
        ),
        (GOOD | {"expires": 20270131}, "p[0].expires: expected a date such as 2027-01-31, got 20270131"),
        (
            GOOD | {"expires": datetime.datetime(2027, 1, 31)},
            "p[0].expires: expected a date such as 2027-01-31, got",
        ),
        (GOOD | {"reason": " "}, "p[0].reason: expected a text, got ' '"),
        (GOOD | {"vllm": "0.32"}, "p[0].vllm: expected versions such as >=0.32,<0.33, got '0.32'"),
        (GOOD | {"vllm": ""}, "p[0].vllm: expected a text, got ''"),
    ],
)
def test_a_mistake_names_the_key(row, says):
    with pytest.raises(BadSetting) as caught:
        read_known([row], "p")
    assert says in str(caught.value)


def test_a_glob_takes_brackets_as_they_are():
    def matches(case: str, name: str) -> bool:
        return KnownFailure(case=case, issue=ISSUE, expires=TODAY, reason="r").matches(name)

    assert matches("kv::a/b::c[gemma3-P1D1-n63]", "kv::a/b::c[gemma3-P1D1-n63]")
    assert matches("kv::a/b::c[gemma3-*]", "kv::a/b::c[gemma3-P1D1-n63]")
    assert matches("kv::a/*", "kv::a/b::c[gemma3-P1D1-n63]")
    assert not matches("kv::a/b::c[gemma3-P1D1-n6?]", "kv::a/b::c[gemma3-P1D1-n630]")
    assert not matches("kv::a/b::c[gm]", "kv::a/b::cg")
