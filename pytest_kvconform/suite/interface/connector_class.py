"""What vLLM requires of a connector's class and of its constructor."""

from __future__ import annotations

import inspect
from typing import Any

from pytest_kvconform.case import case
from pytest_kvconform.result import Evidence
from pytest_kvconform.rigs.scheduler.connector_class import connector_class
from pytest_kvconform.rigs.scheduler.rig import Rig
from pytest_kvconform.rigs.scheduler.worker_half import WorkerHalf
from pytest_kvconform.rigs.vllm_setup.hooks import (
    BOTH,
    CLASS,
    SCHEDULER,
    WORKER,
    calls_of,
    class_named,
    has_hook,
)
from pytest_kvconform.suite.interface._cells import has_groups, once


@case("KV-CLASS-001", applies=once, variants=lambda cell, matrix: ("scheduler", "worker"), rig="scheduler")
def base_class_gets_constructor_arguments(rig: Rig, which: str) -> Evidence:
    """After construction the base class has what it needs of the three arguments that vLLM passed.

    These are the role, and the KV cache groups: hooks of the base class answer with them. What else a half
    keeps, and whether it keeps copies, is its choice.
    """
    if which == "worker":
        half = WorkerHalf(rig, "P")
        found, config, kv_config = half.construct(), half.config, half.kv_config
    else:
        side = rig.side("P")
        found, config, kv_config = side.connector, side.config, side.kv_config
    if not isinstance(found, class_named("KVConnectorBase_V1")):
        raise rig.violation(
            "",
            f"{type(found).__name__} is no subclass of KVConnectorBase_V1",
            diagnosis="the class has another base",
        )
    role = class_named("KVConnectorRole")[which.upper()]
    given = {
        "role": (found.__dict__.get("_role"), role),
        "KV cache groups": (_groups(found.__dict__.get("_kv_cache_config")), _groups(kv_config)),
        "KV transfer configuration": (
            type(found.__dict__.get("_kv_transfer_config")).__name__,
            type(config.kv_transfer_config).__name__,
        ),
    }
    for name, (has, passed) in given.items():
        if has != passed:
            raise rig.violation(
                "",
                f"the base class of the {which} half has {_short(has)} as its {name}, and vLLM built the "
                f"connector with {_short(passed)}",
                diagnosis=f"the constructor did not pass its arguments to super().__init__: the {name} "
                "differs",
            )
    return Evidence(looked_at=len(given), unit="attributes")


@case("KV-CLASS-002", applies=once, rig="scheduler")
def hooks_accept_vllm_arguments(rig: Rig, _: None) -> Evidence:
    """Every hook exists, can be called as vLLM calls it, and is no coroutine."""
    found, signatures = connector_class(rig), 0
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise rig.violation(
            "",
            f"{found.__name__} does not implement {', '.join(missing)}",
            diagnosis=f"{missing[0]} is missing",
        )
    of_objects = calls_of(SCHEDULER, WORKER, BOTH, hma=rig.host.spec.facts.supports_hma)
    for calls, of_class in ((calls_of(CLASS), True), (of_objects, False)):
        for hook, (positions, names) in calls.items():
            if not has_hook(hook):
                continue
            method = getattr(found, hook, None)
            if not callable(method):
                raise rig.violation(
                    "",
                    f"{found.__name__}.{hook} is {_short(method)}, and vLLM calls it",
                    diagnosis=f"{hook} is no method",
                )
            if inspect.iscoroutinefunction(method):
                raise rig.violation(
                    "",
                    f"{found.__name__}.{hook} is a coroutine, and vLLM awaits nothing",
                    diagnosis=f"{hook} is async",
                )
            # vLLM calls the hook of an object: a function of the class gets the object first
            bound = of_class or isinstance(
                inspect.getattr_static(found, hook, None), (staticmethod, classmethod)
            )
            try:
                inspect.signature(method).bind(*[None] * (positions + (not bound)), **dict.fromkeys(names))
            except TypeError as error:
                called = f"{hook}({', '.join(['_'] * positions + [f'{name}=_' for name in names])})"
                raise rig.violation(
                    "",
                    f"vLLM calls {called} on the {'class' if of_class else 'object'}, and {found.__name__} "
                    "has "
                    f"{hook}({_parameters(method)}): {error}",
                    diagnosis=f"{hook} does not accept the arguments that vLLM passes: {error}",
                ) from None
            signatures += 1
    return Evidence(looked_at=signatures, unit="hooks")


@case("KV-CLASS-003", applies=has_groups, rig="scheduler")
def supports_hma_matches_hybrid_allocator(rig: Rig, _: None) -> Evidence:
    """The hybrid memory allocator is on if the class has request_finished_all_groups.

    vLLM did not turn it off without a message.
    """
    found, hma = connector_class(rig), rig.host.spec.facts.supports_hma
    finishes = callable(getattr(found, "request_finished_all_groups", None))
    if finishes and not issubclass(found, class_named("SupportsHMA")):
        raise rig.violation(
            "",
            f"{found.__name__} has request_finished_all_groups and does not inherit SupportsHMA, so vLLM "
            "turned the hybrid memory "
            f"allocator off without a message, and all layers of {rig.cell.family} share one block table",
            diagnosis=f"{found.__name__} does not inherit SupportsHMA",
        )
    side = rig.side("P")
    on, groups = (
        not side.config.scheduler_config.disable_hybrid_kv_cache_manager,
        len(side.kv_config.kv_cache_groups),
    )
    if on != hma or (groups > 1) != hma:
        raise rig.violation(
            "",
            f"vLLM turns the hybrid memory allocator {'on' if hma else 'off'} for {found.__name__} "
            "(supports_hma_config), and it is "
            f"{'on' if on else 'off'} with {groups} KV cache groups",
            diagnosis="the connector changed what vLLM decides about the hybrid memory allocator",
        )
    return Evidence(
        looked_at=groups,
        unit="groups",
        notes={"hybrid memory allocator": "on" if on else "off", "groups": groups},
    )


def _groups(kv_cache_config: Any) -> list[list[str]] | None:
    """Return the names of the layers of each KV cache group; None if there is no KV cache configuration."""
    groups = getattr(kv_cache_config, "kv_cache_groups", None)
    return None if groups is None else [list(group.layer_names) for group in groups]


def _parameters(method: Any) -> str:
    """Return the parameters of a method without annotations, such as `self, forward_context, **kwargs`."""
    return ", ".join(
        str(p.replace(annotation=inspect.Parameter.empty))
        for p in inspect.signature(method).parameters.values()
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"a {type(value).__name__}"
