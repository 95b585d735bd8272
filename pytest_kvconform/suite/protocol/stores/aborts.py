"""Aborts of requests that load what a store has saved."""

from __future__ import annotations

from pytest_kvconform.case import case
from pytest_kvconform.result import Evidence, Violation
from pytest_kvconform.rigs.scheduler.live.pair import live_engines
from pytest_kvconform.rigs.scheduler.rig import Rig
from pytest_kvconform.suite.protocol.multi_connector import _dense
from pytest_kvconform.suite.protocol.stores.saved_prompts import require_store
from pytest_kvconform.suite.protocol.stress._live import (
    abort_once_admitted,
    decode,
    loaded,
    prefill,
    prompts_of,
    settle,
)

STATES = ("waiting", "loading")


@case("KV-ABORT-001", applies=_dense, variants=lambda cell, matrix: STATES, rig="scheduler")
def abort_of_a_load_leaves_others_alone(rig: Rig, state: str) -> Evidence:
    """One of two requests that load is aborted in the engine that has saved their prompts.

    `waiting`: before its first step. `loading`: in the step in which its load begins. The other request loads
    what was saved, a later request with the prompt of the aborted one does so or computes it, and nothing is
    left.
    """
    require_store(rig)
    try:
        return _abort(rig, state)
    except Violation as broken:
        happened = f"a request was aborted while {state}: {broken.finding.happened}"
        raise rig.violation("", happened, broken.finding.differs) from None


def _abort(rig: Rig, state: str) -> Evidence:
    with live_engines(rig) as live:
        block = rig.host.spec.memory["D"].block
        prompts = prompts_of(live, (4 * block + 5, 3 * block + 7))
        saved = prefill(live, prompts)
        aborted, other = decode(live, prompts, saved)
        if state == "waiting":
            live.d.abort(aborted)
        with abort_once_admitted(live, [aborted] if state == "loading" else []):
            settle(live, [other])
        live.settle(lambda: live.d.ended([aborted]), "the aborted request")
        live.d.evict_prefix_cache()
        settle(live, decode(live, {0: prompts[0]}, saved))
        if left := live.d.leaks():
            raise rig.violation("", left[0])
        return loaded(live, [other])
