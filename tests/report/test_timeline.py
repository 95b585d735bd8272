"""The timeline of hook calls: which findings of a report have one, and what the page draws of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pytest_kvconform.case_outcome import MOST_CALLS, CaseEnd, end_of, with_calls
from pytest_kvconform.report import consistency, digest, document, page
from pytest_kvconform.report.page import timeline
from pytest_kvconform.result import Blocked, CaseResult, Cell, Finding, HookCall, Outcome, Violation

from .parsed import Page, made


def call(at: float, side: str = "D", hook: str = "start_load_kv", **more: object) -> HookCall:
    return HookCall(at=at, side=side, hook=hook, **more)  # type: ignore[arg-type]


def failed(name: str, calls: Sequence[HookCall], diagnosis: str = "the same") -> CaseResult:
    return CaseResult(
        id=f"kv::engine/bytes::{name}[llama-P1D1-n63]",
        rule="KV-BYTES-001",
        outcome=Outcome.FAIL,
        level="core",
        cell=Cell("llama", "P1D1"),
        finding=Finding(rule="KV-BYTES-001", happened=name, diagnosis=diagnosis, calls=tuple(calls)),
    )


CALLS = (
    call(0.0, "P", "request_finished_all_groups", requests=("r-1",), answer="(True, {3 more})"),
    call(0.25, "D", "get_num_new_matched_tokens", requests=("r-1",), given="0", answer="(63, True)"),
    call(0.5, "D", rank=0, answer="raised OSError: no route", times=3),
)


# ---- what a finding and a report have ----------------------------------------------------------------------


def ended(calls: Sequence[HookCall]) -> tuple[HookCall, ...]:
    end = with_calls(end_of(Violation(Finding(rule="KV-BYTES-001", happened="x"))), calls)
    assert end.finding is not None
    return end.finding.calls


def test_a_finding_has_the_last_calls_of_each_side_in_their_order() -> None:
    many = [call(100.0 + n, "P", str(n)) for n in range(MOST_CALLS + 5)]
    few = [call(130.5, "D", "one"), call(90.0, "D", "two")]
    found = ended([*few, *many])
    assert [one.hook for one in found if one.side == "D"] == ["two", "one"]
    assert [one.hook for one in found if one.side == "P"] == [str(n) for n in range(5, MOST_CALLS + 5)]
    assert (found[0].hook, found[0].at, found[1].at) == ("two", 0.0, 15.0)
    assert [one.at for one in found] == sorted(one.at for one in found)


def test_an_end_without_a_finding_has_no_calls() -> None:
    end: CaseEnd = end_of(Blocked("no server"))
    assert with_calls(end, CALLS) == end


def test_a_report_keeps_the_calls_of_the_first_case_of_each_cause() -> None:
    report = made([failed("a", CALLS), failed("b", CALLS), failed("c", CALLS, diagnosis="another")])
    kept = {one.id.split("::")[2][0]: one.finding.calls for one in report.results if one.finding}
    assert kept == {"a": CALLS, "b": (), "c": CALLS}


def test_a_report_with_calls_is_read_back_and_verifies(tmp_path) -> None:
    report = made([failed("a", CALLS)])
    path = document.write(report, tmp_path)
    assert document.read(path).results == report.results
    assert digest.altered(path) == "" and consistency.inconsistencies(report) == []
    path.write_text(path.read_text().replace("no route", "no path"))
    assert digest.altered(path).startswith("the digest is not ")


# ---- what the page draws -----------------------------------------------------------------------------------


def test_the_page_draws_the_calls_with_their_cause() -> None:
    shown = Page(page.render(made([failed("a", CALLS), failed("b", CALLS)])))
    [summary] = shown.texts["figcaption"]
    assert summary == "5 calls of hooks in 500.0 ms; start_load_kv of D, rank 0 raised."
    rows = [" ".join(text.split()) for text in shown.texts["tr"] if " ms" in text]
    assert rows == [
        "P0.0 ms request_finished_all_groups r-1 (True, {3 more})",
        "D250.0 ms get_num_new_matched_tokens r-1 0 (63, True)",
        "D, rank 0500.0 ms start_load_kv 3 times raised OSError: no route",
    ]
    assert [one["class"] for one in shown.of("tr", "raised")] == ["raised"]
    assert [(one["cx"], one.get("class")) for one in shown.of("circle")] == [
        ("104", None),
        ("402", None),
        ("700", "raised"),
    ]
    first, second = (row[-1] for row in shown.data["rows"])
    assert first[-1] == ["calls", ["The timeline of hook calls is with the cause of this case."]]
    assert "calls" not in dict(second)


def test_a_picture_has_a_name_for_who_cannot_see_it() -> None:
    shown = Page(page.render(made([failed("a", CALLS), failed("b", CALLS, diagnosis="another")])))
    named = [one["aria-labelledby"] for one in shown.of("svg")]
    assert named == [one["id"] for one in shown.of("title") if "id" in one]
    assert len(set(named)) == 2
    assert shown.texts["title"][1] + "." == shown.texts["figcaption"][0]


def test_a_page_without_calls_has_no_timeline() -> None:
    shown = Page(page.render(made([failed("a", ())])))
    assert shown.of("svg") == [] and shown.of("details", "calls") == []


@pytest.mark.parametrize("at", [0.0, -3.0, 1e308, -1e308])
def test_any_times_of_a_report_can_be_drawn(at: float) -> None:
    drawn = timeline.timeline((call(at), call(-1e308), call(0.0, "P0")))
    assert drawn is not None
    assert all(104 <= dot.x <= 700 and 0 < dot.y < drawn.height for dot in drawn.dots)
    assert [lane.name for lane in drawn.lanes] == ["P0", "D"]
