"""Engines with a tiny Kimi Linear, in float32: pieces of a prompt, and ranks, compute what one step does."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import pytest

from model_matrix import ensure_checkpoint, load_families
from pytest_kvconform.rigs.context import port_environment
from pytest_kvconform.rigs.engine.handle import ModelEngineHandle, leave_all
from pytest_kvconform.rigs.engine.messages import EngineSpec, Output, Request, Snapshot, Trace
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
LIMIT = 2e-5  # measured: 0 and 4e-6 in one engine, 5e-6 between one rank and two
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


class Computed(NamedTuple):
    """An engine's KV after a prompt, and how it was computed."""

    kv: Snapshot
    trace: Trace
    logprobs: np.ndarray  # [word], of the generated token: the last layer's attention shows in nothing else


def computed(engine: ModelEngineHandle, length: int, budget: int = 0, salt: str = "") -> Computed:
    """Rows and states after a prompt, of which a step computes `budget` tokens at most; 0: all it can."""
    name = next(NAMES)
    engine.budget(budget)
    engine.add(Request(id=name, tokens=tokens(length), max_tokens=1, salt=salt or name, watch=True))
    generated: list[np.ndarray] = []
    for _ in range(length + 5):
        generated += [one for output in engine.step(1.0).outputs for one in output.logprobs]
        if generated:
            break
    engine.budget(0)
    return Computed(snapshot(engine, name), engine.trace(name), generated[0])


def snapshot(engine: ModelEngineHandle, name: str) -> Snapshot:
    """Rows and states after the prompt of a request."""
    found = engine.pop_snapshot(name)
    assert found is not None
    return found


def difference(one: Computed, other: Computed) -> float:
    """The largest difference of a word of KV, or of a log-probability."""
    return max(difference_of_kv(one.kv, other.kv), np.abs(one.logprobs - other.logprobs).max())


def difference_of_kv(one: Snapshot, other: Snapshot) -> float:
    """The largest difference of a word, of the same layers."""
    assert len(one.rows) + len(one.state) == FAMILY.config["num_hidden_layers"]
    return max(differences(one, other).values())


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
    assert whole.trace.steps <= 2  # vLLM ends a step at the last block boundary, to keep the state there
    assert pieces.trace.steps >= length / budget > whole.trace.steps
    assert difference(whole, pieces) < LIMIT


def test_a_prompt_behind_a_hit(engines: dict[int, ModelEngineHandle]) -> None:
    computed(engines[1], 200, salt="turns")
    behind, alone = computed(engines[1], TOKENS, salt="turns"), computed(engines[1], TOKENS)
    assert (behind.trace.local_tokens, alone.trace.local_tokens) == (FAMILY.block_size, 0)
    assert difference(behind, alone) < LIMIT


LENGTHS = {"decode": 40, "short": 100, "long": 200}  # of prompts
GENERATED = {"decode": 6, "short": 1, "long": 1}


def outputs(engine: ModelEngineHandle, *names: str) -> Iterator[list[Output]]:
    """Add requests, and run them to their end. Yields the outputs of each step, also of other requests."""
    for name in names:
        kind = name.partition("-")[0]
        prompt = tokens(LENGTHS[kind], seed=len(kind))
        engine.add(Request(id=name, tokens=prompt, max_tokens=GENERATED[kind], salt=name, watch=True))
    left = set(names)
    while left:
        found = list(engine.step(1.0).outputs)
        left -= {output.id for output in found if output.finish}
        yield found


def logprobs(steps: Iterable[list[Output]], name: str) -> np.ndarray:
    """[generated token, word] of a request."""
    return np.array(
        [one for step in steps for output in step if output.id == name for one in output.logprobs]
    )


def test_two_prompts_and_a_decode_in_one_step(engines: dict[int, ModelEngineHandle]) -> None:
    """Each request gets what it gets alone."""
    engine = engines[1]
    alone = {name: list(outputs(engine, f"{name}-alone")) for name in LENGTHS}
    decode = outputs(engine, "decode-beside")
    beside = [next(decode), *outputs(engine, "short-beside", "long-beside"), *decode]
    # the first token; both prompts, of which vLLM ends one at a block boundary; its rest
    first = [{output.id.partition("-")[0] for output in step} for step in beside[:3]]
    assert first == [{"decode"}, {"decode", "short"}, {"decode", "long"}]
    for name in LENGTHS:
        one, other = logprobs(alone[name], f"{name}-alone"), logprobs(beside, f"{name}-beside")
        assert one.shape == other.shape
        assert np.abs(one - other).max() < LIMIT
        kv = (snapshot(engine, f"{name}-{how}") for how in ("alone", "beside"))
        assert difference_of_kv(*kv) < LIMIT


def test_two_ranks_compute_what_one_does(engines: dict[int, ModelEngineHandle]) -> None:
    one, two = (computed(engines[size], TOKENS) for size in (1, 2))
    assert difference(one, two) < LIMIT
    shapes = [
        tuple(part.shape for part in of["model.layers.0.self_attn"]) for of in (one.kv.state, two.kv.state)
    ]
    assert shapes[0] == shapes[1] == ((256, 3), (256, 3), (256, 3), (4, 64, 64))
