"""Preemptions after saves or sends have begun: the blocks of the request belong to another one at once."""

from __future__ import annotations

from pytest_kvconform.case import case
from pytest_kvconform.result import Blocked, HarnessError, NotApplicable
from pytest_kvconform.rigs.cluster.loop import watching
from pytest_kvconform.rigs.cluster.scripts.cluster import Cluster, Steps
from pytest_kvconform.suite.protocol.stress._live import loaded, plain, prompts_of, settle


@case("KV-PREEMPT-001", applies=plain, rig="scheduler", script=True)
def preempted_blocks_are_never_read_again(cluster: Cluster, variant: None) -> Steps:
    """A prefill is preempted between two chunks, and another request writes into its blocks in the same step.

    Whatever was saved or sent of it, D loads the KV of its own tokens.
    """
    yield from cluster.start()
    p, b = cluster.p, cluster.block(cluster.p)
    prompts, ids = prompts_of(cluster, (6 * b + 3, 5 * b + 7)), dict[int, str]()
    yield from p.call("budget", 4 * b, 2 * b)
    for owner, prompt in prompts.items():
        ids[owner] = yield from cluster.add(p, prompt, owner, asks=not cluster.store)
    yield from cluster.step(p)
    deadline = watching(cluster.settle_s, p)
    # a store may look prompts up for some steps before vLLM computes them
    while set((statuses := cluster.looks[p].statuses).values()) - {"RUNNING"} and not deadline.over():
        yield from cluster.step(p)
    if len(statuses) < len(ids):
        raise NotApplicable("one of two prefills ended before vLLM began the other")
    if waiting := [id for id, status in statuses.items() if status != "RUNNING"]:
        limit = f"{cluster.settle_s:g} s"
        raise Blocked(f"vLLM has not begun the prefill of {', '.join(waiting)} within {limit}")
    last = yield from p.call("preempt_for_another")
    yield from cluster.step(p)
    preempted, waits_for_frees = yield from p.call("preempted")
    if not preempted and waits_for_frees:
        raise NotApplicable("has_pending_block_frees returned True, and vLLM preempted no request")
    # the other one as well, where the connector holds the blocks in vLLM's pool
    if last not in preempted:
        raise HarnessError(f"vLLM preempted {preempted}, and not {last}, the last of two prefills")
    yield from p.call("budget", 0)
    yield from cluster.settle(lambda: cluster.ended(p, ids.values()), "prefills")
    if cluster.store:
        yield from cluster.await_saves(p)
    found = yield from cluster.decode(prompts, ids)
    yield from settle(cluster, found)
    return (yield from loaded(cluster, found))
