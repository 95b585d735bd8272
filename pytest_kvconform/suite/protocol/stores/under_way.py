"""Stores that are asked about a prompt while another engine computes and saves it."""

from __future__ import annotations

from msgspec.structs import replace

from pytest_kvconform.case import case
from pytest_kvconform.result import NotApplicable, Violation
from pytest_kvconform.rigs.cluster.scripts.cluster import Cluster, Steps
from pytest_kvconform.suite.protocol.stores.saved_prompts import require_store
from pytest_kvconform.suite.protocol.stress._live import loaded, plain, prompts_of, settle

MOMENTS = 8  # P saves, and D asks after 1, 2, ... steps of P
BLOCKS = 4  # whole blocks of a prompt; the prompt is longer if the connector declares an amount that it loads
ALONE_S = 0.2  # for which D may step before P steps, too


@case("KV-STORE-001", applies=plain, rig="scheduler", script=True)
def prompts_can_be_loaded_while_they_are_saved(cluster: Cluster, variant: None) -> Steps:
    """An engine computes prompts in several steps. Another one asks about one after its first step, about
    the next after its second step, and so on, and about one that is saved: what it loads is right.
    """
    require_store(cluster)
    if cluster.subject.is_same_engine:
        raise NotApplicable("no engine loads what another one saves")
    yield from cluster.start(apart=True)
    p, d, block = cluster.p, cluster.d, cluster.block(cluster.p)
    prompts = prompts_of(cluster, [BLOCKS * block + 5] * (MOMENTS + 1))
    unit = max(block, cluster.subject.load_granularity)
    yield from p.call("budget", 0, unit * -(-len(prompts[0]) // (unit * (BLOCKS + 1))))
    asked: list[str] = []
    for owner in range(MOMENTS):
        yield from cluster.add(p, prompts[owner], owner)
        yield from cluster.step(p, owner + 1)
        asked.append((yield from cluster.add(d, prompts[owner], owner)))
        yield from cluster.step(d, alone_s=ALONE_S)
        try:
            yield from settle(cluster, asked, released=False)
        except Violation as wrong:
            if asked[-1] not in wrong.finding.happened:
                raise
            when = f"asked after step {owner + 1} of another engine, which computes and saves the prompt: "
            raise Violation(replace(wrong.finding, happened=when + wrong.finding.happened)) from None
    saved = yield from cluster.add(p, prompts[MOMENTS], MOMENTS)
    yield from cluster.settle(lambda: cluster.ended(p, [saved]), "prefills")
    yield from cluster.await_saves(p)
    asked.append((yield from cluster.add(d, prompts[MOMENTS], MOMENTS)))
    yield from settle(cluster, asked)
    yield from loaded(cluster, asked[-1:])  # what P alone has saved
    return (yield from loaded(cluster, asked))
