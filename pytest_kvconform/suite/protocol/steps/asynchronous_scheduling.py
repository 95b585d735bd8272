"""Asynchronous scheduling, vLLM's default on GPUs: schedule() runs before the step before it has ended.

vLLM's EngineCore.step_with_batch_queue calls schedule() of step n + 1, and with it build_connector_meta,
before update_from_output() of step n. A request then ends in a step in which it was scheduled once more. Each
case runs its requests twice: step by step, and with a step in flight. Only what goes wrong the second time is
a violation of KV-ASYNC-001.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from pytest_kvconform.case import case
from pytest_kvconform.result import Cell, Evidence, NotApplicable, Violation
from pytest_kvconform.rigs.scheduler.own_workers.memory import Ending
from pytest_kvconform.rigs.scheduler.rig import Rig, Side
from pytest_kvconform.rigs.scheduler.store_engine import end_engine_with_worker, start_engine_with_worker
from pytest_kvconform.suite.protocol._scenarios import (
    ENDINGS,
    PROMPT,
    one_group,
    report_all,
    run_mixed_requests,
    run_to_end,
    token_count,
)
from pytest_kvconform.suite.protocol.multi_connector import _dense
from pytest_kvconform.suite.protocol.stores.saved_prompts import step_until_found

IN_FLIGHT = "with a step in flight between schedule() and update_from_output()"
FEW = (Ending("d", "length"), Ending("p", "length"), Ending("d", "abort", "loading"))


class Did(NamedTuple):
    """What a connector did for the requests of a scenario. Each field: how many requests."""

    kept: int  # whose blocks were kept at their end
    handed_over: int  # for which request_finished returned kv_transfer_params
    loaded: int  # for which tokens were announced

    def differs(self, other: Did, real_worker: bool) -> str:
        """Return what is different, as words; "" for nothing.

        `real_worker`: the worker half took part. Then `kept` is not compared: a store keeps the blocks of a
        request only if a save is still under way at its end, and that depends on how long the save takes.
        """
        words = (
            "blocks were kept at the end of {} requests, and otherwise of {}",
            "{} requests were handed over, and otherwise {}",
            "{} requests were loaded, and otherwise {}",
        )
        found = [
            text.format(mine, its)
            for name, text, mine, its in zip(self._fields, words, self, other, strict=True)
            if mine != its and not (real_worker and name == "kept")
        ]
        return "; ".join(found)


def did(*sides: Side) -> Did:
    """Return what the connector did for all requests of these sides."""
    ends = [call.result for side in sides for call in side.calls_of("request_finished")]
    loaded = sum(bool(side.loads_started(id)) for side in sides for id in side.prompts)
    return Did(sum(bool(end[0]) for end in ends), sum(bool(end[1]) for end in ends), loaded)


def twice(rig: Rig, scenario: Callable[[], Did], real_worker: bool = False) -> Did:
    """Run a scenario step by step, and then with a step in flight. Returns what the connector did.

    `real_worker`: the worker half takes part, instead of scripted reports. Raises Violation if only the
    second run goes wrong, or if the connector did something else in it.
    """
    alone = scenario()
    rig.asynchronous = True
    rig.renew_prompts()
    try:
        overlapping = scenario()
    except Violation as broken:
        finding = broken.finding
        happened = f"{IN_FLIGHT}, {finding.happened}"
        diagnosis = finding.diagnosis or "the same requests pass step by step"
        raise Violation(
            msgspec.structs.replace(
                finding, rule=rig.rule, happened=happened, diagnosis=diagnosis, declined=""
            )
        ) from None
    except NotApplicable as missing:
        raise rig.violation("", f"{IN_FLIGHT}, {missing}: step by step it does") from None
    if differs := overlapping.differs(alone, real_worker):
        raise rig.violation(
            "",
            f"{IN_FLIGHT}, {differs}",
            diagnosis="a hook uses what build_connector_meta noted of its step, and vLLM has scheduled the "
            "next step by then",
        )
    return alone


def ends(cell: Cell, matrix: str) -> tuple[Ending, ...]:
    """Variants: ends of requests. The quick matrix has them for one model of one KV cache group."""
    return ENDINGS if matrix != "quick" else FEW if one_group(cell) else FEW[:1]


@case("KV-ASYNC-001", variants=ends, rig="scheduler")
def requests_end_with_a_step_in_flight(rig: Rig, ending: Ending) -> Evidence:
    """A request ends, is handed over, loaded and freed as without a step in flight."""

    def scenario() -> Did:
        _, _, sides = run_to_end(rig, ending)
        for side in sides:
            side.end_flight()
        found = did(*sides)
        report_all(*sides)
        rig.require_no_leaks(*sides)
        return found

    found = twice(rig, scenario)
    return Evidence(looked_at=sum(found) + 1, unit="answers", notes=found._asdict())


@case("KV-ASYNC-001", applies=one_group, variants=lambda cell, matrix: ("P", "D"), rig="scheduler")
def mixed_requests_with_a_step_in_flight(rig: Rig, role: str) -> Evidence:
    """Requests of every kind run at once, one is preempted and one aborted, with a step in flight."""

    def scenario() -> Did:
        side = run_mixed_requests(rig, role)
        found = did(side)
        report_all(side)
        rig.require_no_leaks(side)
        return found

    found = twice(rig, scenario)
    return Evidence(looked_at=sum(found) + 1, unit="answers", notes=found._asdict())


@case("KV-ASYNC-001", applies=_dense, rig="scheduler")
def saved_prompts_load_with_a_step_in_flight(rig: Rig, _: None) -> Evidence:
    """A store saves a prompt, and loads it again, with a step in flight."""
    if not rig.subject.is_store:
        raise NotApplicable(f"{rig.subject.connector} is no store: it saves nothing")

    def scenario() -> Did:
        side = start_engine_with_worker(rig)
        prompt = rig.prompt(token_count(PROMPT, side.block_size))
        for _ in range(2):
            side.add(prompt, max_tokens=3)
            side.run(lambda: not side.unfinished_requests() and not side.delayed_free_requests())
            step_until_found(rig, side)
            side.end_flight()
            side.evict_prefix_cache()
        rig.require_no_leaks(side)
        end_engine_with_worker(side)
        return did(side)

    found = twice(rig, scenario, real_worker=True)
    return Evidence(looked_at=sum(found) + 1, unit="answers", notes=found._asdict())
