"""What runs in the process of one case: a fork of the scheduler host process."""

from __future__ import annotations

import gc
import importlib
import inspect
import os
import sys
import traceback
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NoReturn

from msgspec.structs import replace

from pytest_kvconform.case_outcome import end_of, run_case, with_calls
from pytest_kvconform.result import Blocked, HarnessError, message_of
from pytest_kvconform.rigs.engine.stopped import SchedulerStopped
from pytest_kvconform.rigs.hook_calls import take_all
from pytest_kvconform.rigs.missing import what_is_missing
from pytest_kvconform.rigs.processes.linux import die_with_parent, write_stack_at_death
from pytest_kvconform.rigs.scheduler.rig import Rig
from pytest_kvconform.rigs.scheduler.violations import START_HOOKS, HookRaised
from pytest_kvconform.rigs.vllm_setup.worker import has_worker_half, shut_worker_half_down

if TYPE_CHECKING:
    from pytest_kvconform.rigs.scheduler.host import Host
    from pytest_kvconform.subject import Subject


def serve_one_case(host: Host, connection: Connection) -> NoReturn:
    """Receive (module, function, rule, variant, answers, waited, own_reports) and run this case. Ends the
    process.

    `answers`, `own_reports`: see Rig. `waited`: another case of the cell has waited in vain for the end of
    something.

    Sends its CaseEnd, and whether this process then shuts worker halves down.
    """
    _prepare_process()
    end = end_of(HarnessError("the case did not reach its end"))
    try:
        module, function, rule, variant, answers, waited, own_reports = connection.recv()
    except EOFError:
        os._exit(0)  # there is no further case
    rig = Rig(host, rule, waited, own_reports=own_reports, answers=answers)
    try:
        if host.spec.subject.asks_worker or own_reports:
            from pytest_kvconform.rigs.scheduler.own_workers.worker_beside import Nursery

            rig.nursery = Nursery(rig)
        end = with_calls(run_case(lambda: _call(rig, module, function, variant), function), take_all())
        waited_for = rig.waited_for if end.finding else ""
        end = replace(end, unheard=rig.unheard, waited_for=waited_for, asks=rig.asks)
        print(end.defect, end="", file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        leaves = has_worker_half() or rig.nursery is not None
        connection.send((end, leaves))
        if leaves:
            _shut_down()
        if rig.nursery is not None:
            rig.nursery.end()
        os._exit(0)


def _call(rig: Rig, module: str, function: str, variant: Any) -> object:
    try:
        body = inspect.unwrap(getattr(importlib.import_module(module), function))
        return body(rig, variant)
    except (HookRaised, SchedulerStopped) as raised:
        traceback.print_exc()  # to the log
        if isinstance(raised, HookRaised) and (lacks := _what_is_missing(rig.subject, raised)):
            raise Blocked(f"{rig.subject.connector} cannot start here: {lacks}") from None
        raise


def _shut_down() -> None:
    """Let vLLM shut the worker half down, so that it signs off where it has signed on."""
    try:
        shut_worker_half_down()
    except BaseException:
        traceback.print_exc()  # to the log: cases about shutdown judge it
    sys.stdout.flush()
    sys.stderr.flush()


def _what_is_missing(subject: Subject, raised: HookRaised) -> str:
    """Return what this environment lacks, if a hook of the start has raised because of it."""
    if not raised.hook.startswith(("__init__", *START_HOOKS)):
        return ""
    error = raised.error
    return what_is_missing(type(error).__name__, message_of(error), subject.module or "", subject.packages)


def _prepare_process() -> None:
    """Make the fork end with its parent, lead a process group, and write its Python stack if it dies."""
    die_with_parent()
    os.setpgid(0, 0)
    gc.disable()  # a collection would walk the inherited heap, and copy it by that
    write_stack_at_death()
