"""P and D of one machine: D reads P's memory itself, in the step that orders the load."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, KVConnectorTransferResults

from ..sockets import Load, Orders
from .pulls import CarefulPull

ENDED = 1 << 16  # entries of the table of leases that have ended
MARK = 32  # bytes by which D knows that the process is still P
AT_ONCE = 512  # pieces of one call


class _Piece(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t


def read_memory(pid: int, pieces: list[tuple[int, int, int]]) -> None:
    """Read pieces of another process's memory: (own address, its address, bytes). Raises OSError."""
    for first in range(0, len(pieces), AT_ONCE):
        some = pieces[first : first + AT_ONCE]
        mine = (_Piece * len(some))(*((own, size) for own, _, size in some))
        theirs = (_Piece * len(some))(*((its, size) for _, its, size in some))
        read = _libc.process_vm_readv(pid, mine, len(some), theirs, len(some), 0)
        if read != sum(size for _, _, size in some):
            raise OSError(ctypes.get_errno(), "process_vm_readv")


@dataclass
class NumberedOrders(Orders):
    """`leases`: request of P -> number of its lease."""

    leases: dict[str, int] = field(default_factory=dict)


@dataclass
class Whereabouts:
    """What a rank publishes: its process, and what lies where in its memory."""

    found: dict[str, Any]


class SharesAMachine(CarefulPull):
    """D reads P's memory with process_vm_readv, in start_load_kv itself. A load is reported in the step that
    orders it. Whether P has kept the blocks to the end stands in P's memory, too, so that a P whose process
    is stopped is read as any other. A socket carries only the message that D has read.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.orders, self.last = NumberedOrders(), 0
        self.place: dict[str, Any] = {}

    # ---- the scheduler half

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        for one in metadata.values():
            self.place = one.found if isinstance(one, Whereabouts) else self.place

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        kept, params = super().request_finished_all_groups(request, block_ids)
        if params is None:
            return kept, None
        self.last += 1
        self.orders.leases[request.request_id] = self.last
        return kept, params | {"remote_place": self.place, "remote_lease": self.last}

    def build_connector_meta(self, scheduler_output: Any) -> NumberedOrders:
        orders, self.orders = self.orders, NumberedOrders()
        return orders

    # ---- the worker half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        self.numbers: dict[str, int] = {}  # P: request -> its lease
        self.ended = np.zeros(ENDED, np.int64)  # P: number of a lease modulo ENDED -> the last that has ended
        self.mark = np.frombuffer(os.urandom(MARK), np.uint8).copy()
        self.found = {
            "process": os.getpid(),
            "mark": [self.mark.ctypes.data, self.mark.tobytes().hex()],
            "ended": self.ended.ctypes.data,
            "layers": [[cache.data_ptr(), _bytes_of_block(cache)] for cache in self.caches],
        }

    def get_handshake_metadata(self) -> Whereabouts:
        return Whereabouts(self.found)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.numbers |= self._get_connector_metadata().leases
        super().start_load_kv(forward_context, **kwargs)

    def begin(self, load: Load) -> None:
        what, steps = self.fault_of_next()
        load.open, load.dropped = 1, what == "drop"

        def read() -> None:
            self.ends.put((load, what != "fail" and self.fetch(load, range(len(self.caches)))))

        if what == "delay" and steps:
            self.delayed.append((steps, read))
        else:
            read()

    def read(self, load: Load, layers: range) -> bool:
        try:
            pid, number, places = self.pieces_of(load)
            mark, hexadecimal = load.params["remote_place"]["mark"]
            ended = int(load.params["remote_place"]["ended"]) + 8 * (number % ENDED)
        except (LookupError, TypeError, ValueError):
            return False
        seen, last = np.zeros(MARK, np.uint8), np.zeros(1, np.int64)
        read_memory(pid, [(seen.ctypes.data, int(mark), MARK)])
        if seen.tobytes().hex() != hexadecimal:
            return False
        read_memory(pid, places)
        read_memory(pid, [(last.ctypes.data, ended, 8)])
        return bool(last[0] < number)

    def pieces_of(self, load: Load) -> tuple[int, int, list[tuple[int, int, int]]]:
        """P's process, the number of the lease, and what to read.

        Raises LookupError, TypeError or ValueError if the params are not P's.
        """
        place = load.params["remote_place"]
        pieces = []
        for cache, (address, size) in zip(self.caches, place["layers"], strict=True):
            if size != _bytes_of_block(cache):
                raise ValueError("blocks of another size")
            for own, its in zip(load.blocks, load.remote, strict=True):
                pieces.append((cache.data_ptr() + own * size, int(address) + its * size, size))
        return int(place["process"]), int(load.params["remote_lease"]), pieces

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        before = set(self.leases)
        found = super().get_transfer_results(finished_req_ids)
        for request in before - self.leases.keys():  # before P's scheduler frees the blocks
            number = self.numbers.pop(request, 0)
            self.ended[number % ENDED] = max(self.ended[number % ENDED], number)
        return found


def _bytes_of_block(cache: torch.Tensor) -> int:
    return cache.stride(0) * cache.element_size()


class LeavesWhatEnded(SharesAMachine):
    """A load that is still to begin when its request has ended is not made, and reported as failed, with its
    blocks. vLLM tells the workers of the end.
    """

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        self.over: set[str] = set()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        self.over |= finished_req_ids
        found = super().get_transfer_results(finished_req_ids)
        self.over -= found.finished_recving
        return found

    def fetch(self, load: Load, layers: range) -> bool:
        return load.request not in self.over and super().fetch(load, layers)


class LosesFailures(LeavesWhatEnded):
    """Wrong: only loads of requests that have ended are reported as failed."""

    def note_end(self, found: KVConnectorTransferResults, load: Load, right: bool) -> None:
        super().note_end(found, load, right or load.request not in self.over)
