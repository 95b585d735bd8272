"""Aborts of requests that load what a store has saved."""

from __future__ import annotations

from pytest_kvconform.case import case
from pytest_kvconform.result import Violation
from pytest_kvconform.rigs.cluster.scripts.cluster import Cluster, Steps
from pytest_kvconform.rigs.engine.handle import EngineFailed
from pytest_kvconform.suite.protocol.multi_connector import _dense
from pytest_kvconform.suite.protocol.stores.saved_prompts import require_store
from pytest_kvconform.suite.protocol.stress._live import loaded, prompts_of, settle

STATES = ("waiting", "loading")


@case("KV-ABORT-001", applies=_dense, variants=lambda cell, matrix: STATES, rig="scheduler", script=True)
def abort_of_a_load_leaves_others_alone(cluster: Cluster, state: str) -> Steps:
    """One of two requests that load is aborted in the engine that has saved their prompts.

    `waiting`: before its first step. `loading`: in the step in which its load begins. The other request loads
    what was saved, a later request with the prompt of the aborted one does so or computes it, and nothing is
    left.
    """
    require_store(cluster)
    try:
        return (yield from _abort(cluster, state))
    except (Violation, EngineFailed) as raised:
        broken = cluster.ended_by(raised)
        if not isinstance(broken, Violation):
            raise broken from None
        happened = f"a request was aborted while {state}: {broken.finding.happened}"
        raise cluster.violation("", happened, broken.finding.differs) from None


def _abort(cluster: Cluster, state: str) -> Steps:
    yield from cluster.start()
    d, block = cluster.d, cluster.block(cluster.d)
    prompts = prompts_of(cluster, (4 * block + 5, 3 * block + 7))
    saved = yield from cluster.prefill(prompts)
    aborted, other = yield from cluster.decode(prompts, saved)
    if state == "waiting":
        yield from cluster.abort(d, aborted)
    else:
        yield from d.call("abort_once_admitted", (aborted,))
    yield from settle(cluster, [other])
    yield from d.call("abort_once_admitted", ())
    yield from cluster.settle(lambda: cluster.ended(d, [aborted]), "the aborted request")
    yield from d.call("evict_prefix_cache")
    again = yield from cluster.decode({0: prompts[0]}, saved, name="again")
    yield from settle(cluster, again)
    if left := (yield from cluster.left(d)):
        raise cluster.violation("", left)
    return (yield from loaded(cluster, [other]))
