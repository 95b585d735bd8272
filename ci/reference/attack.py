"""Attack the reference connector with a key: what D reads, what crashes, and what it costs healthy requests.

The script tests nothing on the clock: docs/security.md has the numbers.

    python ci/reference/attack.py [MESSAGES, default 10000]

P and D are byte engines over real NIXL that step as vLLM's own loop does (bench_first_token.py). They share
a key, and their leases are short. A client of the API gives D hand-overs in which a field is changed,
hand-overs of other prompts, of other tenants and of their blocks, old ones, ones that D has loaded before,
and made up ones that name a port that never answers. D must load none of them, and compute each prompt.

While healthy requests are handed over, other processes attack P's side channel. They send malformed messages,
ask for the ranks without the key, send proofs of earlier handshakes, and open connections on which they say
nothing. Then D also gets hand-overs of a peer that has the key and never answers.

Exit 1: D has loaded what it should not, or has connected to a port that only a client named, or P has
answered with more than a challenge or a refusal. An engine that is gone raises.
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
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import zmq
from bench_first_token import MODEL, OURS, PATIENCE_S, Engine, hand_over
from bench_transfer import engines

from model_matrix import load_geometries
from pytest_kvconform.rigs.bench import launch_zygote, wait_for_zygote
from pytest_kvconform.rigs.bytes.messages import ByteRequest
from pytest_kvconform.rigs.cluster.peers.hostile_clients import malformed_messages
from pytest_kvconform.rigs.engine.messages import PREFILL
from pytest_kvconform.rigs.scenario import tokens
from reference_connector.messages import (
    VERSION,
    Answer,
    Ask,
    Challenge,
    Handoff,
    Proof,
    Refusal,
    Sealed,
    decode,
    encode,
)
from reference_connector.options import Options
from reference_connector.trust.authentication import Trust, trust

LENGTH, HEALTHY, LEASE_S = 512, 40, 3.0  # tokens; hand-overs; seconds
SILENT, SHORT, WAITING = 100, 24, 4  # connections that say nothing; loads of so many tokens that wait at once
STATISTICS = "remote_prefill_cached_tokens"  # vLLM adds it for its own statistics; no connector reads it
FRAMES = (1, 64, 65536)  # sizes of the random frames that seeds of malformed messages have


def byte_request(name: str, prompt: tuple[int, ...], params: dict[str, Any], salt: str) -> ByteRequest:
    owners = np.zeros(len(prompt), dtype=int)
    return ByteRequest(
        id=name, tokens=prompt, max_tokens=1, salt=salt, owners=owners, number=0, kv_transfer_params=params
    )


def ask(engine: Engine, name: str, prompt: tuple[int, ...], params: dict[str, Any], salt: str) -> Any:
    """Let an engine compute a prompt. Returns its params."""
    engine.call("until", time.monotonic() + PATIENCE_S)
    return engine.call("finish", byte_request(name, prompt, params, salt))[3]


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
        return d.trace(name).computed_tokens < len(prompt)

    def handed(salt: str) -> dict[str, Any]:
        params: dict[str, Any] = ask(p, f"tenant-{next(number)}", tokens(LENGTH), PREFILL, salt)
        return params

    mine, other = tokens(LENGTH), tokens(LENGTH, seed=1)
    theirs = handed("a")
    place = {key: theirs[key] for key in ("remote_block_ids", "remote_lease", "remote_request_id")}
    fields = [key for key in handed("b") if key not in ("do_remote_decode", "do_remote_prefill", STATISTICS)]
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
        "another tenant's blocks": [given(handed("g") | place, mine, "g") for _ in range(4)],
        "a port that never answers": [
            given(handed("h") | {"remote_host": "127.0.0.1", "remote_port": silent_port}, mine, "h")
            for _ in range(4)
        ],
    }
    again = handed("r")
    if not given(again, mine, "r"):
        raise SystemExit("D loads nothing of what P has signed")
    # P has the blocks under another lease by then, and steps: without that a read may not end.
    tried["loaded before"] = [given(again, mine, "r") for _ in range(2) if handed("s")]
    old = [handed("i") for _ in range(4)]
    p.call("serve")
    time.sleep(LEASE_S)
    tried["expired"] = [given(params, mine, "i") for params in old]
    return {kind: (len(loaded), sum(loaded)) for kind, loaded in tried.items()}


def send(port: int, count: int, seed: int, known: list[bytes], answers: Any) -> None:
    """Send messages to a side channel, and keep connections open that say nothing.

    `known`: well-formed ones, which every fourth message is. `answers`: a queue for their kinds, counted.
    """
    silent = [socket.create_connection(("127.0.0.1", port), PATIENCE_S) for _ in range(SILENT)]
    seeds = [[os.urandom(size)] for size in FRAMES] + [[b"", message] for message in known]
    malformed, wellformed = malformed_messages(seeds, count, seed), itertools.cycle(known)
    kinds, asked = Counter[str](), 0
    with zmq.Context() as context, context.socket(zmq.DEALER) as noise, context.socket(zmq.DEALER) as asking:
        for dealer in (noise, asking):  # P ends the connection of the first one now and then
            dealer.setsockopt(zmq.LINGER, 10_000)
            dealer.setsockopt(zmq.SNDHWM, 0)
            dealer.setsockopt(zmq.RCVHWM, 0)
            dealer.connect(f"tcp://127.0.0.1:{port}")
        for number in range(count):
            if number % 4:
                noise.send_multipart(next(malformed))
            else:
                asking.send_multipart([b"", next(wellformed)])
                asked += 1
        while kinds.total() < asked and asking.poll(1000 * PATIENCE_S):
            reply = decode(asking.recv_multipart()[-1], Answer | Sealed | Challenge | Refusal)
            kinds[type(reply).__name__] += 1
    for one in silent:
        one.close()
    answers.put(kinds)


def healthy(
    p: Engine, d: Engine, name: str, until: Callable[[int], bool], before: Callable[[], None] = lambda: None
) -> np.ndarray:
    """Milliseconds of hand-overs, from P's last step to D's first token. `before`: called before each."""
    took = []
    for number in itertools.count():
        before()
        p.call("arrange", True), d.call("arrange", True)
        took.append(hand_over(p, d, f"{name}-{number}", LENGTH)[0])
        if until(number + 1):
            return np.array(took)
    raise AssertionError


def give_silent_peers(d: Engine, key: Trust, port: int) -> None:
    """Let D wait for loads from peers that have the key and never answer, each another life of one engine."""
    prompt = tokens(SHORT)
    for _ in range(WAITING):
        name = os.urandom(8).hex()
        handoff = Handoff(
            do_remote_prefill=True,
            remote_engine_id="silent",
            remote_incarnation=name,
            remote_request_id=name,
            remote_host="127.0.0.1",
            remote_port=port,
            remote_lease=1,
            remote_lease_duration=LEASE_S,
            remote_num_tokens=SHORT,
            remote_block_ids=[[1, 2]],
            remote_first_tokens=[0],
        )
        request = SimpleNamespace(num_prompt_tokens=SHORT, prompt_token_ids=list(prompt), cache_salt=name)
        signed = msgspec.structs.asdict(key.sign(handoff, request, PATIENCE_S))
        d.add(byte_request(f"silent-{name}", prompt, signed, name))


def main(messages: str = "10000") -> int:
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    zygote = launch_zygote([], load_geometries()[MODEL].architectures)
    many, took = multiprocessing.get_context("spawn"), dict[str, np.ndarray]()
    forbidden, silent = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
    for one in (forbidden, silent):
        one.setblocking(False)
    try:
        wait_for_zygote(zygote.address, PATIENCE_S)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "kv.key")
            file.write_text(os.urandom(32).hex())
            extra = {"key": f"file:{file}", "kv_lease_duration": LEASE_S, "handshake_timeout": 1.0}
            config = {"kv_connector_extra_config": extra, "kv_load_failure_policy": "recompute"}
            key = trust(Options(key=extra["key"]), "127.0.0.1", {})
            p, d = engines(zygote.address, OURS, (MODEL, "P1D1", LENGTH), "cpu", Engine, json.dumps(config))
        hand_over(p, d, "first", LENGTH)
        took["before"] = healthy(p, d, "before", lambda number: number >= HEALTHY)
        loaded = hand_overs(p, d, forbidden.getsockname()[1])
        place = ask(p, "place", tokens(LENGTH), PREFILL, "place")
        p.call("serve")  # until the lease is over
        engine, port = (place["remote_engine_id"], place["remote_incarnation"]), place["remote_port"]
        about = (*engine, os.urandom(32), os.urandom(32))  # of an earlier handshake
        known = [encode(Ask(VERSION, *engine, about[2])), encode(Proof(key.mac("question", *about)))]
        answers = many.Queue()
        attackers = [
            many.Process(target=send, args=(port, int(messages) // 2, seed, known, answers))
            for seed in (1, 2)
        ]
        for one in attackers:
            one.start()
        took[f"during {messages} messages"] = healthy(
            p, d, "during", lambda number: number >= HEALTHY and not any(one.is_alive() for one in attackers)
        )
        kinds = answers.get(timeout=PATIENCE_S) + answers.get(timeout=PATIENCE_S)
        for one in attackers:
            one.join(PATIENCE_S)
        took["after"] = healthy(p, d, "after", lambda number: number >= HEALTHY)
        took[f"while {WAITING} loads wait for peers that never answer"] = healthy(
            p,
            d,
            "beside",
            lambda number: number >= HEALTHY // 2,
            lambda: give_silent_peers(d, key, silent.getsockname()[1]),
        )
        p.end(), d.end()
    finally:
        zygote.close()
    reached = {name: is_reached(one) for name, one in (("forbidden", forbidden), ("silent", silent))}
    if not reached["silent"]:
        raise SystemExit("D has not tried to meet a peer that has the key")
    print("| hand-overs of an attacker | given to D | loaded by D |\n|---|---|---|")
    for kind, (given, read) in loaded.items():
        print(f"| {kind} | {given} | {read} |")
    print("\n| healthy hand-overs of 512 tokens | number | median ms | longest ms |\n|---|---|---|---|")
    for word, times in took.items():
        print(f"| {word} | {len(times)} | {np.median(times):.1f} | {times.max():.1f} |")
    print(f"\nanswers of P's side channel: {', '.join(f'{n} {kind}' for kind, n in sorted(kinds.items()))}")
    print(f"D has connected to a port that only a client named: {'yes' if reached['forbidden'] else 'no'}")
    told = set(kinds) - {"Challenge", "Refusal"}
    return int(reached["forbidden"] or bool(told) or any(read for _, read in loaded.values()))


def is_reached(listening: socket.socket) -> bool:
    """Whether a connection waits to be accepted."""
    try:
        listening.accept()[0].close()
        return True
    except BlockingIOError:
        return False


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
