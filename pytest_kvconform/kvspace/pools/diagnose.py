"""From a comparison of a pool to one plain sentence: the named mistake if there is one, else what happened to the coordinates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

import numpy as np

from pytest_kvconform.kvspace.pools.classify import COLLATERAL
from pytest_kvconform.kvspace.pools.compare import KINDS, PoolComparison
from pytest_kvconform.kvspace.pools.mistakes import Source, name_mistakes
from pytest_kvconform.kvspace.pools.regions import ATTENTION, POISON, STATE, Array, Region
from pytest_kvconform.kvspace.pools.sentences import (
    ENGINES,
    collateral,
    garbled,
    layers_of,
    name_of,
    share_of,
    unwritten,
    words_of,
    zeroed,
)
from pytest_kvconform.kvspace.rows.compare import GARBLED, MOVED, PLANES, SAME, SEGMENTS, UNWRITTEN, ZEROED
from pytest_kvconform.kvspace.rows.explain import intervals


def explain_pool(
    comparison: PoolComparison,
    *,
    source: Source | None = None,
    later_right: bool = False,
    drafts: Collection[str] = (),
) -> str:
    """One sentence on why bytes are wrong; empty when none is.

    `source` (where P's rows lie) lets the mistakes be named that depend on it. `later_right`: a later look found all these bytes right.
    `drafts` are names of layers of a draft model.
    """
    if not comparison.wrong:
        return ""
    if later_right:
        return f"{words_of(comparison.wrong)} were still unwritten when the load was reported complete; a later look found them right"
    names = name_mistakes(comparison, source)
    if names:
        return (
            f"{' or '.join(names)}: it explains all {words_of(comparison.wrong)} in {layers_of(comparison)}"
        )
    order = sorted(comparison.words, key=lambda kind: (kind == MOVED, comparison.words[kind]), reverse=True)
    first, rest = order[0], order[1:]
    sentence = _SAYS[first](comparison, drafts)
    said = ", ".join(f"{words_of(comparison.words[kind])} {KINDS[kind]}" for kind in rest)
    return sentence + (f"; besides, {said}" if said else "")


def explain_source(comparison: PoolComparison) -> str:
    """One sentence on what stands in a pool that loads only read; empty when nothing is wrong there."""
    if not comparison.wrong:
        return ""
    runs = comparison.runs[comparison.runs["kind"] != SAME]
    held = Counter[str]()
    for run in runs:
        holds = run["belongs"]
        if holds["kind"] in (ATTENTION, STATE):
            what = f"what {ENGINES[holds['engine']]} computed"
        elif holds["kind"] == POISON:
            what = f"memory that {ENGINES[holds['engine']]} never wrote"
        else:
            what = "zeros" if run["kind"] == ZEROED else "bytes that are nobody's"
        held[what] += int(run["words"])
    what = max(held, key=lambda said: held[said], default="bytes that are nobody's")
    where = f" of {layers_of(comparison)}" if len(runs) else ""
    return f"a pool that loads only read was written to: {words_of(comparison.wrong)}{where} hold {what}"


def count_pool(comparison: PoolComparison) -> str:
    """ "320 words in 20 rows differ: 300 moved, 20 never written"."""
    said = ", ".join(f"{count} {KINDS[kind]}" for kind, count in comparison.words.items())
    return f"{words_of(comparison.wrong)} in {sum(comparison.rows.values())} rows differ: {said}"


def _moved(comparison: PoolComparison, drafts: Collection[str]) -> str:
    """A part of a sentence for each coordinate that is not kept."""
    runs = comparison.runs[comparison.runs["kind"] == MOVED]
    stands, belongs, weights = runs["stands"], runs["belongs"], runs["words"]
    share = f"in {share_of(comparison, MOVED)}"
    mixed = stands["kind"] != belongs["kind"]
    if mixed.any():
        a, b = stands[mixed][0], belongs[mixed][0]
        what = "rows of attention" if b["kind"] == ATTENTION else "a state"
        return f"{name_of(comparison, a['layer'])} holds {what} of {name_of(comparison, b['layer'])} {share}"
    said = []
    if (stands["owner"] != belongs["owner"]).any():
        owners = sorted(set(belongs["owner"][stands["owner"] != belongs["owner"]].tolist()))
        said.append(f"rows of another request (owner {intervals(owners)})")
    if (stands["engine"] != belongs["engine"]).any():
        engine = int(belongs["engine"][stands["engine"] != belongs["engine"]][0])
        said.append(f"rows that {ENGINES[engine]} computed instead of {ENGINES[1 - engine]}")
    said += _layer_change(comparison, stands, belongs)
    is_state = stands["kind"] == STATE
    if is_state.any():
        said += _state_change(comparison.regions, runs[is_state])
    if not is_state.all():
        said += _attention_change(comparison, runs[~is_state])
    if not said:
        lanes = Counter(
            dict(zip(*_counted(belongs["lane"].astype(int) - stands["lane"], weights), strict=True))
        )
        said.append(f"bytes are off by {8 * lanes.most_common(1)[0][0]:+d} within the row")
    return f"{'; '.join(said)} {share}"


def _counted(values: Array, weights: Array) -> tuple[list[int], list[int]]:
    found, inverse = np.unique(values, return_inverse=True)
    return found.tolist(), np.bincount(inverse, weights).astype(int).tolist()


def _layer_change(comparison: PoolComparison, stands: Array, belongs: Array) -> list[str]:
    pairs = {
        (a, b) for a, b in zip(stands["layer"].tolist(), belongs["layer"].tolist(), strict=True) if a != b
    }
    if not pairs:
        return []
    a, b = min(pairs)
    if pairs == {(a, b), (b, a)}:
        return [f"{name_of(comparison, a)} and {name_of(comparison, b)} are exchanged"]
    more = f" (and {len(pairs) - 1} more layers are mixed up)" if len(pairs) > 1 else ""
    return [f"{name_of(comparison, a)} holds rows of {name_of(comparison, b)}{more}"]


def _attention_change(comparison: PoolComparison, runs: Array) -> list[str]:
    said = []
    stands, belongs = runs["stands"], runs["belongs"]
    sizes = np.array([region.block_size or 1 for region in comparison.regions])[runs["region"]]
    shift = belongs["token"] - stands["token"]
    if shift.any():
        said.append(_token_shift(comparison, runs, shift, sizes))
    planes = {
        (a, b) for a, b in zip(stands["plane"].tolist(), belongs["plane"].tolist(), strict=True) if a != b
    }
    if planes:
        both = planes == {(0, 1), (1, 0)}
        said.append(
            "K and V are exchanged"
            if both
            else "{} holds rows of {}".format(*(PLANES[p] for p in min(planes)))
        )
    said += _permutation("head", stands["head"], belongs["head"])
    return said


def _token_shift(comparison: PoolComparison, runs: Array, shift: Array, sizes: Array) -> str:
    stands = runs["stands"]
    shifts = Counter(dict(zip(*_counted(shift, runs["words"]), strict=True)))
    if len(shifts) == 1:
        (by,) = shifts
        first = int(stands["token"].min())
        if _right_before(comparison, runs, first):
            engine = ENGINES[int(runs["belongs"]["engine"][0])]
            return (
                f"token {first} onwards holds {engine}'s token {abs(by)} further {'back' if by < 0 else 'on'}"
            )
        if not (by % sizes).any() and len(set(sizes.tolist())) == 1:
            return f"block is off by {by // int(sizes[0]):+d}"
        return f"token is off by {by:+d}"
    if not (shift % sizes).any():
        return _permutation("block", stands["token"] // sizes, runs["belongs"]["token"] // sizes)[0]
    common, count = shifts.most_common(1)[0]
    return f"token is mixed up ({len(shifts)} different distances, most often {common:+d}, {words_of(count)})"


def _right_before(comparison: PoolComparison, runs: Array, first: int) -> bool:
    """Whether each layer's rows are right up to token `first` and all wrong from there on."""
    for index in np.unique(runs["region"]).tolist():
        region, mine = comparison.regions[index], comparison.runs[comparison.runs["region"] == index]
        due = comparison.due.get(region.layer, ())
        moved = runs["block"][runs["region"] == index]
        before = [block for block in due if block not in set(mine["block"].tolist())]
        right = (mine["kind"] == SAME) & (mine["stands"]["token"] < first)
        after = (mine["kind"] == SAME) & (mine["stands"]["token"] >= first)
        touched = [place for place, block in enumerate(due) if block in set(moved.tolist())]
        behind = touched == list(range(len(due) - len(touched), len(due)))
        if after.any() or not (right.any() or before) or not behind:
            return False
    return True


def _state_change(regions: Sequence[Region], runs: Array) -> list[str]:
    said = []
    stands, belongs = runs["stands"], runs["belongs"]
    if (stands["token"] != belongs["token"]).any():
        whole = np.array([region.width != 6 for region in regions])[
            runs["region"]
        ]  # rows of 6 bytes have a residue only
        some = (stands["token"] != belongs["token"]) & (whole if whole.any() else True)
        at = int(np.argmax(some))
        unit = "tokens" if whole[at] else "tokens (mod 251)"
        said.append(f"state of {belongs['token'][at]} {unit} instead of {stands['token'][at]}")
    segments = {
        (a, b) for a, b in zip(stands["plane"].tolist(), belongs["plane"].tolist(), strict=True) if a != b
    }
    if segments:
        a, b = min(segments)
        if segments == {(a, b), (b, a)}:
            said.append(f"{SEGMENTS[a]} and {SEGMENTS[b]} are exchanged")
        else:
            channels = intervals(
                set(stands["head"][(stands["plane"] == a) & (belongs["plane"] == b)].tolist())
            )
            said.append(f"{SEGMENTS[a]} was cut across segments: channels {channels} hold {SEGMENTS[b]}")
    else:
        said += _permutation("channel", stands["head"], belongs["head"])
    return said


def _permutation(field: str, stands: Array, belongs: Array) -> list[str]:
    """What happened to one coordinate: nothing, an exchange, a constant distance, or a mix."""
    pairs = set(zip(stands.tolist(), belongs.tolist(), strict=True))
    moved = sorted((a, b) for a, b in pairs if a != b)
    if not moved:
        return []
    a, b = moved[0]
    if set(moved) == {(a, b), (b, a)}:
        return [f"{field} {a} and {field} {b} are exchanged"]
    if len(moved) > 1 and len({b - a for a, b in moved}) == 1 and len(moved) == len(pairs):
        return [f"{field} is off by {b - a:+d}"]
    if len(moved) == 1:
        return [f"{field} {a} holds {field} {b}"]
    return [
        f"{field}s are mixed up ("
        + ", ".join(f"{a} holds {b}" for a, b in moved[:4])
        + (", …)" if moved[4:] else ")")
    ]


_SAYS: dict[int, Callable[[PoolComparison, Collection[str]], str]] = {
    MOVED: _moved,
    UNWRITTEN: unwritten,
    ZEROED: zeroed,
    GARBLED: garbled,
    COLLATERAL: collateral,
}
