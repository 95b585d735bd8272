"""A right connector without NIXL, with a fault hook: D asks P over TCP for the blocks of each request."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.request import RequestStatus

from tests.faults.fault_hook import FaultHook

PATIENCE_S = 5.0  # of a peer with an answer
SOON_S = 3.0
GONE = b"gone"


@dataclass
class Load:
    """The load of one request on D: what it reads, and its transfers that have not ended."""

    request: str
    params: dict[str, Any]
    blocks: list[int]  # of D
    remote: list[int]  # the same blocks of P
    open: int = 0
    failed: bool = False
    dropped: bool = False  # whether P is not told


@dataclass
class Orders(KVConnectorMetadata):
    """What the workers do from this step on."""

    loads: list[Load] = field(default_factory=list)
    sends: dict[str, list[int]] = field(default_factory=dict)  # request of P -> blocks that D may read
    releases: list[dict[str, Any]] = field(default_factory=list)  # params of requests that D does not load


class TcpPull(FaultHook, KVConnectorBase_V1, SupportsHMA):
    """Reads the blocks of a request over a TCP connection of its own, in two transfers of half the layers
    each, as the P2pNcclConnector of earlier versions of vLLM asked for each request (GET), and as Mooncake
    reads over TCP.
    """

    transfers = 2

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        FaultHook.__init__(self)
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self.port = transfer.kv_port
        self.lease_s = float(transfer.kv_connector_extra_config.get("kv_lease_duration", 30))
        model = vllm_config.model_config
        self.model = f"{model.model} {model.dtype} {model.hf_text_config.rope_parameters}"
        self.block_size = vllm_config.cache_config.block_size
        self.orders = Orders()
        self.wanted: dict[str, dict[str, Any]] = {}  # D: requests that nobody has released
        if role is KVConnectorRole.WORKER:
            assert vllm_config.cache_config.num_gpu_blocks, (
                "vLLM sets num_gpu_blocks before it builds the worker half"
            )
            self.start_worker(transfer.is_kv_producer)

    # ---- scheduler half --------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        params = request.kv_transfer_params or {}
        if params.get("do_remote_prefill") and params.get("remote_model") == self.model:
            self.wanted[request.request_id] = params

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if (params := self.wanted.get(request.request_id)) is None:
            return 0, False
        count = max(0, self.end_of_load(request, params) - num_computed_tokens)
        return count, count > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        params = self.wanted.pop(request.request_id, None)
        if params is None:
            return
        if not num_external_tokens:
            self.orders.releases.append(params)
            return
        (mine,) = blocks.get_block_ids()
        end = self.end_of_load(request, params)
        first, last = (end - num_external_tokens) // self.block_size, -(-end // self.block_size)
        theirs = params["remote_block_ids"][first:last]
        self.orders.loads.append(Load(request.request_id, params, mine[first:][: len(theirs)], theirs))

    def end_of_load(self, request: Any, params: dict[str, Any]) -> int:
        """Tokens of the prompt up to which its load goes."""
        return int(request.num_prompt_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Orders:
        orders, self.orders = self.orders, Orders()
        return orders

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if (params := self.wanted.pop(request.request_id, None)) is not None:
            self.orders.releases.append(params)
        asked = (request.kv_transfer_params or {}).get("do_remote_decode")
        if not asked or request.status != RequestStatus.FINISHED_LENGTH_CAPPED:
            return False, None
        self.orders.sends[request.request_id] = list(block_ids[0])
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": list(block_ids[0]),
            "remote_request_id": request.request_id,
            "remote_model": self.model,
            "remote_host": "127.0.0.1",
            "remote_port": self.port,
        }

    # ---- worker half -----------------------------------------------------------------------------------

    def start_worker(self, serves: bool) -> None:
        self.leases: dict[str, tuple[list[int], float]] = {}  # P: request -> blocks, end of its lease
        self.released = queue.Queue[str]()  # P: requests that D has read
        self.jobs = queue.Queue[Any]()
        self.ends = queue.Queue[tuple[Load, bool]]()
        self.delayed: list[tuple[int, Any]] = []  # steps that a transfer waits, the transfer
        self.failures: set[int] = set()
        self.server = serve(self) if serves else None
        self.connected, self.closing = set[socket.socket](), False
        self.threads = [
            threading.Thread(target=self.work, name="tcp-pull", daemon=True)
            for _ in range(0 if serves else 4)
        ]
        for thread in self.threads:
            thread.start()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.caches = list(kv_caches.values())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        orders = self._get_connector_metadata()
        for request, blocks in orders.sends.items():
            self.leases[request] = blocks, time.monotonic() + self.lease_s
        for params in orders.releases:
            self.jobs.put(lambda params=params: self.tell(params))
        for load in orders.loads:
            self.begin(load)

    def begin(self, load: Load) -> None:
        """Begin the transfers of a load. The suite's faults change some of them."""
        size = -(-len(self.caches) // self.transfers)
        parts = [range(at, min(at + size, len(self.caches))) for at in range(0, len(self.caches), size)]
        load.open = len(parts)
        for part in parts:
            what, steps = self.fault_of_next()
            load.dropped |= what == "drop"

            def job(part: range = part, what: str = what) -> None:
                self.ends.put((load, what != "fail" and self.fetch(load, part)))

            if what == "delay" and steps:
                self.delayed.append((steps, job))
            else:
                self.jobs.put(job)

    def work(self) -> None:
        while (job := self.jobs.get()) is not None and not self.closing:
            job()

    def fetch(self, load: Load, layers: range) -> bool:
        """Read the blocks of some layers. Returns whether all of them came."""
        try:
            return self.read(load, layers)
        except (OSError, EOFError):
            return False

    def read(self, load: Load, layers: range) -> bool:
        """Read the blocks of some layers. Returns whether P held them to the end.

        Raises OSError or EOFError if the connection ends.
        """
        with connect(load.params) as peer, self.until_closed(peer):
            ask(peer, request=load.params["remote_request_id"], blocks=load.remote, layers=list(layers))
            for layer in layers:
                cache = self.caches[layer]
                rows = cache[load.blocks].contiguous()
                data = receive(peer, rows.nbytes)
                found = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                cache[load.blocks] = found.view(cache.dtype).reshape(rows.shape)
            return receive(peer, len(GONE)) != GONE

    @contextlib.contextmanager
    def until_closed(self, peer: socket.socket) -> Iterator[None]:
        """Let `shutdown` end this connection. Raises EOFError if it was called before."""
        self.connected.add(peer)
        try:
            if self.closing:
                raise EOFError
            yield
        finally:
            self.connected.discard(peer)

    def tell(self, params: dict[str, Any]) -> None:
        """Tell P that nobody reads these blocks any more. If P does not hear it, its lease ends."""
        with contextlib.suppress(OSError, EOFError), connect(params) as peer:
            ask(peer, done=params["remote_request_id"])

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        waiting = [(0 if self.start_delayed else steps - 1, job) for steps, job in self.delayed]
        self.delayed = [one for one in waiting if one[0] > 0]
        for _, job in (one for one in waiting if one[0] <= 0):
            self.jobs.put(job)
        found = KVConnectorTransferResults()
        while not self.ends.empty():
            self.note_end(found, *self.ends.get())
        while not self.released.empty():
            if self.leases.pop(request := self.released.get(), None) is not None:
                found.finished_sending.add(request)
        for request in [name for name, (_, end) in self.leases.items() if end < time.monotonic()]:
            del self.leases[request]
            found.finished_sending.add(request)
        return found

    def note_end(self, found: KVConnectorTransferResults, load: Load, right: bool) -> None:
        """Note the end of a transfer. The last one ends the load."""
        load.open -= 1
        load.failed |= not right
        if not load.open:
            self.report(found, load)

    def report(self, found: KVConnectorTransferResults, load: Load) -> None:
        found.finished_recving.add(load.request)
        if load.failed:
            found.failed_recving.add(load.request)
            self.failures.update(load.blocks)
        if not load.dropped:
            self.jobs.put(lambda: self.tell(load.params))

    def get_block_ids_with_load_errors(self) -> set[int]:
        failures, self.failures = self.failures, set()
        return failures

    def answer(self, peer: socket.socket, question: dict[str, Any]) -> None:
        """P: answer one question of a peer."""
        if "done" in question:
            self.released.put(question["done"])
            return
        end = time.monotonic() + SOON_S  # P hears of its request in the step after the one that ended it
        while question["request"] not in self.leases and time.monotonic() < end:
            time.sleep(0.002)
        blocks, _ = self.leases[question["request"]]
        if not self.may_read(question["blocks"], blocks):
            return
        for layer in question["layers"]:
            self.send(peer, question["request"], layer, question["blocks"])
        held = question["request"] in self.leases
        peer.sendall(b"held" if held else GONE)

    def may_read(self, asked: list[int], blocks: list[int]) -> bool:
        """P: whether these are blocks of the request behind those that D has."""
        return asked == blocks[-len(asked) :]

    def send(self, peer: socket.socket, request: str, layer: int, blocks: list[int]) -> None:
        """P: send what a layer has in these blocks."""
        rows = self.caches[layer][blocks].contiguous()
        peer.sendall(rows.view(torch.uint8).numpy().tobytes())

    def shutdown(self) -> None:
        if self.role is KVConnectorRole.WORKER and self.server:
            self.server.shutdown()
            self.server.server_close()
        elif self.role is KVConnectorRole.WORKER:
            self.closing = True
            for peer in list(self.connected):
                with contextlib.suppress(OSError):  # it has just ended
                    peer.shutdown(socket.SHUT_RDWR)
            for _ in self.threads:
                self.jobs.put(None)
            for thread in self.threads:
                thread.join()  # none of them writes any more


def connect(params: dict[str, Any]) -> socket.socket:
    return socket.create_connection((params["remote_host"], params["remote_port"]), PATIENCE_S)


def ask(peer: socket.socket, **question: Any) -> None:
    peer.sendall(json.dumps(question).encode() + b"\n")


def receive(peer: socket.socket, size: int) -> bytes:
    """Read so many bytes. Raises EOFError if the peer ends before."""
    data = bytearray()
    while len(data) < size:
        if not (more := peer.recv(min(1 << 20, size - len(data)))):
            raise EOFError
        data += more
    return bytes(data)


def serve(connector: TcpPull) -> socketserver.ThreadingTCPServer:
    class Handler(socketserver.StreamRequestHandler):
        timeout = PATIENCE_S

        def handle(self) -> None:
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
                connector.answer(self.request, json.loads(self.rfile.readline(1 << 20)))

    server = socketserver.ThreadingTCPServer(("127.0.0.1", connector.port), Handler, bind_and_activate=False)
    server.daemon_threads = server.allow_reuse_address = True
    server.server_bind()
    server.server_activate()
    threading.Thread(target=server.serve_forever, args=(0.05,), name="tcp-pull", daemon=True).start()
    return server
