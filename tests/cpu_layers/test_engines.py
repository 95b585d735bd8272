"""Engines with a tiny Kimi Linear, in float32: pieces of a prompt, and ranks, compute what one step does."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from model_matrix import ensure_checkpoint, load_families
from pytest_kvconform.rigs.context import port_environment
from pytest_kvconform.rigs.engine.handle import ModelEngineHandle, leave_all
from pytest_kvconform.rigs.engine.messages import EngineSpec, Request, Snapshot
from pytest_kvconform.rigs.launch import launch_zygote, wait_for_zygote
from pytest_kvconform.rigs.scenario import tokens
from tests.helpers.fixtures import must_be_installed

FAMILY = load_families()["kimi_linear"]
CONNECTOR = {
    "kv_connector": "NoConnector",
    "kv_connector_module_path": "pytest_kvconform.rigs.engine.no_connector",
    "kv_role": "kv_producer",
    "kv_buffer_device": "cpu",
}
TOKENS, START_S = 300, 120.0
NAMES = (f"request-{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[int, ModelEngineHandle]]:
    """Tensor parallel size -> an engine without a connector."""
    must_be_installed()
    zygote = launch_zygote(FAMILY.config["architectures"])
    wait_for_zygote(zygote.address, START_S)
    started = {
        size: ModelEngineHandle(zygote.address, f"kimi-{size}", spec(size), START_S, START_S)
        for size in (1, 2)
    }
    for engine in started.values():
        engine.wait_ready()
    yield started
    leave_all(tuple(started.values()))
    assert zygote.close() == []


def spec(size: int) -> EngineSpec:
    """An engine of this tensor parallel size."""
    return EngineSpec(
        role="P",
        checkpoint=str(ensure_checkpoint(FAMILY)),
        tensor_parallel=size,
        dtype=FAMILY.dtype,
        block_size=FAMILY.block_size,
        num_blocks=48,
        max_model_len=512,
        max_batched_tokens=512,
        kv_transfer_config=CONNECTOR,
        environment=port_environment(),
    )


def computed(engine: ModelEngineHandle, length: int, budget: int = 0, salt: str = "") -> Snapshot:
    """Rows and states after a prompt, of which a step computes `budget` tokens at most; 0: all it can."""
    name = next(NAMES)
    engine.budget(budget)
    engine.add(Request(id=name, tokens=tokens(length), max_tokens=1, salt=salt or name, watch=True))
    for _ in range(length + 5):
        if any(output.finish for output in engine.step(1.0).outputs):
            break
    engine.budget(0)
    snapshot = engine.pop_snapshot(name)
    assert snapshot is not None
    return snapshot


def differences(one: Snapshot, other: Snapshot) -> dict[str, float]:
    """Layer -> the largest difference of a word."""
    found = {}
    for name, rows in one.rows.items():
        found[name] = np.abs(_numbers(rows) - _numbers(other.rows[name])).max()
    for name, parts in one.state.items():
        pairs = zip(parts, other.state[name], strict=True)
        found[name] = max(np.abs(_numbers(a) - _numbers(b)).max() for a, b in pairs)
    return found


def _numbers(words: object) -> np.ndarray:
    return np.asarray(words).view(np.float32)


@pytest.mark.parametrize(("length", "budget"), [(TOKENS, 100), (TOKENS, 128), (TOKENS, 17), (40, 1)])
def test_a_prompt_in_pieces(engines: dict[int, ModelEngineHandle], length: int, budget: int) -> None:
    """With one token a step, every step is a decode."""
    whole, pieces = computed(engines[1], length), computed(engines[1], length, budget)
    assert len(whole.rows) + len(whole.state) == FAMILY.config["num_hidden_layers"]
    assert max(differences(whole, pieces).values()) < 2e-5


def test_a_prompt_behind_a_hit(engines: dict[int, ModelEngineHandle]) -> None:
    computed(engines[1], 200, salt="turns")
    assert (
        max(differences(computed(engines[1], TOKENS, salt="turns"), computed(engines[1], TOKENS)).values())
        < 2e-5
    )


def test_two_ranks_compute_what_one_does(engines: dict[int, ModelEngineHandle]) -> None:
    one, two = computed(engines[1], TOKENS), computed(engines[2], TOKENS)
    assert max(differences(one, two).values()) < 2e-5
    shapes = [tuple(part.shape for part in of["model.layers.0.self_attn"]) for of in (one.state, two.state)]
    assert shapes[0] == shapes[1] == ((256, 3), (256, 3), (256, 3), (4, 64, 64))
