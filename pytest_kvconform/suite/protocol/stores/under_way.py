"""Stores that are asked about a prompt while another engine computes and saves it."""

from __future__ import annotations

from msgspec.structs import replace

from pytest_kvconform.case import case
from pytest_kvconform.result import Evidence, NotApplicable, Violation
from pytest_kvconform.rigs.scheduler.rig import Rig
from pytest_kvconform.suite.protocol.stores.saved_prompts import is_store
from pytest_kvconform.suite.protocol.stress._live import await_saves, loaded, plain, prompts_of, settle

MOMENTS = 8  # steps of the engine that saves, after which another one asks
BLOCKS = 4  # of a prompt, each computed in a step of its own
ALONE_S = 0.2  # for which the other one may step before the first one goes on


@case("KV-STORE-001", applies=plain, rig="scheduler")
def prompts_can_be_loaded_while_they_are_saved(rig: Rig, variant: None) -> Evidence:
    """An engine computes prompts block by block. Another one asks about one after its first step, about the
    next after its second step, and so on: what is announced is loaded, and is right.
    """
    from pytest_kvconform.rigs.scheduler.live.config import LiveSpec
    from pytest_kvconform.rigs.scheduler.live.pair import live_engines

    is_store(rig)
    if rig.subject.is_same_engine:
        raise NotApplicable("no engine loads what another one saves")
    # both write the same words: the second one saves what it computes itself, too
    with live_engines(rig, LiveSpec("P"), LiveSpec("D", port=1), apart=True) as live:
        block = rig.host.spec.memory["P"].block
        prompts = prompts_of(live, [BLOCKS * block + 5] * MOMENTS)
        live.p.set_token_budget(1 << 12, each=block)
        saved, asked = [], []
        for owner, prompt in prompts.items():
            saved.append(live.p.add(prompt, owner))
            live.p.step(owner + 1)
            asked.append(live.d.add(prompt, owner))
            live.d.step(alone_s=ALONE_S)
            try:
                settle(live, asked, released=False)
            except Violation as wrong:
                when = f"asked in step {owner + 1} after another engine began to compute and save a prompt: "
                raise Violation(replace(wrong.finding, happened=when + wrong.finding.happened)) from None
        live.settle(lambda: live.p.ended(saved), "prefills")
        await_saves(live, live.p)
        live.d.evict_prefix_cache()
        asked.append(live.d.add(prompts[0], 0))
        settle(live, asked)
        return loaded(live, asked)
