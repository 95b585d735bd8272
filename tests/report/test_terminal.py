"""What a run prints for a person: progress, failures, and the summary."""

from __future__ import annotations

from itertools import pairwise

import pytest

from pytest_kvconform import features
from pytest_kvconform.apply_declaration import FeatureResult
from pytest_kvconform.report import terminal
from pytest_kvconform.report.failure import compress_ids

SECTIONS = ["rule", "happened", "differs", "diagnosis", "check", "log", "again", "report"]


def summary_of(run) -> list[str]:
    start = next(n for n, line in enumerate(run.lines) if "KV conformance" in line)
    end = next(n for n, line in enumerate(run.lines) if n > start and line.startswith("report: "))
    return run.lines[start : end + 1]


def test_the_sections_of_a_failure_come_in_order(kv):
    run = kv(deeds={"arrive(llama-P1D1-n63*": "violate"})
    words = [
        line.split()[0]
        for line in run.lines
        if line[:1].isalpha() and line[:11].split()[:1] and line[:11].split()[0] in SECTIONS
    ]
    assert words[: len(SECTIONS)] == SECTIONS
    assert "rule       Every byte arrives." in run.lines
    assert "           KV-BYTES-001 MUST, since vLLM 0.9" in run.lines
    assert "           layer  5 K  . . . U" in run.lines
    assert "check      - is the partial tail in the block list?" in run.lines
    assert (
        f"again      pytest --kv-connector=m:C --kv-declare={run.declared} "
        "'kv::engine/bytes::arrive[llama-P1D1-n63]'"
    ) in run.lines


def test_the_line_that_runs_it_again_has_what_it_needs(kv, pytester, monkeypatch):
    pytester.makepyprojecttoml('[tool.kvconform]\ndevice = "cpu"')
    monkeypatch.setenv("KVCONFORM_TIMEOUT_SCALE", "2")
    pytester.makefile(".json", my="{}")
    run = kv(
        "--kv-config=my.json",
        "--kv-matrix=full",
        "--kv-seed=3",
        "--kv-family=llama",
        deeds={"arrive(llama-P1D2-n63*": "violate"},
    )
    [again] = [line.removeprefix("again").strip() for line in run.lines if line.startswith("again")]
    assert again == (
        f"pytest --kv-connector=m:C --kv-config=my.json --kv-declare={run.declared} "
        "--kv-matrix=full --kv-timeout-scale=2.0 --kv-seed=3 "
        "'kv::engine/bytes::arrive[llama-P1D2-n63]'"
    )
    run = kv(*again.replace("'", "").split()[2:], deeds={"arrive(llama-P1D2-n63*": "violate"})
    assert run.code == 1
    assert len(run.outcomes) == 1


def test_one_cause_is_shown_once(kv):
    run = kv(deeds={"arrive(gemma3*": "violate", "window*": "violate otherwise"})
    # each hanging window is a cause of its own
    assert sum(line.startswith("happened") for line in run.lines) == 3
    assert any("the same cause in 5 more" in line for line in run.lines)
    assert "kv::engine/bytes::arrive[gemma3-P1D1-{n63,n95}]" in run.lines
    assert sum(line.startswith("FAILED kv::") for line in run.lines) == 8
    assert "8 failed, 5 passed" in run.lines[-1]
    assert "8 violations, 3 causes:" in run.lines
    assert "  6 × the last window block was never read (KV-BYTES-001)" in run.lines


def test_ids_that_differ_in_the_variant_share_a_line():
    ids = [
        "kv::e/b::c[llama-P1D1-n1]",
        "kv::e/b::c[llama-P1D1-n2]",
        "kv::e/b::c[llama-P1D2-n1]",
        "kv::e/b::d[llama-P1D1]",
        "kv::e/b::c[l-P1D1-a-b]",
    ]
    assert compress_ids(ids) == [
        "kv::e/b::c[llama-P1D1-{n1,n2}]",
        "kv::e/b::c[llama-P1D2-n1]",
        "kv::e/b::d[llama-P1D1]",
        "kv::e/b::c[l-P1D1-a-b]",
    ]


@pytest.mark.parametrize(
    "arguments", [[], ["-q"], ["-qq"], ["-v"], ["-s"], ["--capture=sys"], ["--tb=no"], ["--tb=line"], ["-rA"]]
)
def test_progress_and_verdict_are_always_shown(kv, arguments):
    run = kv(*arguments, deeds={"window*P1D2*": "violate"})
    for cell in run.cells:
        assert sum(line == f"kv: {cell}: starting P (TP 1) and D (TP {cell[-1]})" for line in run.lines) == 1
    assert len(run.cells) == 3
    assert any(line.startswith("VIOLATES: ") for line in run.lines)


def test_progress_does_not_break_the_dots(kv):
    lines = kv().lines
    assert "kv ..." in lines
    assert "kv: gemma3-P1D1: starting P (TP 1) and D (TP 1)" in lines


def test_the_table(kv):
    run = kv(deeds={"arrive(gemma3-P1D2*": "violate", "hello(llama*": "blocked"})
    assert summary_of(run)[1:11] == [
        "level core           INCOMPLETE  2✓ 1B",
        "  1 of 3 cases could not run here: no GPU here; run on a machine with one",
        "level hybrid         CONFORMS    4✓",
        "level heterogeneous  VIOLATES    1✓ 3✗",
        "level resilient      CONFORMS    2✓",
        "level accurate: not run",
        "                   gemma3         llama",
        "                   P1D1    P1D2   P1D1",
        "interface/answers  1✓      1✓     1B",
        "engine/bytes       4✓      1✓ 3✗  2✓",
    ]
    assert "C 1.2.3 · vLLM 0.32.0 · suite" in summary_of(run)[0]


ON = "kv::engine/bytes::arrive[llama-P1D1-n16]"


def test_a_case_that_did_not_run_and_that_others_need_has_a_command(kv):
    deeds = {"hello(llama*": f"depends on {ON}"}
    run = kv("kv::interface", deeds=deeds)
    lines = summary_of(run)
    assert f"again: pytest --kv-connector=m:C --kv-declare={run.declared} '{ON}'" in lines
    assert lines[-2] == (
        "INCOMPLETE: 1 of 3 cases could not run: "
        f"depends on {ON}: P did not start: KeyError in __init__ (m.py:61): 'hosts'"
    )


@pytest.mark.parametrize(
    ("arguments", "on"), [((), ON), (("kv::interface",), "kv::engine/bytes::arrive[llama-P1D1]")]
)
def test_a_case_that_ran_or_does_not_exist_has_no_command(kv, arguments, on):
    lines = summary_of(kv(*arguments, deeds={"hello(llama*": f"depends on {on}", "arrive(llama*": "violate"}))
    assert any(on in line for line in lines)
    assert not [line for line in lines if line.startswith("again")]


def test_a_level_that_does_not_conform_has_its_reason(kv):
    deeds = {"hello(llama*": "blocked", "window*": "violate", "arrive(gemma3-P1D2*": "moves nothing"}
    lines = summary_of(kv(deeds=deeds))
    reasons = {line.split()[1]: after for line, after in pairwise(lines) if line.startswith("level ")}
    assert reasons["core"] == "  1 of 3 cases could not run here: no GPU here; run on a machine with one"
    assert reasons["hybrid"].startswith("level ")


def test_the_reason_of_the_only_level_is_the_last_line(kv):
    lines = summary_of(kv("--kv-level=core", deeds={"*": "moves nothing"}))
    assert lines[-2].startswith("INCOMPLETE: 3 cases passed, but no byte was moved")
    assert len([line for line in lines if "no byte was moved" in line]) == 1


def test_names_of_features_are_wrapped_and_never_cut(kv):
    lines = terminal._features(
        [
            FeatureResult(name=name, declared="supported", observed="works", cases=1, passed=1)
            for name in features.load()
        ],
        "matrix",
        80,
    )
    assert max(map(len, lines)) <= 80
    assert set(features.load()) <= set(" ".join(lines).split())


def test_without_unicode_everything_is_ascii(kv, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    run = kv(deeds={"arrive(gemma3-P1D2*": "violate"}, apart=True)
    assert all(line.isascii() for line in summary_of(run))
    assert "1 ok 3 bad" in " ".join(summary_of(run))


@pytest.mark.parametrize("width", [200, 80, 40, 10])
def test_the_summary_is_short_and_narrow_whatever_happened(kv, width):
    from pytest_kvconform.apply_declaration import Criteria, apply_declaration
    from pytest_kvconform.report.document import Selection, read
    from pytest_kvconform.result import LEVELS, CaseResult, Finding, Outcome
    from pytest_kvconform.verdict import decide_verdict

    small = read(kv().path)
    results = tuple(
        CaseResult(
            id=f"kv::t{tier}/m{module}::case[family{family}-P{size}D1]",
            rule="KV-X-001",
            level=list(LEVELS)[tier],
            outcome=list(Outcome)[(tier + module + family + size) % 7],
            reason=f"reason {module} {family}",
            finding=Finding(rule="KV-X-001", happened=f"happened {module} {family}"),
        )
        for tier in range(5)
        for module in range(6)
        for family in range(6)
        for size in (1, 2, 4)
    )
    troubles = tuple(f"trouble {n}" for n in range(9))
    import msgspec

    names = tuple(features.load())
    results = tuple(
        msgspec.structs.replace(r, features=names[n % 17 : n % 17 + 3]) for n, r in enumerate(results)
    )
    declared = {name: ("", "why")[n % 2] for n, name in enumerate(names) if n % 7}
    selection = Selection(
        manifest=tuple(map(str, range(9999))), selected=tuple(result.id for result in results)
    )
    criteria = Criteria(features=declared)
    results = tuple(apply_declaration(one, criteria) for one in results)
    verdict = decide_verdict(results, selection.selected, troubles, criteria)
    assert {row.rule for row in verdict.features} >= {"", "KV-DECLARE-003"}
    big = msgspec.structs.replace(
        small, results=results, troubles=troubles, selection=selection, verdict=verdict
    )
    lines = terminal.summary(big, "kv-report/report.json", width, unicode=True)
    assert [text.split()[1] for text, _ in lines if text.startswith("level ")] == list(LEVELS)
    more = sum(text.startswith("    ") for text, _ in lines)  # what of a long line did not fit in its width
    assert 8 < len(lines) + 1 - more <= 38
    assert more <= 20
    table = [
        text
        for text, _ in lines[: next(n for n, (text, _) in enumerate(lines) if text.startswith("selection"))]
    ]
    assert width < 80 or max(map(len, table)) <= width


def test_the_summary_page_of_a_ci_job(kv, pytester, monkeypatch):
    page = pytester.path / "page.md"
    page.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(page))
    kv(deeds={"arrive(gemma3*": "violate"})
    text = page.read_text()
    assert text.startswith("before\n### KV conformance · C 1.2.3")
    assert "**VIOLATES**: 6 cases break the rule KV-BYTES-001" in text
    assert (
        "| FAIL | 6 | the last window block was never read | KV-BYTES-001 | "
        "`kv::engine/bytes::arrive[gemma3-P1D1-{n16,n63,n95}]` |"
    ) in text
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(pytester.path / "no" / "page.md"))
    assert kv().code == 0


def test_the_header_says_what_was_set_and_where(kv, pytester, monkeypatch):
    pytester.makepyprojecttoml("[tool.kvconform]\ntimeout-scale = 2")
    monkeypatch.setenv("KVCONFORM_SEED", "6")
    run = kv("--kv-tier=engine")
    [line] = [line for line in run.lines if line.startswith("kv: m:C,")]
    assert "matrix quick, seed 6, device auto" in line
    declare = f"declare={run.declared} (KVCONFORM_DECLARE)"
    assert line.endswith(
        f"connector=m:C (command line), {declare}, tier=engine (command line), timeout-scale=2.0 "
        "(pyproject.toml), seed=6 (KVCONFORM_SEED)"
    )
