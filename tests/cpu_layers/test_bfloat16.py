"""Linear layers in bfloat16 on CPUs whose oneDNN has no kernel for it: the numbers, and who is left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytest_kvconform.rigs.vllm_setup import overrides
from pytest_kvconform.rigs.vllm_setup.optional_packages import mend_imports
from tests.helpers.fixtures import must_be_installed

X, WEIGHT, BIAS = (
    torch.randn(*shape, generator=torch.Generator().manual_seed(17)).bfloat16()
    for shape in ((5, 256), (64, 256), (64,))
)


class Layer(torch.nn.Module):
    """What vLLM hands over."""

    def __init__(self, weight: torch.Tensor):
        super().__init__()
        self.weight, self.cpu_linear = torch.nn.Parameter(weight, requires_grad=False), None


@pytest.fixture
def utils(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's module, in which layers that are left to vLLM get the word "vLLM"."""
    must_be_installed()
    mend_imports()
    from vllm.model_executor.layers import utils

    def dispatch(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = "vLLM"

    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", dispatch)
    return utils


def dispatched(utils: Any, weight: torch.Tensor, remove_weight: bool = True) -> Any:
    layer: Any = Layer(weight)
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight)
    assert layer.cpu_linear == "vLLM" or layer.weight.numel() == (0 if remove_weight else weight.numel())
    return layer.cpu_linear


def without_kernels(monkeypatch: pytest.MonkeyPatch, missing: bool = True) -> None:
    monkeypatch.setattr(overrides, "_has_bfloat16_kernels", lambda: not missing)
    overrides.multiply_bfloat16_in_float32()


def test_products_are_rounded_once(utils: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    without_kernels(monkeypatch)
    for bias in (None, BIAS):
        found = dispatched(utils, WEIGHT, remove_weight=bias is None)(X, None, bias)
        exact = torch.nn.functional.linear(
            X.double(), WEIGHT.double(), bias if bias is None else bias.double()
        )
        assert found.dtype == torch.bfloat16
        # half a unit of the last of 8 bits, and what sums in float32 lose: measured 1e-6
        assert ((found.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-5).all()


@pytest.mark.parametrize("weight", [WEIGHT.float(), WEIGHT.view(4, 16, 256)], ids=["float32", "3 dimensions"])
def test_other_layers_are_left_to_vllm(
    utils: Any, monkeypatch: pytest.MonkeyPatch, weight: torch.Tensor
) -> None:
    without_kernels(monkeypatch)
    assert dispatched(utils, weight) == "vLLM"


def test_where_there_is_a_kernel_vllm_chooses(utils: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    without_kernels(monkeypatch, missing=False)
    assert dispatched(utils, WEIGHT) == "vLLM"
