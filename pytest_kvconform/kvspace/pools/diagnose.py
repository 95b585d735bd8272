"""One sentence on a `PoolComparison`: the named mistake, or else what happened to the coordinates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

import numpy as np

from pytest_kvconform.kvspace.kinds import (
    COLLATERAL,
    GARBLED,
    MOVED,
    NAMES,
    PLANES,
    SAME,
    SEGMENTS,
    UNWRITTEN,
    ZEROED,
    intervals,
    permutation,
)
from pytest_kvconform.kvspace.pools.addresses import ATTENTION, POISON, STATE, Array
from pytest_kvconform.kvspace.pools.compare import PoolComparison
from pytest_kvconform.kvspace.pools.mistakes import name_mistakes
from pytest_kvconform.kvspace.pools.regions import Region
from pytest_kvconform.kvspace.pools.sentences import (
    ENGINES,
    NO_ADDRESS,
    collateral,
    garbled,
    layers_of,
    name_of,
    share_of,
    unwritten,
    words_of,
    zeroed,
)
from pytest_kvconform.kvspace.pools.sources import Source


def diagnose_pool(
    comparison: PoolComparison,
    *,
    source: Source | None = None,
    later_right: bool = False,
    drafts: Collection[str] = (),
) -> str:
    """The likely reason why words are wrong; empty if none is.

    `source` (where P's rows lie) is needed to name the mistakes that depend on it. `later_right`: a later
    look found all these words correct. `drafts` are names of layers of a draft model.
    """
    if not comparison.wrong:
        return ""
    if later_right:
        return (
            f"{words_of(comparison.wrong)} were still unwritten when the load was reported complete; "
            "a later look found them correct"
        )
    names = name_mistakes(comparison, source)
    if names:
        return (
            f"{' or '.join(names)}: this explains all {words_of(comparison.wrong)} in {layers_of(comparison)}"
        )
    order = sorted(comparison.words, key=lambda kind: (kind == MOVED, comparison.words[kind]), reverse=True)
    first, rest = order[0], order[1:]
    sentence = _SENTENCES[first](comparison, drafts)
    others = ", ".join(f"{words_of(comparison.words[kind])} {NAMES[kind]}" for kind in rest)
    return sentence + (f"; besides, {others}" if others else "")


def diagnose_source(comparison: PoolComparison) -> str:
    """What was written into P's pool, from which loads only read; empty if nothing was."""
    if not comparison.wrong:
        return ""
    runs = comparison.runs[comparison.runs["kind"] != SAME]
    contents = Counter[str]()
    for run in runs:
        found = run["found"]
        if found["kind"] in (ATTENTION, STATE):
            what = f"what {ENGINES[found['engine']]} computed"
        elif found["kind"] == POISON:
            what = f"memory that {ENGINES[found['engine']]} had not written"
        else:
            what = "zeros" if run["kind"] == ZEROED else NO_ADDRESS
        contents[what] += int(run["words"])
    what = max(contents, key=lambda content: contents[content], default=NO_ADDRESS)
    where = f" of {layers_of(comparison)}" if len(runs) else ""
    return f"P's pool was written to, but loads only read it: {words_of(comparison.wrong)}{where} hold {what}"


def count_pool(comparison: PoolComparison) -> str:
    """ "320 words in 20 rows differ: 300 moved, 20 never written"."""
    parts = ", ".join(f"{count} {NAMES[kind]}" for kind, count in comparison.words.items())
    return f"{words_of(comparison.wrong)} in {sum(comparison.rows.values())} rows differ: {parts}"


def _moved(comparison: PoolComparison, drafts: Collection[str]) -> str:
    """The sentence on MOVED words: a part for each coordinate that was not kept."""
    runs = comparison.runs[comparison.runs["kind"] == MOVED]
    expected, found, weights = runs["expected"], runs["found"], runs["words"]
    share = f"in {share_of(comparison, MOVED)}"
    mixed = expected["kind"] != found["kind"]
    if mixed.any():
        a, b = expected[mixed][0], found[mixed][0]
        what = "rows of attention" if b["kind"] == ATTENTION else "a state"
        return f"{name_of(comparison, a['layer'])} holds {what} of {name_of(comparison, b['layer'])} {share}"
    changes = []
    if (expected["owner"] != found["owner"]).any():
        owners = sorted(set(found["owner"][expected["owner"] != found["owner"]].tolist()))
        changes.append(f"rows of another request (owner {intervals(owners)})")
    if (expected["engine"] != found["engine"]).any():
        engine = int(found["engine"][expected["engine"] != found["engine"]][0])
        changes.append(f"rows that {ENGINES[engine]} computed instead of {ENGINES[1 - engine]}")
    changes += _layer_change(comparison, expected, found)
    is_state = expected["kind"] == STATE
    if is_state.any():
        changes += _state_change(comparison.regions, runs[is_state])
    if not is_state.all():
        changes += _attention_change(comparison, runs[~is_state])
    if not changes:
        lanes = _counted(found["lane"].astype(int) - expected["lane"], weights)
        changes.append(f"bytes are off by {8 * lanes.most_common(1)[0][0]:+d} within the row")
    return f"{'; '.join(changes)} {share}"


def _counted(values: Array, weights: Array) -> Counter[int]:
    """Value -> sum of the weights of its elements."""
    distinct, inverse = np.unique(values, return_inverse=True)
    sums = np.bincount(inverse, weights).astype(int).tolist()
    return Counter(dict(zip(distinct.tolist(), sums, strict=True)))


def _layer_change(comparison: PoolComparison, expected: Array, found: Array) -> list[str]:
    pairs = {
        (a, b) for a, b in zip(expected["layer"].tolist(), found["layer"].tolist(), strict=True) if a != b
    }
    if not pairs:
        return []
    a, b = min(pairs)
    if pairs == {(a, b), (b, a)}:
        return [f"{name_of(comparison, a)} and {name_of(comparison, b)} are exchanged"]
    more = f" (and {len(pairs) - 1} more layers are mixed up)" if len(pairs) > 1 else ""
    return [f"{name_of(comparison, a)} holds rows of {name_of(comparison, b)}{more}"]


def _attention_change(comparison: PoolComparison, runs: Array) -> list[str]:
    changes = []
    expected, found = runs["expected"], runs["found"]
    sizes = np.array([region.block_size or 1 for region in comparison.regions])[runs["region"]]
    shift = found["token"] - expected["token"]
    if shift.any():
        changes.append(_token_shift(comparison, runs, shift, sizes))
    planes = {
        (a, b) for a, b in zip(expected["plane"].tolist(), found["plane"].tolist(), strict=True) if a != b
    }
    if planes:
        both = planes == {(0, 1), (1, 0)}
        changes.append(
            "K and V are exchanged"
            if both
            else "{} holds rows of {}".format(*(PLANES[p] for p in min(planes)))
        )
    changes += _permutation("head", expected["head"], found["head"])
    return changes


def _token_shift(comparison: PoolComparison, runs: Array, shift: Array, sizes: Array) -> str:
    expected = runs["expected"]
    shifts = _counted(shift, runs["words"])
    if len(shifts) == 1:
        (by,) = shifts
        first = int(expected["token"].min())
        if _correct_before(comparison, runs, first):
            engine = ENGINES[int(runs["found"]["engine"][0])]
            distance = f"{abs(by)} positions {'earlier' if by < 0 else 'later'}"
            return f"from token {first} on, each place holds {engine}'s token from {distance}"
        if not (by % sizes).any() and len(set(sizes.tolist())) == 1:
            return f"block is off by {by // int(sizes[0]):+d}"
        return f"token is off by {by:+d}"
    if not (shift % sizes).any():
        return _permutation("block", expected["token"] // sizes, runs["found"]["token"] // sizes)[0]
    common, count = shifts.most_common(1)[0]
    return f"token is mixed up ({len(shifts)} different distances, most often {common:+d}, {words_of(count)})"


def _correct_before(comparison: PoolComparison, runs: Array, first: int) -> bool:
    """Whether all rows of each layer are correct before token `first`, and wrong from there on."""
    for index in np.unique(runs["region"]).tolist():
        region, mine = comparison.regions[index], comparison.runs[comparison.runs["region"] == index]
        due = comparison.due.get(region.layer, ())
        moved = runs["block"][runs["region"] == index]
        before = [block for block in due if block not in set(mine["block"].tolist())]
        correct = (mine["kind"] == SAME) & (mine["expected"]["token"] < first)
        after = (mine["kind"] == SAME) & (mine["expected"]["token"] >= first)
        touched = [place for place, block in enumerate(due) if block in set(moved.tolist())]
        at_end = touched == list(range(len(due) - len(touched), len(due)))
        if after.any() or not (correct.any() or before) or not at_end:
            return False
    return True


def _state_change(regions: Sequence[Region], runs: Array) -> list[str]:
    changes = []
    expected, found = runs["expected"], runs["found"]
    if (expected["token"] != found["token"]).any():
        # Rows of 6 bytes hold a residue of the number of tokens only.
        whole = np.array([region.width != 6 for region in regions])[runs["region"]]
        some = (expected["token"] != found["token"]) & (whole if whole.any() else True)
        at = int(np.argmax(some))
        unit = "tokens" if whole[at] else "tokens (mod 251)"
        changes.append(f"state of {found['token'][at]} {unit} instead of {expected['token'][at]}")
    segments = {
        (a, b) for a, b in zip(expected["plane"].tolist(), found["plane"].tolist(), strict=True) if a != b
    }
    if segments:
        a, b = min(segments)
        if segments == {(a, b), (b, a)}:
            changes.append(f"{SEGMENTS[a]} and {SEGMENTS[b]} are exchanged")
        else:
            channels = intervals(
                set(expected["head"][(expected["plane"] == a) & (found["plane"] == b)].tolist())
            )
            changes.append(f"{SEGMENTS[a]} was cut across segments: channels {channels} hold {SEGMENTS[b]}")
    else:
        changes += _permutation("channel", expected["head"], found["head"])
    return changes


def _permutation(field: str, expected: Array, found: Array) -> list[str]:
    part = permutation(field, set(zip(expected.tolist(), found.tolist(), strict=True)))
    return [part] if part else []


_SENTENCES: dict[int, Callable[[PoolComparison, Collection[str]], str]] = {
    MOVED: _moved,
    UNWRITTEN: unwritten,
    ZEROED: zeroed,
    GARBLED: garbled,
    COLLATERAL: collateral,
}
