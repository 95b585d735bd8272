"""`@case` is the only way to become a case of the suite. A case is a function of a bench; what varies is data."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_kvconform.result import Cell, Evidence

if TYPE_CHECKING:
    from pytest_kvconform.rigs.bench import Bench

RIGS = {
    "interface": "scheduler",
    "protocol": "scheduler",
    "bytes": "bytes",
}  # tier -> rig in whose cells it runs; others: "engine"
Body = Callable[
    ..., Evidence
]  # body(bench, variant): returns evidence, or raises Violation, Blocked, NotApplicable, HarnessError


@dataclass(frozen=True)
class Case:
    """One registered case; the plugin makes one pytest item for each of its cells and variants."""

    name: str  # the function's name: "arrive"
    rule: str  # id of the rule it checks: "KV-BYTES-001"
    tier: str  # the folder of its module: "engine"
    body: Body
    applies: Callable[[Cell], bool]  # whether the case has a meaning there
    variants: Callable[
        [Cell, str], Iterable[Any]
    ]  # (cell, matrix) -> the scenarios; str(variant) is the last word of the id
    inside: bool = False  # it runs in a process of its own, and needs none of the cell's engines


def case(
    rule: str,
    *,
    applies: Callable[[Cell], bool] = lambda cell: True,
    variants: Callable[[Cell, str], Iterable[Any]] = lambda cell, matrix: (None,),
    inside: bool = False,
) -> Callable[[Body], Body]:
    """Register a function as a case. A variant of None adds no word to the id.

    The function is called as `body(bench, variant)` and must return Evidence. With `inside` it is called as `body(rig, variant)` in a
    process of its own that has vLLM, see pytest_kvconform/rigs/scheduler/rig.py; the variant travels there.
    """

    def register(body: Body) -> Body:
        tier = body.__module__.split(".")[-2]
        run = _inside(body, rule) if inside else body
        run.kv_case = Case(body.__name__, rule, tier, run, applies, variants, inside)  # type: ignore[attr-defined]
        return run

    return register


def _inside(body: Body, rule: str) -> Body:
    """A body that runs another one on the scheduler rig; that one is its `__wrapped__`."""

    @functools.wraps(body)
    def run(bench: Bench, variant: Any) -> Evidence:
        return bench.scheduler.run(bench.cell, body.__module__, body.__name__, rule, variant)

    return run


# The plugin hands every body a Bench: what runs the case. See pytest_kvconform/rigs/bench.py.
__all__ = ["RIGS", "Bench", "Body", "Case", "case"]
