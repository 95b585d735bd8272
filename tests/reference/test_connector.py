"""What the connector's class says of itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pytest_kvconform.rigs.vllm_setup.optional_packages import mend_imports


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (None, None),
        (SimpleNamespace(is_hybrid=False, use_mla=False), "BHLNC"),
        (
            SimpleNamespace(is_hybrid=False, use_mla=True),
            "BLHNC",
        ),  # with a draft whose layers have heads BHLNC cannot be had
        (SimpleNamespace(is_hybrid=True, use_mla=False), "LBHNC"),
        (SimpleNamespace(is_hybrid=True, use_mla=True), "LBHNC"),
    ],
)
def test_the_layout_with_the_longest_runs(model: Any, layout: str | None) -> None:
    mend_imports()
    from reference_connector import ReferenceConnector

    assert ReferenceConnector.get_required_kvcache_layout(SimpleNamespace(model_config=model)) == layout
