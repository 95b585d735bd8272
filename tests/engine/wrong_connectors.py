"""Connectors with one mistake each. All of them are vLLM's NixlConnector but for what the first sentence of their docstring says.

`Right` has no mistake: what the suite says about NixlConnector it must say about `Right` too. Engines import this module under its bare
name; nothing here is imported by the tests themselves.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

os.environ["VLLM_SSM_CONV_STATE_LAYOUT"] = (
    "DS"  # vLLM sets it for connectors that are called Nixl*; any other has to do it itself
)

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

BLOCK = 32  # tokens, of every family but qwen3_5

Groups = tuple[list[int], ...]  # block ids, one list per KV cache group


class Right(NixlPullConnector):
    """No mistake."""

    def loads(self) -> dict[str, Any]:
        """Worker half: what this step begins to load, by request."""
        return self._connector_metadata.reqs_to_recv


# ---- what D reads ------------------------------------------------------------------------------------------------------------


class Reads(Right):
    """`choose` says which of P's blocks are read into which of D's."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for meta in self.loads().values():
            if any(meta.local_block_ids):
                chosen = [
                    self.choose(list(ours), list(theirs))
                    for ours, theirs in zip(meta.local_block_ids, meta.remote.block_ids, strict=True)
                ]
                meta.local_block_ids, meta.remote.block_ids = (
                    tuple(groups) for groups in zip(*chosen, strict=True)
                )
        super().start_load_kv(forward_context, **kwargs)

    def choose(self, ours: list[int], theirs: list[int]) -> tuple[list[int], list[int]]:
        raise NotImplementedError


class MovesNothing(Right):
    """Tells P and vLLM that everything was read, and reads nothing."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for meta in self.loads().values():
            meta.local_block_ids = ()  # as after a full hit in D's own cache
        super().start_load_kv(forward_context, **kwargs)


class LateByOne(Reads):
    """Reads P's block i + 1 into D's block i."""

    def choose(self, ours: list[int], theirs: list[int]) -> tuple[list[int], list[int]]:
        return ours, theirs[1:] + theirs[-1:]


class DropsTail(Reads):
    """Does not read the last block."""

    def choose(self, ours: list[int], theirs: list[int]) -> tuple[list[int], list[int]]:
        return ours[:-1], theirs[:-1]


class SwapsBlocks(Reads):
    """Exchanges the first two blocks."""

    def choose(self, ours: list[int], theirs: list[int]) -> tuple[list[int], list[int]]:
        return ours, theirs[1::-1] + theirs[2:]


class WritesNull(Reads):
    """Writes one block too many: the null block."""

    def choose(self, ours: list[int], theirs: list[int]) -> tuple[list[int], list[int]]:
        return [0, *ours], [theirs[0], *theirs]


class WritesOutside(Reads):
    """Writes one block too many: one that belongs to no request."""

    def choose(self, ours: list[int], theirs: list[int]) -> tuple[list[int], list[int]]:
        return [next(b for b in range(1, 200) if b not in ours), *ours], [theirs[0], *theirs]


class HalfAWindow(Reads):
    """Reads only the last block of a sliding window, as if every window began at a block."""

    def choose(self, ours: list[int], theirs: list[int]) -> tuple[list[int], list[int]]:
        return (ours[-1:], theirs[-1:]) if len(ours) == 2 else (ours, theirs)


# ---- what D's cache holds after the read -------------------------------------------------------------------------------------


class Spoils(Right):
    """`spoil` changes D's cache when a read has ended, before vLLM hears of it."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.layers = (
            self._vllm_config.compilation_config.static_forward_context
        )  # kv_caches has states as rows of bytes
        self.targets = dict[str, Groups]()
        super().register_kv_caches(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.targets.update(
            {name: meta.local_block_ids for name, meta in self.loads().items() if any(meta.local_block_ids)}
        )
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        for request in results.finished_recving:
            groups = self.kv_cache_config.kv_cache_groups
            for group, blocks in zip(groups, self.targets.pop(request), strict=True):
                self.spoil([self.layers[name].kv_cache for name in group.layer_names], blocks)
        return results

    def spoil(self, layers: list[Any], blocks: list[int]) -> None:
        """`layers` are the caches of one group: tensors [block, head, ...], or pairs (convolution, recurrent) of [block, ...]."""
        raise NotImplementedError


class OneBit(Spoils):
    """One bit of one word of all that was read is wrong."""

    def spoil(self, layers: list[Any], blocks: list[int]) -> None:
        raw = layers[-1][blocks[0]].view(dtype=layers[-1].dtype).flatten(1)
        words = raw.view({4: _torch().int32, 2: _torch().int16}[raw.element_size()])
        words[1, 5] ^= 1


class SwapsHeads(Spoils):
    """Heads 0 and 1 are exchanged."""

    def spoil(self, layers: list[Any], blocks: list[int]) -> None:
        for cache in layers:
            cache[blocks] = cache[blocks].flip(1)


class SwapsLayers(Spoils):
    """The first two layers are exchanged."""

    def spoil(self, layers: list[Any], blocks: list[int]) -> None:
        first, second = layers[0][blocks].clone(), layers[1][blocks].clone()
        layers[0][blocks], layers[1][blocks] = second, first


class ForgetsLayer(Spoils):
    """The last layer holds zeros."""

    def spoil(self, layers: list[Any], blocks: list[int]) -> None:
        layers[-1][blocks] = 0


class RollsConvolution(Spoils):
    """The convolution state is off by one position."""

    def spoil(self, layers: list[Any], blocks: list[int]) -> None:
        for conv, _ in (pair for pair in layers if isinstance(pair, (tuple, list))):
            conv[blocks] = conv[blocks].roll(1, -1)


class ZeroesState(Spoils):
    """The recurrent state is zero."""

    def spoil(self, layers: list[Any], blocks: list[int]) -> None:
        for _, recurrent in (pair for pair in layers if isinstance(pair, (tuple, list))):
            recurrent[blocks] = 0


def _torch() -> Any:
    import torch

    return torch


# ---- when it says that it has read -------------------------------------------------------------------------------------------


class ReportsEarly(Right):
    """Reports a load as finished in the step in which it begins, and reads one step later."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.waiting, self.early = dict[str, Any](), set[str]()
        super().register_kv_caches(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        begun = {name: meta for name, meta in self.loads().items() if any(meta.local_block_ids)}
        self._connector_metadata.reqs_to_recv = self.waiting | {
            name: meta for name, meta in self.loads().items() if name not in begun
        }
        self.waiting = begun
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        results.finished_recving = results.finished_recving - self.early | set(self.waiting) - self.early
        self.early |= set(self.waiting)
        return results


class NeverFinishes(Right):
    """Reads everything and never reports it."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        results.finished_recving.clear()
        return results


class ReportsTwice(Right):
    """Reports every load in two steps, one after the other."""

    last: frozenset[str] = frozenset()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        new = frozenset(results.finished_recving)
        results.finished_recving |= self.last
        self.last = new
        return results


class KeepsBlocks(Right):
    """P never says that D has read, so that its blocks stay until the lease runs out, or longer."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        results.finished_sending.clear()
        return results


# ---- what the scheduler halves say -------------------------------------------------------------------------------------------


class RecomputesQuietly(Right):
    """D announces nothing, and computes the whole prompt."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False


class AnnouncesLess(Reads):
    """D announces one block less than P has, and reads what it announced."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        count, parked = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return (count - BLOCK, parked) if count and count > BLOCK else (count, parked)

    def choose(self, ours: list[int], theirs: list[int]) -> tuple[list[int], list[int]]:
        return ours, theirs[: len(ours)]


class AnnouncesMore(Right):
    """D announces one token more than the prompt has."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        count, parked = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return (count + 1, parked) if count else (count, parked)


class NoHandover(Right):
    """P returns no parameters for D."""

    def request_finished_all_groups(
        self, request: Any, block_ids: Groups
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None


class BacksOff(Right):
    """No mistake: P stops one token before the end of the prompt, and D loads one token less.

    That is what upstream does for state layers alone. It repairs sliding windows, so this one conforms where NixlConnector does not.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        if self.connector_scheduler is not None:
            self.connector_scheduler._prefill_backoff = lambda: 1


class NoTruncation(Right):
    """P computes the whole prompt, and D announces one token less: P's state has seen a token too many."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        if self.connector_scheduler is not None:
            self.connector_scheduler._truncate_request_for_prefill = lambda request: None


# ---- how it fails ------------------------------------------------------------------------------------------------------------


class CrashesInLoad(Right):
    """Dies of a segmentation fault in start_load_kv."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self.loads():
            faulthandler._sigsegv()
        super().start_load_kv(forward_context, **kwargs)


class HangsInLoad(Right):
    """Never comes back from start_load_kv."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        while self.loads():
            print("still in start_load_kv", flush=True)
            time.sleep(1)
        super().start_load_kv(forward_context, **kwargs)


class RaisesInLoad(Right):
    """Raises in start_load_kv."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self.loads():
            raise RuntimeError("the wire is cut")
        super().start_load_kv(forward_context, **kwargs)


class LeavesInLoad(Right):
    """Calls sys.exit in start_load_kv."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self.loads():
            sys.exit(3)
        super().start_load_kv(forward_context, **kwargs)


class RaisesAtStart(Right):
    """Raises in its constructor."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        raise ValueError("no such fabric")


class CrashesAtStart(Right):
    """Dies of a segmentation fault when the KV caches are registered."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        faulthandler._sigsegv()


# ---- how it ends -------------------------------------------------------------------------------------------------------------


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
    """Never comes back from shutdown."""

    def shutdown(self) -> None:
        while True:
            time.sleep(1)


# ---- noise and form ----------------------------------------------------------------------------------------------------------


class PrintsBinary(Right):
    """No mistake, but writes bytes that are no text to stdout and stderr all the time."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for stream in (1, 2):
            os.write(
                stream,
                os.urandom(4096)
                + b"\x00\xff\xfe\n\x1b[2J\x1b]0;title\x07Current thread 0x0 (most recent call first):\n",
            )
        super().start_load_kv(forward_context, **kwargs)


class NoHMA(KVConnectorBase_V1):
    """Does not inherit SupportsHMA. Everything else is passed to a NixlConnector."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.inner = NixlPullConnector(vllm_config, role, kv_cache_config)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.inner.start_load_kv(forward_context, **kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        self.inner.wait_for_save()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.inner.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.inner.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return self.inner.build_connector_meta(scheduler_output)


def _passes(name: str) -> Any:
    return lambda self, *args: getattr(self.inner, name)(*args)


for _name in """bind_connector_metadata clear_connector_metadata register_kv_caches set_host_xfer_buffer_ops get_transfer_results
                get_block_ids_with_load_errors on_new_request update_connector_output request_finished get_handshake_metadata
                set_xfer_handshake_metadata_pp_aware get_loaded_kv_cache_group_ids shutdown""".split():
    setattr(NoHMA, _name, _passes(_name))
