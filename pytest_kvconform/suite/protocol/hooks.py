"""Hooks of the scheduler half never end the engine, whatever happens to requests.

The recorder checks the three rules in every case of the scheduler rig, and names the rule that is broken. The
cases here are the situations in which each rule is most likely to be broken.
"""

from __future__ import annotations

import itertools

from pytest_kvconform.case import case
from pytest_kvconform.result import Evidence, NotApplicable
from pytest_kvconform.rigs.scheduler.own_workers.memory import Ending
from pytest_kvconform.rigs.scheduler.rig import Rig
from pytest_kvconform.suite.protocol._scenarios import (
    PROMPT,
    endings,
    first_in_quick,
    needs_hand_over,
    report_all,
    run_mixed_requests,
    run_to_end,
    token_count,
)

SOON_S = 1.0  # a hook takes microseconds, and the engine waits for it; times --kv-timeout-scale
SILENT = 20  # steps in which no worker reports anything


@case("KV-HOOK-001", variants=endings, rig="scheduler")
def no_hook_raises(rig: Rig, ending: Ending) -> Evidence:
    """No hook raises between the arrival of a request and its end."""
    _, _, sides = run_to_end(rig, ending)
    report_all(*sides)
    for side in sides:
        side.step()
    return Evidence(looked_at=sum(len(side.calls) for side in sides), unit="calls")


@case("KV-HOOK-002", variants=first_in_quick("loading", "kept"), rig="scheduler")
def every_hook_returns_soon(rig: Rig, what: str) -> Evidence:
    """While workers report nothing, every hook returns soon and other requests go on.

    A load, or kept blocks, wait for these workers.
    """
    p = side = rig.side("P")
    if what == "loading":
        needs_hand_over(rig)
        side = rig.side("D")
        rig.hand_over_and_load(p, side, rig.prompt(token_count(PROMPT, side.block_size)))
    else:
        id = p.add(rig.prompt(token_count(PROMPT, p.block_size)), rig.prefill_params() or None)
        p.run(lambda: id in p.results)
        if id not in p.delayed_free_requests():
            raise NotApplicable(f"{rig.subject.connector} keeps no blocks of a request that has ended")
    other = side.add(rig.prompt(side.block_size + 3, seed=1), max_tokens=3)
    rig.step_until_matched(side, other)
    for _ in range(SILENT):
        side.step()
    if other not in side.results:
        raise rig.violation(
            "",
            f"no worker reports what is {what}, and {SILENT} steps later another request is "
            f"{side.status(other)}",
        )
    late = [call for call in side.calls if call.seconds > rig.scaled_seconds(SOON_S)]
    for first, again in itertools.combinations(late, 2):
        if first.hook == again.hook:  # a machine may stop for a second, but hardly twice in one hook
            took, where = (
                f"{first.seconds:.1f} s and {again.seconds:.1f} s",
                f"steps {first.step} and {again.step} of {side.name}",
            )
            raise rig.violation("", f"{first.hook} took {took} in {where}, and the engine waited for it")
    longest = max(call.seconds for call in side.calls)
    return Evidence(looked_at=len(side.calls), unit="calls", notes={"longest_s": round(longest, 4)})


@case("KV-HOOK-003", variants=first_in_quick("P", "D"), rig="scheduler")
def scheduler_assertions_hold(rig: Rig, role: str) -> Evidence:
    """No answer and no act of the connector makes vLLM's own assertions fail.

    Requests of every kind run at once.
    """
    side = run_mixed_requests(rig, role)
    return Evidence(looked_at=len(side.steps), unit="steps", notes={"calls": len(side.calls)})
