"""Stores that are asked about a prompt while another engine computes and saves it."""

from __future__ import annotations

from msgspec.structs import replace

from pytest_kvconform.case import case
from pytest_kvconform.result import Evidence, NotApplicable, Violation
from pytest_kvconform.rigs.scheduler.live.config import LiveSpec
from pytest_kvconform.rigs.scheduler.live.pair import live_engines
from pytest_kvconform.rigs.scheduler.rig import Rig
from pytest_kvconform.suite.protocol.stores.saved_prompts import require_store
from pytest_kvconform.suite.protocol.stress._live import await_saves, loaded, plain, prompts_of, settle

MOMENTS = 8  # P saves, and D asks after 1, 2, ... steps of P
BLOCKS = 4  # whole blocks of a prompt; the prompt is longer if the connector declares an amount that it loads
ALONE_S = 0.2  # for which D may step before P steps, too


@case("KV-STORE-001", applies=plain, rig="scheduler")
def prompts_can_be_loaded_while_they_are_saved(rig: Rig, variant: None) -> Evidence:
    """An engine computes prompts in several steps. Another one asks about one after its first step, about
    the next after its second step, and so on, and about one that is saved: what it loads is right.
    """
    require_store(rig)
    if rig.subject.is_same_engine:
        raise NotApplicable("no engine loads what another one saves")
    # Both write the same words: D saves what it computes itself, and P may find that.
    with live_engines(rig, LiveSpec("P"), LiveSpec("D", port=1), apart=True) as live:
        block = rig.host.spec.memory["P"].block
        prompts = prompts_of(live, [BLOCKS * block + 5] * (MOMENTS + 1))
        unit = max(block, rig.subject.load_granularity)
        live.p.set_token_budget(1 << 12, each=unit * -(-len(prompts[0]) // (unit * (BLOCKS + 1))))
        asked: list[str] = []
        for owner in range(MOMENTS):
            live.p.add(prompts[owner], owner)
            live.p.step(owner + 1)
            asked.append(live.d.add(prompts[owner], owner))
            live.d.step(alone_s=ALONE_S)
            try:
                settle(live, asked, released=False)
            except Violation as wrong:
                if asked[-1] not in wrong.finding.happened:
                    raise
                when = (
                    f"asked after step {owner + 1} of another engine, which computes and saves the prompt: "
                )
                raise Violation(replace(wrong.finding, happened=when + wrong.finding.happened)) from None
        saved = live.p.add(prompts[MOMENTS], MOMENTS)
        live.settle(lambda: live.p.ended([saved]), "prefills")
        await_saves(live, live.p)
        asked.append(live.d.add(prompts[MOMENTS], MOMENTS))
        settle(live, asked)
        loaded(live, asked[-1:])  # what P alone has saved
        return loaded(live, asked)
