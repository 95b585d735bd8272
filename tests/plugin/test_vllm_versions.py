"""Versions and builds of vLLM: which are supported, and with what environment they run without a GPU."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from pytest_kvconform.rigs import launch
from pytest_kvconform.rigs.vllm_setup.compat import environment_without_gpu, reason_not_supported

MAIN = "0.34.0rc1.dev42+g017e9f444.empty"
CPU = {"VLLM_TARGET_DEVICE": "cpu"}


@pytest.mark.parametrize("version", ["0.31.4", "0.32.0+cpu", "0.33.0", MAIN, "0.1.dev1+g017e9f444"])
def test_supported_versions(version: str) -> None:
    assert reason_not_supported(version) == ""


@pytest.mark.parametrize("version", ["0.30.0", "0.34.0", "0.34.0rc1", "0.3.30"])
def test_other_versions_are_named(version: str) -> None:
    assert reason_not_supported(version) == (
        f"vLLM {version} is installed, and this suite holds the contracts of 0.31.x, 0.32.x, 0.33.x: install "
        "one of them"
    )


@pytest.mark.parametrize(
    ("version", "given"),
    [
        ("0.33.0", CPU),  # the published wheel for CUDA, or a build without a device
        ("0.33.0+cu129", CPU),
        ("0.33.0+empty", CPU),
        (MAIN, CPU),
        ("0.33.0+cpu", {}),
        ("0.33.1.dev3+g017e9f444.cpu", {}),
        ("0.33.0+rocm700", {}),
        ("0.33.0+xpu", {}),
    ],
)
def test_a_build_for_no_other_device_runs_on_the_cpu(
    version: str, given: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert environment_without_gpu(version) == given
    monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    for gpu in (False, True):
        monkeypatch.setattr(launch, "_has_gpu", lambda gpu=gpu: gpu)
        found = {name: value for name, value in launch.environment(tmp_path).items() if name in CPU}
        assert found == ({} if gpu else given)
