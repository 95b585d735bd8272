"""Every family runs on CPUs with fewer features than this one: vLLM has other kernels there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .command import Run

ROOT = Path(__file__).parents[2]
MASK = Path(__file__).parent / "cpu_mask"
LENGTHS = "n1] or n2] or chunked] or partial_hit] or engines_start"  # one token, two, and several steps
HIDDEN = {
    "no AMX": "amx_tile",
    "no AVX512-BF16": "amx_tile,avx512_bf16",
    "no AVX512": "amx_tile,avx512_bf16,avx512",
}


@pytest.fixture(params=HIDDEN.values(), ids=HIDDEN)
def hidden(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Features that processes started from now on take for missing."""
    paths = [str(MASK), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("HIDDEN_CPU_FEATURES", request.param)
    return str(request.param)


def test_every_family_conforms_without(hidden: str, command: Run) -> None:
    run = command(
        "reference_connector:ReferenceConnector",
        f"--kv-declare={ROOT / 'reference_connector' / 'declaration.toml'}",
        "--kv-family=llama,gemma3,gpt_oss,qwen3_5",
        "--kv-topology=P1D1",
        "-k",
        LENGTHS,
    )
    assert run.code == 0, run.text
    assert {result["cell"]["family"] for result in run.report["results"]} == {
        "llama",
        "gemma3",
        "gpt_oss",
        "qwen3_5",
    }


def test_the_mask_hides_the_named_features(hidden: str) -> None:
    asked = [f"torch.cpu._is_{feature}_supported()" for feature in hidden.split(",")]
    code = f"import torch; print([{', '.join(asked)}])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == str([False] * len(asked))
