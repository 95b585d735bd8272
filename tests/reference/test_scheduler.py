"""The scheduler half, hook by hook, in the order in which vLLM calls them."""

from __future__ import annotations

from typing import Any

import pytest

from reference_connector.messages import Lease, Part
from reference_connector.scheduler import Group, Scheduler
from tests.reference.doubles import FULL, STATE, WINDOW, request, scheduler, tables

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


def handed(p: Scheduler, tokens: int, *blocks: list[int], name: str = "r-p") -> dict[str, Any]:
    kept, params = p.request_finished(request(name, tokens, dict(PREFILL)), blocks)
    assert kept and params is not None
    return params


# ---- P
# ------------------------------------------------------------------------------------------------------------------------


def test_p_keeps_blocks_under_a_lease_that_workers_hear_of_once() -> None:
    p = scheduler()
    one, two = handed(p, 40, [1, 2, 3], name="one"), handed(p, 16, [4], name="two")
    assert p.take_orders().leases == {one["remote_lease"]: "one", two["remote_lease"]: "two"}
    assert not p.take_orders().leases
    assert (one["remote_num_tokens"], one["remote_block_ids"], one["remote_first_tokens"]) == (
        40,
        [[1, 2, 3]],
        [0],
    )


@pytest.mark.parametrize("status", ["FINISHED_ABORTED", "FINISHED_ERROR", "FINISHED_IGNORED"])
def test_p_hands_nothing_over_that_is_not_complete(status: str) -> None:
    p = scheduler()
    assert p.request_finished(request("r", 40, dict(PREFILL), status), ([1, 2, 3],)) == (False, None)
    assert not p.take_orders().leases


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {"do_remote_decode": False},
        {"other": 1},
        {"do_remote_decode": True, "do_remote_prefill": True},
    ],
)
def test_other_requests_are_left_alone(params: Any) -> None:
    s = scheduler(FULL, STATE)
    r = request("r", 40, params)
    s.on_new_request(r)
    assert s.get_num_new_matched_tokens(r, 0) == (0, False)
    s.update_state_after_alloc(r, tables("nnn", "nn"), 0)
    assert s.request_finished(r, ([1, 2, 3], [4, 5])) == (False, None)
    orders = s.take_orders()
    assert not (orders.loads or orders.leases or orders.releases or orders.renewals or s.busy)
    assert r.num_prompt_tokens == 40


def test_what_a_window_left_behind_and_scratch_slots_are_not_named() -> None:
    params = handed(scheduler(WINDOW, STATE), 79, [0, 0, 7, 8, 9], [3, 5, 6])
    assert params["remote_block_ids"] == [[7, 8, 9], [5]]
    assert params["remote_first_tokens"] == [32, 0]


def test_p_without_a_state_hands_nothing_over() -> None:
    p = scheduler(FULL, STATE)
    assert p.request_finished(request("r", 40, dict(PREFILL)), ([1, 2, 3], [])) == (False, None)
    assert p.request_finished(request("r", 40, dict(PREFILL)), ([1, 2, 3], [0])) == (False, None)


@pytest.mark.parametrize(("groups", "left"), [((FULL,), 40), ((FULL, WINDOW), 39), ((FULL, STATE), 39)])
def test_p_stops_before_the_last_token_where_it_has_to(groups: tuple[Any, ...], left: int) -> None:
    p, r = scheduler(*groups), request("r", 40, dict(PREFILL))
    for _ in range(2):  # idempotent
        p.on_new_request(r)
        assert (r.num_prompt_tokens, len(r.prompt_token_ids), len(r._all_token_ids)) == (left, left, left)
    assert r.max_tokens == (16 if left == 40 else 1)
    single = request("s", 1, dict(PREFILL))
    p.on_new_request(single)
    assert single.num_prompt_tokens == 1


# ---- D
# ------------------------------------------------------------------------------------------------------------------------


def test_from_known_to_released() -> None:
    p, d = scheduler(), scheduler(heartbeat=0.0)
    params = handed(p, 40, [1, 2, 3])
    r = request("r", 40, params)
    d.on_new_request(r)
    lease = d.take_orders().renewals[0]
    assert lease.number == params["remote_lease"] and lease.peer.port == 4321
    assert d.get_num_new_matched_tokens(r, 16) == (23, True)
    d.update_state_after_alloc(r, tables("hnn"), 23)
    orders = d.take_orders()
    assert orders.loads["r"].parts == [Part(16, 39, [2, 3], 16)] and not orders.releases
    assert not d.take_orders().loads
    d.update_state_after_alloc(r, tables("hnn"), 0)  # the second admission, to be computed
    assert d.get_num_new_matched_tokens(r, 0) == (0, False)  # after a preemption
    d.on_loads_finished({"r"})
    assert d.busy
    orders = d.take_orders()
    assert orders.releases == [lease] and not orders.renewals
    assert not d.take_orders().releases and d.busy
    d.on_notified({lease})
    assert not d.busy
    assert d.request_finished(r, ([1, 2, 3],)) == (False, None)


@pytest.mark.parametrize("end", ["full hit", "aborted", "aborted while loading"])
def test_p_hears_of_every_end_once(end: str) -> None:
    p, d = scheduler(), scheduler()
    r = request("r", 40, handed(p, 40, [1, 2, 3]), "FINISHED_ABORTED")
    d.on_new_request(r)
    if end == "full hit":
        d.update_state_after_alloc(r, tables("hhh"), 0)
    elif end == "aborted while loading":
        d.update_state_after_alloc(r, tables("nnn"), 39)
    released = [*d.take_orders().releases]
    d.request_finished(r, ([],))
    released += d.take_orders().releases
    assert len(released) == (end != "aborted while loading"), "P's blocks must stay while they may be read"
    d.on_loads_finished({"r"} if end == "aborted while loading" else None)
    released += d.take_orders().releases
    assert [lease.number for lease in released] == [1]


def test_two_samples_of_one_prompt_hold_one_lease() -> None:
    p, d = scheduler(), scheduler()
    params = handed(p, 40, [1, 2, 3])
    samples = [request(name, 40, dict(params)) for name in "ab"]
    for sample in samples:
        d.on_new_request(sample)
        d.update_state_after_alloc(sample, tables("nnn"), 39)
    d.on_loads_finished({"a"})
    assert not d.take_orders().releases
    d.on_loads_finished({"b"})
    assert [lease.number for lease in d.take_orders().releases] == [1]


def test_a_window_is_loaded_from_its_first_token() -> None:
    p, d = scheduler(FULL, WINDOW), scheduler(FULL, WINDOW)
    r = request("r", 80, handed(p, 79, [1, 2, 3, 4, 5], [0, 0, 7, 8, 9]))
    d.on_new_request(r)
    assert d.get_num_new_matched_tokens(r, 0) == (79, True)
    d.update_state_after_alloc(r, tables("nnnnn", "00nnn"), 79)
    # D computes token 79, which sees tokens 48 to 79. What its third block has of earlier ones P need not
    # have any more.
    assert d.take_orders().loads["r"].parts == [Part(0, 79, [1, 2, 3, 4, 5], 0), Part(48, 79, [3, 4, 5], 32)]


@pytest.mark.parametrize(
    ("caching", "computed", "found"), [(True, 0, (0, False)), (True, 64, (15, True)), (False, 0, (79, True))]
)
def test_nothing_is_loaded_into_a_block_of_which_p_has_only_a_part(
    caching: bool, computed: int, found: tuple[int, bool]
) -> None:
    p, d = scheduler(FULL, WINDOW), scheduler(FULL, Group(64, window=32), caching=caching)
    r = request(
        "r", 80, handed(p, 79, [1, 2, 3, 4, 5], [0, 0, 7, 8, 9])
    )  # P has tokens from 32 on, D's block begins at 0
    d.on_new_request(r)
    assert d.get_num_new_matched_tokens(r, computed) == found


def test_states_are_loaded_whatever_else_is_here() -> None:
    p, d = scheduler(FULL, STATE), scheduler(FULL, STATE)
    params = handed(p, 39, [1, 2, 3], [4, 6])
    r = request("r", 40, params)
    d.on_new_request(r)
    assert d.get_num_new_matched_tokens(r, 32) == (7, True)
    d.update_state_after_alloc(r, tables("hhn", "0nnn"), 7)
    assert d.take_orders().loads["r"].parts == [Part(32, 39, [3], 32), Part(0, 1, [3])]


def test_a_state_that_has_seen_too_much_is_refused_before_anything_waits() -> None:
    d = scheduler(FULL, STATE)
    r = request("r", 40, handed(scheduler(FULL, STATE), 40, [1, 2, 3], [4, 6]))
    d.on_new_request(r)
    assert d.get_num_new_matched_tokens(r, 0) == (0, False)
    d.update_state_after_alloc(r, tables("nnn", "nn"), 0)
    assert isinstance(d.take_orders().releases[0], Lease)
