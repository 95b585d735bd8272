"""Hand-overs of the reference connector, of NixlConnector, and raw NIXL reads of as many bytes.

The script tests nothing: docs/benchmarks.md has the numbers.

    python ci/reference/bench_transfer.py [cpu|cuda, default cpu] [ROUNDS, default 5]

Both connectors run in vLLM's own scheduler and worker hooks, as in the byte tier, over real NIXL with the
same settings. Each has the memory layout that it asks vLLM for. A round starts engines of a real geometry
with the one connector, then with the other, and reads as many bytes raw: what else the machine does disturbs
all three. The first hand-over of a pair of engines does not count, since the peers meet in it.

The script measures on D the time from the hook that orders a load (`start_load_kv`) to the return of the hook
that reports it (`get_transfer_results`), which it calls without a pause. P steps without a pause meanwhile: a
read after a notification ends when P's agent has made progress (docs/findings.md), and in a server P's thread
makes it. In host memory UCX copies within the call that begins a read: CPU time is that of the transfer, and
other work disturbs it less. Blocks are in ascending order on both sides, or shuffled on each. Bytes and
descriptors are NIXL's count of every transfer of D (`get_xfer_telemetry`). The raw read is between two agents
without a connector, as many bytes in one descriptor. Ratios are of medians, in time and in CPU time; brackets
are quartiles. The second table is what hand-overs of models with windows move.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np

from model_matrix import load_geometries, parse_topology
from model_matrix.geometries import SlidingWindow, expand_layers
from pytest_kvconform.rigs.bench import launch_zygote, wait_for_zygote
from pytest_kvconform.rigs.bytes.handle import ByteEngineHandle
from pytest_kvconform.rigs.bytes.messages import PACKED, ByteEngineSpec, ByteRequest
from pytest_kvconform.rigs.bytes.process import ByteEngineProcess
from pytest_kvconform.rigs.bytes.specs import blocks_for
from pytest_kvconform.rigs.cluster.loop import play
from pytest_kvconform.rigs.cluster.release import until_released
from pytest_kvconform.rigs.context import transfer_config
from pytest_kvconform.rigs.engine import process as engine_process
from pytest_kvconform.rigs.engine.messages import ON_D, ON_P, PREFILL
from pytest_kvconform.rigs.processes.child import ChildProcess
from pytest_kvconform.rigs.processes.ports import free_port
from pytest_kvconform.rigs.scenario import tokens
from pytest_kvconform.settings import Settings
from pytest_kvconform.subject import resolve
from reference_connector.scheduler import Group, _group_load

BLOCK, REPEAT, PATIENCE_S = 16, 4, 120.0  # tokens; hand-overs of a pair for each order of blocks; seconds
LLAMA = [("llama3_1_8b", "P1D1", 64), ("llama3_1_8b", "P1D1", 1024), ("llama3_1_8b", "P2D1", 1024)]
# geometry, topology, tokens of the prompt
CASES = [
    *LLAMA,
    ("deepseek_v3", "P1D1", 1024),
    ("gpt_oss_20b", "P1D1", 4096),
]
NIXL, OURS = CONNECTORS = ("NixlConnector", "reference_connector:ReferenceConnector")
COLUMNS = (
    *("case", "blocks", "NixlConnector: ms / CPU ms", "reference", "raw read", "to NixlConnector", "to raw"),
    *("MB", "bytes", "descriptors"),
)
HEAD = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"
counted = np.zeros(2, dtype=np.int64)  # of this rank: bytes and descriptors of its transfers
took: list[np.ndarray] = []  # clock() when its load was ordered; then what the load took


def clock() -> np.ndarray:
    """Seconds, and CPU seconds of this thread."""
    return np.array([time.perf_counter(), time.thread_time()])


class Arranged(ByteEngineProcess):
    """A byte engine whose blocks have the order that a measurement asks for."""

    def arrange(self, shuffled: bool) -> None:
        """Empty the prefix cache, and give blocks out in ascending or in random order from now on."""
        self.manager.reset_prefix_cache()
        queue = self.manager.block_pool.free_block_queue
        free = sorted(queue.popleft_n(queue.num_free_blocks), key=lambda block: block.block_id)
        if shuffled:
            self.order.shuffle(free)
        queue.append_n(free)


def serve(connection: Any, spec: ByteEngineSpec) -> None:
    """Serve one engine in a child of the zygote: see `serve` of pytest_kvconform/rigs/engine/process.py."""
    from nixl._api import nixl_agent, nixl_agent_config

    class Timed(Arranged):
        def expect(self) -> None:
            """Time the next load."""
            self._workers(_expect)

        def transferred(self) -> tuple[np.ndarray, np.ndarray]:
            """Since `expect`:

            (seconds and CPU seconds of the slowest rank, (bytes, descriptors) of all of them).
            """
            times, counts = zip(*self._workers(lambda worker: (took[0], counted)), strict=True)
            return np.max(times, axis=0), np.sum(counts, axis=0)

    made, release = nixl_agent_config.__init__, nixl_agent.release_xfer_handle

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.capture_telemetry = True  # as NixlConnector has it

    def release_xfer_handle(self: Any, handle: Any) -> None:
        telemetry = self.get_xfer_telemetry(handle)
        counted[:] += telemetry.totalBytes, telemetry.descCount
        release(self, handle)

    nixl_agent_config.__init__, nixl_agent.release_xfer_handle = __init__, release_xfer_handle
    engine_process.serve(connection, spec, Timed)


def _expect(worker: Any) -> None:
    """From the next `start_load_kv` of a rank on, call the hook that reports loads until it reports one."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector = get_kv_transfer_group()
    start, report = connector.start_load_kv, connector.get_transfer_results
    counted[:] = 0

    def start_load_kv(*args: Any, **kwargs: Any) -> None:
        took[:] = [clock()]
        start(*args, **kwargs)

    def get_transfer_results(finished: set[str]) -> Any:
        deadline = time.monotonic() + PATIENCE_S / 2
        while not (results := report(finished)).finished_recving and time.monotonic() < deadline:
            pass
        took[0] = clock() - took[0]
        del connector.start_load_kv, connector.get_transfer_results  # the class's own again
        return results

    connector.start_load_kv, connector.get_transfer_results = start_load_kv, get_transfer_results


def serve_raw(connection: Any, spec: tuple[int, str]) -> None:
    """Serve an agent with some memory, and send where the memory is.

    An agent that is sent where another one's memory is reads it some times, and sends how long the reads
    took.
    """
    import torch
    from nixl._api import nixl_agent, nixl_agent_config

    (nbytes, device), kind = spec, "DRAM" if spec[1] == "cpu" else "VRAM"
    agent, memory = (
        nixl_agent(str(os.getpid()), nixl_agent_config()),
        torch.ones(nbytes, dtype=torch.uint8, device=device),
    )
    agent.register_memory([(memory.data_ptr(), nbytes, 0, "")], kind)
    connection.send((agent.get_agent_metadata(), mine := [(memory.data_ptr(), nbytes, 0)]))
    while not connection.poll(0.001):
        agent.get_new_notifs()  # an agent without a thread makes progress in its calls
    metadata, theirs, times = connection.recv()
    name, spent = agent.add_remote_agent(metadata), []
    for _ in range(times):
        torch.ones(1 << 27, dtype=torch.uint8)  # caches are as cold as they are after a step of an engine
        begun = clock()
        handle = agent.initialize_xfer(
            "READ", agent.get_xfer_descs(mine, kind), agent.get_xfer_descs(theirs, kind), name
        )
        agent.transfer(handle)
        while (state := agent.check_xfer_state(handle)) == "PROC":
            pass
        spent.append(clock() - begun)
        agent.release_xfer_handle(handle)
    connection.send(spent[1:] if state == "DONE" else state)  # in the first one the agents meet


class Engine(ByteEngineHandle):
    target = "bench_transfer:serve"


EngineT = TypeVar("EngineT", bound=ByteEngineHandle)


def compare(address: str, case: tuple[str, str, int], device: str, rounds: int) -> int:
    """Two lines of the table. Returns the bytes of KV that the reference connector moved."""
    spent: dict[tuple[str, bool], list[np.ndarray]] = {
        (who, shuffled): [] for who in CONNECTORS for shuffled in (False, True)
    }
    bare, counts = list[np.ndarray](), dict[tuple[str, bool], np.ndarray]()
    for number in range(rounds):
        for who in CONNECTORS:
            p, d = engines(address, who, case, device, Engine)
            hand_over(p, d, f"{number}-first", case[2], timed=False)
            for turn in range(2 * REPEAT):
                key = who, turn % 2 == 1
                p.call("arrange", key[1]), d.call("arrange", key[1])
                lasted, counts[key] = hand_over(p, d, f"{number}-{turn}", case[2])
                spent[key].append(lasted)
            p.end(), d.end()
        bare += raw(address, int(counts[OURS, False][0]), device)
    for shuffled in (False, True):
        times = 1e3 * np.array([spent[NIXL, shuffled], spent[OURS, shuffled], bare])
        low, middle, high = np.percentile(times, (25, 50, 75), axis=1)
        cells = ["{} {}, {} tokens".format(*case), "shuffled" if shuffled else "in order"]
        cells += [
            f"{m[0]:.1f} [{a[0]:.1f}, {z[0]:.1f}] / {m[1]:.1f}"
            for a, m, z in zip(low, middle, high, strict=True)
        ]
        cells += [" / ".join(f"{ratio:.2f}" for ratio in middle[1] / middle[other]) for other in (0, 2)]
        nbytes, number, other, others = *counts[OURS, shuffled], *counts[NIXL, shuffled]
        print(
            f"| {' | '.join(cells)} | {nbytes / 2**20:.1f} | {nbytes - other:+} | "
            f"{number} against {others} |",
            flush=True,
        )
    # What is read of the ledgers is no KV: for this load, and after the notification of the one before.
    return int(nbytes) - 2 * 8 * parse_topology(case[1])[0]


def engines(
    address: str,
    connector: str,
    case: tuple[str, str, int],
    device: str,
    kind: type[EngineT],
    config: str = "",
) -> list[EngineT]:
    """P and D, started. `config`: further fields of KVTransferConfig, as JSON."""
    model, topology, longest, made = *case[:2], case[2] + BLOCK, list[EngineT]()
    common = {
        "geometry": model,
        "block_size": BLOCK,
        "max_model_len": longest,
        "max_batched_tokens": 2 * longest,
        "content": PACKED,
    }
    for role, size, more in zip("PD", parse_topology(topology), (4, 9), strict=True):
        subject = resolve(Settings(connector=connector, config=config))
        common["kv_transfer_config"] = transfer_config(subject, role, device)
        common["environment"] = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
        room = blocks_for(load_geometries()[model], BLOCK, longest) + more
        spec = ByteEngineSpec(role=role, tensor_parallel=size, num_blocks=room, device=device, **common)
        made.append(kind(address, f"transfer-{role}", spec, PATIENCE_S, PATIENCE_S))
    for engine in made:
        engine.wait_ready()
    return made


def hand_over(
    p: Engine, d: Engine, name: str, length: int, timed: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Hand one prompt over from P to D. Returns the answer of `Timed.transferred`.

    A load that is measured is one long step of D, and many steps of P.
    """
    params, deadline = PREFILL, time.monotonic() + PATIENCE_S
    for engine, peer, id in ((p, d, f"{name}-{ON_P}"), (d, p, f"{name}-{ON_D}")):
        more = {"kv_transfer_params": params, "owners": np.zeros(length, dtype=int), "number": 0}
        engine.add(ByteRequest(id=id, tokens=tokens(length), max_tokens=1, salt=name, **more))
        if timed and engine is d:
            d.call("expect")
        ends: list[Any] = []
        while not ends:
            engine.send("step", 0.1)
            while not engine.process.connection.poll() and time.monotonic() < deadline:
                peer.step()
            ends = [output for output in engine.answer("step").outputs if output.id == id and output.finish]
            if time.monotonic() > deadline or "error" in [end.finish for end in ends]:
                raise SystemExit(
                    f"{name} failed on {engine.role}: it is {engine.trace(id).status}; "
                    f"{engine.process.last_lines()[-1:]}"
                )
        params = ends[0].kv_transfer_params
    play(partial(until_released, seconds=PATIENCE_S), p, d)
    return d.call("transferred") if timed else (counted, counted)


def raw(address: str, nbytes: int, device: str) -> list[np.ndarray]:
    """Measure some reads of so many bytes between two agents without a connector."""
    p, d = (
        ChildProcess(address, f"raw-{role}", "bench_transfer:serve_raw", (nbytes, device), PATIENCE_S)
        for role in "PD"
    )
    try:
        d.receive(PATIENCE_S)
        d.connection.send((*p.receive(PATIENCE_S), REPEAT + 1))
        spent: list[np.ndarray] = d.receive(PATIENCE_S)
    finally:
        p.end(), d.end()
    return spent


def planned(model: str, length: int, windows: bool = True) -> int:
    """Bytes of the blocks that the reference connector orders of a prompt of which D has nothing."""
    total, fresh = (
        0,
        [SimpleNamespace(block_id=1 + i, is_null=False, block_hash=None) for i in range(-(-length // BLOCK))],
    )
    for kind in (layer.kind for layer in expand_layers(load_geometries()[model])):
        part = _group_load(
            Group(BLOCK, window=kind.window if windows and isinstance(kind, SlidingWindow) else 0),
            fresh,
            length - 1,
        )
        # K and V, two bytes each
        total += (-(-part.stop // BLOCK) - part.start // BLOCK) * BLOCK * kind.kv_heads * kind.head_size * 4
    return total


def main(device: str = "cpu", rounds: str = "5") -> None:
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    zygote = launch_zygote(
        [], {word for model, *_ in CASES for word in load_geometries()[model].architectures}
    )
    try:
        wait_for_zygote(zygote.address, PATIENCE_S)
        print(HEAD, flush=True)
        moved = {case: compare(zygote.address, case, device, int(rounds)) for case in CASES}
    finally:
        zygote.close()
    print("\n| model | tokens | moved | all layers full | part |\n|---|---|---|---|---|")
    for model, length in (
        (m, n) for m in ("gpt_oss_20b", "gemma3_27b") for n in (1 << 10, 1 << 12, 1 << 13, 1 << 15, 1 << 17)
    ):
        ours, whole = planned(model, length), planned(model, length, windows=False)
        print(f"| {model} | {length} | {ours / 2**20:.1f} MB | {whole / 2**20:.1f} MB | {ours / whole:.1%} |")
        # the most of a last block that is left unread where it is the end of a run
        token = planned(model, 2) // BLOCK
        if not 0 <= ours - moved.get((model, "P1D1", length), ours) <= token:
            raise SystemExit(
                f"{model}: {ours} bytes should have moved, and NIXL counts {moved[model, 'P1D1', length]}"
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
