"""What `rows` and `pools` share: the kinds of a compared row or word, and parts of sentences and pictures.

To add a kind, add it to the numbers, `NAMES` and `LETTERS` here; then let one of the two `compare.py` find
it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

# Kinds, from harmless to worst: a picture shows the highest one of a block.
(
    NOT_DUE,  # nothing had to arrive here
    SAME,  # correct
    MISSING,  # the block table has no block for it (rows only)
    UNWRITTEN,  # still the poison that the harness put there
    ZEROED,
    MOVED,  # KV of another place
    GARBLED,  # none of these: torn, flipped or foreign bytes
    COLLATERAL,  # changed although nothing had to arrive here (pools only)
) = range(8)

NAMES = {  # of the kinds that are not as they should be
    MISSING: "not in the cache",
    UNWRITTEN: "never written",
    ZEROED: "zero",
    MOVED: "moved",
    GARBLED: "garbled",
    COLLATERAL: "written where nothing was due",
}
LETTERS = {
    NOT_DUE: " ",
    SAME: ".",
    MISSING: "?",
    UNWRITTEN: "-",
    ZEROED: "0",
    MOVED: "M",
    GARBLED: "x",
    COLLATERAL: "!",
}
PLANES = "KV"
SEGMENTS = ("convolution Q", "convolution K", "convolution V", "recurrent state")  # of a state


def legend(*kinds: int) -> str:
    """The line under a picture: ". correct  - never written" for (SAME, UNWRITTEN)."""
    return "  ".join(f"{LETTERS[kind]} {NAMES.get(kind, 'correct')}" for kind in kinds)


def intervals(numbers: Iterable[int]) -> str:
    """ "3-17, 40" for {3, …, 17, 40}."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)


def permutation(field: str, pairs: Collection[tuple[int, int]]) -> str:
    """What happened to one coordinate, from (expected, found) pairs; "" if nothing did."""
    moved = sorted({(a, b) for a, b in pairs if a != b})
    if not moved:
        return ""
    a, b = moved[0]
    if set(moved) == {(a, b), (b, a)}:
        return f"{field} {a} and {field} {b} are exchanged"
    if len(moved) > 1 and len({b - a for a, b in moved}) == 1 and len(moved) == len(set(pairs)):
        return f"{field} is off by {b - a:+d}"
    if len(moved) == 1:
        return f"{field} {a} holds {field} {b}"
    some = ", ".join(f"{a} holds {b}" for a, b in moved[:4])
    return f"{field}s are mixed up ({some}{', …' if moved[4:] else ''})"


def short_name(layer: str) -> str:
    """ "layers.3.self_attn" for "model.layers.3.self_attn.attn", at most 22 characters."""
    return layer.removeprefix("language_model.").removeprefix("model.").removesuffix(".attn")[:22]
