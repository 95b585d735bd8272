"""get_num_new_matched_tokens and update_state_after_alloc: what a connector announces, and what it loads."""

from __future__ import annotations

from pytest_kvconform.case import case
from pytest_kvconform.result import Evidence, NotApplicable
from pytest_kvconform.rigs.scheduler.rig import Rig, Side
from pytest_kvconform.rigs.scheduler.steps import ORDER_STEPS
from pytest_kvconform.suite.protocol._scenarios import (
    PROMPT,
    SAME,
    first_in_quick,
    identifiers,
    lengths,
    needs_hand_over,
    needs_metadata_of_loads_only,
    places_while_waiting,
    report_all,
    require_d_loads_no_more,
    require_no_order,
    require_no_order_yet,
    token_count,
    wrong_reload,
)

ASKED, PLACED = "get_num_new_matched_tokens", "update_state_after_alloc"
TIMES = 4  # calls of get_num_new_matched_tokens for one request
SAME_ANSWER = "KV-MATCH-010"
CHANGES = f"{ASKED} changes its answer from call to call"


def _hand_over(rig: Rig, *prompts: tuple[int, ...], warm: int = 0) -> Evidence:
    """Hand prompts over to a D that has `warm` tokens of each; the recorder checks every answer.

    For each prompt after the first, the method is first called with 0 computed tokens, as in a step in which
    D had neither a hit nor free blocks.
    """
    p, d = rig.side("P"), rig.side("D")
    for number, prompt in enumerate(prompts):
        if warm:
            d.warm_prefix_cache(prompt, warm)
        ids = (p.add(prompt), d.add(prompt)) if rig.subject.is_store else rig.hand_over(p, d, prompt)
        if number:
            d.call_hook(ASKED, d.request(ids[1]), 0)
        d.run()
        p.run(sent=True)
    return _answers(p, d)


def _answers(*sides: Side) -> Evidence:
    answers = [call for side in sides for call in side.calls_of(ASKED)]
    return Evidence(
        looked_at=len(answers), unit="answers", external_tokens=sum(call.result[0] or 0 for call in answers)
    )


@case("KV-MATCH-001", variants=first_in_quick("plain", "handed_over", "hit", "preempted"), rig="scheduler")
def returns_int_or_none_and_bool(rig: Rig, situation: str) -> Evidence:
    """get_num_new_matched_tokens returns (int or None, bool) in every situation."""
    length = token_count(PROMPT, rig.side("P").block_size)
    if situation in ("handed_over", "hit"):
        return _hand_over(rig, rig.prompt(length), warm=length if situation == "hit" else 0)
    side = rig.side("P")
    id = side.add(rig.prompt(length), max_tokens=3)
    if situation == "preempted":
        side.run(lambda: side.status(id) == "RUNNING")
        side.preempt(id)
    side.run()
    return _answers(side)


@case("KV-MATCH-002", variants=lengths, rig="scheduler")
def at_most_the_uncomputed_tokens(rig: Rig, length: str) -> Evidence:
    """The announced tokens of a prompt of any length are at most those that are not computed yet."""
    p = rig.side("P")
    return _hand_over(rig, rig.prompt(token_count(length, p.block_size)))


@case("KV-MATCH-002", variants=first_in_quick("b", "2b", "3b"), rig="scheduler")
def at_most_the_tokens_after_a_local_hit(rig: Rig, warm: str) -> Evidence:
    """After a hit in D's own prefix cache, fewer tokens are left to announce.

    So it is if the method was called before with 0 computed tokens, as where another request has computed
    them since.
    """
    b = rig.side("P").block_size
    prompts = (rig.prompt(3 * b + 1, seed=seed) for seed in range(2))
    return _hand_over(rig, *prompts, warm=token_count(warm, b))


@case("KV-MATCH-003", variants=first_in_quick("b+1", "2b+1", "3b+1"), rig="scheduler")
def zero_tokens_is_never_async(rig: Rig, length: str) -> Evidence:
    """0 tokens are never asynchronous: D has all blocks but the last token, or no engine has any block."""
    b = rig.side("P").block_size
    size = token_count(length, b)
    return _hand_over(rig, rig.prompt(size), warm=size)


@case(SAME_ANSWER, rig="scheduler")
def repeated_call_returns_the_same(rig: Rig, variant: None) -> Evidence:
    """get_num_new_matched_tokens may be called several times before update_state_after_alloc.

    It returns the same, and the load goes on as after one call.
    """
    needs_hand_over(rig)
    p, d = rig.side("P"), rig.side("D")
    _, d_id = rig.hand_over(p, d, rig.prompt(token_count(PROMPT, d.block_size)))
    d.take_all_free_blocks()
    rig.step_until_matched(d, d_id)
    for _ in range(TIMES):
        d.call_hook(ASKED, d.request(d_id), 0)
    answers = d.match_answers(d_id)
    d.return_taken_blocks()
    d.run()
    report_all(p)
    rig.require_no_leaks(p, d)
    external = d.first_external_tokens(d_id)
    _require_one_answer(rig, answers, external, f"called {len(answers)} times for one request")
    return Evidence(looked_at=len(answers) + 1, unit="answers", external_tokens=external)


@case("KV-MATCH-004", rig="scheduler")
def call_without_free_blocks_starts_no_load(rig: Rig, variant: None) -> Evidence:
    """While D has no free block, no step orders a load; then there is one load, and nothing is left.

    get_num_new_matched_tokens is called in every step.
    """
    needs_hand_over(rig)
    p, d = rig.side("P"), rig.side("D")
    _, d_id = rig.hand_over(p, d, rig.prompt(token_count(PROMPT, d.block_size)))
    d.take_all_free_blocks()
    rig.step_until_matched(d, d_id)
    for _ in range(TIMES):
        d.step()
    waiting, answers = d.steps[:], d.match_answers(d_id)
    require_no_order_yet(rig, d, d_id)
    d.return_taken_blocks()
    d.run()
    report_all(p)
    rig.require_no_leaks(p, d)
    if not answers:
        raise NotApplicable(f"{rig.subject.connector} returned None in every step without a free block")
    external = d.first_external_tokens(d_id)
    _require_one_answer(rig, answers, external, f"called in {len(waiting)} steps while no block was free")
    return Evidence(looked_at=len(waiting), unit="steps", external_tokens=external)


@case("KV-MATCH-004", rig="scheduler")
def load_without_room_starts_later(rig: Rig, variant: None) -> Evidence:
    """Two loads compete for blocks that are enough for one.

    The second one starts later, as it was announced.
    """
    needs_hand_over(rig)
    p, probe = rig.side("P"), rig.side("D")
    length = token_count(PROMPT, p.block_size)
    rig.hand_over_and_load(p, probe, rig.prompt(length))
    need = probe.free_blocks_at_start - probe.free_blocks()
    d = rig.side("D", blocks=need + need // 2 + 1)
    ids = [rig.hand_over(p, d, rig.prompt(length, seed=seed), max_tokens=2)[1] for seed in (3, 4)]
    rig.step_until_matched(d, *ids)
    for _ in range(TIMES):
        d.step()
    if [d.waits_for_remote_kv(id) for id in ids] != [True, False]:
        raise NotApplicable(f"of two loads in a pool for one, {sum(map(d.waits_for_remote_kv, ids))} began")
    early = d.match_answers(ids[1])
    require_no_order_yet(rig, d, ids[1])
    d.run()
    report_all(p)
    rig.require_no_leaks(p, d)
    external = d.first_external_tokens(ids[1])
    _require_one_answer(rig, early or [d.matched_tokens(ids[1])], external, "called without room for a load")
    return Evidence(looked_at=len(d.calls_of(ASKED)), unit="answers", external_tokens=external)


def _require_one_answer(rig: Rig, answers: list[tuple[int, bool]], external: int, how: str) -> None:
    """Raise Violation (a SHOULD) unless all answers are one, and as much was loaded. The last answer decides
    how much is loaded, and D computes the rest.
    """
    if len(different := list(dict.fromkeys(answers))) > 1:
        raise rig.violation(
            SAME_ANSWER, f"{how}, {ASKED} returned {', '.join(map(repr, different))}", diagnosis=CHANGES
        )
    if answers and external != answers[0][0]:
        raise rig.violation(
            SAME_ANSWER,
            f"{how}, {ASKED} returned {answers[0]}, and {external} tokens when the request got its blocks",
            diagnosis=CHANGES,
        )


@case("KV-MATCH-005", variants=first_in_quick("preempted", "preempted_twice", "one_token"), rig="scheduler")
def announces_no_freed_blocks_after_the_load(rig: Rig, why: str) -> Evidence:
    """After a load get_num_new_matched_tokens announces nothing that P has freed."""
    needs_hand_over(rig)
    p, d = rig.side("P"), rig.side("D")
    prompt = rig.prompt(1 if why == "one_token" else token_count(PROMPT, d.block_size))
    p_id = p.add(prompt, rig.prefill_params())
    p.run(lambda: p_id in p.results)
    params = p.kv_transfer_params(p_id)
    waiting = places_while_waiting(rig.side("D"), p, p_id)
    d.add(prompt, params, id=SAME, max_tokens=4)
    rig.start_loads(d, SAME)
    asked = len(d.calls_of(ASKED, SAME))
    d.step(received=[SAME])
    for _ in range({"preempted": 1, "preempted_twice": 2}.get(why, 0)):
        d.run(lambda: d.status(SAME) == "RUNNING")
        d.preempt(SAME)
        d.step()
    d.run()
    answers = d.match_answers(SAME, asked)
    if not answers:
        raise NotApplicable(f"vLLM's scheduler did not call {ASKED} again")
    if wrong := wrong_reload(p, d, identifiers(p, p_id), waiting):
        raise rig.violation("", f"after the load of {SAME} {ASKED} returned {max(answers)}: it {wrong}")
    report_all(p)
    rig.require_no_leaks(p, d)
    return Evidence(looked_at=len(answers), unit="answers")


@case("KV-MATCH-006", variants=first_in_quick("handed_over", "plain"), rig="scheduler")
def none_is_followed_by_an_answer(rig: Rig, who: str) -> Evidence:
    """A request waits while get_num_new_matched_tokens returns None. Another answer follows at some time."""
    p, d = rig.side("P"), rig.side("D")
    prompt = rig.prompt(token_count(PROMPT, d.block_size))
    if who == "handed_over":
        needs_hand_over(rig)
        _, id = rig.hand_over(p, d, prompt)
    else:
        id = d.add(prompt)
    d.run(lambda: bool(d.calls_of(PLACED, id)))
    return Evidence(looked_at=len(d.calls_of(ASKED, id)), unit="answers")


@case("KV-MATCH-007", variants=first_in_quick("discarded", "second_call"), rig="scheduler")
def update_state_after_alloc_with_zero_tokens_starts_no_load(rig: Rig, why: str) -> Evidence:
    """update_state_after_alloc with 0 tokens and all blocks of the request orders no load."""
    needs_hand_over(rig)
    needs_metadata_of_loads_only(rig)
    p, d = rig.side("P"), rig.side("D")
    prompt = rig.prompt(token_count(PROMPT, d.block_size))
    if why == "discarded":
        # the scheduler calls the hook, and drops the answer
        _, d_id = rig.hand_over(p, d, prompt, read_cache=False)
    else:
        _, d_id = rig.hand_over_and_load(p, d, prompt)
        d.step(received=[d_id])
    start = len(d.steps)
    d.run()
    counts = [call.arguments["num_external_tokens"] for call in d.calls_of(PLACED, d_id)]
    if counts[-1:] != [0]:
        raise NotApplicable(f"vLLM called update_state_after_alloc with {counts} tokens")
    require_no_order(rig, d, d_id, start)
    report_all(p)
    rig.require_no_leaks(p, d)
    return Evidence(looked_at=len(d.steps) - start, unit="steps")


@case("KV-MATCH-008", variants=first_in_quick("no_hit", "hit", "starved"), rig="scheduler")
def load_fills_the_allocated_blocks(rig: Rig, situation: str) -> Evidence:
    """A load is ordered for every block with announced tokens, and for no block of another request."""
    needs_hand_over(rig)
    p, d = rig.side("P"), rig.side("D")
    d.scatter_free_blocks()  # the metadata may name blocks as runs
    length = token_count(PROMPT, d.block_size)
    prompt = rig.prompt(length)
    if situation == "hit":
        d.warm_prefix_cache(prompt, 2 * d.block_size)
    _, d_id = rig.hand_over(p, d, prompt)
    if situation == "starved":
        d.take_all_free_blocks()
        d.step()
        d.return_taken_blocks()
    rig.start_loads(d, d_id)
    [placed] = d.calls_of(PLACED, d_id)
    named = frozenset(filter(d.owns_block, d.ordered_ids(d_id)))
    if not named:
        raise NotApplicable("the metadata names no block in a form that the suite can read")
    external, tables = placed.arguments["num_external_tokens"], placed.arguments["blocks"]
    end = d.calls_of(ASKED, d_id)[-1].arguments["num_computed_tokens"] + external
    due = {
        block
        for group in d.full_attention_groups()
        for block in placed.arguments["writable"][group]
        if block in tables[group][: -(-end // d.block_size)]
    }
    for _ in range(ORDER_STEPS):  # a connector may order a load in parts
        if due <= named:
            break
        named |= set(filter(d.owns_block, d.step().block_ids_for(d_id)))
    all_of_them = {block for group in tables for block in group}
    if wrong := sorted(named - all_of_them):
        raise rig.violation(
            "",
            f"the metadata orders a load into blocks {wrong}, which are none of the request's "
            f"{sorted(all_of_them)}",
        )
    if missing := sorted(due - named):
        raise rig.violation(
            "",
            f"{external} tokens were announced, and no load is ordered into blocks {missing}",
        )
    d.run()
    report_all(p)
    return Evidence(looked_at=len(named), unit="blocks", external_tokens=external)


@case(
    "KV-MATCH-009",
    variants=first_in_quick("plain", "decode", "prefill", "prefill_preempted"),
    rig="scheduler",
)
def on_new_request_leaves_request_unchanged(rig: Rig, who: str) -> Evidence:
    """on_new_request changes no request. It may cut the end off a prefill for another engine, once."""
    p, d = rig.side("P"), rig.side("D")
    prompt = rig.prompt(token_count(PROMPT, d.block_size))
    side = d if who == "decode" else p
    if who == "decode":
        needs_hand_over(rig)
        _, id = rig.hand_over(p, d, prompt, max_tokens=3)
    else:
        id = p.add(prompt, None if who == "plain" else rig.prefill_params(), max_tokens=3)
    request = side.request(id)
    found = tuple(request.prompt_token_ids), request.num_prompt_tokens, request.num_tokens
    whole = (prompt, len(prompt), len(prompt))
    if who in ("plain", "decode") and (*found, request.max_tokens) != (*whole, 3):
        raise rig.violation(
            "",
            f"a request of {len(prompt)} tokens and max_tokens 3 has {found[1]} and {request.max_tokens} "
            "after on_new_request",
        )
    if found[0] != prompt[: len(found[0])] or not len(found[0]) == found[1] == found[2] > 0:
        raise rig.violation(
            "",
            f"after on_new_request a prompt of {len(prompt)} tokens is no prefix of itself: {found[1]} "
            "tokens",
        )
    if who == "prefill_preempted":
        side.set_token_budget(side.block_size)
        side.run(lambda: side.status(id) == "RUNNING")
        side.preempt(id)
        side.run(lambda: side.status(id) == "PREEMPTED")
        side.run(lambda: side.status(id) == "RUNNING")
        now = side.request(id).num_prompt_tokens
        side.run(lambda: id in side.results)
        if now != found[1]:
            require_d_loads_no_more(rig, side, id, now)
    side.run()
    return Evidence(looked_at=len(found[0]), unit="tokens")
