"""Connectors that leave something behind, or whose shutdown fails."""

from __future__ import annotations

import mmap
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from .right import Right

MASTER, SEGMENT = "master", "segment-of-a-store-"
FORGOTTEN: list[Any] = []  # or the end of the connector object would be the end of what it began


class Keeps(Right):
    """`begin` starts something in P's worker half that shutdown does not end."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        if self.kv_transfer_config.kv_role == "kv_producer":
            FORGOTTEN.append(self.begin())

    def begin(self) -> Any:
        raise NotImplementedError


class LeavesThread(Keeps):
    """Leaves a thread."""

    def begin(self) -> Any:
        threading.Thread(target=threading.Event().wait, name="kv-forgotten", daemon=True).start()


class LeavesPort(Keeps):
    """Leaves a port open."""

    def begin(self) -> Any:
        return socket.create_server(("127.0.0.1", 0))


class LeavesProcess(Keeps):
    """Leaves a process, in a session of its own."""

    def begin(self) -> Any:
        return subprocess.Popen(["sleep", "1000"], start_new_session=True)


class LeavesSharedMemory(Keeps):
    """Leaves a file in /dev/shm."""

    def begin(self) -> Any:
        with tempfile.NamedTemporaryFile(
            dir="/dev/shm", prefix="left-by-a-wrong-connector-", delete=False
        ) as file:
            file.truncate(mmap.PAGESIZE)
            return mmap.mmap(file.fileno(), mmap.PAGESIZE)


class RaisesInShutdown(Right):
    """Raises in shutdown."""

    def shutdown(self) -> None:
        super().shutdown()
        raise OSError("the fabric was gone")


class RankRaisesInShutdown(Right):
    """Raises in shutdown of the second rank."""

    def shutdown(self) -> None:
        super().shutdown()
        if self.role is KVConnectorRole.WORKER and get_tensor_model_parallel_rank() == 1:
            raise OSError("the fabric of rank 1 was gone")


class DiesInShutdown(Right):
    """Ends the process in shutdown."""

    def shutdown(self) -> None:
        os._exit(3)


class HangsInShutdown(Right):
    """shutdown never returns."""

    def shutdown(self) -> None:
        while True:
            time.sleep(1)


class Waits:
    """What a connector left open: its __del__ waits for ever, as that of a zmq.Context may."""

    itself: object

    def __del__(self) -> None:
        threading.Event().wait()


class WaitsWhenCollected(LeavesThread):
    """Besides the thread, shutdown leaves an object that waits once Python collects it."""

    def shutdown(self) -> None:
        super().shutdown()
        left = Waits()
        left.itself = left


class SignsOn(Right):
    """No mistake. As the client of a store it signs on at a master (a folder) and signs off in shutdown. It
    makes a file in /dev/shm that it does not map.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        name = f"{self.role.name}-{os.getpid()}"
        self.signed_on = Path(tempfile.gettempdir(), MASTER, name)
        self.signed_on.parent.mkdir(exist_ok=True)
        self.signed_on.touch()
        Path("/dev/shm", f"{SEGMENT}{name}").touch()

    def shutdown(self) -> None:
        super().shutdown()
        self.signed_on.unlink(missing_ok=True)


class SignsOnAndHangs(SignsOn):
    """shutdown never returns."""

    def shutdown(self) -> None:
        while True:
            time.sleep(1)


class KilledInLoad(Right):
    """No mistake: D is killed during its first load, as Linux kills a process for want of memory."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._connector_metadata.reqs_to_recv:
            os.kill(os.getpid(), signal.SIGKILL)
        super().start_load_kv(forward_context, **kwargs)
