"""The last calls of the connector's hooks before a failure: a picture as SVG, and a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from pytest_kvconform.result import HookCall

WIDTH, LANE = 720, 24  # of the picture, and the height of a lane, in its own units
_LEFT, _RIGHT, _TOP, _BOTTOM = 104, 20, 8, 22  # margins
_LONGEST = 14  # characters of a lane's name in the picture


class Dot(NamedTuple):
    """A call. Calls at one place of the picture are one dot."""

    x: int
    y: int
    raised: bool


class Lane(NamedTuple):
    """The calls of one half of a connector."""

    name: str
    y: int


class Row(NamedTuple):
    """A call in the table."""

    at: str
    who: str  # "P", or "D, rank 1"
    hook: str
    about: list[str]  # ids of requests, and what was given
    answer: str
    times: int
    raised: bool


class Timeline(NamedTuple):
    """The last calls of both sides, in the order in which they began."""

    height: int
    lanes: list[Lane]
    dots: list[Dot]
    last: str  # when the last call began
    rows: list[Row]
    summary: str  # one sentence, for who cannot see the picture


def timeline(calls: Sequence[HookCall]) -> Timeline | None:
    """Return what the page draws of the calls of a finding; None without calls."""
    if not calls:
        return None
    names = sorted({(call.side, call.rank is not None, call.rank or 0) for call in calls}, key=_p_first)
    places = {name: _TOP + LANE * number + LANE // 2 for number, name in enumerate(names)}
    first, last = min(call.at for call in calls), max(call.at for call in calls)
    dots = {
        Dot(
            _across(call.at, first, last),
            places[call.side, call.rank is not None, call.rank or 0],
            _has_raised(call),
        )
        for call in calls
    }
    raised = [f"{call.hook} of {_who(call)}" for call in calls if _has_raised(call)]
    end = f"{raised[-1]} raised" if raised else f"the last one is {calls[-1].hook} of {_who(calls[-1])}"
    return Timeline(
        height=_TOP + LANE * len(names) + _BOTTOM,
        lanes=[
            Lane(f"{side} rank {rank}"[:_LONGEST] if worker else side[:_LONGEST], y)
            for (side, worker, rank), y in places.items()
        ],
        dots=sorted(dots),
        last=_seconds(last - first),
        rows=[
            Row(
                at=_seconds(call.at - first),
                who=_who(call),
                hook=call.hook,
                about=[*call.requests, *([call.given] if call.given else [])],
                answer=call.answer,
                times=call.times,
                raised=_has_raised(call),
            )
            for call in calls
        ],
        summary=f"{sum(call.times for call in calls):,} calls of hooks in {_seconds(last - first)}; {end}",
    )


def _p_first(name: tuple[str, bool, int]) -> tuple[bool, str, bool, int]:
    return not name[0].startswith("P"), *name


def _has_raised(call: HookCall) -> bool:
    return call.answer.startswith("raised ")


def _who(call: HookCall) -> str:
    return call.side if call.rank is None else f"{call.side}, rank {call.rank}"


def _across(at: float, first: float, last: float) -> int:
    share = (at - first) / (last - first) if 0 < last - first < math.inf else 0.0
    return _LEFT + round(share * (WIDTH - _LEFT - _RIGHT))


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.3f} s"
