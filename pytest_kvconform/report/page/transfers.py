"""Sizes and times of the transfers of a run: a plot as SVG, and a table by family."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import NamedTuple

from pytest_kvconform.report.document import Report
from pytest_kvconform.result import CaseResult, Outcome

WIDTH, HEIGHT = 720, 340  # of the picture, in its own units
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 40, 14, 44  # margins
ROWS = "rows"  # unit of evidence about a whole transfer


class Transfer(NamedTuple):
    """One hand-over of the byte rig."""

    family: str
    size: float  # bytes
    seconds: float


class Dot(NamedTuple):
    """A place of the plot. Transfers that fall on one place are one dot."""

    x: int
    y: int


class Tick(NamedTuple):
    """A line across the plot, with its label."""

    at: int
    label: str


class Plot(NamedTuple):
    """A plot of seconds over bytes, both logarithmic."""

    dots: list[Dot]
    across: list[Tick]  # of bytes
    upward: list[Tick]  # of seconds
    summary: str  # one sentence, for who cannot see the plot


class FamilyRow(NamedTuple):
    """The transfers of one family, added up."""

    family: str
    number: int
    size: str  # of all
    median: str  # seconds
    longest: str


def transfers(report: Report) -> list[Transfer]:
    """Return the transfers whose bytes and seconds the report has, each once.

    Several cases of a module judge one transfer. Its cell and its variant name it.
    """
    found: dict[tuple[str, str], Transfer] = {}
    for result in report.results:
        module, _, case = result.id.partition("::")[2].partition("::")
        if (one := _transfer(result)) is not None:
            found.setdefault((module, case.partition("[")[2]), one)
    return list(found.values())


def _transfer(result: CaseResult) -> Transfer | None:
    evidence = result.evidence
    if result.outcome is not Outcome.PASS or evidence is None or evidence.unit != ROWS:
        return None
    seconds = evidence.notes.get("seconds")
    if evidence.bytes_moved <= 0 or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        return None
    return Transfer(result.cell.family if result.cell else "-", evidence.bytes_moved, float(seconds))


def plot(report: Report) -> Plot | None:
    """Return the plot; None if the report has no transfer with its bytes and its seconds."""
    every = transfers(report)
    if not every:
        return None
    sizes = _decades(one.size for one in every)
    times = _decades(one.seconds for one in every)

    def across(size: float) -> int:
        return _LEFT + round(_share(size, sizes) * (WIDTH - _LEFT - _RIGHT))

    def upward(seconds: float) -> int:
        return HEIGHT - _BOTTOM - round(_share(seconds, times) * (HEIGHT - _TOP - _BOTTOM))

    return Plot(
        dots=sorted({Dot(across(one.size), upward(one.seconds)) for one in every}),
        across=[Tick(across(10**n), _bytes_text(10**n)) for n in range(sizes[0], sizes[1] + 1)],
        upward=[Tick(upward(10**n), _seconds_text(10**n)) for n in range(times[0], times[1] + 1)],
        summary=f"{len(every):,} transfers of {_bytes_text(min(one.size for one in every))} to "
        f"{_bytes_text(max(one.size for one in every))}, which took "
        f"{_seconds_text(min(one.seconds for one in every))} to "
        f"{_seconds_text(max(one.seconds for one in every))}",
    )


def by_family(report: Report) -> list[FamilyRow]:
    """Return a row for each family whose transfers the plot shows."""
    found: dict[str, list[Transfer]] = {}
    for one in transfers(report):
        found.setdefault(one.family, []).append(one)
    return [
        FamilyRow(
            family,
            len(mine),
            _bytes_text(sum(one.size for one in mine)),
            _seconds_text(statistics.median(one.seconds for one in mine)),
            _seconds_text(max(one.seconds for one in mine)),
        )
        for family, mine in sorted(found.items())
    ]


def _decades(values: Iterable[float]) -> tuple[int, int]:
    """Return the powers of ten between which the values lie, at least one apart."""
    powers = [math.log10(value) for value in values]
    low = math.floor(min(powers))
    return low, max(low + 1, math.ceil(max(powers)))


def _share(value: float, decades: tuple[int, int]) -> float:
    return (math.log10(value) - decades[0]) / (decades[1] - decades[0])


def _bytes_text(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def _seconds_text(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"
