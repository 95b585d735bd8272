"""What makes docs/evidence.md can fail: the comparison of two reports, the second turn, and the soak."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from model_matrix import load_families, load_geometries, prompt_lengths
from pytest_kvconform import rules
from pytest_kvconform.plan import make_plan
from pytest_kvconform.report import document
from pytest_kvconform.result import CaseResult, Cell, Evidence, Finding, Outcome
from pytest_kvconform.rigs.bench import launch_zygote, wait_for_zygote
from pytest_kvconform.settings import Settings
from pytest_kvconform.subject import Subject
from tests.docs.pages import PAGES, tables
from tests.helpers.fixtures import ROOT, importable_from, must_be_installed
from tests.helpers.rings import night

GEOMETRIES = "gpt_oss_20b", "qwen3_5_35b_a3b"


@pytest.fixture(scope="module", autouse=True)
def _scripts() -> Iterator[None]:
    with importable_from(ROOT / "ci", ROOT):
        yield


# ---- side by side


def case(
    cell: str, rule: str, outcome: Outcome = Outcome.PASS, why: str = "", name: str = "n2", **more: Any
) -> CaseResult:
    """One result, of a case that has one rule."""
    family, topology, *setup = cell.replace(".", "-").split("-")
    finding = Finding(rule=rule, happened="it happened", diagnosis=why) if outcome is Outcome.FAIL else None
    passed = Evidence(looked_at=1, unit="rows", bytes_moved=1_500_000, notes={"largest difference": 0.0})
    given = {
        "evidence": passed if outcome is Outcome.PASS else None,
        "finding": finding,
        "reason": why if finding is None else "",
    } | more
    return CaseResult(
        id=f"kv::bytes/pool::{rule}[{cell}-{name}]",
        rule=rule,
        outcome=outcome,
        cell=Cell(family, topology, *setup),
        **given,
    )


@pytest.fixture
def compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """compare(results of Upstream, results of Ours) -> exit code, what was printed."""

    def run(*sides: list[CaseResult]) -> tuple[int, str]:
        for name, results in zip(("Upstream", "Ours"), sides, strict=True):
            subject, ids = Subject(spec=name, connector=name), [result.id for result in results]
            made = document.make_report(
                Settings(connector=name), subject, None, results, ids, make_plan(Settings(), ()).manifest, ()
            )
            document.write(made, tmp_path / name)
        code = importlib.import_module("side_by_side").main(
            [str(tmp_path / "Upstream"), str(tmp_path / "Ours")]
        )
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run


UPSTREAM = [
    case("llama-P1D1.b16", "KV-BYTES-001"),
    case("llama-P1D1.b16x64", "KV-BYTES-001", Outcome.FAIL, "off by 16 tokens", "hit1"),
    case("llama-P2D1.b16x64", "KV-BYTES-001", Outcome.FAIL, "off by 32 tokens", "hit1"),
    case("llama-P1D2.b16", "KV-HANDOVER-001", Outcome.FAIL, "sizes | must match", refused=True),
    case("llama-P1D2.b16", "KV-BYTES-001", Outcome.BLOCKED, "depends on completes", refused=True),
]


def ours(*others: CaseResult) -> list[CaseResult]:
    """All pass but these."""
    passed = {r.id: case(str(r.cell), r.rule, name=r.id.rpartition("-")[2][:-1]) for r in UPSTREAM}
    return list((passed | {other.id: other for other in others}).values())


def test_combinations_with_one_cause_share_a_row(compare: Callable[..., tuple[int, str]]) -> None:
    code, text = compare(UPSTREAM, ours())
    assert code == 0
    assert text.splitlines() == [
        "| model | combinations | rule: hand-overs | Upstream | because | Ours |",
        "| --- | --- | --- | --- | --- | --- |",
        (
            "| `llama` | P1D1.b16x64, P2D1.b16x64 | KV-BYTES-001: hit1 | 2 FAIL | off by 16 tokens "
            "| 2 PASS (3.0 MB) |"
        ),
        "| `llama` | P1D2.b16 | KV-HANDOVER-001: n2 | 2 refused | sizes \\| must match | 2 PASS (1.5 MB) |",
    ]


def test_what_is_declared_as_unsupported_is_refused_all_the_same(
    compare: Callable[..., tuple[int, str]],
) -> None:
    declared = case(
        "llama-P1D1.nhd",
        "KV-HANDOVER-001",
        Outcome.NOT_APPLICABLE,
        "is declared",
        refused=True,
        case_outcome=Outcome.FAIL,
    )
    code, text = compare([declared], [case("llama-P1D1.nhd", "KV-HANDOVER-001")])
    assert code == 0
    assert (
        text.splitlines()[-1]
        == "| `llama` | P1D1.nhd | KV-HANDOVER-001: n2 | 1 refused | is declared | 1 PASS (1.5 MB) |"
    )


@pytest.mark.parametrize("outcome", [Outcome.FAIL, Outcome.BLOCKED, Outcome.NOT_APPLICABLE])
def test_what_both_fail_is_shown_and_not_joined_to_what_one_fails(
    compare: Callable[..., tuple[int, str]], outcome: Outcome
) -> None:
    code, text = compare(UPSTREAM, ours(case("llama-P2D1.b16x64", "KV-BYTES-001", outcome, "so", "hit1")))
    assert code == 0
    assert "| P1D1.b16x64 | KV-BYTES-001: hit1 | 1 FAIL | off by 16 tokens | 1 PASS (1.5 MB) |" in text
    assert f"| P2D1.b16x64 | KV-BYTES-001: hit1 | 1 FAIL | off by 32 tokens | 1 {outcome.value} |" in text


def test_a_table_that_says_nothing_is_an_error(compare: Callable[..., tuple[int, str]]) -> None:
    unmoved = [
        msgspec.structs.replace(result, evidence=Evidence(looked_at=1, unit="rows")) for result in ours()
    ]
    for sides, message in (
        ((ours(), ours()), "the first connector passes all of its 5 cases: there is nothing to list"),
        (
            (UPSTREAM, ours()[:-1]),
            (
                "the second connector has not run 1 of the cases that are listed, "
                "the first is kv::bytes/pool::KV-BYTES-001"
            ),
        ),
        (
            (UPSTREAM, unmoved),
            "llama-P1D1.b16x64: the second connector passes KV-BYTES-001 and has moved no byte",
        ),
    ):
        code, text = compare(*sides)
        assert code == 2 and text.startswith(message) and "|" not in text


def test_reports_of_one_connector_are_an_error(
    compare: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    compare(UPSTREAM, ours())
    with pytest.raises(ValueError, match="of two connectors are compared, and these are of Ours"):
        importlib.import_module("side_by_side").joined([str(tmp_path / "Ours")])


def test_differences_of_log_probabilities(compare: Callable[..., tuple[int, str]]) -> None:
    rule = "KV-OUTPUT-001"
    wrong = Finding(rule=rule, happened="log-probabilities differ by up to 0.808 (token id 124: -9.5)")
    upstream = [
        case("gemma3-P1D1", rule, Outcome.FAIL, name="n63", finding=wrong),
        case("gemma3-P1D1", rule, name="n64"),
        case("gemma3-P1D1", rule, Outcome.BLOCKED, name="n65"),
    ]
    code, text = compare(upstream, [case("gemma3-P1D1", rule, name=name) for name in ("n63", "n64", "n65")])
    assert code == 0
    assert text.splitlines()[-2:] == [
        "| `gemma3` | 32 | 32 | n63 | P1D1 | 0.808 | 0 |",
        "| 1 other hand-overs |  |  |  |  | 0 | 0 |",
    ]


# ---- the page


def tables_of_the_page() -> list[list[list[str]]]:
    """The two that ci/side_by_side.py prints."""
    return [table for table in tables(PAGES["docs/evidence.md"]) if {"because", "topologies"} & set(table[0])]


def test_the_table_names_cells_and_rules_of_the_matrix() -> None:
    manifest = make_plan(Settings(matrix="full", tier=("bytes", "engine")), ()).manifest
    cells = {case.partition("[")[2].rpartition("-")[0] for case in manifest}
    table, _ = tables_of_the_page()
    assert len(table) > 20
    for model, places, rule, one, _, two in table[1:]:
        assert {f"{model.strip('`')}-{place}" for place in places.split(", ")} <= cells, model
        assert rule.partition(":")[0] in rules.load()
        assert re.fullmatch(r"\d+ (FAIL|refused)(, \d+ \w+)*", one), one
        outcomes = [r"\d+ PASS \([\d.]+ MB\)"]
        # small blocks with windows do not fill large ones, and the other refused ones keep nothing on D
        small = places == "P1D1.b16x64" and model in ("`gemma3_1b`", "`gpt_oss_20b`")
        if small or "refused" in one:
            outcomes.append(r"\d+ NOT-APPLICABLE")
        assert all(re.fullmatch("|".join(outcomes), part) for part in two.split(", ")), two


def test_log_probabilities_differ_where_the_window_loses_a_token_and_nowhere_else() -> None:
    _, table = tables_of_the_page()
    *every, rest = table[1:]
    rounded = [row for row in every if max(map(float, row[-2:])) < 1e-5]
    rows = [row for row in every if row not in rounded]
    assert {row[3] for row in rounded} <= {"two_at_once"}  # loads end in one step or in two
    found = {(model.strip("`"), int(name[1:])) for model, _, _, name, *_ in rows}
    due = {
        (family.id, n)
        for family in load_families().values()
        for n in prompt_lengths(family, family.block_size, "full")
        if (w := family.sliding_window)
        and (n - w + 1) % family.block_size == 0
        and n >= w - 1 + family.block_size
    }
    assert found == due
    assert all(float(one) > 0.1 and two == "0" for *_, one, two in rows) and rest[-2:] == ["0", "0"]


# ---- second turn and soak


@pytest.fixture(scope="module")
def address(_scripts: None) -> Iterator[str]:
    must_be_installed()
    zygote = launch_zygote(
        [], [word for name in GEOMETRIES for word in load_geometries()[name].architectures]
    )
    wait_for_zygote(zygote.address, 180.0)
    yield zygote.address
    assert zygote.close() == []


@pytest.mark.parametrize(
    ("connector", "code"),
    [("reference_connector:ReferenceConnector", 0), ("tests.reference.leaky_connectors:SpoilsTheSecond", 1)],
)
def test_second_turn(
    address: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    connector: str,
    code: int,
) -> None:
    script = importlib.import_module("second_turn")
    monkeypatch.setattr(script, "background", lambda geometry: contextlib.nullcontext(address))
    assert script.main(connector, GEOMETRIES[1], "P1D1") == code
    kept, without = (line.split(" | ") for line in capsys.readouterr().out.splitlines()[-2:])
    moved = [int(row[4].replace(",", "")) for row in (kept, without)]
    hit = int(kept[1].split()[0])
    assert hit > 0 and without[1].startswith("0 ") and int(without[2]) - int(kept[2]) == hit
    more = hit * 10 * 2 * 2 * 256 * 2  # layers, heads, K and V, numbers of bfloat16
    # After each load D reads a number of 8 bytes from P's ledger, which may be counted with the next load.
    assert abs(moved[1] - moved[0] - more) in (0, 8, 16)
    assert 0 < int(kept[5]) < int(without[5])
    assert (kept[6], without[6]) == (("0 |", "0 |") if not code else ("1 |", "0 |"))


@pytest.fixture
def soak(address: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """soak(connector, hand-overs) -> the Soak, after its run."""

    # On a busy machine D began a load seconds after P's answer, when a lease of 1 s was over.
    def run(connector: str, handovers: int, lease: float = 4.0, visits: int = 0) -> Any:
        options = argparse.Namespace(
            handovers=handovers,
            connector=connector,
            geometry=GEOMETRIES[0],
            seed=1,
            lease=lease,
            visits=visits,
            minutes=float("inf"),
        )
        monkeypatch.setattr("soak.PORTS", 1)
        found = importlib.import_module("soak").Soak(address, options, rests=3)
        found.run()
        found.table()
        return found

    return run


SOME_FATES = ("in chunks on P", "preempted on D", "loaded while P sleeps")


def test_a_short_soak_of_a_right_connector(soak: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("soak.FATES", {"undisturbed": 0.7} | dict.fromkeys(SOME_FATES, 0.1))
    found = soak("reference_connector:ReferenceConnector", 60, visits=18)
    assert found.troubles == []
    assert (
        found.counts["right"] >= 60
        and found.counts["P was killed"] == 1
        and found.counts["bytes compared"] > 50_000_000
    )
    assert min(found.counts[fate] for fate in SOME_FATES) > 0
    assert sum(what.startswith("visits of a ") for what in found.counts) == 5, found.counts
    assert len(found.series["P"]) > 0 and len(found.series["D"]) == 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        night("LeaksHandles", "D leaks NIXL handles: "),
        night("KeepsBlocks", "P at rest still has "),
        ("OneWrongByte", "1 word"),
        ("KeepsPeers", "D leaks NIXL peers: "),
    ],
)
def test_a_short_soak_finds(
    soak: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    monkeypatch.setattr("soak.PATIENCE_S", 10.0)
    troubles = soak(f"tests.reference.leaky_connectors:{name}", 30, lease=3.0, visits=18).troubles
    assert troubles and any(message in trouble for trouble in troubles), troubles


@pytest.mark.parametrize(
    ("values", "leaks"),
    [
        ([100.0] * 20, False),
        ([100.0 + i % 3 for i in range(20)], False),
        ([100.0, 140, 150, 155, *(158.0 + i % 2 for i in range(16))], False),  # it warms up
        ([100.0 + i % 3 + 40 * (i > 17) for i in range(20)], False),  # an allocator's piece
        ([100.0 + i % 3 + 40 * (i > 15) for i in range(20)], False),
        ([100.0 + i % 3 + 10 * (i // 3) for i in range(20)], True),
        ([100.0 + 5 * i + i % 3 + 40 * (i == 15) for i in range(20)], True),  # a piece that is freed
        ([100.0 + 5 * i + i % 3 + 40 * (i > 15) for i in range(20)], True),
        ([100.0 + i for i in range(20)], True),
        ([100.0 + i + i % 3 for i in range(20)], True),
    ],
)
def test_growth(values: list[float], leaks: bool) -> None:
    rise, noise = importlib.import_module("leak_table").growth(values)
    assert (rise > noise) is leaks, (rise, noise)
