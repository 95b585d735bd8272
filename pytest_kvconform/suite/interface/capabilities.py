"""Capabilities of a connector: what its hooks answer to questions that vLLM asks beside the transfers."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from pytest_kvconform.case import case
from pytest_kvconform.result import Evidence, blocked_by, repr_of
from pytest_kvconform.rigs.processes.cores import Deadline
from pytest_kvconform.rigs.scheduler.connector_class import call_class_hook, require_standard_reports
from pytest_kvconform.rigs.scheduler.rig import Rig, Side
from pytest_kvconform.rigs.scheduler.store_engine import (
    end_engine_with_worker,
    spare_port,
    start_engine_with_worker,
)
from pytest_kvconform.rigs.vllm_setup.answers import why_no_truth
from pytest_kvconform.rigs.vllm_setup.engine_config import LAYOUT_ALIASES, layout_names
from pytest_kvconform.rigs.vllm_setup.hooks import class_named, has_hook
from pytest_kvconform.suite.interface._cells import once

DELIVERY = "requires_kv_delivery"
PUSH_S = 2.0  # seconds in which pending push work ends when no request is left; times --kv-timeout-scale


@case("KV-LAYOUT-001", rig="scheduler")
def get_required_kvcache_layout_names_a_layout(rig: Rig, _: None) -> Evidence:
    """get_required_kvcache_layout returns the name of a layout that vLLM has, or None.

    It returns the same each time, also before a model is loaded.
    """
    names = [*layout_names(), *LAYOUT_ALIASES]
    answers = [
        call_class_hook(rig, "get_required_kvcache_layout", rig.host.vllm_config(role)) for role in "PDPD"
    ]
    for answer in answers:
        if answer is not None and (not isinstance(answer, str) or answer not in names):
            raise rig.violation(
                "",
                f"get_required_kvcache_layout returned {answer!r}; vLLM knows {', '.join(names)}",
                diagnosis=f"{answer!r} is no name of a layout",
            )
    if answers[:2] != answers[2:]:
        raise rig.violation(
            "",
            f"get_required_kvcache_layout returned {answers[:2]} and then {answers[2:]} for the same "
            "configurations",
        )
    return Evidence(looked_at=len(answers), unit="answers", notes={"layout": answers[0] or "any"})


@case("KV-CAPS-001", applies=once, rig="scheduler")
def requires_piecewise_for_cudagraph_answers_any_configuration(rig: Rig, _: None) -> Evidence:
    """requires_piecewise_for_cudagraph answers for the extra configuration of the engine, on P and on D.

    vLLM tests the truth of the answer.
    """
    hook = "requires_piecewise_for_cudagraph"
    for role in "PD":
        extra = dict(rig.host.vllm_config(role).kv_transfer_config.kv_connector_extra_config)
        truth(rig, f"{hook}({extra})", call_class_hook(rig, hook, extra))
    return Evidence(looked_at=2, unit="answers")


def truth(rig: Rig, what: str, answer: Any) -> bool:
    """Return the truth value of an answer of any type: vLLM tests nothing else.

    Raises Violation if there is none, or if the answer is a coroutine or a method, which is always true.
    """
    if wrong := why_no_truth(answer):
        raise rig.violation("", f"{what} {wrong}, and vLLM tests its truth", diagnosis=f"{what} {wrong}")
    return bool(answer)


@case("KV-CAPS-002", applies=once, variants=lambda cell, matrix: ("scheduler",), rig="scheduler")
def capability_properties_have_truth_values(rig: Rig, which: str) -> Evidence:
    """supports_divergent_local_hybrid_hits and requires_kv_delivery of the scheduler half have truth values.

    vLLM reads them as attributes, and a method would always be true. It reads the latter once, at the start.
    """
    side = rig.side("P")
    names = ("supports_divergent_local_hybrid_hits", DELIVERY)
    now = {name: truth(rig, f"{name} of the {which} half", getattr(side.connector, name)) for name in names}
    if (first := bool(side.scheduler.requires_kv_delivery)) != now[DELIVERY]:
        raise rig.violation(
            "",
            f"{DELIVERY} of the {which} half was {first} when vLLM read it, and is {now[DELIVERY]} now",
            diagnosis=f"{DELIVERY} changes",
        )
    return Evidence(
        looked_at=len(names), unit="promises", notes={name: str(value) for name, value in now.items()}
    )


@case("KV-CAPS-003", rig="scheduler")
def get_loaded_kv_cache_group_ids_names_loaded_groups(rig: Rig, _: None) -> Evidence:
    """get_loaded_kv_cache_group_ids returns a collection. Where vLLM zeroes new blocks, it has only groups
    that are transferred, and for a hand-over of a request's own blocks all of them.
    """
    d = rig.side("D")
    hand_over = rig.subject.profile == "p2p"
    prompt = rig.prompt(3 * d.block_size + 5)
    id = rig.hand_over_and_load(rig.side("P"), d, prompt)[1] if hand_over else d.add(prompt)
    found = d.call_hook("get_loaded_kv_cache_group_ids", d.request(id))
    transferred = set(d.kv_config.transfer_group_ids)
    try:  # vLLM tests for each group whether it is in the answer: no iterator is good for that
        looks = [{index for index in range(len(d.group_sizes)) if index in found} for _ in range(2)]
    except TypeError:
        looks = [set(), {-1}]
    groups = looks[0]
    if looks[1] != groups:
        raise rig.violation(
            "",
            f"get_loaded_kv_cache_group_ids returned {found!r}, and vLLM tests which group numbers are in it",
            diagnosis="the result is no collection of group numbers",
        )
    zeroes = d.kv_config.needs_kv_cache_zeroing  # otherwise vLLM does nothing with the answer
    if zeroes and (extra := groups - transferred):
        raise rig.violation(
            "",
            f"get_loaded_kv_cache_group_ids names {sorted(extra)}, but only the groups {sorted(transferred)} "
            "are transferred",
        )
    if zeroes and hand_over and groups != transferred:
        raise rig.violation(
            "",
            f"get_loaded_kv_cache_group_ids names {sorted(groups)} of the groups {sorted(transferred)}: vLLM "
            "zeroes new blocks of the others while the load writes to them",
            diagnosis="a hand-over fills every group that is transferred, and the hook leaves some of them "
            "out",
        )
    return Evidence(looked_at=len(transferred), unit="groups", notes={"loaded": len(groups)})


@case("KV-CAPS-004", applies=once, variants=lambda cell, matrix: ("P", "D"), rig="scheduler")
def optional_hooks_return_their_types(rig: Rig, role: str) -> Evidence:
    """Optional hooks return their types before, during and after a request.

    They are the hooks for events, pending work, hit sources, and reset_cache.
    """
    side = rig.side(role)
    asked = _answers(rig, side)
    id = side.add(rig.prompt(2 * side.block_size + 1), max_tokens=4)
    side.step()
    asked += _answers(rig, side)
    asked += _hit_sources(rig, side, side.request(id))
    side.abort(id)
    side.run()
    side.step()
    asked += _answers(rig, side)
    if not (_push_work_ends(rig, side) or _push_work_ends_with_workers(rig, side)):
        require_standard_reports(side)
        raise rig.violation(
            "",
            "has_pending_push_work() is true with no request left, so the engine never stops stepping",
            diagnosis="pending push work never ends",
        )
    answer = side.call_hook("reset_cache")
    if answer is not None and answer is not False and not truth(rig, "reset_cache()", answer):
        raise rig.violation(
            "",
            f"reset_cache() returned {answer!r}: vLLM takes everything but False itself for a success",
            diagnosis="a reset that failed looks like one that worked",
        )
    return Evidence(looked_at=asked + 2, unit="answers")


def _answers(rig: Rig, side: Side) -> int:
    for hook in ("has_pending_push_work", "has_pending_block_frees"):
        truth(rig, f"{hook}()", side.call_hook(hook))
    if not (events := side.call_hook("take_events")):  # vLLM looks no further
        return 3
    try:
        listed = list(events)
    except TypeError:
        raise rig.violation(
            "",
            f"take_events() returned {events!r}, and vLLM makes a list of it",
            diagnosis="take_events returns no iterable",
        ) from None
    if wrong := [event for event in listed if not isinstance(event, class_named("KVCacheEvent"))]:
        raise rig.violation(
            "",
            f"take_events() returned a {type(wrong[0]).__name__}, which is no KVCacheEvent",
            diagnosis="take_events returns objects of another class",
        )
    return 3


def _push_work_ends(rig: Rig, side: Side) -> bool:
    """Whether has_pending_push_work becomes false in time, while vLLM goes on stepping."""
    deadline = Deadline(rig.scaled_seconds(PUSH_S))
    while truth(rig, "has_pending_push_work()", side.call_hook("has_pending_push_work")):
        if deadline.over():
            return False
        side.step()
        time.sleep(0.01)
    return True


def _push_work_ends_with_workers(rig: Rig, scripted: Side) -> bool:
    """Whether has_pending_push_work becomes false in an engine with a worker half. The scheduler half may
    wait for a report of its worker half about the end of a request, if that half has reports of its own.
    """
    hook, base = "build_connector_worker_meta", class_named("KVConnectorBase_V1")
    if getattr(type(scripted.connector), hook) is getattr(base, hook):
        return False
    role = scripted.role
    side = start_engine_with_worker(rig, port=spare_port(rig, role), role=role)
    try:
        id = side.add(rig.prompt(2 * side.block_size + 1), max_tokens=4)
        side.step()
        side.abort(id)
        return _push_work_ends(rig, side)
    finally:
        end_engine_with_worker(side)


def _hit_sources(rig: Rig, side: Side, request: Any) -> int:
    if not has_hook("get_external_cache_hit_sources"):
        return 0
    counts: Any = dict[class_named("CacheHitSource"), int]  # type: ignore[misc]
    answers = _asked_for_sources(side, request)
    for count, found in answers:
        if found is None:  # PrefixCacheStats.record takes it for no answer
            continue
        said = f"get_external_cache_hit_sources(request, {count}) returned {repr_of(found)}"
        try:
            if sum(found.values()) != count:  # vLLM replaces the result: see KV-CAPS-005
                continue
            # the way of vLLM's statistics to the API server
            msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=counts)
        except (AttributeError, TypeError, msgspec.ValidationError) as error:
            raise rig.violation(
                "",
                f"{said}, and vLLM's statistics cannot use it: {error}",
                diagnosis="the result is no dict of CacheHitSource and int",
            ) from None
    return len(answers)


def _asked_for_sources(side: Side, request: Any) -> list[tuple[int, Any]]:
    """Return numbers of tokens, and what get_external_cache_hit_sources answers."""
    counts = (1, side.block_size, 2 * side.block_size)
    return [(n, side.call_hook("get_external_cache_hit_sources", request, n)) for n in counts]


@case("KV-CAPS-005", applies=once, rig="scheduler")
def external_cache_hit_sources_add_up(rig: Rig, _: None) -> Evidence:
    """The counts of get_external_cache_hit_sources add up to the number of tokens."""
    side = rig.side("D")
    id = side.add(rig.prompt(2 * side.block_size + 1), max_tokens=4)
    side.step()
    answers = _asked_for_sources(side, side.request(id))
    for count, found in answers:
        try:
            adds_up = found is None or sum(found.values()) == count
        except (AttributeError, TypeError):
            case = f"kv::interface/capabilities::optional_hooks_return_their_types[{rig.cell}-D]"
            raise blocked_by(case) from None
        if not adds_up:
            raise rig.violation(
                "",
                f"get_external_cache_hit_sources(request, {count}) returned {found!r}",
                diagnosis="the counts do not add up to the tokens",
            )
    return Evidence(looked_at=len(answers), unit="answers")
