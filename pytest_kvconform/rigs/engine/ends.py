"""The end of an engine: vLLM's own shutdown, and what the process still has after it."""

from __future__ import annotations

import gc
import os
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_kvconform.result import message_of
from pytest_kvconform.rigs.engine.messages import Leftovers
from pytest_kvconform.rigs.processes.cores import Deadline
from pytest_kvconform.rigs.processes.linux import children_but_pythons, listening_sockets, threads
from pytest_kvconform.rigs.processes.stacks import Frame, stack_of
from pytest_kvconform.rigs.vllm_setup.overrides import unfreeze_heap

if TYPE_CHECKING:
    from pytest_kvconform.rigs.engine.process import EngineProcess

SOON_S = 0.5  # in which most threads end; to collect all garbage takes a second
MOMENT_S = 4.0  # that threads, processes and ports may take to end


@dataclass
class Before:
    """What a process had before the connector was built. The connector need not end what vLLM keeps."""

    threads: dict[str, str] = field(default_factory=dict)  # id -> name
    ports: frozenset[str] = frozenset()
    noted: bool = False


def note_environment() -> Before:
    """Note threads and ports when vLLM builds the first half of the connector in this process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    create, process, before = KVConnectorFactory.create_connector, os.getpid(), Before()

    def create_connector(*args: Any, **kwargs: Any) -> Any:
        if not before.noted and os.getpid() == process:  # not in a rank that was forked
            before.threads, before.ports = threads(), frozenset(listening_sockets(process))
            before.noted = True
        return create(*args, **kwargs)

    KVConnectorFactory.create_connector = create_connector
    return before


def end_core(engine: EngineProcess) -> tuple[str, tuple[Frame, ...]]:
    """Shut down as vLLM's EngineCore.shutdown does. Returns what was raised, or "", and its stack."""
    try:
        engine.core.structured_output_manager.clear_backend()
        engine.core.model_executor.shutdown()
        engine.scheduler.shutdown()
    except Exception as raised:
        traceback.print_exc()
        return f"{type(raised).__name__}: {message_of(raised)}", stack_of(raised)
    return "", ()


def shut_down(engine: EngineProcess, before: Before) -> Leftovers:
    """Shut down, and return what the process still has."""
    error, frames = end_core(engine)
    deadline = Deadline(MOMENT_S)
    if any(_left(before)):
        engine.core.model_executor = engine.scheduler.connector = None
    frozen = True  # vLLM froze what there was when the engine had started, and later lets it go, as here
    while any(left := _left(before)) and not deadline.over():
        if frozen and deadline.passed() > SOON_S:
            unfreeze_heap()
            frozen = False
        gc.collect()  # some threads end with the objects that they serve, which others may hold for a while
        time.sleep(0.02)
    threads, children, listening = left
    return Leftovers(threads=threads, children=children, error=error, frames=frames, listening=listening)


def _left(before: Before) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Threads, processes and listening ports that the process did not have before."""
    pid, now = os.getpid(), threads()
    # by ids first: a thread of vLLM may have taken its name after it was noted
    new = [name for one, name in now.items() if one not in before.threads]
    gone = [name for one, name in before.threads.items() if one not in now]
    return (
        tuple(sorted((Counter(new) - Counter(gone)).elements())),
        tuple(children_but_pythons().values()),
        tuple(address for address in listening_sockets(pid) if address not in before.ports),
    )
