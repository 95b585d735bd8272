"""Two nodes of a Ray cluster for the engines of one pytest process: reserved, and given a zygote each."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from model_matrix import expand, parse_topology
from pytest_kvconform.result import Blocked, HarnessError
from pytest_kvconform.rigs.launch import short_temporary_folder
from pytest_kvconform.rigs.nodes.host import THREADS, NodeHost
from pytest_kvconform.rigs.nodes.place import NodePlace, ask

if TYPE_CHECKING:
    from pytest_kvconform.rigs.context import SubjectFacts
    from pytest_kvconform.settings import Settings

ROLES = "PD"
COMPARED = ("vllm", "device", "kernels")  # facts that must be those of where pytest runs
BUSY = 3  # times as long as on an idle node an import may last: the actor leaves out waits for a core
RESERVE_S = 60.0  # for two nodes to be free
WORDS = 300  # characters that a sentence repeats of an error of Ray
ERRORS = (ray.exceptions.RayError, OSError, RuntimeError, ValueError)  # of Ray's functions


class Cluster:
    """P's node and D's: `places`, by role. Raises Blocked where the cluster cannot give two, or one differs
    from where pytest runs, and HarnessError where vLLM cannot be imported on one.
    """

    def __init__(self, settings: Settings, address: str, facts: SubjectFacts, start_s: float):
        """`address`: of the zygote where pytest runs. `facts`: what was found out there. `start_s`: for a
        zygote to import vLLM.
        """
        _connect(settings.ray)
        gpus = _largest_side(settings) if facts.device == "cuda" else 0
        bundle = {"CPU": 1.0} | ({"GPU": float(gpus)} if gpus else {})
        self._group = placement_group([bundle] * len(ROLES), strategy="STRICT_SPREAD")
        self._actors: dict[str, Any] = {}
        try:
            self.places = self._places(settings, address, facts, start_s, gpus)
        except BaseException:
            self.close()
            raise

    def _places(
        self, settings: Settings, address: str, facts: SubjectFacts, start_s: float, gpus: int
    ) -> dict[str, NodePlace]:
        if not self._group.wait(RESERVE_S):
            needs = f"one CPU{f' and {gpus} GPUs' if gpus else ''} each"
            raise Blocked(
                f"--kv-ray: the cluster had no two nodes with {needs} free within {RESERVE_S:.0f} s"
            )
        models = Path(short_temporary_folder()) / f"{Path(address).parent.name}-models"
        for index, role in enumerate(ROLES):
            options = {
                "num_cpus": 1,
                "num_gpus": gpus,
                "max_concurrency": THREADS,
                "runtime_env": {"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}},
                "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, index),
            }
            self._actors[role] = (
                ray.remote(NodeHost).options(**options).remote(settings, os.getcwd(), str(models))
            )
        hosts: dict[str, str] = {}
        for role, actor in self._actors.items():
            try:
                hosts[role], outcome, said, found = ray.get(
                    actor.ready.remote(start_s), timeout=RESERVE_S + BUSY * start_s
                )
            except ray.exceptions.RayError as error:
                raise HarnessError(
                    f"--kv-ray: the actor on the node of {role} failed: {_words(error)}"
                ) from None
            if outcome:
                raise (Blocked if outcome == "BLOCKED" else HarnessError)(
                    f"on the node of {role}, {hosts[role]}: {said}"
                )
            if differs := _difference(found, facts):
                raise Blocked(f"the node of {role}, {hosts[role]}, {differs}")
        peers = dict(zip(ROLES, reversed(ROLES), strict=True))
        return {
            role: NodePlace(
                address, hosts[role], role=role, peer=hosts[peers[role]], actor=self._actors[role]
            )
            for role in ROLES
        }

    def close(self) -> list[str]:
        """End both zygotes, and give the nodes back. Returns sentences about what did not end."""
        troubles: list[str] = []
        for role, actor in self._actors.items():
            said = ask(actor.end)
            troubles += (
                [f"the actor on the node of {role} did not answer at the end"] if said is None else said
            )
        try:
            remove_placement_group(self._group)
        except ERRORS as error:
            troubles.append(f"--kv-ray: the two nodes were not given back: {_words(error)}")
        return troubles


def _connect(address: str) -> None:
    """Make this process a driver of the cluster, once. Raises Blocked if it cannot be reached."""
    if ray.is_initialized():
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address, log_to_driver=False, configure_logging=False, logging_level="error")
    except ERRORS as error:
        raise Blocked(f"--kv-ray: no Ray cluster was reached at {address!r}: {_words(error)}") from None
    finally:  # Ray's own handler would raise SystemExit within a case, and pytest would go on
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _words(error: Exception) -> str:
    """An error of Ray in one line: its text may have a stack of the other process."""
    return " ".join(str(error).split())[-WORDS:]


def _difference(found: Mapping[str, str], facts: SubjectFacts) -> str:
    """How a node with these facts of its zygote differs from where pytest runs; "": it does not."""
    for name in COMPARED:
        if found[name] != (here := getattr(facts, name)):
            return f"has {name} {found[name]!r}, and where pytest runs it is {here!r}"
    return ""


def _largest_side(settings: Settings) -> int:
    """The largest tensor parallel size of the cells that the settings select."""
    cells = expand(settings.matrix, settings.family, settings.topology)
    return max((max(parse_topology(cell.topology)) for cell in cells), default=1)
