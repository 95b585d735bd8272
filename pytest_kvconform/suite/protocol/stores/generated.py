"""What a store loads of blocks that decoding has filled."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from pytest_kvconform.case import case
from pytest_kvconform.result import Evidence
from pytest_kvconform.rigs.scheduler.live.pair import live_engines
from pytest_kvconform.rigs.scheduler.rig import Rig
from pytest_kvconform.rigs.scheduler.side import SAMPLED
from pytest_kvconform.suite.protocol.multi_connector import _dense
from pytest_kvconform.suite.protocol.stores.saved_prompts import require_store
from pytest_kvconform.suite.protocol.stress._live import await_saves, loaded, settle

ASKED = 5  # tokens that the user adds to what was generated, which are no whole block


@case("KV-BYTES-001", applies=_dense, rig="scheduler")
def sampled_tokens_are_loaded_as_computed(rig: Rig, variant: None) -> Evidence:
    """Each prompt of a conversation is the one before, what was generated for it, and some tokens more.

    A store may save blocks that sampled tokens fill. What it loads of them is what was computed. Each answer
    ends at the end of a block, and no KV of its last token is computed.
    """
    require_store(rig)
    with live_engines(rig) as live:
        engine, b = live.d, rig.host.spec.memory["D"].block
        answer = 2 * b - ASKED
        unit = max(b, rig.subject.load_granularity)
        first = math.ceil(max(3 * b, unit + rig.subject.min_load) / unit) * unit  # tokens after one answer
        of_user = rig.prompt(first + 2 * b + ASKED)  # it may be longer, and is cut below
        beside = rig.prompt(first + ASKED, seed=1)[: first + ASKED]
        tokens, ids, others = of_user[: first - answer], list[str](), [engine.add(beside, 1)]
        settle(live, others)
        await_saves(live, engine)
        for count in (answer, answer, 1):
            ids.append(id := engine.add(tokens, 0, max_tokens=count))
            live.settle(partial(_ended, engine, id, len(tokens), beside, others), "requests")
            wrong, _ = engine.verdict()
            if wrong:
                happened = wrong[0]
                if id in happened and len(ids) > 1:  # what one load beside it brings was not sampled
                    happened += (
                        f". Tokens {len(tokens) - ASKED - answer} to {len(tokens) - ASKED - 1} were sampled "
                        f"for {ids[-2]}, which computed KV of all of them but the last"
                    )
                raise rig.violation(
                    "",
                    happened,
                    differs="; ".join(wrong[1:3]),
                    check=(
                        "is a block that sampled tokens fill saved before the forward of its last token?",
                        "does a request that ends save as many blocks as request.block_hashes has?",
                        "is the last sampled token, of which there is no KV, left out?",
                    ),
                )
            settle(live, ids + others)
            await_saves(live, engine)
            tokens += (SAMPLED,) * count
            tokens += of_user[len(tokens) : len(tokens) + ASKED]
        return loaded(live, ids)


def _ended(engine: Any, id: str, prompt: int, beside: tuple[int, ...], others: list[str]) -> bool:
    """Whether a request has ended.

    If not, and the next step fills a block with a sampled token, adds a request that loads `beside` in this
    step: vLLM calls start_load_kv before the forward if a load is synchronous, and else after it.
    """
    if not engine.ended([id]):
        computed = engine.side.num_computed_tokens(id)
        if computed >= prompt and not (computed + 1) % engine.side.block_size and engine.ended(others):
            engine.evict_prefix_cache()
            others.append(engine.add(beside, 1))
    return engine.ended([id])
