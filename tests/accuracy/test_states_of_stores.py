"""Servers without a prefix cache keep no states for a store, and a store may refuse them."""

from __future__ import annotations

import contextlib

import pytest

from pytest_kvconform.result import Blocked, Cell
from pytest_kvconform.rigs.serving import bench
from pytest_kvconform.settings import Settings
from pytest_kvconform.subject import resolve


@pytest.mark.parametrize(
    ("connector", "family", "refusal", "blocked"),
    [
        ("MooncakeStoreConnector", "qwen3_5", "mamba_cache_mode='none'", True),
        ("MooncakeStoreConnector", "qwen3_5", "", False),
        ("MooncakeStoreConnector", "llama", "no", False),
        ("LMCacheMPConnector", "qwen3_5", "it supports no states", False),  # declared: not applicable
        ("NixlConnector", "qwen3_5", "no", False),
    ],
)
def test_a_store_of_states_may_want_a_prefix_cache(
    connector: str, family: str, refusal: str, blocked: bool
) -> None:
    subject, cell = resolve(Settings(connector=connector)), Cell(family, "P1D1")
    with (
        pytest.raises(Blocked, match=r".* no prefix cache.*: mamba_cache_mode='none'")
        if blocked
        else contextlib.nullcontext()
    ):
        bench._raise_if_states_want_a_prefix_cache(subject, cell, refusal)
