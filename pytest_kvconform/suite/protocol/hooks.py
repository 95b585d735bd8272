"""No hook of a connector ends the engine, whatever happens to requests."""

from __future__ import annotations

from pytest_kvconform.case import case
from pytest_kvconform.result import Evidence
from pytest_kvconform.rigs.scheduler_rig import Rig
from pytest_kvconform.suite.protocol._scenes import end, endings, settle


@case("KV-HOOK-001", variants=endings, inside=True)
def no_hook_raises(rig: Rig, ending: str) -> Evidence:
    """From its arrival to the end of a request no hook raises."""
    return _called(rig, ending)


@case("KV-HOOK-002", variants=endings, inside=True)
def no_hook_ends_or_stops_the_process(rig: Rig, ending: str) -> Evidence:
    """Every hook comes back, and the process lives on."""
    return _called(rig, ending)


@case("KV-HOOK-003", variants=endings, inside=True)
def the_scheduler_can_go_on(rig: Rig, ending: str) -> Evidence:
    """What the connector answers, and what it does to requests and blocks, never makes vLLM's own assertions fail."""
    return _called(rig, ending)


def _called(rig: Rig, ending: str) -> Evidence:
    _, _, sides = end(rig, ending)
    settle(*sides)
    for side in sides:
        side.step()
    return Evidence(looked_at=sum(len(side.calls) for side in sides), unit="calls")
