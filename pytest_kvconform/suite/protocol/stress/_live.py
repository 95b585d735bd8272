"""Hand-overs between live engines, and the cells of cases on them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from model_matrix import parse_topology
from model_matrix.geometries import State, load_geometries
from pytest_kvconform.result import Cell, Evidence, NotApplicable, Violation
from pytest_kvconform.rigs.processes.cores import Deadline
from pytest_kvconform.rigs.scheduler.violations import RELEASES
from pytest_kvconform.suite.protocol._scenarios import one_group

Prompts = dict[int, tuple[int, ...]]  # owner -> prompt


def plain(cell: Cell) -> bool:
    """Whether this is the cell of full attention at one rank: a live engine has one rank."""
    return parse_topology(cell.topology) == (1, 1) and one_group(cell) and cell.setup == "b16"


def first_alone(cell: Cell, matrix: str, *variants: str) -> tuple[str, ...]:
    """Return the variants of a case: all in the full matrix, and the first one in the quick matrix."""
    return variants if matrix != "quick" else variants[:1]


def in_full(cell: Cell, matrix: str) -> tuple[None, ...]:
    """Return the variants of a case that only the full matrix has: one without a name."""
    return () if matrix == "quick" else (None,)


def with_states(cell: Cell) -> bool:
    """Whether some layers keep a state, and P and D have equal ranks."""
    p, d = parse_topology(cell.topology)
    return p == d and any(isinstance(kind, State) for kind in load_geometries()[cell.family].kinds.values())


def prompts_of(live: Any, lengths: Iterable[int], first: int = 0) -> Prompts:
    """Prompts of these lengths in tokens, owner -> prompt, the first of number `first`."""
    return {owner: live.rig.prompt(length, seed=owner) for owner, length in enumerate(lengths, first)}


def prefill(live: Any, prompts: Prompts, p: Any = None, **more: Any) -> dict[int, str]:
    """Let P compute prompts. Returns owner -> id. The engine of a store has saved all of them then, and its
    prefix cache is empty. `p`: another engine than P. `more`: of `LiveEngine.add`.
    """
    p = p or live.p
    ids = {
        owner: p.add(prompt, owner, live.rig.prefill_params() or None, **more)
        for owner, prompt in prompts.items()
    }
    live.settle(lambda: p.ended(list(ids.values())), "prefills")
    if live.store:
        await_saves(live, p)
    return ids


def await_saves(live: Any, p: Any) -> None:
    """Step the engine of a store until its prompts are saved, and empty its prefix cache. The store may hold
    blocks in vLLM's pool until its workers have saved them.
    """
    live.settle(p.is_idle, "saves")
    keeps = bool(p.leaks())
    for _ in live.rig.waits(Deadline(0.0 if live.keeps else live.rig.settle_s)):
        if not keeps:
            break
        keeps = bool(p.leaks())  # looking takes a step
    live.keeps = keeps
    for _ in live.rig.waits(Deadline(live.rig.subject.save_delay)):
        p.leaks()
    p.evict_prefix_cache()


def decode(
    live: Any, prompts: Prompts, prefills: dict[int, str], p: Any = None, d: Any = None, **more: Any
) -> list[str]:
    """Add these prompts to D with what P handed over. Returns their ids. `p`, `d`: other engines."""
    p, d = p or live.p, d or live.d
    return [
        d.add(
            prompt,
            owner,
            None if live.store else p.params(prefills[owner]),
            loads_from=p.spec.engine,
            like=prefills[owner],
            **more,
        )
        for owner, prompt in prompts.items()
    ]


@contextlib.contextmanager
def abort_once_admitted(live: Any, ids: Iterable[str]) -> Iterator[None]:
    """Abort each of these requests of D in the step in which it is admitted, for as long as the block lasts.

    vLLM takes aborts between the step of the workers and update_from_output (EngineCore.step). So a load that
    ends within that step is still under way for the scheduler half.
    """
    side, left = live.d.side, set(ids)
    work = side.worker

    def work_and_abort(output: Any) -> Any:
        reported = work(output)
        for id in [id for id in left if side.status(id) != "WAITING"]:
            left.remove(id)
            side.abort_in_next_step(id)
        return reported

    side.worker = work_and_abort
    try:
        yield
    finally:
        side.worker = work


def settle(live: Any, ids: Iterable[str], d: Any = None, released: bool = True) -> None:
    """Step until these requests of D have ended, and with `released` until all engines are idle. Raises
    Violation of the case's rule if loaded KV is wrong, or if a request ended with an error.
    """
    wanted, d = list(ids), d or live.d
    live.settle(lambda: d.ended(wanted), "requests of D")
    live.check()
    if failed := [id for id, finish in d.finishes(wanted).items() if finish == "error"]:
        raise live.rig.violation("", f"{failed[0]} ended with an error: the connector gave its load up")
    if released:
        live.settle(lambda: all(engine.is_idle() for engine in live.engines), RELEASES)


def loaded(live: Any, ids: Iterable[str], d: Any = None) -> Evidence:
    """Check what was loaded. Raises NotApplicable if nothing was loaded."""
    ids = list(ids)
    compared, announced = live.check(), (d or live.d).announced(ids)
    if not sum(announced.values()):
        raise NotApplicable(
            f"{live.rig.subject.connector} loaded nothing of {len(ids)} prompts", refused=True
        )
    return Evidence(looked_at=max(1, compared), unit="tokens", external_tokens=sum(announced.values()))


def declined(error: Violation, what: str) -> Exception:
    """NotApplicable if the connector declined to start engines that do this, otherwise the violation."""
    if error.finding.declined:
        return NotApplicable(f"it declines {what}: {error.finding.declined}", refused=True)
    return error
