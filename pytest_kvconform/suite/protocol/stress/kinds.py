"""Requests that are not plain text: embeddings instead of tokens, pooling, LoRA."""

from __future__ import annotations

from msgspec import structs

from pytest_kvconform.case import case
from pytest_kvconform.result import Cell, Evidence, Violation
from pytest_kvconform.rigs.cluster.scripts.cluster import Cluster, Steps
from pytest_kvconform.rigs.scheduler.rig import Rig
from pytest_kvconform.suite.protocol._scenarios import (
    PROMPT,
    first_in_quick,
    needs_hand_over,
    report_all,
    token_count,
)
from pytest_kvconform.suite.protocol.stores.saved_prompts import require_store
from pytest_kvconform.suite.protocol.stress._live import in_full, plain, prompts_of, settle


@case("KV-KIND-001", variants=first_in_quick("embeds", "pooling", "lora"), rig="scheduler")
def requests_of_every_kind_end(rig: Rig, kind: str) -> Evidence:
    """A request of this kind comes to its end on P and on D, beside one of plain text, and leaves nothing."""
    try:
        return _end_both(rig, kind)
    except Violation as broken:
        happened = f"with a request of kind {kind!r}: {broken.finding.happened}"
        raise Violation(
            structs.replace(broken.finding, rule=rig.rule, happened=happened, diagnosis="")
        ) from None


def _end_both(rig: Rig, kind: str) -> Evidence:
    sides = rig.side("P"), rig.side("D")
    for side in sides:
        prompt = rig.prompt(token_count(PROMPT, side.block_size))
        asked = rig.prefill_params() or None if side.role == "P" and kind != "pooling" else None
        ids = [side.add(prompt, asked, kind=kind, max_tokens=2), side.add(prompt, max_tokens=2)]
        side.run()
        if bad := [id for id in ids if side.results[id].finish not in ("length", "stop")]:
            raise rig.violation("", f"a request ({kind}) ended with {side.results[bad[0]].finish!r}")
        report_all(side)
    rig.require_no_leaks(*sides)
    return Evidence(looked_at=4, unit="requests")


def _ways(cell: Cell, matrix: str) -> tuple[str, ...]:
    return () if matrix == "quick" else ("saved", "handed_over")


@case("KV-KIND-002", applies=plain, variants=_ways, rig="scheduler", script=True)
def loads_belong_to_their_own_embeddings(cluster: Cluster, way: str) -> Steps:
    """Prompts of embeddings have no token ids, and those of one length look alike. D loads, if it loads at
    all, the KV of its own prompt.
    """
    require = require_store if way == "saved" else needs_hand_over
    require(cluster)
    found = yield from _load_embeddings(cluster)
    yield from cluster.settle(lambda: cluster.ended(cluster.d, found), "requests of D")
    compared = yield from cluster.check()
    return Evidence(looked_at=len(found), unit="requests", external_tokens=compared)


@case("KV-BLOCKS-001", applies=plain, variants=in_full, rig="scheduler", script=True)
def blocks_of_embeddings_are_freed(cluster: Cluster, _: None) -> Steps:
    """P frees the blocks of prompts of embeddings once D has ended them, whether D loads them or computes
    them itself.
    """
    found = yield from _load_embeddings(cluster)
    yield from settle(cluster, found)
    return Evidence(looked_at=len(found), unit="requests")


def _load_embeddings(cluster: Cluster) -> Steps:
    """Let P compute prompts of embeddings, and add them to D. Returns D's ids."""
    yield from cluster.start()
    prompts = prompts_of(cluster, [3 * cluster.block(cluster.p) + 5] * 3)
    ids = yield from cluster.prefill(prompts, embeds=True)
    return (yield from cluster.decode(prompts, ids, embeds=True))
