"""kv_transfer_params: which requests they concern, what they must hold, and requests with unusable params."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from pytest_kvconform.case import case
from pytest_kvconform.result import Cell, Evidence, NotApplicable, Violation
from pytest_kvconform.rigs.context import declared_amount
from pytest_kvconform.rigs.engine.router import RENDEZVOUS
from pytest_kvconform.rigs.scheduler.connector_class import REPORTS, classes_with
from pytest_kvconform.rigs.scheduler.leaks import growing_memory, integers, leaks
from pytest_kvconform.rigs.scheduler.own_workers.memory import grow_with_bad_params
from pytest_kvconform.rigs.scheduler.rig import Rig, Side
from pytest_kvconform.rigs.scheduler.store_engine import end_in_worker
from pytest_kvconform.suite.protocol._corrupted_params import CORRUPT_LISTS, CORRUPT_VALUES, corrupted
from pytest_kvconform.suite.protocol._scenarios import (
    PROMPT,
    needs_hand_over,
    one_group,
    report_all,
    token_count,
    was_computed,
)

ASKED, PLACED, ENDED = "get_num_new_matched_tokens", "update_state_after_alloc", "request_finished"
ALL_WHOLE_BLOCKS = "KV-HANDOVER-003"
ID = "transfer_id"  # the param by which P and D of a rendezvous meet
STRANGE: dict[str, dict[str, Any] | None] = {
    "none": None,
    "empty": {},
    "of_a_router": {"trace": "0af7651916cd43dd", "priority": 3, "labels": ["a", None, {"b": 1.5}]},
    "of_another": {
        "transfer_id": "xfer-1",
        "remote_bootstrap_addr": "10.0.0.7:8998",
        "lmcache.skip_save": True,
    },
}
LONG = 80  # tokens: more than the few for which a connector may not start a transfer


def _one_rank(cell: Cell) -> bool:
    """Whether P and D have one rank each: params do not depend on the number of ranks."""
    return cell.topology == "P1D1"


def _strangers(cell: Cell, matrix: str) -> list[str]:
    return (
        [f"{role}-{which}" for role in "pd" for which in STRANGE]
        if one_group(cell)
        else ["p-of_a_router", "d-none"]
    )


# ---- requests of others ------------------------------------------------------------------------------------


@case("KV-PARAMS-001", variants=_strangers, rig="scheduler")
def requests_without_own_params_are_ignored(rig: Rig, who: str) -> Evidence:
    """A request without params, or with keys of others only, is computed: the connector announces no tokens
    for it, hands none of its blocks over, and its blocks are freed. What the connector notes about the
    request, and what else it returns in params, is its own choice: it may pair P and D by request id.
    """
    needs_hand_over(rig)
    role, _, which = who.partition("-")
    side = rig.side(role.upper())
    prompt = rig.prompt(token_count(PROMPT, side.block_size))
    id = side.add(prompt, STRANGE[which], max_tokens=2)
    side.run()
    wrong: list[Any] = [answer for answer in side.match_answers(id) if answer[0]]
    ends = [call.result for call in side.calls_of(ENDED, id)]
    wrong += [end for end in ends if any(map(side.owns_block, integers(end[1])))]
    if wrong:
        asked = f"for a request with the params {STRANGE[which]}"
        raise rig.violation("", f"{asked} the connector returned {str(wrong[0])[:200]}")
    if not was_computed(side, id):
        done = f"{side.locally_computed_tokens(id)} of its {len(prompt)} tokens were computed"
        said = f"a request with the params {STRANGE[which]} ended with {side.results[id].finish!r}"
        raise rig.violation("", f"{said}, and {done}")
    report_all(side)
    rig.require_no_leaks(side)
    return Evidence(looked_at=len(side.steps), unit="steps")


# ---- what a hand-over needs --------------------------------------------------------------------------------


@case("KV-PARAMS-003", applies=_one_rank, rig="scheduler")
def null_keys_may_be_left_out(rig: Rig, variant: None) -> Evidence:
    """The one key that asks for a hand-over is enough.

    P answers as if the keys that are left out were there: those that are null, and of vLLM's own words those
    that are false. In the words of an author's proxy false may mean something else than no key.
    """
    needs_hand_over(rig)
    prompt = rig.prompt(token_count(PROMPT, rig.side("P").block_size))
    whole, asks = rig.prefill_params(), rig.prefill_params()
    empty = (None,) if rig.subject.hook else (None, False)
    few = {key: value for key, value in asks.items() if not any(value is one for one in empty)}
    if few.keys() == asks.keys():
        raise NotApplicable("a request for a hand-over has no key that may be left out")
    answers = []
    for asked in (whole, few):
        p, d = rig.side("P"), rig.side("D")
        p_id = p.add(prompt, asked)
        p.run()
        nothing = p_id not in p.results or p.results[p_id].params is None
        if asked is few and nothing and rig.subject.handover == "handoff":
            raise rig.violation("", f"asked with {asked}, P hands nothing over")
        d_id = d.add(prompt, p.kv_transfer_params(p_id))
        d.run()
        p.run(sent=True)
        rig.require_no_leaks(p, d)
        answers.append((sorted(p.kv_transfer_params(p_id)), d.first_external_tokens(d_id)))
    (keys, tokens), (fewer, given) = answers
    if keys != fewer or bool(tokens) != bool(given):
        raise rig.violation(
            "",
            f"asked with {few}, P and D give {answers[1]} (params, tokens), and with {whole} {answers[0]}",
        )
    _warn_of_less(rig, f"asked with {few}", given, f"asked with {whole}", tokens)
    return Evidence(looked_at=len(keys), unit="params", external_tokens=tokens)


@case("KV-PARAMS-004", variants=lambda cell, matrix: ("reordered", "with_more", "twice"), rig="scheduler")
def params_are_read_by_key(rig: Rig, way: str) -> Evidence:
    """A router may change the order of a dict, add keys and send it through JSON again: D loads from the same
    blocks. How much of them it loads is the connector's choice. Of two requests with the same params each is
    loaded or computed.
    """
    needs_hand_over(rig)
    p, plain, d = rig.side("P"), rig.side("D"), rig.side("D")
    prompt = rig.prompt(token_count(PROMPT, p.block_size))
    p_id, _ = rig.hand_over_and_load(p, plain, prompt)
    params = p.kv_transfer_params(p_id)
    if way == "reordered":
        params = dict(reversed(params.items()))
    elif way == "with_more":
        params = {"trace": None} | params | (STRANGE["of_a_router"] or {})
    d_id = d.add(prompt, params)
    rig.step_until_matched(d, d_id)
    rig.step_until_ordered(d, d_id)
    if not (given := d.first_external_tokens(d_id)) and rig.own_reports:
        raise NotApplicable("the workers of another D have read what P handed over")
    ordered = _loads(d, p)
    if way == "twice":
        third = d.add(prompt, params)
        rig.step_until_matched(d, third)
        d.run(lambda: d.loads_started(third) > 0 or third in d.results)
        rig.step_until_ordered(d, third)
        loads = d.loads_started(third) > 0
        names = any(step.mentions(d_id) for step in d.steps)
        ordered_third = not names or any(step.mentions(third) for step in d.steps)
        if not (ordered_third if loads else was_computed(d, third)):
            raise rig.violation(
                "",
                f"of two requests with the same params the second one is {d.status(third)}, and no step "
                "orders its load",
            )
    tokens, begun = plain.first_external_tokens(next(iter(plain.prompts))), _loads(plain, p)
    other = ordered != begun if given == tokens else not 1 <= given <= len(prompt)
    # what is loaded of another amount, or for the second request, are blocks that the params name
    if other or _loads(d, p) - begun - integers(params):
        raise rig.violation(
            "",
            f"with the same params, {way}, D announces {given} tokens and orders another load",
        )
    d.run()
    plain.run()
    p.run(sent=True)
    rig.require_no_leaks(p, plain, d)
    _warn_of_less(rig, f"with the same params, {way},", given, "with the params as P returned them", tokens)
    return Evidence(looked_at=len(params), unit="params", external_tokens=given)


def _warn_of_less(rig: Rig, one: str, given: int, another: str, tokens: int) -> None:
    """Raise Violation (KV-HANDOVER-003) if D loaded one amount of a prompt and another one, unless the
    connector declares how much it loads.

    `one`, `another`: what the params were, in words.
    """
    if given != tokens and not declared_amount(rig.subject):
        raise rig.violation(
            ALL_WHOLE_BLOCKS, f"{one} D loaded {given} tokens, and {another} it loaded {tokens} of them"
        )


def _loads(side: Side, p: Side) -> frozenset[int]:
    """Return P's blocks in the metadata of all steps of a side."""
    return frozenset(block for step in side.steps for block in integers(step.metadata) if p.owns_block(block))


# ---- unusable params ---------------------------------------------------------------------------------------


def _ways_of_values(cell: Cell, matrix: str) -> list[str]:
    return list(CORRUPT_VALUES) if one_group(cell) else []


def _ways_of_lists(cell: Cell, matrix: str) -> list[str]:
    return list(CORRUPT_LISTS) if one_group(cell) else ["missing", "emptied", "shorter", "longer"]


@case("KV-PARAMS-002", applies=_one_rank, variants=_ways_of_values, rig="scheduler")
def corrupted_params_fail_only_their_request(rig: Rig, how: str) -> Evidence:
    """Each field of P's params in turn is corrupted.

    D's engine lives: the request is computed, fails, or loads what P has.
    """
    return _each_field(rig, how, lists=False)


@case("KV-PARAMS-002", variants=_ways_of_lists, rig="scheduler")
def corrupted_lists_fail_only_their_request(rig: Rig, how: str) -> Evidence:
    """The same for fields that hold lists, such as block ids."""
    return _each_field(rig, how, lists=True)


def _each_field(rig: Rig, how: str, lists: bool) -> Evidence:
    needs_hand_over(rig)
    p, d = rig.side("P"), rig.side("D")
    prompt = rig.prompt(token_count(PROMPT, p.block_size))
    p_id, d_id = rig.hand_over_and_load(p, d, prompt)
    params = p.kv_transfer_params(p_id)
    table = corrupted(params, how, lists)
    named = next((key for key, value in params.items() if value == p.transfer_ids[p_id]), ID)
    if rig.subject.handover == RENDEZVOUS and isinstance(table.get(named, {}).get(named), str):
        del table[named]  # P may begin a transfer of any id later: D may wait for it
    ordered = d.ordered_ids(d_id)
    names_own, names_p = (
        any(map(side.owns_block, blocks)) for side, blocks in ((d, ordered), (p, integers(params) & ordered))
    )
    return _run_each(
        rig, "D", table, how, lambda d, params: _run_request(d, prompt, params, names_own, names_p)
    )


@case("KV-PARAMS-005", applies=_one_rank, variants=_ways_of_values, rig="scheduler")
def p_survives_corrupted_params(rig: Rig, how: str) -> Evidence:
    """Each field of the params that ask P is corrupted: the request ends, and its blocks are freed.

    It may end with or without a hand-over.
    """
    needs_hand_over(rig)
    prompt = rig.prompt(token_count(PROMPT, rig.side("P").block_size))
    return _run_each(
        rig, "P", corrupted(rig.prefill_params(), how), how, lambda p, params: _run_request(p, prompt, params)
    )


@case("KV-PARAMS-005", applies=_one_rank, rig="scheduler")
def p_survives_params_of_an_earlier_turn(rig: Rig, variant: None) -> Evidence:
    """P is asked for a hand-over with params that name the KV of an earlier turn.

    Routers with two-way hand-overs send such params.
    """
    needs_hand_over(rig)
    p = rig.side("P")
    prompt = rig.prompt(max(LONG, token_count(PROMPT, p.block_size)))
    p_id, d_id = rig.hand_over_and_load(p, d := rig.side("D"), prompt)
    names_own = any(map(d.owns_block, d.ordered_ids(d_id)))
    turn = p.kv_transfer_params(p_id) | {
        key: value for key, value in rig.prefill_params().items() if value is not None
    }
    return _run_each(
        rig,
        "P",
        {"params of an earlier turn": turn},
        "",
        lambda p, params: _run_request(p, prompt, params, names_own),
    )


NO_LOAD = {  # an end in an engine with a worker half, where no load was ordered -> what is wrong
    "": "the request waits for ever: its load was announced, and none is ordered",
    "loaded": "the workers reported a load that was not ordered, and none that failed: D uses what was there",
}


def _run_each(
    rig: Rig,
    role: str,
    table: dict[str, dict[str, Any]],
    how: str,
    fate: Callable[[Side, dict[str, Any]], str],
) -> Evidence:
    """Give each of these params to a side. A side that nothing went wrong on also gets the next ones."""
    if not table:
        raise NotApplicable(f"the params have no field that could be {how}")
    wrong: dict[str, list[str]] = {}
    side: Side | None = None
    for field, params in table.items():
        side = side or rig.side(role)
        try:
            reported = fate(side, params)
        except Violation as error:
            reported = error.finding.happened
        if reported:
            wrong.setdefault(reported, []).append(field)
            side = None
    every = itertools.cycle(table.values())
    if not wrong and side:
        growing = growing_memory((side,), lambda: fate(side, next(every)), rig.subject.remembers)
        places = {place for _, place in growing}
        if places and classes_with(side, REPORTS):
            places = set(grow_with_bad_params(rig, role, places, table.values()))
        wrong |= {growing[side, place]: list(table) for place in sorted(places)[:1]}
    if wrong:
        reported, fields = next(iter(wrong.items()))
        more = "; ".join(f"{', '.join(others)}: {text}" for text, others in list(wrong.items())[1:])
        raise rig.violation(
            "",
            f"with {' '.join([', '.join(fields), how]).strip()}: {reported}",
            differs=more,
            diagnosis=reported,
        )
    return Evidence(looked_at=len(table), unit="params")


def _run_request(
    side: Side,
    prompt: tuple[int, ...],
    params: dict[str, Any],
    names_own: bool = True,
    names_p: bool = False,
) -> str:
    """Return what goes wrong with a request that has these params, or "". An ordered load is reported as
    failed. `names_own`, `names_p`: whether metadata of a right load names blocks of this side, and of P's.
    """
    id = side.add(prompt, params)
    side.rig.step_until_matched(side, id)
    if side.waits_for_remote_kv(id):
        step = side.rig.step_until_ordered(side, id)
        blocks, ordered = integers(params), step.block_ids_for(id)
        if names_own and not any(map(side.owns_block, ordered)):
            told = any(one.mentions(id) for one in side.steps)
            end = end_in_worker(side.rig, side.role, prompt, params) if told else ""
            if end in NO_LOAD:
                return NO_LOAD[end]
            names_p = False  # the workers refuse the params: D reads nothing of P
        if names_p and not blocks & ordered:
            return "the request waits for a load of nothing: the metadata names no block to load from"
        side.step(failed=[id])
    side.run(sent=True, limit=20)
    side.step()
    left = leaks(side)
    return left[0].replace(id, "it") if left else ""
