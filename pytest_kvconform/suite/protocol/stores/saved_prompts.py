"""What a store announces for prompts that its workers have saved, and for prompts that grow turn by turn."""

from __future__ import annotations

from pytest_kvconform.case import case
from pytest_kvconform.result import Evidence, NotApplicable
from pytest_kvconform.rigs.cluster.scripts.cluster import Cluster
from pytest_kvconform.rigs.processes.cores import Deadline
from pytest_kvconform.rigs.scheduler.rig import Rig, Side
from pytest_kvconform.rigs.scheduler.store_engine import start_engine_with_worker
from pytest_kvconform.suite.protocol._scenarios import token_count
from pytest_kvconform.suite.protocol.multi_connector import _dense

ASKED = "get_num_new_matched_tokens"
TURNS = ("b-1", "b", "b+1", "2b-1", "2b", "2b+1", "3b+1")  # lengths of the prompts of one conversation
SAVES_S = 2.0  # in which saves in the background may end


def require_store(rig: Rig | Cluster) -> None:
    """Raise NotApplicable for a P/D pair: it loads what P keeps, and nothing that was saved."""
    if not rig.subject.is_store:
        raise NotApplicable(f"{rig.subject.connector} is no store: it loads what another engine keeps for it")


def start_store(rig: Rig) -> Side:
    """Start an engine with a worker half. Raises NotApplicable for a P/D pair."""
    require_store(rig)
    return start_engine_with_worker(rig)


def run_and_save(rig: Rig, side: Side) -> None:
    """Run all requests, and then until no save holds blocks, but not for longer than SAVES_S."""
    side.run()
    for _ in rig.waits(Deadline(rig.scaled_seconds(SAVES_S))):
        if not side.delayed_free_requests():
            break
        side.step()
    step_until_found(rig, side)


def step_until_found(rig: Rig, side: Side) -> None:
    """Step until a store finds what it has saved: for the `save_delay` that is declared."""
    for _ in rig.waits(Deadline(rig.subject.save_delay)):
        side.step()


def _turn(rig: Rig, side: Side, prompt: tuple[int, ...], known: int) -> tuple[int, int]:
    """Let the engine compute a prompt of which `known` tokens were computed before.

    Returns the local and the external tokens with which it was admitted.
    """
    id = side.add(prompt)
    run_and_save(rig, side)
    asked = side.calls_of(ASKED, id)[-1].arguments["num_computed_tokens"]
    local, external = asked, side.first_external_tokens(id)
    if external and local + external > known:
        raise rig.violation(
            "",
            f"of a prompt of {len(prompt)} tokens, {known} of which were ever computed, {external} were "
            f"announced after {local} local ones",
        )
    if (reported := side.results.get(id)) is None or reported.finish != "length":
        raise rig.violation(
            "",
            f"a request of {len(prompt)} tokens, {local} of them local and {external} from the store, ended "
            f"with {reported}",
        )
    return local, external


@case("KV-STORE-001", applies=_dense, variants=lambda cell, matrix: ("kept", "forgotten"), rig="scheduler")
def growing_prompts_can_be_loaded(rig: Rig, cache: str) -> Evidence:
    """Each prompt of a conversation extends the one before.

    D's own prefix cache is kept, or dropped before each prompt. All announced tokens can be loaded.
    """
    side = start_store(rig)
    known, turns = 0, []
    for length in TURNS:
        prompt = rig.prompt(token_count(length, side.block_size))
        for _ in range(2):
            if cache == "forgotten":
                side.evict_prefix_cache()
            turns.append(_turn(rig, side, prompt, known))
            known = len(prompt)
    external = sum(external for _, external in turns)
    if cache == "forgotten" and not external:
        raise NotApplicable(
            f"{rig.subject.connector} announced no token of {len(turns)} prompts that it could save"
        )
    return Evidence(looked_at=len(turns), unit="turns", external_tokens=external)


@case(
    "KV-STORE-002",
    applies=_dense,
    variants=lambda cell, matrix: ("nothing", "another", "beginning", "swapped"),
    rig="scheduler",
)
def unsaved_prompts_match_nothing(rig: Rig, saved: str) -> Evidence:
    """A store announces nothing for a prompt that shares less than a block with what was saved.

    It does so however often it is asked. Of a prompt whose blocks come from several saved ones, it announces
    no more than their common beginning.
    """
    side = start_store(rig)
    b = side.block_size
    prompt = rig.prompt(3 * b + 5, shared=b // 2)
    if saved != "nothing":
        other = rig.prompt(3 * b + 5, seed=1, shared=b // 2 if saved == "beginning" else 0)
        _turn(
            rig, side, (*prompt[b : 2 * b], *prompt[:b], *prompt[2 * b :]) if saved == "swapped" else other, 0
        )
    known = b // 2 if saved == "beginning" else 0
    id = side.add(prompt)
    answers = [side.call_hook(ASKED, side.request(id), 0) for _ in range(3)]
    side.run()
    answers += [call.result for call in side.calls_of(ASKED, id)]
    if wrong := [answer for answer in answers if (answer[0] or 0) > known]:
        raise rig.violation(
            "", f"no engine has saved a block of this prompt, and {ASKED} returned {wrong[0]}"
        )
    if saved == "another":  # both are saved by now: this one begins as one of them, and goes on as the other
        run_and_save(rig, side)
        side.evict_prefix_cache()
        unit = max(b, rig.subject.load_granularity)
        _turn(rig, side, (*other[:unit], *prompt[unit:]), unit)
    return Evidence(looked_at=len(answers), unit="answers")


@case("KV-STORE-003", applies=_dense, rig="scheduler")
def repeated_lookup_returns_the_same(rig: Rig, variant: None) -> Evidence:
    """Asked several times about a saved prompt, a store returns the same, unless it returns None."""
    side = start_store(rig)
    prompt = rig.prompt(token_count("3b+5", side.block_size))
    _turn(rig, side, prompt, 0)
    side.evict_prefix_cache()
    id = side.add(prompt)
    answers = [side.call_hook(ASKED, side.request(id), 0) for _ in range(4)]
    side.run()
    external = side.first_external_tokens(id)
    if not external and {answer[0] for answer in answers} <= {0, None}:
        raise NotApplicable(f"{rig.subject.connector} announced no token of a prompt that it could save")
    if wrong := [answer for answer in answers if answer[0] not in (None, external)]:
        raise rig.violation(
            "",
            f"called four times for one request {ASKED} returned {answers}, and {external} tokens were "
            f"loaded, not {wrong[0][0]}",
        )
    return Evidence(looked_at=len(answers), unit="answers", external_tokens=external)
