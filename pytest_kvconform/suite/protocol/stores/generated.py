"""What a store loads of blocks that decoding has filled."""

from __future__ import annotations

import math
from functools import partial

from pytest_kvconform.case import case
from pytest_kvconform.rigs.bytes.messages import token_after
from pytest_kvconform.rigs.cluster.scripts.cluster import Cluster, Engine, Steps
from pytest_kvconform.suite.protocol.multi_connector import _dense
from pytest_kvconform.suite.protocol.stores.saved_prompts import require_store
from pytest_kvconform.suite.protocol.stress._live import loaded, settle

ASKED = 5  # tokens that the user adds to what was generated, which are no whole block


@case("KV-BYTES-001", applies=_dense, rig="scheduler", script=True)
def sampled_tokens_are_loaded_as_computed(cluster: Cluster, variant: None) -> Steps:
    """Each prompt of a conversation is the one before, what was generated for it, and some tokens more.

    A store may save blocks that sampled tokens fill. What it loads of them is what was computed. Each answer
    ends at the end of a block, and no KV of its last token is computed.
    """
    require_store(cluster)
    yield from cluster.start()
    engine, b = cluster.d, cluster.block(cluster.d)
    answer = 2 * b - ASKED
    unit = max(b, cluster.subject.load_granularity)
    first = math.ceil(max(3 * b, unit + cluster.subject.min_load) / unit) * unit  # tokens after one answer
    of_user = cluster.prompt(first + 2 * b + ASKED)  # it may be longer, and is cut below
    beside = cluster.prompt(first + ASKED, seed=1)[: first + ASKED]
    tokens, ids, others = of_user[: first - answer], list[str](), list[str]()
    others.append((yield from cluster.add(engine, beside, 1)))
    yield from settle(cluster, others)
    yield from cluster.await_saves(engine)
    for count in (answer, answer, 1):
        ids.append(id := (yield from cluster.add(engine, tokens, 0, max_tokens=count)))
        yield from cluster.settle(
            partial(cluster.ended, engine, [id]),
            "requests",
            partial(_load_beside, cluster, engine, id, len(tokens), beside, others),
        )
        yield from cluster.look_at_loads()
        if wrong := cluster.wrong:
            happened = wrong[0]
            if id in happened and len(ids) > 1:  # what one load beside it brings was not sampled
                happened += (
                    f". Tokens {len(tokens) - ASKED - answer} to {len(tokens) - ASKED - 1} were sampled "
                    f"for {ids[-2]}, which computed KV of all of them but the last"
                )
            raise cluster.violation(
                "",
                happened,
                differs="; ".join(wrong[1:3]),
                check=(
                    "is a block that sampled tokens fill saved before the forward of its last token?",
                    "does a request that ends save as many blocks as request.block_hashes has?",
                    "is the last sampled token, of which there is no KV, left out?",
                ),
            )
        yield from settle(cluster, ids + others)
        yield from cluster.await_saves(engine)
        tokens += tuple(token_after(len(tokens) + number) for number in range(count))
        tokens += of_user[len(tokens) : len(tokens) + ASKED]
    return (yield from loaded(cluster, ids))


def _load_beside(
    cluster: Cluster, engine: Engine, id: str, prompt: int, beside: tuple[int, ...], others: list[str]
) -> Steps:
    """If the next step fills a block with a sampled token, add a request that loads `beside` in this step:
    vLLM calls start_load_kv before the forward if a load is synchronous, and else after it.
    """
    computed = yield from engine.call("computed_tokens", id)
    if computed >= prompt and not (computed + 1) % cluster.block(engine) and cluster.ended(engine, others):
        yield from engine.call("evict_prefix_cache")
        others.append((yield from cluster.add(engine, beside, 1)))
