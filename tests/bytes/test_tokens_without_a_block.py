"""Tokens without a block in a group without a window: vLLM makes no such table, so the test makes it up."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from pytest_kvconform.kvspace.pools.classify import RUN
from pytest_kvconform.result import Violation
from pytest_kvconform.rigs.bytes.messages import Missing
from pytest_kvconform.rigs.scenario import Prompt, Transfer, tokens
from pytest_kvconform.subject import Subject
from pytest_kvconform.suite.bytes import pool

LAYERS = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")
BENCH = SimpleNamespace(subject=Subject(spec="m:C", connector="C", module="m"))
TRANSFER = Transfer("n40", (Prompt(tokens(40)),))


def observation(*missing: Missing) -> SimpleNamespace:
    regions = tuple(SimpleNamespace(layer=layer, kind="attention") for layer in LAYERS)
    compared = SimpleNamespace(regions=regions, runs=np.zeros(0, dtype=RUN), truncated=False, wrong=0)
    check = SimpleNamespace(rank=0, missing=missing, pool=compared, rows_due=10, bytes_due=80, failed=())
    request = SimpleNamespace(
        name="request 0", length=40, checks=(check,), decode=SimpleNamespace(external_tokens=39)
    )
    return SimpleNamespace(requests=(request,), seconds=0.0)


def test_tokens_without_a_block_are_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Missing(group=0, layers=LAYERS, window=0, block_size=16, tokens=(16, 17, 18))
    monkeypatch.setattr(pool, "with_loaded_kv", lambda bench, transfer: observation(gone))
    with pytest.raises(Violation) as raised:
        pool.attention_kv_arrives(BENCH, TRANSFER)  # type: ignore[arg-type]
    happened = raised.value.finding.happened
    assert happened.startswith(
        f"request 0 of 40 tokens: tokens 16-18 of {LAYERS[0]} and 1 more layers have no block on rank 0 of D"
    )


def test_tokens_with_blocks_are_no_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "with_loaded_kv", lambda bench, transfer: observation())
    assert pool.attention_kv_arrives(BENCH, TRANSFER).looked_at == 10  # type: ignore[arg-type]
