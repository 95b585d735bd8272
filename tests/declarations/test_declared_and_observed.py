"""What a connector declares as supported or not, against what a run shows; and what is not declared."""

from __future__ import annotations

import tomllib

import pytest

from pytest_kvconform import cli, features

ALL = dict.fromkeys(features.load(), "")
WHY = "same size on both sides only"
UNEQUAL = {"tp-heterogeneous": WHY}


def row_of(run, name: str) -> dict:
    [row] = [row for row in run.report["verdict"]["features"] if row["name"] == name]
    return row


def test_what_is_unsupported_and_refused_is_not_applicable(kv, capsys):
    run = kv(unsupported=UNEQUAL, deeds={"arrive(*P1D2-n95*": "depends on a refusal", "*P1D2*": "refuse"})
    assert (run.code, run.word) == (0, "CONFORMS")
    refused = {name: outcome for name, outcome in run.outcomes.items() if "P1D2" in name}
    assert len(refused) == 5
    assert {run.outcomes[name] for name in run.outcomes.keys() - refused.keys()} == {"PASS"}
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
        f"tp-heterogeneous is declared unsupported ({WHY}), and the connector refused it: P did not start for"
    )
    capsys.readouterr()
    assert cli.main(["verify", str(run.path)]) == 0


def test_what_is_unsupported_and_works_is_a_warning(kv):
    run = kv(unsupported=UNEQUAL)
    assert (run.code, run.word) == (0, "CONFORMS")
    assert {name for name, outcome in run.outcomes.items() if outcome == "WARNING"} == moving(run)
    assert run.outcomes["interface/answers::hello[gemma3-P1D2]"] == "NOT-APPLICABLE"
    assert any(line.startswith("CONFORMS, with 4 warnings: 8 cases passed") for line in run.lines)
    hidden = f"hidden ability: tp-heterogeneous is declared unsupported ({WHY}), but it works"
    assert (row_of(run, "tp-heterogeneous")["rule"], row_of(run, "tp-heterogeneous")["sentence"]) == (
        "KV-DECLARE-002",
        hidden,
    )
    assert any(line.startswith(f"  KV-DECLARE-002: {hidden}"[:70]) for line in run.lines)


def test_what_is_unsupported_and_works_leaves_a_claim_incomplete(kv):
    run = kv("--kv-claim", unsupported=UNEQUAL)
    assert (run.code, run.word) == (10, "INCOMPLETE")
    assert {name for name, outcome in run.outcomes.items() if outcome == "WARNING"} == moving(run)
    says = "INCOMPLETE, with 4 warnings: a claim declares every feature that works as true: tp-heterogeneous"
    assert any(line.startswith(says) for line in run.lines)


def moving(run) -> set[str]:
    """The cases of engines of different sizes that move bytes: hello moves nothing, and shows nothing."""
    return {name for name in run.outcomes if "P1D2" in name and "hello" not in name}


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
    assert {name for name, outcome in run.outcomes.items() if outcome == "FAIL"} == moving(run)
    assert run.outcomes["interface/answers::hello[gemma3-P1D2]"] == "WARNING"  # KV-ANSWER-001 is a SHOULD
    assert {outcome for name, outcome in run.outcomes.items() if "P1D2" not in name} == {"PASS"}
    assert "VIOLATES, with 1 warning: 4 cases break 2 rules: KV-BYTES-001, KV-BYTES-002" in run.lines
    row = row_of(run, "tp-heterogeneous")
    assert (row["declared"], row["observed"], row["rule"]) == ("supported", "refused", "KV-DECLARE-001")
    assert any(
        line.startswith("  KV-DECLARE-001: tp-heterogeneous is declared supported, but was refused")
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
        "[tool.kvconform]\nconnector = 'theirs:Other'\nhandover = "
        "'none'\n[tool.kvconform.features]\nmla = true"
    )
    run = kv(undeclared=True)
    assert "19 features are not declared" in run.text
    assert run.report["subject"]["handover"] == "handoff"
