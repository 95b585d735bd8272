"""How long the hooks of the step loop take: every step of an engine waits for them."""

from __future__ import annotations

from pytest_kvconform.case import case
from pytest_kvconform.result import Evidence
from pytest_kvconform.rigs.history import Recorder
from pytest_kvconform.rigs.scheduler.rig import Rig
from pytest_kvconform.rigs.scheduler.store_engine import start_engine_with_worker
from pytest_kvconform.rigs.vllm_setup.hooks import STEP_LOOP
from pytest_kvconform.suite.protocol.multi_connector import _dense

REQUESTS = 10  # as many calls at least has a hook about a request
CALLS = 8  # a hook that is called less often is not judged
SLOW_S = 0.02  # as long as a decode step of a large model


@case("KV-HOOK-004", applies=_dense, variants=lambda cell, matrix: ("scheduler", "worker"), rig="scheduler")
def step_loop_hooks_return_at_once(rig: Rig, half: str) -> Evidence:
    """No hook of the step loop takes long each time, while nothing is transferred.

    A hook may take long once, and while it moves bytes. So its shortest call of many is judged, without the
    time in which it waited for a core.
    """
    recorder = Recorder("P0", rank=0, timed=STEP_LOOP)
    side = start_engine_with_worker(rig, recorder) if half == "worker" else rig.side("P")
    for seed in range(REQUESTS):
        side.add(rig.prompt(side.block_size + 3, seed=seed), max_tokens=2)
        side.run(sent=half == "scheduler")
        side.run(lambda: not side.delayed_free_requests())
    times = (recorder if half == "worker" else side.recorder).history().times
    judged = {
        hook: float(every[:, 1].min())
        for hook, every in times.items()
        if hook in STEP_LOOP and len(every) >= CALLS
    }
    slow = {hook: shortest for hook, shortest in judged.items() if shortest > SLOW_S}
    if slow:
        hook = max(slow, key=lambda name: slow[name])
        raise rig.violation(
            "",
            f"{hook} took {1000 * slow[hook]:.0f} ms or more in each of {len(times[hook])} calls without "
            "a transfer, and the engine waited for it",
            differs="; ".join(f"{name}: {1000 * seconds:.0f} ms or more" for name, seconds in slow.items()),
            diagnosis=f"{hook} waits for something in every step",
        )
    longest = max(judged.values())
    return Evidence(looked_at=len(judged), unit="hooks", notes={"longest_ms": round(1000 * longest, 3)})
