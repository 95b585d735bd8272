"""Sleep mode: the KV of an engine goes, and its memory comes back at the same addresses."""

from __future__ import annotations

from pytest_kvconform.case import case
from pytest_kvconform.result import Cell, Evidence, NotApplicable
from pytest_kvconform.rigs.cluster.scripts.cluster import Cluster, Steps
from pytest_kvconform.rigs.scheduler.connector_class import call_class_hook
from pytest_kvconform.rigs.scheduler.rig import Rig
from pytest_kvconform.suite.interface.capabilities import truth
from pytest_kvconform.suite.protocol.stress._live import hand_over_and_check, plain, prompts_of

SUPPORTS = "supports_sleep_mode"


@case("KV-SLEEP-001", applies=plain, rig="scheduler")
def supports_sleep_mode_has_a_truth_value(rig: Rig, variant: None) -> Evidence:
    """supports_sleep_mode answers for the KV transfer configurations of P and D. vLLM tests the truth."""
    answers = [_supports(rig, role) for role in "PD"]
    return Evidence(looked_at=len(answers), unit="answers", notes={"supported": int(all(answers))})


def engines(cell: Cell, matrix: str) -> tuple[str, ...]:
    """The engines that sleep, one in each variant."""
    return ("P", "D")


@case("KV-SLEEP-002", applies=plain, variants=engines, rig="scheduler", script=True)
def kv_arrives_after_a_sleep(cluster: Cluster, which: str) -> Steps:
    """P hands over to D before and after one of them has slept.

    Hooks that vLLM calls idempotent are called twice.
    """
    if which == "D" and cluster.subject.is_store:
        raise NotApplicable("P and D of a store are one engine, which sleeps in the other case")
    yield from cluster.start()
    for engine in cluster.engines:
        if not (yield from engine.call("supports_sleep_mode")):
            name = cluster.subject.connector
            raise NotApplicable(f"{name} does not support sleep mode: {SUPPORTS} returned False")
    for first in (0, 2):
        prompts = prompts_of(cluster, [3 * cluster.block(cluster.d) + 5] * 2, first)
        evidence = yield from hand_over_and_check(cluster, prompts)
        if not first:
            engine = cluster.p if which == "P" else cluster.d
            if not (yield from engine.call("sleep")):
                happened = "reset_cache returned False, so vLLM does not let the engine sleep"
                raise cluster.violation("", happened)
            yield from engine.call("wake_up")
    return evidence


def _supports(rig: Rig, role: str) -> bool:
    config = rig.host.vllm_config(role).kv_transfer_config
    return truth(rig, f"{SUPPORTS}(kv_transfer_config of {role})", call_class_hook(rig, SUPPORTS, config))
