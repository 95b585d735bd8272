"""Byte engines that count what their process has and what NIXL has moved, for soak.py and second_turn.py.

NIXL's objects are counted in NIXL's Python API (nixl/_api.py), where they are made and released.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from model_matrix import Geometry
from pytest_kvconform.rigs.bench import launch_zygote, wait_for_zygote
from pytest_kvconform.rigs.bytes import process as byte_process
from pytest_kvconform.rigs.bytes.handle import ByteEngineHandle
from pytest_kvconform.rigs.bytes.messages import PACKED, ByteEngineSpec
from pytest_kvconform.rigs.context import transfer_config
from pytest_kvconform.rigs.engine import process as engine_process
from pytest_kvconform.settings import Settings
from pytest_kvconform.subject import resolve

BLOCK, CALL_S, IMPORT_S = 16, 60.0, 180.0  # tokens; seconds
HANDLES = ("nixl_xfer_handle", "nixl_prepped_dlist_handle")
counted = Counter[str]()  # in this process: what NIXL has given out and not taken back, and what it has moved


# ---- inside of an engine's process ---------------------------------------------------------------


def serve(connection: Any, spec: ByteEngineSpec) -> None:
    """Serve one engine in a child of the zygote: see `serve` of pytest_kvconform/rigs/engine/process.py."""
    from nixl._api import nixl_agent, nixl_agent_config

    for name, what, by in (
        ("register_memory", "registrations", 1),
        ("deregister_memory", "registrations", -1),
        ("add_remote_agent", "peers", 1),
        ("remove_remote_agent", "peers", -1),
    ):
        _watch(nixl_agent, name, lambda *_, what=what, by=by: counted.update({what: by}))
    meet = nixl_agent.add_remote_agent

    def add_remote_agent(self: Any, metadata: bytes) -> Any:
        try:
            return meet(self, metadata)
        except Exception as error:
            counted["dead peers"] += "NIXL_ERR_BACKEND" in str(error)
            raise

    nixl_agent.add_remote_agent = add_remote_agent
    made, release = nixl_agent_config.__init__, nixl_agent.release_xfer_handle

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.capture_telemetry = True  # as NixlConnector has it

    def release_xfer_handle(self: Any, handle: Any) -> None:
        with contextlib.suppress(Exception):  # NIXL counts nothing of a transfer that has not ended
            telemetry = self.get_xfer_telemetry(handle)
            counted.update(bytes=telemetry.totalBytes, descriptors=telemetry.descCount)
        release(self, handle)

    nixl_agent_config.__init__, nixl_agent.release_xfer_handle = __init__, release_xfer_handle
    engine_process.serve(connection, spec, CountingProcess)


def _watch(cls: Any, name: str, note: Any) -> None:
    """Call note(answer, *positional arguments) after each call of a method that has not raised."""
    method = getattr(cls, name)

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        answer = method(self, *args, **kwargs)
        note(answer, *args)
        return answer

    setattr(cls, name, watched)


def _count_of_rank(worker: Any) -> Counter[str]:
    """Return the counts of a rank: vLLM calls this in the process of each."""
    return counted


def _forget_calls(worker: Any) -> None:
    worker.recorder.calls.clear()


class CountingProcess(byte_process.ByteEngineProcess):
    """A byte engine that counts."""

    def moved(self) -> tuple[int, int]:
        """(bytes, descriptors) of all transfers of all ranks, as NIXL counts them."""
        bytes_, descriptors = (
            sum(rank[what] for rank in self._workers(_count_of_rank)) for what in ("bytes", "descriptors")
        )
        return bytes_, descriptors

    def has(self) -> dict[str, int]:
        """What this process has, by name: at tensor parallel size 1 the only one of the engine.

        Open files are without the sockets that NIXL leaves over TCP, one of each peer that was dead when it
        was met (docs/findings.md).
        """
        for notes in (self.traces, self.requests, self.recorder.local_hits):  # the rig's own
            for request in notes.keys() - self.scheduler.requests.keys():
                del notes[request]
        self.recorder.calls.clear()
        self._workers(_forget_calls)
        self.tables.clear()
        self.statistics_path.trace()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        usage, pages = self.usage(), int(Path("/proc/self/statm").read_text().split()[1])
        return {
            "blocks": usage.total_blocks - usage.free_blocks,
            "requests": len(usage.requests),
            "NIXL handles": sum(
                type(one).__name__ in HANDLES and not one._released for one in gc.get_objects()
            ),
            "NIXL registrations": counted["registrations"],
            "NIXL peers": counted["peers"],
            "threads": len(os.listdir("/proc/self/task")),
            "open files": len(os.listdir("/proc/self/fd")) - counted["dead peers"],
            "Python objects": sys.getallocatedblocks(),
            "resident KiB": pages * os.sysconf("SC_PAGE_SIZE") // 1024,
        }


# ---- outside -------------------------------------------------------------------------------------


class CountingEngine(ByteEngineHandle):
    """The handle of a CountingProcess."""

    target = "counting_engine:serve"
    wakes = 0.0  # when the process goes on, of the monotonic clock; 0: it is not stopped

    def moved(self) -> tuple[int, int]:
        return self.call("moved")

    def has(self) -> dict[str, int]:
        return self.call("has")

    def sleep(self, seconds: float) -> None:
        """Stop the process and all its threads for so long, as a machine that hangs does."""
        os.kill(self.process.pid, signal.SIGSTOP)
        self.wakes = time.monotonic() + seconds

    def is_awake(self) -> bool:
        """Whether the process runs. Lets it go on when its time is over."""
        if self.wakes and time.monotonic() >= self.wakes:
            os.kill(self.process.pid, signal.SIGCONT)
            self.wakes = 0.0
        return not self.wakes


@contextlib.contextmanager
def background(geometry: Geometry) -> Iterator[str]:
    """The address of a zygote whose children find this module."""
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    zygote = launch_zygote([], geometry.architectures)
    try:
        wait_for_zygote(zygote.address, IMPORT_S)
        yield zygote.address
    finally:
        zygote.close()


def start(
    address: str,
    name: str,
    role: str,
    connector: str,
    model: str,
    tp: int,
    blocks: int,
    longest: int,
    port: int,
    **more: Any,
) -> CountingEngine:
    """An engine with a pool of `blocks`, for requests of up to `longest` tokens.

    `more`: of kv_connector_extra_config.
    """
    transfer = transfer_config(resolve(Settings(connector=connector)), role, "cpu")
    extra = more | transfer.get("kv_connector_extra_config", {})
    spec = ByteEngineSpec(
        role=role,
        geometry=model,
        tensor_parallel=tp,
        block_size=BLOCK,
        num_blocks=blocks,
        max_model_len=longest,
        kv_transfer_config={**transfer, "kv_connector_extra_config": extra},
        environment={"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)},
        content=PACKED,
    )
    return CountingEngine(address, name, spec, CALL_S, CALL_S)
