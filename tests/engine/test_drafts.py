"""Families with a draft model: vLLM loads all of it, and its KV is where the suite compares it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from model_matrix import ensure_checkpoint, load_families, speculative_config
from model_matrix.families import Family, checkpoint_tensors
from pytest_kvconform.result import HarnessError
from pytest_kvconform.rigs.cluster.observation import Generated, RequestObservation
from pytest_kvconform.rigs.engine.handle import ModelEngineHandle
from pytest_kvconform.rigs.engine.kv_access import POISON
from pytest_kvconform.rigs.engine.messages import EngineSpec, Request, Snapshot, Trace
from pytest_kvconform.rigs.launch import wait_for_zygote
from pytest_kvconform.rigs.scenario import tokens
from pytest_kvconform.suite.engine._observations import require_drafts
from tests.helpers.case_runner import CaseRunner, CellRun

FAMILIES = [family for family in load_families().values() if family.draft]
NO_CONNECTOR = {
    "kv_connector": "NoConnector",
    "kv_connector_module_path": "pytest_kvconform.rigs.engine.no_connector",
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
}
BLOCK = 16
ROUNDING = 1e-4  # of a word; measured: 5e-6 between equal rows, 3 and more between others


def start(case_runner: CaseRunner, family: Family, arguments: dict[str, Any]) -> ModelEngineHandle:
    """An engine of a family, without a connector."""
    wait_for_zygote(case_runner.zygote.address, 90.0)
    spec = EngineSpec(
        role="P",
        checkpoint=str(ensure_checkpoint(family)),
        tensor_parallel=1,
        dtype=family.dtype,
        block_size=BLOCK,
        num_blocks=64,
        max_model_len=8 * BLOCK,
        max_batched_tokens=16 * BLOCK,
        kv_transfer_config=NO_CONNECTOR,
        environment={},
        engine_arguments=arguments,
    )
    engine = ModelEngineHandle(case_runner.zygote.address, f"drafts-{family.id}", spec, 60.0, 60.0)
    engine.wait_ready()
    return engine


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.id)
def prefiller(request: pytest.FixtureRequest, case_runner: CaseRunner) -> Iterator[ModelEngineHandle]:
    """An engine that drafts, without a connector."""
    family = request.param
    draft = speculative_config(family, ensure_checkpoint(family))
    engine = start(case_runner, family, {"speculative_config": draft})
    yield engine
    engine.end()


def backends_with_amx(worker: Any) -> list[str]:
    """What vLLM chooses for latent attention on a CPU with AMX: as this engine asks, and without asking."""
    import torch
    from vllm.platforms import current_platform

    asked = worker.model_runner.vllm_config.attention_config.backend
    latent: Any = SimpleNamespace(use_sparse=False, use_mla=True)
    supported, torch.cpu._is_amx_tile_supported = torch.cpu._is_amx_tile_supported, lambda: True
    paths = [current_platform.get_attn_backend_cls(backend, latent) for backend in (asked, None)]
    torch.cpu._is_amx_tile_supported = supported
    return [path.rpartition(".")[2] for path in paths]


def test_a_model_with_latent_attention_runs_without_its_draft_on_cpus_with_amx(
    case_runner: CaseRunner,
) -> None:
    """AMX_MLA takes no float32. The engine that teaches a canary runs such a model without its draft."""
    engine = start(case_runner, load_families()["kimi_k2_5_eagle3"], {})
    assert engine.facts.backend == "CPU_MLA"
    assert engine.call("_workers", backends_with_amx) == [["CPUMLABackend", "AMXMLABackend"]]
    engine.end()


def own_parameters(worker: Any) -> int:
    """Numbers in the parameters of vLLM's class of the draft model. The embedding is that of the model."""
    import torch
    from vllm.config import set_current_vllm_config

    runner = worker.model_runner
    layers = runner.compilation_config.static_forward_context
    running = dict(layers)
    layers.clear()  # a layer must not have the name of another
    with set_current_vllm_config(runner.vllm_config), torch.device("meta"):
        model = type(runner.drafter.model)(vllm_config=runner.vllm_config)
    layers.clear()
    layers.update(running)
    return sum(value.numel() for name, value in model.named_parameters() if "embed_tokens" not in name)


def test_the_checkpoint_has_every_parameter_of_the_draft(prefiller: ModelEngineHandle) -> None:
    [family] = [one for one in FAMILIES if prefiller.spec.checkpoint == str(ensure_checkpoint(one))]
    [loaded] = prefiller.call("_workers", own_parameters)
    assert family.draft is not None
    assert loaded == sum(math.prod(tensor.shape) for tensor in checkpoint_tensors(family.draft).values())


def test_model_and_draft_share_a_group(prefiller: ModelEngineHandle) -> None:
    [group] = prefiller.facts.groups
    assert [name.split(".")[2] for name in group.layers] == ["0", "1", "2", "3", "4"]
    assert set(prefiller.facts.backend.split(", ")) == {"CPU_MLA", "CPU_ATTN"}
    assert prefiller.facts.prefix_caching


def prefilled(engine: ModelEngineHandle, prompt: tuple[int, ...], budget: int = 0) -> Snapshot:
    """The engine's KV after a prompt."""
    engine.poison()
    engine.budget(budget)
    engine.add(Request(id="prompt", tokens=prompt, max_tokens=1, salt="salt", watch=True))
    while not any(output.finish for output in engine.step().outputs):
        pass
    snapshot = engine.pop_snapshot("prompt")
    assert snapshot is not None
    return snapshot


def rows(snapshot: Snapshot, layer: int) -> np.ndarray:
    """[token, word] of one layer."""
    [name] = [name for name in snapshot.rows if f".{layer}." in name]
    found = snapshot.rows[name]
    return found.view(np.float32).reshape(len(found), -1)


def differing(one: np.ndarray, other: np.ndarray) -> set[int]:
    """Tokens whose rows differ by more than rounding."""
    return set(np.flatnonzero(np.abs(one - other[: len(one)]).max(axis=1) > ROUNDING).tolist())


def test_the_draft_has_rows_of_the_whole_prompt(prefiller: ModelEngineHandle) -> None:
    """Row i of a draft takes token i + 1, so that the last row of a prompt takes the generated token."""
    prompt = tokens(100)
    whole, longer = prefilled(prefiller, prompt), prefilled(prefiller, (*prompt, 7))
    for layer in (3, 4):
        assert not (rows(whole, layer).view(np.uint8) == POISON).all(axis=1).any()
    assert differing(rows(whole, 3), rows(longer, 3)) == set()
    assert differing(rows(whole, 4), rows(longer, 4)) == {99}  # D computes it, too: it is not compared


def test_chunks_change_the_draft_at_their_ends_only(prefiller: ModelEngineHandle) -> None:
    """There vLLM 0.32 takes the last token of the prompt for the next one (docs/findings.md)."""
    prompt, budget = tokens(100), 2 * BLOCK - 5
    ends = {budget - 1, 2 * budget - 1, 3 * budget - 1}
    whole = prefilled(prefiller, prompt)
    assert prefiller.trace("prompt").steps == 1
    chunked = prefilled(prefiller, prompt, budget)
    assert prefiller.trace("prompt").steps == len(ends) + 1
    assert differing(rows(whole, 3), rows(chunked, 3)) == set()
    assert differing(rows(whole, 4), rows(chunked, 4)) == ends
    same = tuple(prompt[-1] if i - 1 in ends else token for i, token in enumerate(prompt))
    whole, chunked = prefilled(prefiller, same), prefilled(prefiller, same, budget)
    assert differing(rows(whole, 4), rows(chunked, 4)) == set()


def test_d_verifies_draft_tokens(run_cases: Callable[..., CellRun]) -> None:
    run = run_cases("Right", "kimi_k2_5_eagle3", matrix="full", variants="n17 two_at_once")
    notes = {name: found.notes for name, found in run.evidence.items() if name.startswith("outputs_match")}
    assert len(notes) == 2
    for note in notes.values():
        assert 0 <= note["accepted"] <= note["draft tokens"]
        assert note["draft tokens"] > 0
    assert set(run.outcomes.values()) == {"PASS"}


def observed(generated: int, drafted: int) -> RequestObservation:
    """A request with so many tokens of output."""
    traces = (Trace(id="request", prompt_tokens=17, drafted=count) for count in (0, drafted))
    got = Generated(tokens=(7,) * generated, logprobs=(), finish="length")
    return RequestObservation("request 0", 17, *traces, rows=None, got=got)


def test_speculation_that_is_off_is_an_error_of_the_harness() -> None:
    [family, *_] = FAMILIES
    with pytest.raises(HarnessError, match="drafted none, although kimi_k2_5_eagle3 has a draft model"):
        require_drafts(family, [observed(1, 0), observed(3, 0)])
    require_drafts(family, [observed(3, 0), observed(3, 1)])
    require_drafts(family, [observed(1, 0)])  # of one step
    require_drafts(load_families()["llama"], [observed(3, 0)])


def test_a_family_with_a_draft_is_for_x86_alone(
    run_cases: Callable[..., CellRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    run = run_cases("Right", "kimi_k2_5_eagle3", variants="n100")
    assert set(run.outcomes.values()) == {"BLOCKED"}
    assert "the CPU is aarch64" in run.reasons["completes[n100]"]


def test_what_nixl_cannot_hand_over_is_its_failure(run_cases: Callable[..., CellRun]) -> None:
    run = run_cases("NixlConnector", "kimi_k2_5_eagle3", topology="P1D2", variants="n100")
    assert run.outcomes == {
        "engines_start": "PASS",
        "completes[n100]": "FAIL",
        "d_computes_only_missing_tokens[n100]": "BLOCKED",
        "d_loads_all_whole_blocks[n100]": "BLOCKED",
        "attention_kv_arrives[n100]": "BLOCKED",
        "unowned_blocks_are_unchanged[n100]": "BLOCKED",
        "outputs_match_the_oracle[n100]": "BLOCKED",
        "all_blocks_are_freed[n100]": "BLOCKED",
    }
    assert run.verdict.word == "VIOLATES"
    assert "KV cache sizes must match between P and D when replicated" in (
        run.findings["completes[n100]"].diagnosis
    )
