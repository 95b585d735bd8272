"""Loads in the scheduler half: reported late, failed, aborted, or reported by one rank after the other."""

from __future__ import annotations

import contextlib

from model_matrix import parse_topology
from pytest_kvconform.case import case
from pytest_kvconform.result import Cell, Evidence, NotApplicable, Violation
from pytest_kvconform.rigs.scheduler.rig import Rig, Side, WorkerReport
from pytest_kvconform.rigs.scheduler.violations import HookRaised
from pytest_kvconform.suite.protocol._scenarios import (
    PROMPT,
    first_in_quick,
    needs_hand_over,
    one_group,
    report_all,
    token_count,
)

ASKED = "get_num_new_matched_tokens"
RESETS = first_in_quick("loading", "sending", "idle")
HELD_STEPS = 20  # in which a connector may hold the report of a load back, to look at it itself


def _several_ranks(cell: Cell) -> bool:
    return parse_topology(cell.topology)[1] > 1


def _several_senders(cell: Cell) -> bool:
    return parse_topology(cell.topology)[0] > 1


def _pair(rig: Rig, count: int = 1, **more: object) -> tuple[Side, Side, list[str]]:
    """P, D and requests of D, each of which loads asynchronously."""
    needs_hand_over(rig)
    p, d = rig.side("P"), rig.side("D", **more)  # type: ignore[arg-type]
    ids = [
        rig.hand_over(p, d, rig.prompt(token_count(PROMPT, d.block_size), seed=seed), max_tokens=2)[1]
        for seed in range(count)
    ]
    rig.start_loads(d, *ids)
    return p, d, ids


def _done(rig: Rig, p: Side, d: Side, requests: list[str]) -> Evidence:
    """End the requests. Check their loads: D computed what it did not load, and nothing is left."""
    d.run()
    report_all(p)
    rig.require_no_leaks(p, d)
    for id in requests:
        given, computed = d.first_external_tokens(id), d.locally_computed_tokens(id)
        if computed > max(1, len(d.prompts[id]) - given):
            raise rig.violation(
                "KV-LOAD-001",
                f"{given} of {len(d.prompts[id])} tokens of {id} were loaded, and D computed {computed} "
                "itself",
            )
    return Evidence(
        looked_at=len(d.steps),
        unit="steps",
        external_tokens=sum(map(d.first_external_tokens, requests)),
        computed_tokens=sum(map(d.locally_computed_tokens, requests)),
    )


@case(
    "KV-LOAD-001",
    variants=first_in_quick("at_once", "late", "in_turn", "backwards", "beside_another"),
    rig="scheduler",
)
def request_resumes_when_load_is_reported(rig: Rig, when: str) -> Evidence:
    """A request that waits for remote KV goes on after its report, not before, and does not wait for ever.

    D computes only what it did not load.
    """
    count = 2 if when in ("in_turn", "backwards") else 1
    p, d, requests = _pair(rig, count)
    if when == "beside_another":
        d.add(rig.prompt(d.block_size, seed=9), max_tokens=4)
    for _ in range(0 if when == "at_once" else 10):
        if early := [id for id in requests if not d.waits_for_remote_kv(id)]:
            raise rig.violation(
                "", f"{early[0]} is {d.status(early[0])}, and no worker has reported its load"
            )
        d.step()
    for id in reversed(requests) if when == "backwards" else requests:
        d.step(received=[id])
        first = len(d.steps)
        while d.waits_for_remote_kv(id) and len(d.steps) < first + HELD_STEPS:
            d.step()
        if d.waits_for_remote_kv(id):
            raise rig.violation(
                "", f"the load of {id} was reported, and {HELD_STEPS} steps later it still waits"
            )
    return _done(rig, p, d, requests)


@case(
    "KV-LOAD-002",
    applies=_several_ranks,
    variants=lambda cell, matrix: ("in_turn", "backwards", "twice_in_turn"),
    rig="scheduler",
)
def load_ends_with_the_last_rank(rig: Rig, order: str) -> Evidence:
    """A load has ended when the last rank has reported it.

    get_finished_count agrees with the number of reports.
    """
    p, d, [id] = _pair(rig)
    ranks = list(range(d.ranks))
    for rank in reversed(ranks) if order == "backwards" else ranks:
        if not d.waits_for_remote_kv(id):
            raise rig.violation(
                "", f"{id} is {d.status(id)} although rank {rank} of {d.ranks} has not reported its load"
            )
        d.step(ranks=tuple(WorkerReport(received=[id] if rank == one else ()) for one in ranks))
        d.step() if order == "twice_in_turn" else None
    if d.waits_for_remote_kv(id):
        raise rig.violation("", f"all {d.ranks} ranks have reported the load of {id}, and it still waits")
    return _done(rig, p, d, [id])


@case(
    "KV-LOAD-002",
    applies=_several_senders,
    variants=lambda cell, matrix: ("in_turn", "backwards"),
    rig="scheduler",
)
def send_ends_with_the_last_rank(rig: Rig, order: str) -> Evidence:
    """P keeps its blocks until the last rank has reported that they were read."""
    needs_hand_over(rig)
    p = rig.side("P")
    id = p.add(rig.prompt(token_count(PROMPT, p.block_size)), rig.prefill_params())
    p.run()
    if id not in p.delayed_free_requests():
        raise NotApplicable("P keeps no blocks for D to read")
    ranks = list(range(p.ranks))
    for rank in reversed(ranks) if order == "backwards" else ranks:
        if id not in p.delayed_free_requests():
            raise rig.violation(
                "",
                f"P freed the blocks of {id} although rank {rank} of {p.ranks} has not reported them as sent",
            )
        p.step(ranks=tuple(WorkerReport(sent=[id] if rank == one else ()) for one in ranks))
    if id in p.delayed_free_requests():
        raise rig.violation(
            "", f"all {p.ranks} ranks have reported {id} as sent, and P still keeps its blocks"
        )
    rig.require_no_leaks(p)
    return Evidence(looked_at=p.ranks, unit="reports")


@case("KV-LOAD-002", applies=_several_ranks, variants=lambda cell, matrix: ("first", "last"), rig="scheduler")
def load_fails_if_one_rank_fails(rig: Rig, which: str) -> Evidence:
    """A load that failed on one rank has failed. It is over when every rank has reported it."""
    p, d, [id] = _pair(rig, policy="recompute")
    ranks = range(d.ranks)
    bad = 0 if which == "first" else d.ranks - 1
    for rank in ranks:
        if not d.waits_for_remote_kv(id):
            raise rig.violation(
                "", f"{id} is {d.status(id)} although rank {rank} of {d.ranks} has not reported its load"
            )
        failed = [id] if rank == bad else []
        d.step(
            ranks=tuple(
                WorkerReport(received=[id], failed=failed) if rank == one else WorkerReport() for one in ranks
            )
        )
    d.run(failing=[id])
    if (computed := d.locally_computed_tokens(id)) != len(d.prompts[id]):
        raise rig.violation(
            "",
            f"the load of {id} failed on rank {bad}, and D computed {computed} of {len(d.prompts[id])} "
            "tokens",
        )
    report_all(p)
    rig.require_no_leaks(p, d)
    return Evidence(looked_at=d.ranks, unit="reports", computed_tokens=computed)


@case("KV-LOAD-003", variants=first_in_quick("nothing", "empty", "unknown", "ended"), rig="scheduler")
def update_connector_output_takes_any_report(rig: Rig, what: str) -> Evidence:
    """update_connector_output accepts None, empty sets, requests of others, and requests that have ended."""
    p, d, [id] = _pair(rig)
    if what == "ended":
        d.abort(id)
        d.step()
        d.step(received=[id])
        report_all(p)
        rig.require_no_leaks(p, d)
        return Evidence(looked_at=1, unit="reports")
    report = {
        "nothing": WorkerReport(),
        "empty": WorkerReport(set(), set(), set(), set()),
        "unknown": WorkerReport(sent=["cmpl-nobody-0000"], received=["cmpl-nobody-0001"]),
    }[what]
    d.update_connector_output(report)
    return _done(rig, p, d, [id])


@case("KV-LOAD-004", variants=first_in_quick("request", "one_of_two"), rig="scheduler")
def failed_load_ends_its_request(rig: Rig, what: str) -> Evidence:
    """With kv_load_failure_policy=fail the request of a failed load ends with an error, once.

    No other request ends with an error.
    """
    p, d, requests = _pair(rig, count=2 if what == "one_of_two" else 1, policy="fail")
    step = d.step(failed=requests[:1])
    if (reported := step.outputs.get(requests[0])) is None or reported.finish != "error":
        raise rig.violation(
            "",
            f"the load of {requests[0]} failed, and its request ends with "
            f"{reported.finish if reported else 'nothing'!r}",
        )
    d.run()
    if bad := [id for id in requests[1:] if d.results[id].finish != "length"]:
        raise rig.violation(
            "", f"the load of {requests[0]} failed, and {bad[0]} ends with {d.results[bad[0]].finish!r}"
        )
    report_all(p)
    rig.require_no_leaks(p, d)
    return Evidence(looked_at=len(requests), unit="requests")


@case("KV-LOAD-004", variants=first_in_quick("request", "one_of_two", "preempted_later"), rig="scheduler")
def failed_load_is_recomputed(rig: Rig, what: str) -> Evidence:
    """With kv_load_failure_policy=recompute D computes the whole prompt after a failed load.

    The connector may try the load again. Each of its tries fails, and it must stop.
    """
    p, d, requests = _pair(rig, count=2 if what == "one_of_two" else 1, policy="recompute")
    id, asked = requests[0], len(d.calls_of(ASKED, requests[0]))
    d.step(failed=[id])
    if what == "preempted_later":
        d.run(lambda: d.status(id) == "RUNNING", failing=[id])
        d.preempt(id)
        d.step()
    d.run(failing=[id])
    answers = d.match_answers(id, asked)
    if (computed := d.locally_computed_tokens(id)) != len(d.prompts[id]) or d.results[id].finish != "length":
        raise rig.violation(
            "",
            f"D computed {computed} of {len(d.prompts[id])} tokens, and the request ends with "
            f"{d.results[id].finish!r}",
        )
    report_all(p)
    rig.require_no_leaks(p, d)
    return Evidence(looked_at=len(answers) + 1, unit="answers", computed_tokens=computed)


@case("KV-LOAD-004", applies=one_group, variants=first_in_quick("fail", "recompute"), rig="scheduler")
def failed_block_follows_the_policy(rig: Rig, policy: str) -> Evidence:
    """With one KV cache group a worker may report single blocks as failed.

    With `recompute` the tokens before the first of them are kept.
    """
    p, d, [id] = _pair(rig, policy=policy)
    loaded = d.blocks(id)[0]
    index = min(1, len(loaded) - 1)  # a connector may load one block alone
    d.step(received=[id], invalid=[loaded[index]])
    d.run()
    computed, finish = d.locally_computed_tokens(id), d.results[id].finish
    due, end = (0, "error") if policy == "fail" else (len(d.prompts[id]) - index * d.block_size, "length")
    if (computed, finish) != (due, end):
        raise rig.violation(
            "",
            f"block {index} of {id} failed: D computed {computed} tokens and ended with {finish!r}, due "
            f"{due} and {end!r}",
        )
    report_all(p)
    rig.require_no_leaks(p, d)
    return Evidence(looked_at=len(d.steps), unit="steps", computed_tokens=computed)


@case(
    "KV-LOAD-005",
    variants=first_in_quick("begun", "under_way", "reported", "one_of_two", "one_rank"),
    rig="scheduler",
)
def aborted_load_frees_blocks_after_its_report(rig: Rig, when: str) -> Evidence:
    """Blocks of a request that is aborted while it loads are kept until the load is reported.

    They are freed then.
    """
    p, d, requests = _pair(rig, count=2 if when == "one_of_two" else 1)
    id = requests[0]
    if when == "under_way":
        d.step()
    if when == "reported":
        d.step(received=[id])
    if when == "one_rank":
        d.step(
            ranks=tuple(
                WorkerReport(received=[id] if rank == 0 and d.ranks > 1 else ()) for rank in range(d.ranks)
            )
        )
    before = d.free_blocks()
    d.abort(id)
    d.step()
    if when != "reported":
        if d.free_blocks() > before:
            raise rig.violation(
                "",
                f"{d.free_blocks() - before} blocks of {id} are free, and its load may still write to them",
            )
        if when == "one_rank" and d.ranks > 1:
            d.step(ranks=(WorkerReport(), *[WorkerReport(received=[id])] * (d.ranks - 1)))
        else:
            d.step(received=[id])
    d.run()
    report_all(p)
    rig.require_no_leaks(p, d)
    return Evidence(looked_at=len(d.steps), unit="steps")


@case("KV-LOAD-006", variants=RESETS, rig="scheduler")
def reset_cache_works_at_any_time(rig: Rig, when: str) -> Evidence:
    """After reset_cache, transfers that are under way come to their end, as without it."""
    p, d, requests = _pair(rig)
    _done(rig, p, d, requests)
    p, d, requests = _pair(rig)
    with contextlib.suppress(HookRaised):  # vLLM passes it on to the operator, and goes on: KV-LOAD-007
        _reset(p, d, when)
    try:
        return _done(rig, p, d, requests)
    except Violation as broken:
        raise rig.violation(
            "",
            f"after reset_cache while {when}: {broken.finding.happened}",
            diagnosis="reset_cache drops the state of a transfer that is under way",
        ) from None


@case("KV-LOAD-007", variants=RESETS, rig="scheduler")
def reset_cache_raises_no_error(rig: Rig, when: str) -> Evidence:
    """reset_cache raises no error while transfers are under way."""
    p, d, _ = _pair(rig)
    _reset(p, d, when)
    return Evidence(looked_at=1, unit="calls")


def _reset(p: Side, d: Side, when: str) -> None:
    """Reset the caches of D while it loads or when it is idle, or of P while it sends."""
    if when == "idle":
        d.run()
    (p if when == "sending" else d).reset_prefix_cache()
