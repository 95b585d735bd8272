"""What vllm-router is told of P."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from pytest_kvconform.rigs.serving import chain

URL = "http://127.0.0.1:1"
BOOTSTRAP = {"VLLM_MOONCAKE_BOOTSTRAP_PORT": "2"}


@pytest.mark.parametrize(
    ("word", "environment", "words"),
    [("mooncake", BOOTSTRAP, (URL, "2")), ("mooncake", {}, (URL,)), ("nixl", BOOTSTRAP, (URL,))],
)
def test_mooncake_is_found_by_its_bootstrap_port(
    word: str, environment: Mapping[str, str], words: tuple[str, ...]
) -> None:
    assert chain.prefill_words(URL, word, environment) == words
