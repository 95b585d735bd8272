"""Scenarios of the engine rig.

One scenario is one variant of the cases, and its name is the last word of their ids.
"""

from __future__ import annotations

from model_matrix import load_families, parse_topology, prompt_lengths
from pytest_kvconform.result import Cell
from pytest_kvconform.rigs.scenario import Prompt, Scenario, tokens

LATENT_AND_STATE = {"latent_attention", "linear_attention"}  # kinds of layers


def lengths(cell: Cell, matrix: str) -> list[Scenario]:
    """One prompt of each length that matters: around block boundaries and around the window."""
    data = load_families()[cell.family]
    return [
        Scenario(f"n{n}", (Prompt(tokens(n)),), due=n > 1)
        for n in prompt_lengths(data, data.block_size, "brief" if _is_brief(cell, matrix) else matrix)
    ]


def situations(cell: Cell, matrix: str) -> list[Scenario]:
    """Scenarios that are about anything but the length of a prompt. b is the block size."""
    b, s = _block(cell), _short(cell)
    first = s * b + b // 2
    turns = Scenario("second_turn", (Prompt(tokens(2 * first + 3), turn=first),))
    some = [
        Scenario(
            "two_at_once",
            (
                Prompt(tokens((s + 1) * b + 7, shared=s * b + 5)),
                Prompt(tokens((s + 2) * b + 1, seed=1, shared=s * b + 5)),
            ),
            measure_noise=True,
        ),
        Scenario("partial_hit", (Prompt(tokens(2 * s * b + 3), warm=s * b + 1),)),
    ]
    if _is_brief(cell, matrix):
        return [*some, turns] if has_state(cell) else some
    return [
        *some,
        Scenario("full_hit", (Prompt(tokens(2 * s * b + 1), warm=2 * s * b + 1),), due=False),
        Scenario("chunked", (Prompt(tokens(2 * s * b + b + 3)),), budget=2 * b - 5),
        Scenario("two_samples", (Prompt(tokens((s + 1) * b - 4)),), n=2),
        # D has attention KV of the first turn, and a state at its end at most
        *([turns] if has_state(cell) or matrix != "quick" else []),
    ]


def _is_brief(cell: Cell, matrix: str) -> bool:
    """Whether a cell of the quick matrix has few scenarios, since other cells test the rest.

    Layers of a draft and of its model are of kinds that other families have. What Kimi Linear has at other
    lengths does not depend on tensor parallel sizes; that states and latent rows are paired right does.
    """
    family, (p, d) = load_families()[cell.family], parse_topology(cell.topology)
    pairs_both = p != d and LATENT_AND_STATE.issubset(family.kinds)
    return matrix == "quick" and (family.draft is not None or pairs_both)


def _block(cell: Cell) -> int:
    return load_families()[cell.family].block_size


def _short(cell: Cell) -> int:
    """Return the length of a short prefix in blocks."""
    return 1 if has_state(cell) else 2


def aborts(cell: Cell, matrix: str) -> list[Scenario]:
    """Scenarios in which a request is aborted, on either side."""
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
