"""The connector inside vLLM's MultiConnector, beside a fake connector that does what a case needs."""

from __future__ import annotations

from typing import Any

from model_matrix import load_geometries
from pytest_kvconform.case import case
from pytest_kvconform.result import Cell, Evidence, NotApplicable
from pytest_kvconform.rigs.scheduler.fake_connector import multi_connector_children, with_fake_connector
from pytest_kvconform.rigs.scheduler.leaks import integers
from pytest_kvconform.rigs.scheduler.rig import Rig, Side
from pytest_kvconform.rigs.scheduler.worker_half import WorkerHalf
from pytest_kvconform.suite.protocol._scenarios import (
    PROMPT,
    SAME,
    identifiers,
    names_blocks_of_loads_only,
    needs_hand_over,
    notifies_p,
    places,
    places_while_waiting,
    report_all,
    token_count,
)

PLACED, ENDED = "update_state_after_alloc", "request_finished"
PLACES = ("first", "last")  # of the fake connector
KEEPERS = [f"{who}-{where}" for who in ("both", "fake", "subject") for where in PLACES]
LATER = 3  # steps in which the fake connector does not know yet


def _dense(cell: Cell) -> bool:
    """Whether this is the one cell for questions that do not depend on the model."""
    return (
        load_geometries()[cell.family].family == "llama" and cell.setup == "b16" and cell.topology == "P1D1"
    )


def _pair(rig: Rig, where: str) -> tuple[Side, Side]:
    needs_hand_over(rig)
    return rig.side("P", transfer=with_fake_connector(where)), rig.side(
        "D", transfer=with_fake_connector(where)
    )


def _alone(rig: Rig, prompt: tuple[int, ...]) -> tuple[int, bool]:
    """Return how many tokens of a prompt D loads if the connector is alone, and whether the metadata names
    D's blocks then.
    """
    p, d = rig.side("P"), rig.side("D")
    _, d_id = rig.hand_over_and_load(p, d, prompt)
    return d.first_external_tokens(d_id), any(map(d.owns_block, d.ordered_ids(d_id)))


def _names_p(rig: Rig, prompt: tuple[int, ...]) -> bool:
    """Whether D's metadata names P in a form that can be read if the connector is alone, and loads."""
    p, d = rig.side("P"), rig.side("D")
    p_id, _ = rig.hand_over(p, d, prompt)
    d.run()
    d.step()
    return bool(places(d.steps, identifiers(p, p_id)))


@case("KV-MULTI-001", variants=lambda cell, matrix: PLACES, rig="scheduler")
def loads_nothing_if_another_connector_loads(rig: Rig, where: str) -> Evidence:
    """MultiConnector chooses the fake connector: the connector gets 0 tokens and all blocks.

    It orders no load, and notifies P (KV-HIT-001).
    """
    p, d = _pair(rig, where)
    prompt = rig.prompt(token_count(PROMPT, d.block_size))
    subject, fake = multi_connector_children(d)
    p_id = p.add(prompt, rig.prefill_params())
    p.run()
    params = p.kv_transfer_params(p_id)
    waiting = places_while_waiting(rig.side("D", transfer=with_fake_connector(where)), p, p_id)
    fake.connector.loads = True
    # MultiConnector asks the last one, too, but chooses it only if the first one announces nothing
    id = d.add(prompt, params if where == "first" else None, id=SAME)
    rig.step_until_matched(d, id)
    if not d.waits_for_remote_kv(id):
        raise NotApplicable(
            f"vLLM's scheduler did not take the fake connector's load: {d.matched_tokens(id)}"
        )
    d.run()
    d.step()
    token_counts = [call.arguments["num_external_tokens"] for call in subject.calls_of(PLACED, id)]
    if any(token_counts):
        raise rig.violation(
            "", f"the fake connector loads, and {rig.subject.connector} got {token_counts} tokens"
        )
    for step in d.steps:
        ordered = sorted(filter(d.owns_block, integers(step.metadata.metadata[subject.index])))
        if ordered and names_blocks_of_loads_only(rig):  # or it may save them
            raise rig.violation(
                "",
                f"another connector loads {id}, and step {step.number} orders a load into blocks {ordered}",
            )
    names, kept = identifiers(p, p_id), p_id in p.delayed_free_requests()
    blocks = p.free_blocks_at_start - p.free_blocks()
    report_all(p)
    rig.require_no_leaks(p, d)
    # a P that copies its blocks at once, and so declares that it has no lease, waits for no notification
    waits_for_d = kept and not rig.subject.features.get("lease")
    if where == "first" and waits_for_d and _names_p(rig, prompt) and not notifies_p(d, names, waiting):
        raise rig.violation(
            "KV-HIT-001",
            f"another connector has loaded {SAME}, P keeps {blocks} blocks, and no step's metadata orders a "
            "notification to P",
        )
    return Evidence(looked_at=len(d.steps), unit="steps")


@case(
    "KV-MULTI-001",
    variants=lambda cell, matrix: ("first", "last", "unsure_first", "unsure_last"),
    rig="scheduler",
)
def loads_the_same_as_alone(rig: Rig, where: str) -> Evidence:
    """The fake connector announces nothing, or does not know yet: the connector loads as it does alone."""
    how, _, place = where.rpartition("_")
    p, d = _pair(rig, place)
    prompt = rig.prompt(token_count(PROMPT, d.block_size))
    subject, fake = multi_connector_children(d)
    _, id = rig.hand_over(p, d, prompt, max_tokens=2)
    fake.connector.none_answers = LATER if how else 0
    for _ in range(fake.connector.none_answers):
        step = d.step()
        if d.status(id) != "WAITING" or any(map(d.owns_block, integers(step.metadata))):
            raise rig.violation(
                "",
                f"the fake connector does not know yet, and {id} is {d.status(id)}: an answer that was "
                "dropped had an effect",
            )
    rig.step_until_matched(d, id)
    step = rig.step_until_ordered(d, id)
    external, (due, names) = d.first_external_tokens(id), _alone(rig, prompt)
    ordered = any(map(d.owns_block, integers(step.metadata.metadata[subject.index])))
    # vLLM acts on the connector's last answer. Asked once, alone, the connector may load between steps.
    within_step = bool(external) and not d.matched_tokens(id)[1]
    waits = within_step or d.waits_for_remote_kv(id)
    if bool(external) != bool(due) or not waits or (names and not ordered):
        raise rig.violation(
            "",
            f"alone the connector loads {due} tokens, beside a fake connector ({where}) {external}, and {id} "
            f"is {d.status(id)}",
        )
    d.run()
    report_all(p)
    rig.require_no_leaks(p, d)
    return Evidence(
        looked_at=len(subject.calls_of("get_num_new_matched_tokens", id)),
        unit="answers",
        external_tokens=external,
    )


def _is_reported(p: Side, id: str) -> bool:
    """Whether P keeps no blocks of a request any more, once its workers have reported the ends they know."""
    p.report_told_ends()
    return id not in p.delayed_free_requests()


def _keeps_alone(rig: Rig, prompt: tuple[int, ...], params: dict[str, Any] | None) -> bool:
    """Whether P keeps the blocks of a request if the connector is alone.

    If nothing is handed over, it may do so until its workers, whom it tells, report them as sent.
    """
    p = rig.side("P")
    id = p.add(prompt, params)
    p.run()
    [ended] = p.calls_of(ENDED, id)
    if params is None and not rig.steps_on(p, lambda: _is_reported(p, id)):
        raise rig.violation(
            "",
            f"for a request that asks for no hand-over {ended.hook} returned {str(ended.result)[:200]}, and "
            "neither a step's metadata tells the workers of it, who would have to report it, nor does a "
            "worker half report it",
        )
    return bool(ended.result[0])


@case("KV-MULTI-002", applies=_dense, variants=lambda cell, matrix: KEEPERS, rig="scheduler")
def keeps_only_its_own_blocks(rig: Rig, who: str) -> Evidence:
    """The connector keeps the blocks that it keeps alone, and no others.

    It also gets the reports of the fake connector.
    """
    who, _, where = who.partition("-")
    p, _ = _pair(rig, where)
    subject, fake = multi_connector_children(p)
    fake.connector.keeps = who != "subject"
    prompt = rig.prompt(token_count(PROMPT, p.block_size))
    params = None if who == "fake" else rig.prefill_params()
    id = p.add(prompt, params)
    p.run()
    [ended], due = subject.calls_of(ENDED, id), _keeps_alone(rig, prompt, params)
    if bool(ended.result[0]) != due:
        raise rig.violation(
            "", f"beside a fake connector {ended.hook} returned {str(ended.result)[:200]}, and alone {due}"
        )
    steps = [*p.steps, p.step()]
    waits_for = max(((step.metadata.extra_async_saves or {}).get(id, 0) for step in steps), default=0)
    if waits_for != (due and who != "subject"):
        raise rig.violation(
            "",
            f"{who} keep the blocks of {id}, and MultiConnector waits for {waits_for} reports besides the "
            "last one",
        )
    report_all(p)
    rig.require_no_leaks(p)
    return Evidence(looked_at=len(p.steps), unit="steps")


@case("KV-MULTI-003", applies=_dense, variants=lambda cell, matrix: PLACES, rig="scheduler")
def shares_the_params_dict(rig: Rig, where: str) -> Evidence:
    """The params of two connectors are one dict, in which D finds its own keys.

    The keys of one request are not in the next dict.
    """
    p, d = _pair(rig, where)
    _alone(rig, rig.prompt(token_count(PROMPT, p.block_size)))  # if this prompt is loaded, all of them are
    _, fake = multi_connector_children(p)
    prompts = [rig.prompt(token_count(PROMPT, p.block_size), seed=seed) for seed in range(2)]
    ids = []
    for number, prompt in enumerate(prompts):
        fake.connector.params = {f"fake-{number}": [number]}
        p_id = p.add(prompt, rig.prefill_params())
        p.run()
        returned = p.returned_params(p_id) or {}
        theirs = {key: value for key, value in returned.items() if key.startswith("fake")}
        # a proxy passes on the keys of each connector, whatever words the one under test has
        ids.append(d.add(prompt, p.kv_transfer_params(p_id) | theirs))
        if (keys := sorted(theirs)) != [f"fake-{number}"]:
            raise rig.violation(
                "",
                f"params of request {number} have {keys} of the fake connector: the connector returns one "
                "dict again",
            )
        d.run()  # a connector may load nothing while another load is under way
    if computed := [id for id in ids if not d.loads_started(id)]:
        raise rig.violation(
            "", f"with keys of a fake connector in its params {computed[0]} was computed by D, and not loaded"
        )
    report_all(p)
    rig.require_no_leaks(p, d)
    return Evidence(
        looked_at=len(ids), unit="requests", external_tokens=sum(map(d.first_external_tokens, ids))
    )


@case("KV-MULTI-004", applies=_dense, variants=lambda cell, matrix: PLACES, rig="scheduler")
def handshake_metadata_reaches_scheduler_half(rig: Rig, where: str) -> Evidence:
    """The handshake metadata of the connector's workers reaches its scheduler half.

    The other child of MultiConnector, a fake connector, publishes nothing.
    """
    half, published = WorkerHalf(rig, "P"), list[dict[Any, str]]()
    for config in (
        half.config.kv_transfer_config,
        with_fake_connector(where)(half.config.kv_transfer_config),
    ):
        half.config.kv_transfer_config = config
        half.take_ports(len(published))  # whether shutdown() frees them is judged for KV-SHUTDOWN-003
        half.construct()
        half.register_kv_caches(half.allocate_kv_caches())
        published.append({rank: type(value).__name__ for rank, value in half.handshake_metadata().items()})
        if len(published) == 2:
            half.set_handshake_metadata(half.scheduler_side())
        half.shutdown()
    alone, together = published
    if alone != together:
        raise rig.violation(
            "",
            f"alone the connector publishes {alone or 'nothing'}, and through MultiConnector "
            f"{together or 'nothing'}",
        )
    return Evidence(looked_at=len(published), unit="starts", notes={"publishes": len(alone)})
