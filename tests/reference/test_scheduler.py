"""The scheduler half, hook by hook, in the order in which vLLM calls them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reference_connector.leases import RANDOM_BITS
from reference_connector.messages import BadParams, GroupLoad, Handoff, Lease
from reference_connector.scheduler import SHORTENED, Group, Scheduler
from tests.reference.doubles import FULL, STATE, WINDOW, request, scheduler, tables

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


def handed(p: Scheduler, tokens: int, *blocks: list[int], name: str = "r-p") -> dict[str, Any]:
    kept, params = p.request_finished(request(name, tokens, dict(PREFILL)), blocks)
    assert kept and params is not None
    return params


# ---- P


def test_p_keeps_blocks_under_a_lease_and_orders_it_once() -> None:
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


def test_what_a_client_writes_does_not_keep_p_from_stopping_early() -> None:
    """Nor does another request with the same dict and list: samples of one prompt within one process."""
    p, params, prompt = scheduler(FULL, WINDOW), PREFILL | {SHORTENED: True}, list(range(40))
    for name in "ab":
        r = request(name, 40, params)
        r.prompt_token_ids = prompt
        p.on_new_request(r)
        assert (r.num_prompt_tokens, len(r.prompt_token_ids)) == (39, 39), "P computes the last token"
    assert params == PREFILL | {SHORTENED: True} and len(prompt) == 40


# ---- D


def test_from_known_to_released() -> None:
    p, d = scheduler(), scheduler(heartbeat=1e-9)
    params = handed(p, 40, [1, 2, 3])
    r = request("r", 40, params)
    d.on_new_request(r)
    lease = d.take_orders().renewals[0]
    assert lease.number == params["remote_lease"] and lease.peer.port == 4321
    assert d.get_num_new_matched_tokens(r, 16) == (23, True)
    d.update_state_after_alloc(r, tables("hnn"), 23)
    orders = d.take_orders()
    assert orders.loads["r"].groups == [GroupLoad([2, 3], 16, 16, 39)] and not orders.releases
    assert not d.take_orders().loads
    d.update_state_after_alloc(r, tables("hnn"), 0)  # the second admission, to be computed
    assert d.get_num_new_matched_tokens(r, 0) == (0, False)  # after a preemption
    d.on_loads_finished({"r"})
    assert d.busy
    orders = d.take_orders()
    assert orders.releases == [lease] and not orders.renewals
    assert not d.take_orders().releases and d.busy
    d.on_worker_report({lease}, {})
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
    assert [lease.number >> RANDOM_BITS for lease in released] == [1]


def test_two_samples_of_one_prompt_hold_one_lease() -> None:
    p, d = scheduler(), scheduler()
    params = handed(p, 40, [1, 2, 3])
    samples = [request(name, 40, dict(params)) for name in "ab"]
    for sample in samples:
        d.on_new_request(sample)
        d.update_state_after_alloc(sample, tables("nnn"), 39)
    d.on_loads_finished({"a"})
    assert not d.take_orders().releases, "the other sample still needs the lease"
    d.on_loads_finished({"b"})
    assert [lease.number >> RANDOM_BITS for lease in d.take_orders().releases] == [1]


def test_a_window_is_loaded_from_its_first_token() -> None:
    p, d = scheduler(FULL, WINDOW), scheduler(FULL, WINDOW)
    r = request("r", 80, handed(p, 79, [1, 2, 3, 4, 5], [0, 0, 7, 8, 9]))
    d.on_new_request(r)
    assert d.get_num_new_matched_tokens(r, 0) == (79, True)
    d.update_state_after_alloc(r, tables("nnnnn", "00nnn"), 79)
    # D computes token 79, which sees tokens 48 to 79. What its third block has of
    # earlier ones P need not have any more.
    assert d.take_orders().loads["r"].groups == [
        GroupLoad([1, 2, 3, 4, 5], 0, 0, 79),
        GroupLoad([3, 4, 5], 32, 48, 79),
    ]


@pytest.mark.parametrize(
    ("caching", "computed", "found"), [(True, 0, (0, False)), (True, 64, (15, True)), (False, 0, (79, True))]
)
def test_nothing_is_loaded_into_a_block_of_which_p_has_only_a_part(
    caching: bool, computed: int, found: tuple[int, bool]
) -> None:
    p, d = scheduler(FULL, WINDOW), scheduler(FULL, Group(64, window=32), caching=caching)
    # P has tokens from 32 on, D's block begins at 0
    r = request("r", 80, handed(p, 79, [1, 2, 3, 4, 5], [0, 0, 7, 8, 9]))
    d.on_new_request(r)
    assert d.get_num_new_matched_tokens(r, computed) == found


def test_states_are_loaded_whatever_else_is_here() -> None:
    p, d = scheduler(FULL, STATE), scheduler(FULL, STATE)
    params = handed(p, 39, [1, 2, 3], [4, 6])
    r = request("r", 40, params)
    d.on_new_request(r)
    assert d.get_num_new_matched_tokens(r, 32) == (7, True)
    d.update_state_after_alloc(r, tables("hhn", "0nnn"), 7)
    assert d.take_orders().loads["r"].groups == [GroupLoad([3], 32, 32, 39), GroupLoad([3], 0, 0, 1)]


def test_a_state_that_has_seen_too_much_is_refused_before_anything_waits() -> None:
    d = scheduler(FULL, STATE)
    r = request("r", 40, handed(scheduler(FULL, STATE), 40, [1, 2, 3], [4, 6]))
    d.on_new_request(r)
    assert d.get_num_new_matched_tokens(r, 0) == (0, False)
    d.update_state_after_alloc(r, tables("nnn", "nn"), 0)
    assert isinstance(d.take_orders().releases[0], Lease)


# ---- kv_transfer_params: nothing raises, and no request waits for KV that cannot come


SETTINGS = settings(max_examples=150, deadline=None)
N = 40  # tokens of a prompt
GROUPS = FULL, WINDOW, STATE


def good() -> dict[str, Any]:
    p = scheduler(*GROUPS)
    kept, params = p.request_finished(
        request("r", N - 1, {"do_remote_decode": True}), ([3, 5, 7], [4, 5, 7], [2, 9, 4])
    )
    assert kept and params is not None
    return params


GOOD = good()
scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
keys = st.sampled_from([*GOOD, "remote_hosts", "tp_size"])


@st.composite
def corrupted(draw: st.DrawFn) -> dict[Any, Any]:
    """Good parameters with something else in them, or without something."""
    params: dict[Any, Any] = copy.deepcopy(GOOD)
    for key in draw(st.lists(keys, min_size=1, max_size=3)):
        if draw(st.booleans()):
            params.pop(key, None)
        else:
            params[key] = draw(anything)
    return params


def matched(params: Any, computed: int = 0) -> tuple[int, bool]:
    """What get_num_new_matched_tokens returns on D for these parameters, with all other hooks called."""
    d = scheduler(*GROUPS)
    r = request("r", N, params)
    d.on_new_request(r)
    found = d.get_num_new_matched_tokens(r, computed)
    assert d.get_num_new_matched_tokens(r, computed) == found, "two calls return different values"
    d.update_state_after_alloc(r, tables("nnn", "nnn", "nn"), found[0])
    orders = pickle.loads(pickle.dumps(d.take_orders()))
    assert set(orders.loads) == ({"r"} if found[0] else set()), (
        "a request waits for remote KV if and only if a load is ordered"
    )
    d.update_state_after_alloc(r, tables("nnn", "nnn", "nn"), 0)  # vLLM admits the request again
    d.on_loads_finished({"r"})
    kept, back = d.request_finished(r, ([1], [1], [1]))
    if not (isinstance(params, dict) and params.get("do_remote_decode")):
        assert (kept, back) == (False, None)
    return found


def test_the_parameters_of_p_are_used() -> None:
    assert matched(copy.deepcopy(GOOD)) == (N - 1, True)
    assert matched(copy.deepcopy(GOOD), computed=16) == (N - 17, True)


@SETTINGS
@given(anything)
@example({"do_remote_prefill": True})
@example({"do_remote_prefill": True, "remote_block_ids": [[]]})
@example({"do_remote_prefill": 1, "do_remote_decode": True})
@example({1: 2, "do_remote_prefill": True})
@example([{"do_remote_prefill": True}])
def test_d_computes_a_request_with_other_parameters(params: Any) -> None:
    assert matched(params) == (0, False)


@SETTINGS
@given(corrupted())
def test_corrupted_parameters_are_used_only_if_they_are_complete(params: dict[Any, Any]) -> None:
    try:
        handoff = Handoff.read(params)
    except BadParams:
        handoff = None
    found = matched(params)
    # D cannot use a state that includes the last token, nor a window whose first block P does not have.
    if handoff is None or handoff.remote_num_tokens > N - 1 or any(handoff.remote_first_tokens):
        assert found == (0, False)
    else:
        assert found == (handoff.remote_num_tokens, True)


@pytest.mark.parametrize(
    "wrong",
    [
        {"remote_host": ""},
        {"remote_host": None},
        {"remote_port": "4321"},
        {"remote_port": 0},
        {"remote_block_ids": []},
        {"remote_block_ids": [[], [], []]},
        {"remote_block_ids": [[-1], [], []]},
        {"remote_block_ids": [[1 << 40], [], []]},
        {"remote_block_ids": [3, 5, 7]},
        {"remote_first_tokens": [0]},
        {"remote_num_tokens": 0},
        {"remote_num_tokens": N},  # a state that includes the last token is of no use
        {"remote_engine_id": None},
        {"remote_lease": True},
        {"remote_lease_duration": 0},
        {"remote_lease_duration": float("nan")},
        {"do_remote_decode": True},
    ],
    ids=str,
)
def test_one_wrong_value_makes_d_compute_the_request(wrong: dict[str, Any]) -> None:
    assert matched(GOOD | wrong) == (0, False)


@given(st.integers(1, 100), st.integers(1, 100), st.integers(0, 100))
def test_no_more_tokens_than_p_and_the_prompt_have(prompt: int, given_: int, computed: int) -> None:
    d = scheduler(FULL)
    params = {**GOOD, "remote_num_tokens": given_, "remote_block_ids": [[1]], "remote_first_tokens": [0]}
    r = request("r", prompt, params)
    d.on_new_request(r)
    count, between_steps = d.get_num_new_matched_tokens(r, computed)
    assert count == max(0, min(given_, prompt - 1) - computed) and between_steps == bool(count)


def test_a_lease_that_is_needed_again_is_held_again() -> None:
    p, d = scheduler(), scheduler()
    params = handed(p, 40, [1, 2, 3])
    r = request("r", 40, params)
    d.on_new_request(r)
    d.request_finished(r, ([],))
    released = d.take_orders().releases
    d.on_new_request(request("again", 40, params))
    d.on_worker_report(set(released), {})
    assert not d.busy and not d.take_orders().releases
    d.request_finished(request("again", 40, params), ([],))
    assert d.take_orders().releases == released
