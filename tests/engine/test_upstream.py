"""vLLM's own NixlConnector has one defect. The suite finds it at exactly the prompt lengths where it is."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from model_matrix import load_families, prompt_lengths
from tests.helpers.case_runner import CellRun

from .command import Command, Run

CAUSE = (
    "D computes the last prompt token again: its window begins one token earlier, with the last token "
    "of a block that was already freed"
)


def lengths(family: str) -> tuple[set[int], set[int]]:
    """Prompt lengths of the suite; those of them at which upstream loses a token.

    D computes token N - 1 again, whose window begins at token N - W. That token is lost where it is the last
    one of a block.
    """
    data = load_families()[family]
    block, window = data.block_size, data.sliding_window
    every = set(prompt_lengths(data, block, "quick"))
    return every, {n for n in every if (n - window + 1) % block == 0 and n >= window - 1 + block}


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
def test_the_window_is_torn_at_exactly_the_lengths_of_the_formula(
    run_cases: Callable[..., CellRun], family: str
) -> None:
    run, (every, lost) = run_cases("NixlConnector", family), lengths(family)
    assert len(lost) >= 2, "the suite has no such lengths, and proves nothing"
    assert len(every - lost) >= 10
    assert run.failed == {
        f"{case}[n{n}]" for case in ("sliding_window_is_complete", "outputs_match_the_oracle") for n in lost
    }
    assert set(run.outcomes.values()) == {"PASS", "FAIL"}
    window = load_families()[family].sliding_window
    layers = load_families()[family].config["layer_types"].count("sliding_attention")
    for n in lost:
        finding = run.findings[f"sliding_window_is_complete[n{n}]"]
        assert finding.rule == "KV-WINDOW-001"
        assert re.fullmatch(
            f"request 0 of {n} tokens: token {n - window} of "
            rf"model\.layers\.0\.(?:self_attn|attn)\.attn and {layers - 1} more layers? "
            rf"\(window {window}\) is not in D's cache when D computes token {n - 1}, which reads "
            f"tokens {n - window} to {n - 1}",
            finding.happened,
        )
        assert finding.diagnosis.endswith(CAUSE)
        assert any("?" in line for line in finding.picture)
    assert (
        len(
            {
                finding.signature
                for name, finding in run.findings.items()
                if name.startswith("sliding_window_is_complete")
            }
        )
        == 1
    )


def test_no_window_is_torn_where_vllm_keeps_all_tokens(run_cases: Callable[..., CellRun]) -> None:
    run = run_cases("NoHMA", "gemma3", variants="n63 n64")
    for name in ("sliding_window_is_complete[n63]", "sliding_window_is_complete[n64]"):
        assert run.outcomes[name] == "NOT-APPLICABLE"
        assert run.reasons[name].startswith("NoHMA lacks HMA")


def test_a_state_passes_within_measured_noise(run_cases: Callable[..., CellRun]) -> None:
    run = run_cases("NixlConnector", "qwen3_5")
    assert set(run.outcomes.values()) == {"PASS"}
    notes = [
        evidence.notes
        for name, evidence in run.evidence.items()
        if name.startswith("outputs_match_the_oracle")
    ]
    assert len(notes) >= 10
    for note in notes:
        assert note["largest difference"] <= note["tolerance"] == note["noise"] < 0.1


def test_a_family_without_windows_and_states_conforms(nixl_on_llama: Command) -> None:
    assert (nixl_on_llama.code, nixl_on_llama.word) == (0, "CONFORMS"), nixl_on_llama.text
    assert set(nixl_on_llama.outcomes.values()) == {"PASS"}
    assert nixl_on_llama.left() == []


# ---- order and workers ---------------------------------------------------------------------------

TWO = (
    "--kv-family=llama,gemma3",
    "--kv-topology=P1D1",
    "-k",
    "n63 or n64 or n95 or two_at_once or partial_hit or engines_start",
)


@pytest.fixture(scope="module")
def plain(command_once: Run) -> Command:
    """Two families, in the suite's own order."""
    return command_once("NixlConnector", *TWO)


def test_two_families_by_the_command(plain: Command) -> None:
    lost = lengths("gemma3")[1]
    assert (plain.code, plain.word) == (1, "VIOLATES")
    failed = {name for name, outcome in plain.outcomes.items() if outcome == "FAIL"}
    assert failed == {
        f"kv::engine/{case}[gemma3-P1D1-n{n}]"
        for case in ("bytes::sliding_window_is_complete", "outputs::outputs_match_the_oracle")
        for n in lost
    }
    assert plain.left() == []


@pytest.mark.parametrize("options", [("-n2",), ("--kv-seed=7",)], ids=" ".join)
def test_workers_and_order_change_nothing(command: Run, plain: Command, options: tuple[str, ...]) -> None:
    run = command("NixlConnector", *TWO, *options)
    assert run.outcomes == plain.outcomes
    assert run.report["verdict"] == plain.report["verdict"]
    assert run.code == plain.code
    assert run.left() == []


def test_the_positive_control_gets_the_verdict_of_nixl_connector(
    run_cases: Callable[..., CellRun], nixl_on_llama: Command
) -> None:
    run = run_cases("Right", "llama")
    assert {result.id: result.outcome.value for result in run.results} == nixl_on_llama.outcomes
    assert run.verdict.word == nixl_on_llama.word == "CONFORMS"
    assert run.verdict.exit_code == nixl_on_llama.code == 0
    assert run.verdict.sentence == nixl_on_llama.report["verdict"]["sentence"]
