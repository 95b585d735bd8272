"""A right connector that pushes, without NIXL: D registers blocks with P over TCP, and P writes into them."""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from tests.right_connectors.sockets import SOON_S, Load, TcpPull, ask, connect, receive

HEAD = struct.Struct("!Bi")  # what P sends: WAIT, LAYER and its number, WRITTEN or REFUSED
WAIT, LAYER, WRITTEN, REFUSED = range(4)
SIGN_S, SILENCE_S = 0.2, 3.0  # between signs of P that it will write; until D gives up without one


@dataclass
class Write:
    """What P writes for one registration: one request of D, over a connection of its own."""

    request: str  # of P
    peer: socket.socket
    blocks: list[int]  # of P
    open: int = 0  # transfers that have not ended
    failed: bool = False
    dropped: bool = False  # whether D is not told that they have ended
    over: threading.Event = field(default_factory=threading.Event)
    sending: threading.Lock = field(default_factory=threading.Lock)


class TcpPush(TcpPull):
    """P writes into the blocks that D has registered, as vLLM's NixlPushConnector: P's transfers can be late
    or fail, and D is told. P writes for each request of D that has its params, and keeps its blocks until D
    says that no other one will come. What P is writing from it keeps beyond the lease.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        self.kept: set[str] = set()  # P's requests whose blocks D may still register for
        super().__init__(vllm_config, role, kv_cache_config)

    # ---- scheduler half --------------------------------------------------------------------------------

    def has_pending_push_work(self) -> bool:
        return bool(self.kept)

    def update_connector_output(self, connector_output: Any) -> None:
        self.kept -= connector_output.finished_sending or set()

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        before = len(self.orders.loads)
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        for load in self.orders.loads[before:]:
            mine = load.params["remote_request_id"]
            others = [one for one in self.wanted.values() if one["remote_request_id"] == mine]
            load.params = load.params | {"last": not others}
        if not num_external_tokens:
            self.keep_for_others()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        keeps, params = super().request_finished_all_groups(request, block_ids)
        self.kept |= {request.request_id} if keeps else set()
        self.keep_for_others()
        return keeps, params

    def keep_for_others(self) -> None:
        """P is not released while another request has the same params."""
        wanted = {one["remote_request_id"] for one in self.wanted.values()}
        self.orders.releases = [p for p in self.orders.releases if p["remote_request_id"] not in wanted]

    # ---- worker half of P --------------------------------------------------------------------------------

    def start_worker(self, serves: bool) -> None:
        self.registered = queue.Queue[Write]()
        self.writes: list[Write] = []
        self.last: set[str] = set()  # requests for which no further registration comes
        super().start_worker(serves)
        if serves:
            for _ in range(4):
                threading.Thread(target=self.work, name="tcp-push", daemon=True).start()

    def answer(self, peer: socket.socket, question: dict[str, Any]) -> None:
        if "done" in question:
            self.last.add(question["done"])
            return
        end = time.monotonic() + SOON_S  # P hears of its request in the step after the one that ended it
        while question["request"] not in self.leases and time.monotonic() < end:
            time.sleep(0.002)
        blocks, _ = self.leases.get(question["request"], ([], 0.0))
        if not blocks or question["count"] > len(blocks):
            peer.sendall(HEAD.pack(REFUSED, 0))
            return
        write = Write(question["request"], peer, blocks[-question["count"] :])
        self.writes.append(write)
        if question["last"]:
            self.last.add(question["request"])
        self.begin_write(write)
        while not write.over.wait(SIGN_S):
            with write.sending:
                peer.sendall(HEAD.pack(WAIT, 0))

    def begin_write(self, write: Write) -> None:
        """Begin the transfers of a registration. The suite's faults change some of them."""
        size = -(-len(self.caches) // self.transfers)
        parts = [range(at, min(at + size, len(self.caches))) for at in range(0, len(self.caches), size)]
        write.open = len(parts)
        for part in parts:
            what, steps = self.fault_of_next()
            write.dropped |= what == "drop"

            def job(part: range = part, what: str = what) -> None:
                self.ends.put((write, what != "fail" and self.write(write, part)))

            if what == "delay" and steps:
                self.delayed.append((steps, job))
            else:
                self.jobs.put(job)

    def write(self, write: Write, layers: range) -> bool:
        """Send some layers. Returns whether D can have them."""
        try:
            for layer in layers:
                rows = self.caches[layer][write.blocks].contiguous()
                with write.sending:
                    write.peer.sendall(HEAD.pack(LAYER, layer) + rows.view(torch.uint8).numpy().tobytes())
        except OSError:
            return False
        return True

    def end_write(self, write: Write, right: bool) -> None:
        """Note the end of a transfer of P. D is told when the last one has ended."""
        write.open -= 1
        write.failed |= not right
        if write.open:
            return
        self.writes.remove(write)
        if not write.dropped:
            self.tell_d(write)
        write.over.set()

    def tell_d(self, write: Write) -> None:
        """Tell D how its registration has ended."""
        with contextlib.suppress(OSError), write.sending:
            write.peer.sendall(HEAD.pack(REFUSED if write.failed else WRITTEN, 0))

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        self.renew_leases()
        for request in self.last - self.under_way():
            self.last.discard(request)
            self.released.put(request)
        return super().get_transfer_results(finished_req_ids)

    def renew_leases(self) -> None:
        """Keep the blocks from which P is writing."""
        for request in self.under_way():
            if request in self.leases:
                self.leases[request] = self.leases[request][0], time.monotonic() + self.lease_s

    def under_way(self) -> set[str]:
        """Requests from whose blocks P is writing."""
        return {write.request for write in self.writes}

    def note_end(self, found: KVConnectorTransferResults, load: Any, right: bool) -> None:
        if isinstance(load, Write):
            self.end_write(load, right)
        else:
            super().note_end(found, load, right)

    # ---- worker half of D ----------------------------------------------------------------------------------

    def begin(self, load: Load) -> None:
        load.open = 1
        self.jobs.put(lambda: self.ends.put((load, self.fetch(load, range(len(self.caches))))))

    def read(self, load: Load, layers: range) -> bool:
        """Register the blocks of a load, and take what P writes. Returns whether P has written all."""
        with connect(load.params) as peer:
            peer.settimeout(SILENCE_S)
            ask(
                peer,
                request=load.params["remote_request_id"],
                count=len(load.blocks),
                last=load.params["last"],
            )
            while True:
                what, layer = HEAD.unpack(receive(peer, HEAD.size))
                if what == LAYER:
                    self.take(peer, load, layer)
                elif what != WAIT:
                    return what == WRITTEN

    def take(self, peer: socket.socket, load: Load, layer: int) -> None:
        """Take one layer that P writes."""
        cache = self.caches[layer]
        rows = cache[load.blocks].contiguous()
        found = torch.frombuffer(bytearray(receive(peer, rows.nbytes)), dtype=torch.uint8)
        cache[load.blocks] = found.view(cache.dtype).reshape(rows.shape)

    def report(self, found: KVConnectorTransferResults, load: Load) -> None:
        found.finished_recving.add(load.request)
        if load.failed:
            found.failed_recving.add(load.request)
            self.failures.update(load.blocks)

    def shutdown(self) -> None:
        serves = getattr(self, "server", None)
        super().shutdown()
        if serves:
            for _ in range(4):
                self.jobs.put(None)
