"""Every family runs on CPUs with fewer features than this one: vLLM has other kernels there."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from model_matrix import load_families
from model_matrix.limits import CPU_FEATURES, cpu_features
from pytest_kvconform import settings
from pytest_kvconform.result import Blocked
from pytest_kvconform.rigs.context import RunContext, SubjectFacts
from pytest_kvconform.rigs.launch import limits_of_kernels
from pytest_kvconform.subject import resolve
from tests.helpers.rings import night

from .command import Run

ROOT = Path(__file__).parents[2]
LENGTHS = "n1] or n2] or chunked] or partial_hit] or engines_start"  # one token, two, and several steps
FEWER = {"no AMX": "amx_tile", "nor AVX512-BF16": "avx512_bf16", "nor AVX512": "avx512"}


def library(features: tuple[str, ...]) -> str:
    """The library of kernels that vLLM loads on a CPU with these features (vllm/platforms/cpu.py)."""
    if "avx512" not in features:
        return "_C_AVX2"
    return "_C" if "avx512_bf16" in features else "_C_AVX512"


@pytest.mark.parametrize("hidden", [*map(night, FEWER.values())], ids=FEWER)
def test_every_family_conforms_without(hidden: str, command: Run) -> None:
    run = command(
        "reference_connector:ReferenceConnector",
        f"--kv-declare={ROOT / 'reference_connector' / 'declaration.toml'}",
        f"--kv-hide-cpu={hidden}",
        f"--kv-family={','.join(load_families())}",
        "--kv-matrix=full",
        "--kv-topology=P1D1",
        "-k",
        LENGTHS,
    )
    assert run.code == 0, run.text
    assert {result["cell"]["family"] for result in run.report["results"]} == set(load_families())
    assert run.report["facts"]["kernels"] == library(cpu_features(hidden.split(",")))


def test_the_option_has_the_features_by_which_vllm_chooses() -> None:
    assert tuple(CPU_FEATURES) == settings.CPU_FEATURES


@pytest.mark.parametrize(
    ("hidden", "environment"),
    [
        ((), {}),
        (("amx_tile",), {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}),
        (("amx_tile", "avx512_bf16"), {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"}),
        (
            ("amx_tile", "avx512_bf16", "avx512"),
            {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
        ),
    ],
)
def test_torch_and_onednn_do_not_use_hidden_features(
    hidden: tuple[str, ...], environment: dict[str, str]
) -> None:
    assert limits_of_kernels(hidden) == environment


@pytest.mark.parametrize(
    ("device", "kernels", "blocked"), [("cpu", "", True), ("cpu", "_C", False), ("cuda", "", False)]
)
def test_cases_with_a_model_are_blocked_where_vllm_has_no_kernels(
    device: str, kernels: str, blocked: bool
) -> None:
    facts = SubjectFacts(
        name="", module="", file="", supports_hma=True, vllm="0.33.0", device=device, kernels=kernels
    )
    config = settings.Settings(connector="NixlConnector")
    context = RunContext("", resolve(config), config, facts, print)
    said = pytest.raises(
        Blocked, match=r"vLLM 0\.33\.0 is installed without kernels for CPUs, and there is no"
    )
    with said if blocked else contextlib.nullcontext():
        context.require_kernels()
