"""Attack the reference connector with a key: what D reads, what crashes, and what it costs healthy requests.

The script tests nothing on the clock: docs/security.md has the numbers.

    python ci/reference/attack.py [MESSAGES, default 10000]

P and D are byte engines over real NIXL that step as vLLM's own loop does (bench_first_token.py). They share a
key, and their leases are short. A client of the API gives D hand-overs in which one field is changed,
hand-overs of other prompts, old ones, and made up ones that name a port that never answers. D must load none
of them, and compute each prompt. Then other processes send messages to P's side channel that are none, and
open connections on which they say nothing, while healthy requests are handed over. Exit 1: D has read what it
should not, or has connected to a port that only a client named. An engine that is gone raises.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from bench_first_token import MODEL, OURS, PATIENCE_S, Engine, hand_over
from bench_transfer import engines

from model_matrix import load_geometries
from pytest_kvconform.rigs.bench import launch_zygote, wait_for_zygote
from pytest_kvconform.rigs.bytes.messages import ByteRequest
from pytest_kvconform.rigs.engine.messages import PREFILL
from pytest_kvconform.rigs.peers.hostile_clients import HostileClient, malformed_messages
from pytest_kvconform.rigs.scenario import tokens

LENGTH, HEALTHY, LEASE_S, SILENT = (
    512,
    40,
    3.0,
    100,
)  # tokens; hand-overs; seconds; connections that say nothing
STATISTICS = "remote_prefill_cached_tokens"  # vLLM adds it for its own statistics; no connector reads it
FRAMES = (1, 64, 65536)  # sizes of the random frames that seeds of malformed messages have


def ask(engine: Engine, name: str, prompt: tuple[int, ...], params: dict[str, Any], salt: str) -> Any:
    """Let an engine compute a prompt. Returns its params."""
    engine.call("until", time.monotonic() + PATIENCE_S)
    owners = np.zeros(len(prompt), dtype=int)
    request = ByteRequest(
        id=name, tokens=prompt, max_tokens=1, salt=salt, owners=owners, number=0, kv_transfer_params=params
    )
    return engine.call("finish", request)[2]


def changed(value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str | bytes):
        return value[:-1] + (b"x" if isinstance(value, bytes) else "x")
    if isinstance(value, list | tuple):
        return [changed(value[0]), *value[1:]] if value else [1]
    return {key: changed(one) for key, one in value.items()} if isinstance(value, dict) else 1


def hand_overs(p: Engine, d: Engine, silent_port: int) -> dict[str, tuple[int, int]]:
    """Kind of attack -> hand-overs that D was given, and how many it loaded."""
    number = itertools.count()

    def given(params: dict[str, Any], prompt: tuple[int, ...], salt: str) -> bool:
        """Whether D loads what params describe."""
        name = f"attack-{next(number)}"
        d.call("arrange", False)
        p.send("serve")  # P steps beside D, until D has read or the lease is over
        ask(d, name, prompt, params, salt)
        d.call("serve"), p.answer("serve")
        return d.trace(name).external_tokens > 0

    def handed(salt: str) -> dict[str, Any]:
        params: dict[str, Any] = ask(p, f"tenant-{next(number)}", tokens(LENGTH), PREFILL, salt)
        return params

    mine, other = tokens(LENGTH), tokens(LENGTH, seed=1)
    if not given(handed("a"), mine, "a"):
        raise SystemExit("D loads nothing of what P has signed")
    fields = [key for key in handed("b") if key not in {*PREFILL, STATISTICS}]
    tried = {
        "one field changed": [
            given(params | {key: changed(params[key])}, mine, "c")
            for key in fields
            for params in [handed("c")]
        ],
        "one field missing": [
            given({name: value for name, value in params.items() if name != key}, mine, "d")
            for key in fields
            for params in [handed("d")]
        ],
        "of another prompt": [given(handed("e"), other, "e") for _ in range(4)],
        "of another tenant": [given(handed("f"), mine, "g") for _ in range(4)],
        "a port that never answers": [
            given(handed("h") | {"remote_host": "127.0.0.1", "remote_port": silent_port}, mine, "h")
            for _ in range(4)
        ],
    }
    old = [handed("i") for _ in range(4)]
    p.call("serve")
    time.sleep(LEASE_S)
    tried["expired"] = [given(params, mine, "i") for params in old]
    return {kind: (len(loaded), sum(loaded)) for kind, loaded in tried.items()}


def send(port: int, count: int, seed: int) -> None:
    """Send messages that are none to a side channel, and keep connections open that say nothing."""
    silent = [socket.create_connection(("127.0.0.1", port), PATIENCE_S) for _ in range(SILENT)]
    client = HostileClient(port)
    valid = [[os.urandom(size)] for size in FRAMES]
    for frames in malformed_messages(valid, count, seed):
        client.send(frames)
    time.sleep(1.0)  # ZeroMQ sends in the background
    client.close()
    for one in silent:
        one.close()


def healthy(p: Engine, d: Engine, name: str, until: Any) -> np.ndarray:
    """Milliseconds of hand-overs, from P's last step to D's first token."""
    took = []
    for number in itertools.count():
        p.call("arrange", True), d.call("arrange", True)
        took.append(hand_over(p, d, f"{name}-{number}", LENGTH)[0])
        if until(number + 1):
            return np.array(took)
    raise AssertionError


def main(messages: str = "10000") -> int:
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    zygote = launch_zygote([], set(load_geometries()[MODEL].config["architectures"]))
    silent, many = socket.create_server(("127.0.0.1", 0)), multiprocessing.get_context("spawn")
    silent.setblocking(False)
    try:
        wait_for_zygote(zygote.address, PATIENCE_S)
        with tempfile.TemporaryDirectory() as folder:
            key = Path(folder, "kv.key")
            key.write_text(os.urandom(32).hex())
            extra = {"key": f"file:{key}", "kv_lease_duration": LEASE_S}
            config = json.dumps({"kv_connector_extra_config": extra})
            p, d = engines(zygote.address, OURS, (MODEL, "P1D1", LENGTH), "cpu", Engine, config)
        hand_over(p, d, "first", LENGTH)
        before = healthy(p, d, "before", lambda number: number >= HEALTHY)
        loaded = hand_overs(p, d, silent.getsockname()[1])
        port = ask(p, "port", tokens(LENGTH), PREFILL, "port")["remote_port"]
        p.call("serve")  # until the lease is over
        attackers = [many.Process(target=send, args=(port, int(messages) // 2, seed)) for seed in (1, 2)]
        for one in attackers:
            one.start()
        during = healthy(
            p, d, "during", lambda number: number >= HEALTHY and not any(one.is_alive() for one in attackers)
        )
        for one in attackers:
            one.join(PATIENCE_S)
        after = healthy(p, d, "after", lambda number: number >= HEALTHY)
        p.end(), d.end()
    finally:
        zygote.close()
    try:
        silent.accept()[0].close()
        reached = "D has connected to a port that only the client named"
    except BlockingIOError:
        reached = ""
    print("| hand-overs of an attacker | given to D | loaded by D |\n|---|---|---|")
    for kind, (given, read) in loaded.items():
        print(f"| {kind} | {given} | {read} |")
    print("\n| healthy hand-overs of 512 tokens | number | median ms | longest ms |\n|---|---|---|---|")
    for word, took in (("before", before), (f"during {messages} messages", during), ("after", after)):
        print(f"| {word} | {len(took)} | {np.median(took):.1f} | {took.max():.1f} |")
    print(
        f"delay of the slowest: {during.max() - before.max():+.1f} ms; of the median "
        f"{np.median(during) - np.median(before):+.1f} ms"
    )
    print(reached or "D has connected to no port that only a client named")
    return int(bool(reached) or any(read for _, read in loaded.values()))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
