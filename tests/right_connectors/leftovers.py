"""Connectors that keep something: of requests that have ended, or threads and processes after shutdown()."""

from __future__ import annotations

import collections
import itertools
import multiprocessing
import subprocess
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.shared_memory import SharedMemory
from typing import Any, ClassVar

import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, KVConnectorTransferResults

from reference_connector import ReferenceConnector
from reference_connector.connector import Metadata

POLL_S = 0.01
OF_TWO_ENGINES = 4  # halves
POOL = ThreadPoolExecutor(thread_name_prefix="kv-pool")
Ended = tuple[bool, dict[str, Any] | None]


# ---- what is remembered or kept of requests that have ended ----


class Tombstones(ReferenceConnector):
    """Remembers the last 256 requests that have ended, to tell late messages about them from nonsense."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.ended: collections.deque[str] = collections.deque(maxlen=256)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        self.ended.append(request.request_id)
        return super().request_finished_all_groups(request, block_ids)


class ForgetsByTime(ReferenceConnector):
    """Remembers requests that have ended for half a minute, as connectors do whose peers may ask late."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.ended: dict[str, float] = {}

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        now = time.monotonic()
        self.ended = {name: end for name, end in self.ended.items() if end > now - 30}
        self.ended[request.request_id] = now
        return super().request_finished_all_groups(request, block_ids)


class RemembersLoads(ReferenceConnector):
    """Remembers the last 16 requests that it has loaded, by number. Its memory is full only after many
    requests of which few load something.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.loaded: dict[int, str] = {}
        self.number = 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self.number += 1
            self.loaded[self.number] = request.request_id
            self.loaded.pop(self.number - 16, None)
        super().update_state_after_alloc(request, blocks, num_external_tokens)


class LongMemory(ReferenceConnector):
    """Remembers the last 500 requests in an OrderedDict, whose limit nobody can read off it."""

    KEEPS = 500

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.ended: collections.OrderedDict[str, None] = collections.OrderedDict()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        self._remember(request.request_id)
        return super().request_finished_all_groups(request, block_ids)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        for name in finished_req_ids:
            self._remember(name)
        return super().get_finished(finished_req_ids)

    def _remember(self, name: str) -> None:
        self.ended[name] = None
        while len(self.ended) > self.KEEPS:
            self.ended.popitem(last=False)


class LongerMemory(LongMemory):
    """Wrong where `remembers = 500` is declared: it remembers more."""

    KEEPS = 100_000


@dataclass
class Draining(Metadata):
    drain: list[str] = field(default_factory=list)


class DrainsOnAbort(ReferenceConnector):
    """P keeps the blocks of a prefill that is aborted while it runs, as a connector that pushes. Some steps
    later its worker reports that no write is under way any more.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.drain: list[str] = []
        self.steps_left: dict[str, int] = {}

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Ended:
        drains = self.drains(request)
        kept, params = super().request_finished_all_groups(request, block_ids)
        if not kept and drains and any(map(any, block_ids)):
            self.drain.append(request.request_id)
            return True, params
        return kept, params

    def drains(self, request: Any) -> Any:
        asked = request.kv_transfer_params
        return isinstance(asked, dict) and asked.get("do_remote_decode")

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        drain, self.drain = self.drain, []
        return Draining(self._scheduler.take_orders(), drain)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata: Any = self._get_connector_metadata()
        self.steps_left |= dict.fromkeys(metadata.drain, 3)
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        left = {name: left - 1 for name, left in self.steps_left.items()}
        self.steps_left = {name: steps for name, steps in left.items() if steps}
        sent = results.finished_sending | (left.keys() - self.steps_left.keys())
        return KVConnectorTransferResults(sent, results.finished_recving, results.failed_recving)


class KeepsEveryEnd(DrainsOnAbort):
    """Keeps the blocks of every request for some steps after its end, as a connector that also saves them."""

    def drains(self, request: Any) -> bool:
        return request.request_id not in self._scheduler._loading


# ---- threads that do not end within shutdown(), and do not become more with every engine either ----


class EndsWhenCollected(ReferenceConnector):
    """Has a thread that ends when Python collects the connector, as pools of threads and of sockets do."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        threading.Thread(target=_poll, args=(weakref.ref(self),), name="poller", daemon=True).start()


def _poll(connector: Any) -> None:
    while connector() is not None:
        time.sleep(POLL_S)


class InUseForAMoment(EndsWhenCollected):
    """A thread uses the connector for a moment after shutdown(), as a handshake that is under way, and the
    other thread ends with the connector: only what collects garbage later than at once sees both end.
    """

    def shutdown(self) -> None:
        self.itself = self  # so that counting references does not free it
        threading.Thread(target=_use, args=(self,), name="handshake", daemon=True).start()
        super().shutdown()


def _use(connector: Any) -> None:
    time.sleep(0.3)


class OneContext(ReferenceConnector):
    """Uses the one ZeroMQ context of the process, whose threads stay when the sockets are closed."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.socket = zmq.Context.instance().socket(zmq.PULL)

    def shutdown(self) -> None:
        self.socket.close(linger=0)
        super().shutdown()


class OneContextAndAThread(OneContext):
    """Wrong: besides, each half leaves a thread of its own."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        threading.Thread(target=threading.Event().wait, name="poller", daemon=True).start()


class ReplacesItsThread(ReferenceConnector):
    """The process has one thread of all its engines. Each new half ends the one before and starts another."""

    running: ClassVar[list[tuple[threading.Thread, threading.Event]]] = []
    keeps = 1

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        if len(self.running) >= self.keeps:
            thread, end = self.running.pop()
            end.set()
            thread.join()
        end = threading.Event()
        self.running.append((threading.Thread(target=end.wait, name="poller", daemon=True), end))
        self.running[-1][0].start()


class ReplacesAtLeisure(ReplacesItsThread):
    """The thread has no name, and looks every half second whether it is to end. Nobody waits for its end."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        ReferenceConnector.__init__(self, vllm_config, role, kv_cache_config)
        if len(self.running) >= self.keeps:
            self.running.pop()[1].set()
        end = threading.Event()
        self.running.append((threading.Thread(target=_look_now_and_then, args=(end,), daemon=True), end))
        self.running[-1][0].start()


def _look_now_and_then(end: threading.Event) -> None:
    while not end.is_set():
        time.sleep(0.5)


class ReplacesOnce(ReplacesItsThread):
    """Wrong: what the first engine leaves ends as the second one starts, and later ones leave ever more."""

    built: ClassVar[Iterator[int]] = itertools.count(1)

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        self.keeps = 1 if next(self.built) <= OF_TWO_ENGINES else 99
        super().__init__(vllm_config, role, kv_cache_config)


class PoolOfThreads(ReferenceConnector):
    """The process has one pool of threads. The first load, or the first prompt that P keeps, begins one."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        if metadata.orders.loads or metadata.orders.leases:
            self.begin()
        super().start_load_kv(forward_context, **kwargs)

    def begin(self) -> None:
        POOL.submit(time.monotonic).result()


class ThreadOfEachEngine(PoolOfThreads):
    """Wrong: each engine begins a thread of its own then, and shutdown() does not end it."""

    begun = False

    def begin(self) -> None:
        if not self.begun:
            self.begun = True
            threading.Thread(target=threading.Event().wait, name="poller-1", daemon=True).start()


class ThreadEndsLate(PoolOfThreads):
    """Wrong: such a thread ends a minute after shutdown()."""

    over: threading.Event | None = None

    def begin(self) -> None:
        if self.over is None:
            self.over = threading.Event()
            threading.Thread(target=_end_late, args=(self.over,), name="poller-1", daemon=True).start()

    def shutdown(self) -> None:
        super().shutdown()
        if self.over is not None:
            self.over.set()


def _end_late(over: threading.Event) -> None:
    over.wait()
    time.sleep(60)


# ---- processes that Python's multiprocessing starts once for a process, and does not end ----


class Tracked(ReferenceConnector):
    """Its workers have a page of shared memory, for which Python starts its resource tracker: a process."""

    page: SharedMemory | None = None

    def register_kv_caches(self, kv_caches: Any) -> None:
        super().register_kv_caches(kv_caches)
        self.page = SharedMemory(create=True, size=4096)

    def shutdown(self) -> None:
        super().shutdown()
        if page := self.page:
            self.page = None
            page.close()
            page.unlink()


class TrackedAndAProcess(Tracked):
    """Wrong: besides, each engine leaves a process of its own."""

    left: ClassVar[list[Any]] = []  # or Python would look for their ends

    def register_kv_caches(self, kv_caches: Any) -> None:
        super().register_kv_caches(kv_caches)
        self.left.append(subprocess.Popen(["sleep", "1000"]))


class ForksByAServer(ReferenceConnector):
    """A helper process of its workers comes from Python's fork server, and ends with the connector."""

    helper: Any = None

    def register_kv_caches(self, kv_caches: Any) -> None:
        super().register_kv_caches(kv_caches)
        self.helper = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(1000,))
        self.helper.start()

    def shutdown(self) -> None:
        super().shutdown()
        if self.helper:
            self.helper.kill()
            self.helper = self.helper.join()


class LeavesAFork(ForksByAServer):
    """Wrong: the helper process stays."""

    def shutdown(self) -> None:
        ReferenceConnector.shutdown(self)
