"""kv_transfer_params come from outside. Whatever they are, nothing raises, and no request waits for KV that cannot come."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reference_connector.messages import BadParams, read_params
from tests.reference.doubles import FULL, STATE, WINDOW, request, scheduler, tables

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
def spoiled(draw: st.DrawFn) -> dict[Any, Any]:
    """Good parameters with something else in them, or without something."""
    params: dict[Any, Any] = copy.deepcopy(GOOD)
    for key in draw(st.lists(keys, min_size=1, max_size=3)):
        if draw(st.booleans()):
            params.pop(key, None)
        else:
            params[key] = draw(anything)
    return params


def answer(params: Any, computed: int = 0) -> tuple[int, bool]:
    """What D answers for a request with these parameters, after all that vLLM may do with it has been done."""
    d = scheduler(*GROUPS)
    r = request("r", N, params)
    d.on_new_request(r)
    found = d.get_num_new_matched_tokens(r, computed)
    assert d.get_num_new_matched_tokens(r, computed) == found, "asked twice, answered differently"
    d.update_state_after_alloc(r, tables("nnn", "nnn", "nn"), found[0])
    orders = pickle.loads(pickle.dumps(d.take_orders()))
    assert set(orders.loads) == ({"r"} if found[0] else set()), (
        "a request is parked if and only if a load is ordered"
    )
    d.update_state_after_alloc(r, tables("nnn", "nnn", "nn"), 0)  # its second admission
    d.on_loads_finished({"r"})
    kept, back = d.request_finished(r, ([1], [1], [1]))
    if not (isinstance(params, dict) and params.get("do_remote_decode")):
        assert (kept, back) == (False, None)
    return found


def test_what_p_says_is_used() -> None:
    assert answer(copy.deepcopy(GOOD)) == (N - 1, True)
    assert answer(copy.deepcopy(GOOD), computed=16) == (N - 17, True)


@SETTINGS
@given(anything)
@example({"do_remote_prefill": True})
@example({"do_remote_prefill": True, "remote_block_ids": [[]]})
@example({"do_remote_prefill": 1, "do_remote_decode": True})
@example({1: 2, "do_remote_prefill": True})
@example([{"do_remote_prefill": True}])
def test_nonsense_is_computed_here(params: Any) -> None:
    assert answer(params) == (0, False)


@SETTINGS
@given(spoiled())
def test_what_is_spoiled_is_used_only_if_it_says_everything(params: dict[Any, Any]) -> None:
    try:
        handoff = read_params(params)
    except BadParams:
        handoff = None
    found = answer(params)
    # A state that has seen the last token is of no use, nor is a window of which P has not the first block.
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
        {"remote_num_tokens": N},  # a state that has seen the last token is of no use
        {"remote_engine_id": None},
        {"remote_lease": True},
        {"do_remote_decode": True},
    ],
    ids=str,
)
def test_one_wrong_value_is_enough(wrong: dict[str, Any]) -> None:
    assert answer(GOOD | wrong) == (0, False)


@given(st.integers(1, 100), st.integers(1, 100), st.integers(0, 100))
def test_never_more_than_there_is(prompt: int, given_: int, computed: int) -> None:
    d = scheduler(FULL)
    params = {**GOOD, "remote_num_tokens": given_, "remote_block_ids": [[1]], "remote_first_tokens": [0]}
    r = request("r", prompt, params)
    d.on_new_request(r)
    count, between_steps = d.get_num_new_matched_tokens(r, computed)
    assert count == max(0, min(given_, prompt - 1) - computed) and between_steps == bool(count)
