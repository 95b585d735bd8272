"""`@case` is the only way to become a case of the suite.

A case is a function of a bench; its variants are data.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from model_matrix.cells import RIGS_OF_TIERS
from pytest_kvconform.case_outcome import CaseEnd
from pytest_kvconform.result import Cell, Evidence

if TYPE_CHECKING:
    from pytest_kvconform.rigs.bench import Bench

# body(bench, variant), on the scheduler rig body(rig, variant): returns evidence, or raises
# Violation, Blocked, NotApplicable or HarnessError. The registered body of a case of the
# scheduler rig returns a CaseEnd. A script (`case(script=True)`) is a generator that returns
# evidence or raises, and its registered body is no generator.
Body = Callable[..., Evidence | CaseEnd]


@dataclass(frozen=True)
class Case:
    """One registered case; the plugin makes one pytest item for each of its cells and variants."""

    name: str  # the function's name: "rows_arrive"
    rule: str  # id of the rule it checks: "KV-BYTES-001"
    tier: str  # the folder of `suite` that its module is in: "engine"
    rig: str  # what it runs on, and in whose cells: "engine", "bytes", "peers", "scheduler" or "serving"
    body: Body  # body(bench, variant)
    applies: Callable[[Cell], bool]  # whether the case has a meaning in a cell
    # (cell, matrix) -> variants; str(variant) is the last word of the id
    variants: Callable[[Cell, str], Iterable[Any]]
    # names of the scenarios between peers that it observes; None: that of its variant
    scenarios: tuple[str, ...] | None


def case(
    rule: str,
    *,
    rig: str = "",
    applies: Callable[[Cell], bool] = lambda cell: True,
    variants: Callable[[Cell, str], Iterable[Any]] = lambda cell, matrix: (None,),
    scenarios: tuple[str, ...] | None = (),
    script: bool = False,
) -> Callable[[Callable[..., Any]], Body]:
    """Register a function as a case. A variant of None adds no word to the id.

    A case that names no rig runs on the only one of its tier. The function is called as
    `body(bench, variant)` and must return Evidence. With `rig="scheduler"` it is called as
    `body(rig, variant)` in a process of its own that has vLLM, see pytest_kvconform/rigs/scheduler/rig.py;
    the variant travels there. With `rig="peers"` it names the `scenarios` that it observes: a run has those
    of its cases. None stands for the one that the variant names.

    With `script` it runs in the cells of the rig, and is a script: a generator `body(cluster, variant)` on
    engines of the cluster, see pytest_kvconform/rigs/cluster/scripts. Raises ValueError if the rig has to be
    named and is not.
    """

    def register(body: Callable[..., Any]) -> Body:
        tier = body.__module__.partition(".suite.")[2].partition(".")[0]
        rigs = RIGS_OF_TIERS.get(tier, ("engine",))
        if not rig and "scheduler" in rigs:
            raise ValueError(f"{body.__name__}: a case of tier {tier} names its rig: {', '.join(rigs)}")
        where = rig or rigs[0]
        run: Body = body
        if script:
            run = _as_script(body, rule)
        elif where == "scheduler":
            run = _on_scheduler_rig(body, rule)
        registered = Case(body.__name__, rule, tier, where, run, applies, variants, scenarios)
        run.kv_case = registered  # type: ignore[attr-defined]
        return run

    return register


def _as_script(body: Callable[..., Any], rule: str) -> Body:
    """A function of a bench that runs the script `body`, which is its `__wrapped__`."""

    @functools.wraps(body)
    def run(bench: Bench, variant: Any) -> Evidence:
        return bench.scripts.run(bench.cell, body, rule, variant)

    return run


def _on_scheduler_rig(body: Body, rule: str) -> Body:
    """A function of a bench that runs `body` in the scheduler host process; `body` is its `__wrapped__`."""

    @functools.wraps(body)
    def run(bench: Bench, variant: Any) -> CaseEnd:
        return bench.scheduler.run(bench.cell, body.__module__, body.__name__, rule, variant)

    return run
