"""Cases about the scheduler rig itself. test_scheduler_rig.py runs them as the suite runs its own."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time

from pytest_kvconform.case import case
from pytest_kvconform.result import Evidence, HarnessError, NotApplicable
from pytest_kvconform.rigs.processes.hangs import DEVICE
from pytest_kvconform.rigs.scheduler.leaks import remembered
from pytest_kvconform.rigs.scheduler.rig import Rig, WorkerReport
from pytest_kvconform.suite.interface.shutdown import once_nothing

RULE = "KV-LOAD-001"
runs: list[int] = []
DONE = Evidence(looked_at=1, unit="things")


class Left:
    """What a connector left unclosed: its __del__ waits for ever, as that of a zmq.Context may."""

    itself: object

    def __del__(self) -> None:
        threading.Event().wait()


@case(RULE, rig="scheduler")
def hands_over(rig: Rig, variant: None) -> Evidence:
    p, d = rig.side("P"), rig.side("D")
    prompt = rig.prompt(3 * p.block_size + 5)
    first, second = rig.hand_over(p, d, prompt, max_tokens=2)
    params = p.kv_transfer_params(first)
    assert params["remote_request_id"] == first and isinstance(params["remote_block_ids"][0], list)
    assert (
        p.status(first) == "FINISHED_LENGTH_CAPPED"
        and p.delayed_free_requests() == (first,)
        and p.unfinished_requests() == ()
    )
    step = d.step()
    assert (
        d.waits_for_remote_kv(second)
        and step.scheduled == {}
        and d.matched_tokens(second) == (len(prompt), True)
    )
    assert not d.step().mentions(second) and step.mentions(second)
    blocks = {block for group in d.blocks(second) for block in group}
    assert blocks and all(map(d.owns_block, blocks)) and not any(map(p.owns_block, blocks))
    assert blocks <= step.block_ids_for(second)
    d.step(received=[second])
    step = d.step()
    assert step.scheduled == {second: (len(prompt) - 1, len(prompt))}
    assert len(step.outputs[second].tokens) == 1 and step.outputs[second].finish is None
    assert d.run() == 1 and d.results[second].finish == "length" and d.status(second) == "gone"
    assert d.locally_computed_tokens(second) == 1
    assert p.free_blocks() < p.free_blocks_at_start and "the scheduler still knows" in p.leaks()[0]
    p.step(sent=[first])
    assert p.leaks() == d.leaks() == ()
    return DONE


@case(RULE, rig="scheduler")
def starts_in(rig: Rig, seconds: float) -> Evidence:
    """Two engines start, each with a hook that takes so long."""
    for hook in ("__init__ of the worker half", "register_kv_caches"):
        rig.host.note_running_hook(hook)
        time.sleep(seconds)
        rig.host.note_running_hook("")
    return DONE


@case(RULE, rig="scheduler")
def waits_in_vain_for_leftovers(rig: Rig, variant: None) -> Evidence:
    """The case waits for the end of a thread that does not end."""
    assert once_nothing(rig, lambda: ["poller"])
    return DONE


@case(RULE, rig="scheduler")
def waits_for_its_device(rig: Rig, variant: None) -> Evidence:
    """As a process waits for a GPU that many others use."""
    rig.host.note_running_hook(DEVICE)
    time.sleep(1000)
    return DONE


@case(RULE, rig="scheduler")
def remembers_calls(rig: Rig, variant: None) -> Evidence:
    p = rig.side("P")
    id = p.add(rig.prompt(5), rig.prefill_params(), max_tokens=3)
    p.run()
    hooks = [call.hook for call in p.calls if call.request == id]
    assert hooks == [
        "on_new_request",
        "get_num_new_matched_tokens",
        "update_state_after_alloc",
        "request_finished_all_groups",
    ]
    [told] = p.calls_of("update_state_after_alloc", id)
    assert told.arguments == {"num_external_tokens": 0, "blocks": ((257,),), "writable": ((257,),)}
    [ended] = p.calls_of("request_finished")
    assert (
        ended.arguments == {"blocks": ((257,),), "status": "FINISHED_LENGTH_CAPPED"}
        and ended.result[0] is True
    )
    assert [call.step for call in p.calls_of("build_connector_meta")] == [1, 2, 3]
    return DONE


@case(RULE, rig="scheduler")
def preempts_starves_and_hits(rig: Rig, variant: None) -> Evidence:
    d = rig.side("D", blocks=20)
    prompt = rig.prompt(3 * d.block_size)
    d.warm_prefix_cache(prompt, 2 * d.block_size)
    id = d.add(prompt, max_tokens=4)
    assert d.step().scheduled == {id: (2 * d.block_size, 3 * d.block_size)}
    d.preempt(id)
    assert d.step().scheduled == {} and d.status(id) == "PREEMPTED" and id in d.step().scheduled
    d.run()
    assert [
        call.arguments["num_computed_tokens"] for call in d.calls_of("get_num_new_matched_tokens", id)
    ] == [
        2 * d.block_size,
        3 * d.block_size,
    ]
    other = d.add(prompt)
    d.take_all_free_blocks()  # what was in the prefix cache is lost
    assert d.step().scheduled == {} and d.free_blocks() == 0 and d.status(other) == "WAITING"
    d.return_taken_blocks()
    assert d.step().scheduled == {other: (0, 3 * d.block_size)}
    assert d.leaks() == () and d.free_blocks() == 20
    return DONE


@case(RULE, rig="scheduler")
def ends_by_stop_abort_and_length(rig: Rig, variant: None) -> Evidence:
    p = rig.side("P")
    stops, aborted, goes_on = (p.add(rig.prompt(9, seed=n), max_tokens=3, stop=n == 0) for n in range(3))
    step = p.step()
    assert step.outputs[stops].finish == "stop" and step.outputs[goes_on].finish is None
    p.abort(aborted)
    assert p.status(aborted) == "gone" and p.step().finished == {stops, aborted}
    p.run()
    assert p.results[goes_on].finish == "length" and set(p.finished) == {stops, aborted, goes_on}
    return DONE


@case(RULE, rig="scheduler")
def waits_for_every_rank(rig: Rig, variant: None) -> Evidence:
    p, d = rig.side("P"), rig.side("D", policy="recompute")
    _, id = rig.hand_over_and_load(p, d, rig.prompt(40))
    assert d.ranks == 2
    d.step(ranks=(WorkerReport(received=[id], failed=[id]), WorkerReport()))
    assert d.waits_for_remote_kv(id)
    d.step(ranks=(WorkerReport(), WorkerReport(received=[id])))
    assert not d.waits_for_remote_kv(id)
    d.run()
    assert d.locally_computed_tokens(id) == 40
    return DONE


@case(RULE, variants=lambda cell, matrix: (), rig="scheduler")
def sees_what_is_left(rig: Rig, what: str) -> Evidence:
    """A case that plants a leak and says what the leak check said."""
    p = rig.side("P")
    id = p.add(rig.prompt(40))
    p.run()
    pool = p.manager.block_pool
    if what == "block":
        pool.touch([pool.blocks[263]])
    elif what == "taken":
        pool.free_block_queue.popleft()
    elif what == "queue":
        p.scheduler.failed_recving_kv_req_ids.add(id)
    elif what == "group":
        p.manager.coordinator.single_type_managers[0].req_to_blocks[id] = [pool.blocks[259]]
    elif what == "memory":
        p.connector.connector_scheduler.cache = [{"x": (f"{id}:1",)}]
    named = [f"the connector names {n} of them at {place}" for place, n in remembered(p).items()]
    raise NotApplicable("; ".join([*p.leaks(), *named]))


@case(RULE, rig="scheduler")
def fails(rig: Rig, how: str) -> Evidence:
    if how == "bug":
        raise ZeroDivisionError("ours")
    if how == "harness":
        raise HarnessError("no room")
    if how == "nothing":
        return None  # type: ignore[return-value]
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        os._exit(3)
    if how == "hang":
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        time.sleep(1000)  # here it hangs
    if how in ("slow", "busy"):  # 2 s, or for ever, at a deadline of 1.2 s
        began = time.monotonic()
        while how == "busy" or time.monotonic() < began + 2:
            rig.host.note_running_hook("request_finished")
            time.sleep(0.01)
        return DONE
    if how == "few":  # each hook takes a quarter of that deadline
        while True:
            rig.host.note_running_hook("request_finished")
            time.sleep(0.3)
    if how == "collect":
        left = Left()
        left.itself = left
        del left
        gc.collect()
    if how == "delete":
        left = Left()
        del left
    if how == "state":
        runs.append(1)
        raise NotApplicable(str(len(runs)))
    rig.side("P").add([1, 2], {"a": object()})
    return DONE


@case(RULE, rig="scheduler")
def worker_beside_ends(rig: Rig, method: str) -> Evidence:
    """A worker half beside the scheduler half, in a process of its own, hangs or ends when it starts."""
    from pytest_kvconform.rigs.scheduler.own_workers.worker_beside import Nursery
    from pytest_kvconform.rigs.scheduler.worker_half import WorkerHalf

    WorkerHalf.construct = METHODS[method]  # type: ignore[method-assign, assignment]
    rig.nursery = Nursery(rig)
    rig.nursery.start("P", rig.host.single_rank_config("P"), 0)
    return DONE


def start_load_kv(engine: object) -> None:
    """It has the name of a hook."""
    time.sleep(1000)


def waits(engine: object) -> None:
    time.sleep(1000)


def leaves(engine: object) -> None:
    os._exit(3)


def killed(engine: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


METHODS = {method.__name__: method for method in (start_load_kv, waits, leaves, killed)}


class Scheduler:
    """The assertion of vLLM's scheduler about what workers report."""

    requests: tuple[str, ...] = ()

    def _update_from_kv_xfer_finished(self, req_id: str) -> None:
        assert req_id in self.requests
