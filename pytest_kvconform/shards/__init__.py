"""Division of a run into shards, `--kv-shard=i/n`, each of which another machine can run.

Cases that share engines stay together: the cases of one cell on the rigs that start engines for it. Cases of
the scheduler rig and of the serving rig share none with them, and are a group of their own in each cell. The
groups are dealt by what they cost, the most expensive first, each to the shard that has least to do so far.
The division depends on the planned cases and on `costs.toml` alone: every shard computes the same one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pytest_kvconform.result import Cell
from pytest_kvconform.settings import NIGHTLY

if TYPE_CHECKING:
    from pytest_kvconform.plan import PlannedCase

ALONE_RIGS = ("scheduler", "serving")  # rigs whose cases share no engine with other rigs


class Group(msgspec.Struct, frozen=True):
    """What runs in one place: the cases of a cell that share engines."""

    cell: Cell
    apart: str  # a rig of ALONE_RIGS, or "" for all others together


class Rig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one case of a rig costs, in seconds; costs.toml tells how that was found."""

    other: float  # a case of a family or geometry that was not measured
    families: dict[str, float] = {}  # measured, by family or geometry


@functools.cache
def load_costs() -> dict[str, Rig]:
    """Return the costs by rig, and those of the nightly matrix by its name."""
    return msgspec.toml.decode(Path(__file__).with_name("costs.toml").read_bytes(), type=dict[str, Rig])


def seconds(planned: PlannedCase, matrix: str) -> float:
    """Return what a case costs, with its share of the engines of its cell."""
    rig = _rig(planned, matrix)
    return rig.families.get(planned.cell.family, rig.other)


def is_measured(planned: PlannedCase, matrix: str) -> bool:
    """Whether the cost of a case was measured, and not declared for want of a measurement."""
    return planned.cell.family in _rig(planned, matrix).families


def _rig(planned: PlannedCase, matrix: str) -> Rig:
    return load_costs()[NIGHTLY if matrix == NIGHTLY else planned.case.rig]


def group_of(planned: PlannedCase) -> Group:
    """Return the group of a case."""
    return Group(planned.cell, planned.case.rig if planned.case.rig in ALONE_RIGS else "")


def groups(planned: Iterable[PlannedCase]) -> dict[Group, list[PlannedCase]]:
    """Return the cases by group, in the order given."""
    found: dict[Group, list[PlannedCase]] = {}
    for one in planned:
        found.setdefault(group_of(one), []).append(one)
    return found


def divide(planned: Sequence[PlannedCase], matrix: str, shards: int) -> list[list[Group]]:
    """Return the groups of each shard, the first of them those of shard 1.

    Raises ValueError if there are fewer groups than shards: a shard without a case would show nothing.
    """
    costs = {group: sum(seconds(one, matrix) for one in cases) for group, cases in groups(planned).items()}
    if len(costs) < shards:
        raise ValueError(
            f"the selection can be divided into {len(costs)} shards at most, by cells: give N from 1 to "
            f"{len(costs)}"
        )
    dealt: list[list[Group]] = [[] for _ in range(shards)]
    loads = [0.0] * shards
    for group in sorted(costs, key=lambda group: (-costs[group], str(group.cell), group.apart)):
        least = loads.index(min(loads))
        dealt[least].append(group)
        loads[least] += costs[group]
    return dealt


def part(
    planned: Sequence[PlannedCase], matrix: str, shard: str
) -> tuple[list[PlannedCase], list[PlannedCase]]:
    """Return the cases of one shard, `2/4`, and those of all others, in the order given.

    Without a shard all cases are in the first list. Raises ValueError as `divide` does.
    """
    if not shard:
        return list(planned), []
    number, of = numbers(shard)
    mine = set(divide(planned, matrix, of)[number - 1])
    return (
        [one for one in planned if group_of(one) in mine],
        [one for one in planned if group_of(one) not in mine],
    )


def numbers(shard: str) -> tuple[int, int]:
    """Return i and n of `i/n`."""
    number, _, of = shard.partition("/")
    return int(number), int(of)
