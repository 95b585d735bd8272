"""Scenarios of the engine rig.

One scenario is one variant of the cases, and its name is the last word of their ids.
"""

from __future__ import annotations

from model_matrix import load_families, prompt_lengths
from pytest_kvconform.result import Cell
from pytest_kvconform.rigs.scenario import Prompt, Scenario, tokens


def lengths(cell: Cell, matrix: str) -> list[Scenario]:
    """One prompt of each length that matters: around block boundaries and around the window."""
    data = load_families()[cell.family]
    chosen = prompt_lengths(data, data.block_size, matrix)
    if _is_brief(cell, matrix):
        chosen = chosen[-1:]
    return [Scenario(f"n{n}", (Prompt(tokens(n)),), due=n > 1) for n in chosen]


def situations(cell: Cell, matrix: str) -> list[Scenario]:
    """Scenarios that are about anything but the length of a prompt. b is the block size."""
    b, s = _block(cell), _short(cell)
    first = s * b + b // 2
    # D has attention KV of the first turn, and a state at its end at most
    turns = [Scenario("second_turn", (Prompt(tokens(2 * first + 3), turn=first),))]
    if matrix == "quick" and not (has_state(cell) and cell.topology == "P1D1"):
        turns = []
    if _is_brief(cell, matrix):
        return turns
    return [
        Scenario(
            "two_at_once",
            (
                Prompt(tokens((s + 1) * b + 7, shared=s * b + 5)),
                Prompt(tokens((s + 2) * b + 1, seed=1, shared=s * b + 5)),
            ),
            measure_noise=True,
        ),
        Scenario("partial_hit", (Prompt(tokens(2 * s * b + 3), warm=s * b + 1),)),
        Scenario("full_hit", (Prompt(tokens(2 * s * b + 1), warm=2 * s * b + 1),), due=False),
        Scenario("chunked", (Prompt(tokens(2 * s * b + b + 3)),), budget=2 * b - 5),
        Scenario("two_samples", (Prompt(tokens((s + 1) * b - 4)),), n=2),
        *turns,
    ]


def _is_brief(cell: Cell, matrix: str) -> bool:
    """Whether a cell of the quick matrix has few scenarios: the byte tier has more of latent attention."""
    models = load_families()[cell.family].models
    return matrix == "quick" and any("latent_attention" in model.kinds for model in models)


def _block(cell: Cell) -> int:
    return load_families()[cell.family].block_size


def _short(cell: Cell) -> int:
    """Return the length of a short prefix in blocks."""
    return 1 if has_state(cell) else 2


def aborts(cell: Cell, matrix: str) -> list[Scenario]:
    """Scenarios in which a request is aborted, on either side."""
    if _is_brief(cell, matrix):
        return []
    b = _block(cell)
    prompt = (Prompt(tokens(2 * _short(cell) * b + b + 3)),)
    return [
        Scenario("abort_prefill", prompt, budget=2 * b - 5, abort="prefill"),
        Scenario("abort_waiting", prompt, abort="waiting"),
        Scenario("abort_loading", prompt, abort="loading"),
    ]


def handovers(cell: Cell, matrix: str) -> list[Scenario]:
    """Scenarios that end with D's answer."""
    return lengths(cell, matrix) + situations(cell, matrix)


def transfers(cell: Cell, matrix: str) -> list[Scenario]:
    """Scenarios in which KV must move."""
    return [scenario for scenario in handovers(cell, matrix) if scenario.due]


def everything(cell: Cell, matrix: str) -> list[Scenario]:
    """Every scenario."""
    return handovers(cell, matrix) + aborts(cell, matrix)


def has_window(cell: Cell) -> bool:
    """Whether a layer of the family has a sliding window."""
    return load_families()[cell.family].sliding_window > 0


def has_state(cell: Cell) -> bool:
    """Whether a layer of the family keeps a recurrent state."""
    return load_families()[cell.family].has_state
