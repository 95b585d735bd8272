"""The cells of cases on engines of the cluster, and how their requests end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from model_matrix import parse_topology
from model_matrix.geometries import State, load_geometries
from pytest_kvconform.result import Cell, Evidence, NotApplicable
from pytest_kvconform.rigs.cluster.scripts.cluster import RELEASES, Cluster, Engine, Steps
from pytest_kvconform.suite.protocol._scenarios import one_group

Prompts = dict[int, tuple[int, ...]]  # owner -> prompt


def plain(cell: Cell) -> bool:
    """Whether this is the cell of full attention at one rank: engines of scripts have one."""
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


def prompts_of(cluster: Cluster, lengths: Iterable[int], first: int = 0) -> Prompts:
    """Prompts of these lengths in tokens, owner -> prompt, the first of number `first`."""
    return {owner: cluster.prompt(length, seed=owner) for owner, length in enumerate(lengths, first)}


def hand_over(cluster: Cluster, prompts: Prompts) -> Steps:
    """Let P compute prompts, and add them to D. Returns D's ids."""
    return (yield from cluster.decode(prompts, (yield from cluster.prefill(prompts))))


def hand_over_and_check(cluster: Cluster, prompts: Prompts, released: bool = True, **more: Any) -> Steps:
    """Hand prompts over, and check what D loads. Returns Evidence. `released`: see `settle`; `more`: of P's
    requests.
    """
    ids = yield from cluster.decode(prompts, (yield from cluster.prefill(prompts, **more)))
    yield from settle(cluster, ids, released=released)
    return (yield from loaded(cluster, ids))


def settle(cluster: Cluster, ids: Iterable[str], d: Engine | None = None, released: bool = True) -> Steps:
    """Step until these requests of D have ended, and with `released` until all engines are idle. Raises
    Violation of the case's rule if loaded KV is wrong, or if a request ended with an error.
    """
    wanted, d = list(ids), d or cluster.d
    yield from cluster.settle(lambda: cluster.ended(d, wanted), "requests of D")
    yield from cluster.check()
    if failed := [id for id in wanted if cluster.finish(d, id) == "error"]:
        raise cluster.violation("", f"{failed[0]} ended with an error: the connector gave its load up")
    if released:
        yield from cluster.settle(lambda: all(look.idle for look in cluster.looks.values()), RELEASES)


def loaded(cluster: Cluster, ids: Iterable[str], d: Engine | None = None) -> Steps:
    """Check what was loaded. Returns Evidence. Raises NotApplicable if nothing was loaded."""
    ids = list(ids)
    compared = yield from cluster.check()
    announced = yield from cluster.announced(d or cluster.d, ids)
    if not sum(announced.values()):
        raise NotApplicable(f"{cluster.subject.connector} loaded nothing of {len(ids)} prompts", refused=True)
    return Evidence(looked_at=max(1, compared), unit="tokens", external_tokens=sum(announced.values()))
