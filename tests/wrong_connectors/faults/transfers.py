"""Connectors that do one thing wrong when the transport does.

Without faults all of them are vLLM's NixlConnector; those of states.py and without_nixl.py are not.

Engines import this module under its full name; nothing here is imported by the tests themselves.
"""

from __future__ import annotations

from typing import Any

from tests.right_connectors.sockets import TcpPull
from tests.wrong_connectors.engine import Right as Upstream

from .states import ForgetsFailedState, ForgetsSlowState, StatesApart
from .without_nixl import (
    TcpEndsWithTheFirst,
    TcpForgetsFailure,
    TcpHidesFailure,
    TcpNeverExpires,
    WithoutNixl,
)

__all__ = [
    "ForgetsFailedState",
    "ForgetsSlowState",
    "StatesApart",
    "TcpEndsWithTheFirst",
    "TcpForgetsFailure",
    "TcpHidesFailure",
    "TcpNeverExpires",
    "TcpPull",
    "Upstream",
    "WithoutNixl",
]


class Worker(Upstream):
    """`change` replaces methods of the worker half, and of its NIXL agent, before it knows any address."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.change(self.connector_worker)
        super().register_kv_caches(kv_caches)

    def change(self, worker: Any) -> None:
        raise NotImplementedError


class Right(Worker):
    """No mistake, and better than upstream: a reader counts once, however often it says that it has read."""

    def change(self, worker: Any) -> None:
        agent, heard = worker.nixl_wrapper, set[tuple[str, bytes]]()
        get_new_notifs = agent.get_new_notifs

        def new_only() -> dict[str, list[bytes]]:
            out: dict[str, list[bytes]] = {}
            for sender, messages in get_new_notifs().items():
                for message in messages:
                    if message.startswith(b"HB:") or (sender, message) not in heard:
                        out.setdefault(sender, []).append(message)
                    heard.add((sender, message))
            return out

        agent.get_new_notifs = new_only


# ---- transfers that fail -------------------------------------------------------------------------


TABLES: dict[str, set[int]] = {}  # of requests, for both halves: they are in one process


class ForgetsFailure(Worker):
    """Gives a failed handle back, and remembers nothing else of it: the load is reported as finished."""

    def change(self, worker: Any) -> None:
        worker._handle_failed_transfer = lambda req_id, handle, *args, **kwargs: (
            handle is None or worker._try_release_xfer_handle(req_id, handle)
        )


class ForgetsLaterFailures(Worker):
    """Minds a failure of the first transfer of a load only."""

    def change(self, worker: Any) -> None:
        pop_done, handle_failed = worker._pop_done_transfers, worker._handle_failed_transfer
        first: dict[str, int] = {}  # request -> the handle of its first transfer

        def pop_done_transfers(transfers: dict[str, Any]) -> Any:
            for req_id, handles in transfers.items():
                first.setdefault(req_id, handles[0])
            return pop_done(transfers)

        def failed(req_id: str, handle: int | None, *args: Any, **kwargs: Any) -> bool:
            if handle is None or first.get(req_id, handle) == handle:
                return bool(handle_failed(req_id, handle, *args, **kwargs))
            return bool(worker._try_release_xfer_handle(req_id, handle))

        worker._pop_done_transfers, worker._handle_failed_transfer = pop_done_transfers, failed


class HidesFailure(Worker):
    """Never reports a request whose load failed."""

    def change(self, worker: Any) -> None:
        results = worker.get_transfer_results

        def get_transfer_results() -> Any:
            found = results()
            found.finished_recving -= found.failed_recving
            found.failed_recving.clear()
            worker._invalid_block_ids.queue.clear()
            return found

        worker.get_transfer_results = get_transfer_results


class RaisesOnFailure(Worker):
    """Takes a failed transfer for impossible."""

    def change(self, worker: Any) -> None:
        def impossible(req_id: str, *args: Any, **kwargs: Any) -> bool:
            raise RuntimeError("no transfer ever fails")

        worker._handle_failed_transfer = impossible


class FailsAll(Worker):
    """Lets every load that is under way fail with the first one."""

    def change(self, worker: Any) -> None:
        handle_failed = worker._handle_failed_transfer

        def failed(req_id: str, *args: Any, **kwargs: Any) -> bool:
            worker._recv_failures.update(worker._recving_metadata)
            return bool(handle_failed(req_id, *args, **kwargs))

        worker._handle_failed_transfer = failed


class FailsTheHit(Worker):
    """Reports all blocks of a request whose load failed, and not only those that were to be loaded."""

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        TABLES[request.request_id] = set(blocks.get_block_ids()[0])
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def change(self, worker: Any) -> None:
        results, self.failed = worker.get_transfer_results, set[int]()

        def get_transfer_results() -> Any:
            found = results()
            self.failed = set[int]().union(*(TABLES[name] for name in found.failed_recving))
            found.failed_recving.clear()
            return found

        worker.get_transfer_results = get_transfer_results

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.failed


class IgnoresRelease(Worker):
    """Does not care whether a failed handle could be released."""

    def change(self, worker: Any) -> None:
        release = worker._try_release_xfer_handle
        worker._try_release_xfer_handle = lambda *args: release(*args) or True


class ClearsLater(Worker):
    """Clears the blocks of a load that failed some steps after it has reported it: they are free by then."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.caches, self.failures = list(kv_caches.values()), list[tuple[int, list[int]]]()
        self.steps = 0
        super().register_kv_caches(kv_caches)

    def change(self, worker: Any) -> None:
        handle_failed = worker._handle_failed_transfer

        def failed(req_id: str, *args: Any, **kwargs: Any) -> bool:
            blocks = [
                block
                for group in worker._recving_metadata[req_id].local_physical_block_ids
                for block in group
            ]
            self.failures.append((self.steps + 6, blocks))
            return bool(handle_failed(req_id, *args, **kwargs))

        worker._handle_failed_transfer = failed

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.steps += 1
        for due, blocks in self.failures:
            if due == self.steps:
                for cache in self.caches:
                    cache[blocks] = 0
        super().start_load_kv(forward_context, **kwargs)


class LeavesSiblings(Worker):
    """Reports a failure at once, while another transfer of the same request is under way."""

    def change(self, worker: Any) -> None:
        handle_failed = worker._handle_failed_transfer

        def failed(req_id: str, *args: Any, **kwargs: Any) -> bool:
            worker.left = worker._recving_transfers.pop(req_id, [])
            return bool(handle_failed(req_id, *args, **kwargs))

        worker._handle_failed_transfer = failed


class BearsGrudge(Worker):
    """Reads no more from an engine from which one read has failed."""

    def change(self, worker: Any) -> None:
        handle_failed, grudge = worker._handle_failed_transfer, set[str]()
        read = worker._read_blocks_for_req

        def failed(req_id: str, *args: Any, **kwargs: Any) -> bool:
            grudge.add("P")
            return bool(handle_failed(req_id, *args, **kwargs))

        def read_blocks(req_id: str, meta: Any) -> None:
            # not those that were asked for together with the failed one
            if grudge and len(worker._recving_metadata) == 1:
                worker._recv_failures.add(req_id)
            else:
                read(req_id, meta)

        worker._handle_failed_transfer, worker._read_blocks_for_req = failed, read_blocks


# ---- late readers, and notifications of P ---------------------------------------------------


class NotifiesAtOnce(Worker):
    """Notifies P of a read when the read begins."""

    def change(self, worker: Any) -> None:
        read, make = worker._read_blocks, worker.nixl_wrapper.make_prepped_xfer

        def make_silent(*args: Any, notif_msg: bytes = b"", **kwargs: Any) -> Any:
            return make(*args, **kwargs)

        def read_blocks(**kwargs: Any) -> Any:
            agents = worker._remote_agents[kwargs["dst_engine_id"]]
            message = f"{kwargs['remote_request_id']}:{kwargs['expected_consumers']}".encode()
            worker.nixl_wrapper.send_notif(agents[0, kwargs["read_spec"].remote_rank], notif_msg=message)
            return read(**kwargs)

        worker.nixl_wrapper.make_prepped_xfer, worker._read_blocks = make_silent, read_blocks


class CountsOneReader(Worker):
    """P gives its blocks back when the first rank of D has read them."""

    def change(self, worker: Any) -> None:
        agent = worker.nixl_wrapper
        get_new_notifs = agent.get_new_notifs

        def one_reader() -> dict[str, list[bytes]]:
            return {
                sender: [m if m.startswith(b"HB:") else m.rpartition(b":")[0] + b":1" for m in messages]
                for sender, messages in get_new_notifs().items()
            }

        agent.get_new_notifs = one_reader


class KnowsEveryRequest(Worker):
    """P takes a notification about a request that it does not have for impossible."""

    def change(self, worker: Any) -> None:
        agent = worker.nixl_wrapper
        get_new_notifs = agent.get_new_notifs

        def known_only() -> Any:
            found, seen = get_new_notifs(), set[bytes]()
            for message in (m for messages in found.values() for m in messages if not m.startswith(b"HB:")):
                if (
                    message in seen
                    or message.decode().rpartition(":")[0]
                    not in worker._reqs_to_process | worker._reqs_to_send.keys()
                ):
                    raise KeyError(message)
                seen.add(message)
            return found

        agent.get_new_notifs = known_only


class NeverExpires(Worker):
    """P waits for ever for a reader."""

    def change(self, worker: Any) -> None:
        worker._reap_expired_send_leases = lambda done_sending: None


# ---- loads that are reported too early ----------------------------------------------------------


class EndsWithTheFirst(Worker):
    """Reports a load as finished as soon as one of its transfers has ended."""

    def change(self, worker: Any) -> None:
        pop_done, left = worker._pop_done_transfers, list[Any]()

        def pop_done_transfers(transfers: dict[str, Any]) -> tuple[set[str], set[str]]:
            begun = {name: len(handles) for name, handles in transfers.items()}
            done, failed = pop_done(transfers)
            early = {name for name, handles in transfers.items() if len(handles) < begun[name]}
            left.extend(transfers.pop(name) for name in early)
            return done | early, failed

        worker._pop_done_transfers = pop_done_transfers


class EndsWithTheBegin(Worker):
    """Reports a load as finished as soon as its transfers have begun."""

    def change(self, worker: Any) -> None:
        left = list[Any]()

        def pop_done_transfers(transfers: dict[str, Any]) -> tuple[set[str], set[str]]:
            begun = set(transfers)
            left.extend(transfers.pop(name) for name in begun)
            return begun, set()

        worker._pop_done_transfers = pop_done_transfers
