"""A JUnit file tells failures, errors and blocked cases apart."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from pytest_kvconform.result import Outcome


def test_junit_tells_failure_error_and_blocked_apart(kv, pytester):
    deeds = {"hello(llama*": "blocked", "arrive(llama*n16*": "violate", "arrive(llama*n63*": "harness"}
    kv("--junitxml=junit.xml", deeds=deeds)
    suite = ET.parse(pytester.path / "junit.xml").getroot()[0]
    assert {key: suite.get(key) for key in ("tests", "failures", "errors", "skipped")} == {
        "tests": "13",
        "failures": "1",
        "errors": "1",
        "skipped": "1",
    }
    cases = {case.get("name"): case for case in suite}
    failure = cases["arrive[llama-P1D1-n16]"].find("failure")
    assert failure.get("message") == "KV-BYTES-001: the last window block was never read"
    assert "again" in failure.text
    assert "the port was taken" in cases["arrive[llama-P1D1-n63]"].find("error").get("message")
    assert (
        cases["hello[llama-P1D1]"].find("skipped").get("message") == "no GPU here; run on a machine with one"
    )
    properties = {
        one.get("name"): one.get("value") for one in cases["arrive[gemma3-P1D1-n16]"].find("properties")
    }
    assert properties == {
        "rule": "KV-BYTES-001",
        "strength": "MUST",
        "cell": "gemma3-P1D1",
        "outcome": "PASS",
        "looked_at": "1",
        "bytes_moved": "1000",
    }


@pytest.mark.parametrize("arguments", [(), ("-n2",)], ids=["one", "n2"])
def test_readers_of_junit_count_failures_errors_and_skipped(kv, pytester, arguments):
    """Counted as Jenkins and GitLab do: by the children of a case, not by attributes."""
    deeds = {
        "hello(llama*": "blocked",
        "arrive(llama*n16*": "violate",
        "arrive(llama*n63*": "harness",
        "hello(gemma3-P1D1*": "refuse",
    }
    run = kv("--junitxml=junit.xml", *arguments, deeds=deeds)
    seen = {"failure": set(), "error": set(), "skipped": set(), "": set()}
    suites = ET.parse(pytester.path / "junit.xml").getroot()
    for case in suites.iter("testcase"):
        [kind] = [child.tag for child in case if child.tag in seen] or [""]
        seen[kind].add(case.get("name"))
    by_outcome = {
        outcome: {name.rpartition("::")[2] for name, word in run.outcomes.items() if word == outcome}
        for outcome in Outcome
    }
    assert seen["failure"] == by_outcome["FAIL"] == {"arrive[llama-P1D1-n16]"}
    assert seen["error"] == by_outcome["HARNESS"] == {"arrive[llama-P1D1-n63]"}
    assert seen["skipped"] == by_outcome["BLOCKED"] | by_outcome["WARNING"]
    assert (by_outcome["BLOCKED"], by_outcome["WARNING"]) == ({"hello[llama-P1D1]"}, {"hello[gemma3-P1D1]"})
    assert seen[""] == by_outcome["PASS"]
