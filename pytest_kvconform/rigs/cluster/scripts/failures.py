"""The finding about an engine that raised, died, hung or did not start, in a case that is a script.

There is no control without the connector: a script has no meaning without one. Where no code of the connector
is in the stack, vLLM's scheduler has stopped at what the connector answered or reported; of a death or a hang
nobody knows whose fault it is.
"""

from __future__ import annotations

import linecache
import os
from pathlib import Path

from model_matrix import load_geometries
from model_matrix.geometries import State
from pytest_kvconform.result import Blocked, Cell, Finding, HarnessError, NotApplicable, Violation
from pytest_kvconform.rigs.cluster.control import shows_connector
from pytest_kvconform.rigs.cluster.pairs import note_missing
from pytest_kvconform.rigs.context import RunContext
from pytest_kvconform.rigs.engine.handle import EngineFailed
from pytest_kvconform.rigs.engine.stopped import ASSERTED, STOPS
from pytest_kvconform.rigs.processes.stacks import Frame, is_hook
from pytest_kvconform.rigs.vllm_setup.hooks import IN_STACKS
from pytest_kvconform.rigs.vllm_setup.kv_cache_specs import NO_STATES, unified_in_vain

# Rules that are broken whatever the case is about: a hook raises, its process dies or hangs.
RAISES, DIES = "KV-HOOK-001", "KV-HOOK-002"
# Hooks with a rule of their own.
RULES_OF_HOOKS = {"update_connector_output": "KV-LOAD-003", "reset_cache": "KV-LOAD-007"}
NOT_SHOWN = ": no code of the connector is in its stack, so nobody knows whose fault that is"  # of a hang
_OURS = str(Path(__file__).parents[3])
TEXT = 200  # characters of a message


def ended_by(failed: EngineFailed, context: RunContext, cell: Cell, starting: bool = False) -> Exception:
    """What a case raises whose engine has failed, while it started or later. Raises Blocked if this
    environment lacks something.
    """
    if failed.finding:
        return Violation(failed.finding)
    connector = shows_connector(failed.frames, context.facts)
    if starting:
        if failed.waits:
            waits = "its start waits for a server: start it, or configure its address"
            context.missing.append(f"{context.subject.connector} cannot start here: {waits}")
            context.require_nothing_missing()
        note_missing(context, [(failed.kind, failed.reason)])
        states = any(isinstance(kind, State) for kind in load_geometries()[cell.family].kinds.values())
        if states and not context.facts.supports_hma and unified_in_vain(failed.frames):
            return NotApplicable(f"{context.facts.name} {NO_STATES}: {failed.reason}")
    if not connector and (starting or failed.how in ("died", "hung")):
        return Blocked(f"{failed.sentence}{NOT_SHOWN}")
    if failed.how in ("died", "hung"):
        return _violation(failed, DIES, failed.sentence)
    text = " ".join(failed.message.split())[:TEXT]
    if connector:
        hook = next((frame[2] for frame in failed.frames if is_hook(frame, IN_STACKS)), "__init__")
        happened = f"{hook} raised {failed.kind}{f': {text}' if text else ''} ({_place(failed.frames)})"
        return _violation(failed, RULES_OF_HOOKS.get(hook, RAISES), happened)
    if next((ours for ours in map(_of_suite, failed.frames) if ours is not None), True):
        return HarnessError(failed.sentence)
    file, line, name = failed.frames[0]
    said = linecache.getline(file, line).strip()
    where = f"{Path(file).name}:{line} in {name}"
    happened = f"vLLM's scheduler of {failed.engine} stopped with {failed.kind}: {text or said} ({where})"
    return _violation(failed, STOPS, happened, ASSERTED.get(said, ""))


def _of_suite(frame: Frame) -> bool | None:
    """Whether a frame is code of this project; None: neither that nor vLLM's."""
    return True if frame[0].startswith(_OURS) else False if f"{os.sep}vllm{os.sep}" in frame[0] else None


def _violation(failed: EngineFailed, rule: str, happened: str, diagnosis: str = "") -> Violation:
    log = tuple(f"{file}:{line} in {name}" for file, line, name in failed.frames[:6])
    return Violation(
        Finding(
            rule=rule,
            happened=happened,
            diagnosis=diagnosis,
            log=(*log, *failed.log),
            declined="" if failed.kind == "AssertionError" else failed.refusal,
        )
    )


def _place(frames: tuple[Frame, ...]) -> str:
    """ "connector.py:12": the innermost frame of an exception outside this project."""
    found = next((frame for frame in frames if not frame[0].startswith(_OURS)), ("no frame", 0, ""))
    return f"{Path(found[0]).name}:{found[1]}"
