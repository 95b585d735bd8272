"""Preemptions after saves or sends have begun: the blocks of the request belong to another one at once."""

from __future__ import annotations

from pytest_kvconform.case import case
from pytest_kvconform.result import Blocked, Evidence, HarnessError, NotApplicable
from pytest_kvconform.rigs.processes.cores import Deadline
from pytest_kvconform.rigs.scheduler.live.pair import live_engines
from pytest_kvconform.rigs.scheduler.rig import Rig
from pytest_kvconform.suite.protocol.stress._live import (
    await_saves,
    decode,
    loaded,
    plain,
    prompts_of,
    settle,
)


@case("KV-PREEMPT-001", applies=plain, rig="scheduler")
def preempted_blocks_are_never_read_again(rig: Rig, variant: None) -> Evidence:
    """A prefill is preempted between two chunks, and another request writes into its blocks in the same step.

    Whatever was saved or sent of it, D loads the KV of its own tokens.
    """
    with live_engines(rig) as live:
        p, b = live.p, rig.host.spec.memory["P"].block
        prompts = prompts_of(live, (6 * b + 3, 5 * b + 7))
        p.set_token_budget(4 * b, each=2 * b)
        ids = {owner: p.add(prompt, owner, rig.prefill_params() or None) for owner, prompt in prompts.items()}
        p.step()
        deadline = Deadline(rig.settle_s)
        # a store may look prompts up for some steps before vLLM computes them
        while set(p.statuses().values()) - {"RUNNING"} and not deadline.over():
            p.step()
        if len(p.statuses()) < len(ids):
            raise NotApplicable("one of two prefills ended before vLLM began the other")
        if waiting := [id for id, status in p.statuses().items() if status != "RUNNING"]:
            raise Blocked(f"vLLM has not begun the prefill of {', '.join(waiting)} within {rig.settle_s:g} s")
        last = p.preempt_for_another()
        if not p.preempted() and p.waits_for_frees():
            raise NotApplicable("has_pending_block_frees returned True, and vLLM preempted no request")
        # the other one as well, where the connector holds the blocks in vLLM's pool
        if last not in p.preempted():
            raise HarnessError(f"vLLM preempted {p.preempted()}, and not {last}, the last of two prefills")
        p.set_token_budget(1 << 12)
        live.settle(lambda: p.ended(list(ids.values())), "prefills")
        if live.store:
            await_saves(live, p)
        found = decode(live, prompts, ids)
        settle(live, found)
        return loaded(live, found)
