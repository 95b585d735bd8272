"""The key of a deployment: what D does not read, whom P does not answer, and what goes over the wire."""

from __future__ import annotations

import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from reference_connector.handshake import HandshakeError, Listener, fetch
from reference_connector.messages import (
    VERSION,
    Address,
    Answer,
    Ask,
    Challenge,
    Orders,
    Proof,
    Rank,
    Refusal,
    Sealed,
    decode,
    encode,
)
from reference_connector.options import BadOption, Options
from reference_connector.scheduler import Scheduler
from reference_connector.trust.authentication import ANYBODY, THIS_MACHINE, Trust, trust
from tests.reference.doubles import ADDRESS, FULL, WINDOW, Wire, WorkerEngine, box, request, tables

KEY, OTHER = Trust(b"k" * 32), Trust(b"o" * 32)
RANKS = (Rank(b"agent", ("DRAM", 0), 8192, (box(np.zeros((10, 64), dtype=np.uint8)),)),)
PATIENCE_S = 20.0


# ---- hand-overs


def half(trusted: Trust, *groups: Any) -> Scheduler:
    return Scheduler(groups or (FULL,), dict(ADDRESS), 0, True, Options(kv_lease_duration=30.0), trusted)


def handed_over_before(seconds: float) -> dict[str, Any]:
    now = time.time()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: now - seconds)
        return handed_over()


def handed_over(trusted: Trust = KEY, *groups: Any, **more: Any) -> dict[str, Any]:
    """The params that a P returns for a prompt of 40 tokens, 0 to 39, under a lease of 30 s."""
    p = half(trusted, *groups)
    asked = request("p", 40, {"do_remote_decode": True})
    vars(asked).update(more)
    p.on_new_request(asked)
    asked.num_computed_tokens = asked.num_prompt_tokens
    _, params = p.request_finished(asked, tuple([1, 2, 3] for _ in groups or (FULL,)))
    return params


def loads(params: dict[str, Any], trusted: Trust = KEY, *groups: Any, **more: Any) -> bool:
    """Whether a D loads what these params describe, for the same prompt."""
    d = half(trusted, *groups)
    asked = request("d", 40, params)
    vars(asked).update(more)
    d.on_new_request(asked)
    tokens, _ = d.get_num_new_matched_tokens(asked, 0)
    if tokens:
        d.update_state_after_alloc(asked, tables(*("nnn" for _ in groups or (FULL,))), tokens)
    return bool(d.take_orders().loads)


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW)])
def test_what_p_signed_is_loaded(groups: Any) -> None:
    assert loads(handed_over(KEY, *groups), KEY, *groups)
    assert loads(handed_over(ANYBODY, *groups), ANYBODY, *groups)


@pytest.mark.parametrize("key", sorted(set(handed_over()) - {"do_remote_prefill", "do_remote_decode"}))
def test_no_field_can_be_changed(key: str) -> None:
    params = handed_over()
    match params[key]:
        case [[*_]]:
            params[key] = [[4, 5, 6]]  # another request's blocks
        case [int(_)]:
            params[key] = [16]
        case int(number) | float(number):
            params[key] = number + 1
        case str(text):
            params[key] = text[:-1] + ("0" if text[-1] != "0" else "1")
    assert not loads(params)


@pytest.mark.parametrize(
    ("params", "why"),
    [
        (lambda: handed_over(OTHER), "the signature is not one of this deployment's key"),
        (lambda: handed_over(ANYBODY), "the signature is not one of this deployment's key"),
        (lambda: handed_over() | {"remote_signature": "é" * 9}, "the signature is not one"),
        (lambda: handed_over() | {"remote_signature": "0" * 65}, "Expected `str` of length <= 64"),
        (lambda: handed_over_before(90), r"they expired (58|59|60) s ago, by the clock of this host"),
    ],
)
def test_d_computes_what_is_not_signed(
    params: Callable[[], dict[str, Any]], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    given = params()
    assert not loads(given)
    assert any("request d is computed by D: kv_transfer_params: " in text for text in caplog.messages)
    assert re.search(why, caplog.text), caplog.text


@pytest.mark.parametrize(
    "other",
    [
        {"prompt_token_ids": [7, *range(1, 40)]},
        {"cache_salt": "another tenant"},
        {"lora_request": type("Lora", (), {"lora_name": "another"})},
        {"mm_features": [type("Image", (), {"identifier": "another image"})]},
    ],
)
def test_a_hand_over_serves_no_other_prompt(other: dict[str, Any]) -> None:
    assert not loads(handed_over(), **other)
    assert loads(handed_over(**other), **other)


def test_prompts_that_are_embeddings() -> None:
    import torch

    embeds = torch.arange(40 * 3, dtype=torch.bfloat16).reshape(40, 3)
    given: dict[str, Any] = {"prompt_token_ids": None, "prompt_embeds": embeds}
    assert loads(handed_over(**given), **given)
    assert not loads(handed_over(**given), prompt_token_ids=None, prompt_embeds=embeds + 1)


@pytest.mark.parametrize(
    ("peers", "host", "may"),
    [
        ((), "10.1.2.3", True),
        (("10.0.0.0/8",), "10.1.2.3", True),
        (("10.0.0.0/8", "p-0.prefill"), "p-0.prefill", True),
        (("fd00::/8",), "fd00::1", True),
        (("10.0.0.0/8",), "11.1.2.3", False),
        (("10.0.0.0/8",), "p-0.prefill", False),
        (("10.0.0.0/8",), "fd00::1", False),
        (THIS_MACHINE, "127.0.0.1", True),
        (THIS_MACHINE, "169.254.169.254", False),
    ],
)
def test_d_connects_to_no_host_that_is_not_allowed(peers: tuple[str, ...], host: str, may: bool) -> None:
    for key in (b"", KEY.key):
        p = half(Trust(key))
        p._address["remote_host"] = host
        asked = request("p", 40, {"do_remote_decode": True})
        _, params = p.request_finished(asked, ([1, 2, 3],))
        assert loads(params, Trust(key, peers)) == may


# ---- the handshake


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener(Address("127.0.0.1", 0, "p", "first life"), RANKS, KEY)
    yield made
    made.close()


def address(listener: Listener) -> Address:
    return Address("127.0.0.1", listener.port, "p", "first life")


def ask(listener: Listener, question: Any, peer: bytes = b"peer") -> Any:
    return decode(listener.reply(encode(question), peer), Answer | Challenge | Sealed | Refusal)


def test_ranks_for_who_has_the_key(listener: Listener) -> None:
    assert fetch(address(listener), PATIENCE_S, KEY) == RANKS


@pytest.mark.parametrize(
    ("trusted", "why"),
    [
        (ANYBODY, "refused: the key of this deployment is another one"),
        (OTHER, "refused: the key of this deployment is another one"),
    ],
)
def test_no_rank_without_the_key(listener: Listener, trusted: Trust, why: str) -> None:
    with pytest.raises(HandshakeError, match=why):
        fetch(address(listener), PATIENCE_S, trusted)


def test_a_proof_serves_once_and_for_its_connection_alone(listener: Listener) -> None:
    question = Ask(VERSION, "p", "first life", b"random")
    about = ("p", "first life", b"random", ask(listener, question).random)
    proof = Proof(KEY.mac("question", *about))
    assert isinstance(ask(listener, proof, b"another"), Refusal)
    assert isinstance(ask(listener, proof), Sealed)
    assert isinstance(ask(listener, proof), Refusal), "replayed"
    assert isinstance(ask(listener, question), Challenge)
    assert isinstance(ask(listener, proof), Refusal), "replayed in another handshake"
    about = ("p", "first life", b"random", ask(listener, question).random)
    assert isinstance(ask(listener, Proof(KEY.mac("answer", *about))), Refusal), "of another purpose"


@pytest.mark.parametrize("fake", ["no key", "unsealed", "another key", "replayed"])
def test_d_looks_at_no_rank_of_who_has_no_key(fake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that took P's port sends ranks of its own, or those that P once sent."""
    port = Listener(Address("127.0.0.1", 0, "p", "first life"), RANKS, KEY if fake == "replayed" else OTHER)
    right, sealed = port.reply, list[bytes]()

    def reply(question: bytes, peer: bytes = b"") -> bytes:
        if fake == "no key" or (fake == "unsealed" and isinstance(decode(question, Ask | Proof), Proof)):
            return encode(Answer(list(RANKS)))
        if fake == "another key" and isinstance(decode(question, Ask | Proof), Proof):
            return encode(Sealed(encode(Answer(list(RANKS))), b"m" * 32))
        if fake == "replayed" and isinstance(decode(question, Ask | Proof), Proof):
            sealed.append(right(question, peer))
            return sealed[0]
        return right(question, peer)

    monkeypatch.setattr(port, "reply", reply)
    try:
        if fake == "replayed":
            assert fetch(address(port), PATIENCE_S, KEY) == RANKS
        with pytest.raises(HandshakeError):
            fetch(address(port), PATIENCE_S, KEY)
    finally:
        port.close()


def test_challenges_that_nobody_answers_are_forgotten(listener: Listener) -> None:
    for number in range(3000):
        ask(listener, Ask(VERSION, "p", "first life", b"random"), str(number).encode())
    assert len(listener._challenged) == 1024
    assert fetch(address(listener), PATIENCE_S, KEY) == RANKS


def test_the_key_goes_neither_over_the_wire_nor_into_a_log(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, right = list[bytes](), listener.reply

    def reply(question: bytes, peer: bytes) -> bytes:
        said.extend((question, right(question, peer)))
        return said[-1]

    monkeypatch.setattr(listener, "reply", reply)
    assert fetch(address(listener), PATIENCE_S, KEY) == RANKS
    assert len(said) == 4 and not any(b"kkkk" in text for text in said)
    assert "kkkk" not in repr(KEY) and "kkkk" not in str(handed_over())


# ---- the option


def test_where_the_key_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "kv.key"
    file.write_text("k" * 32 + "\n")
    monkeypatch.setitem(os.environ, "KV_KEY", "k" * 32)
    for key in (f"file:{file}", "env:KV_KEY"):
        assert trust(Options(key=key), "10.1.2.3", {}) == KEY
    assert trust(Options(key="none"), "10.1.2.3", {}) == ANYBODY
    assert trust(Options(key="none", peers=("10.0.0.0/8",)), "10.1.2.3", {}) == Trust(peers=("10.0.0.0/8",))


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.1.1", "::1"])
def test_without_a_key_peers_are_on_this_machine(host: str) -> None:
    assert trust(Options(), host, {}) == Trust(peers=THIS_MACHINE)


@pytest.mark.parametrize(
    ("key", "host", "why"),
    [
        (
            "",
            "10.1.2.3",
            r"other machines reach the side channel on 10\.1\.2\.3, and there is no key",
        ),
        ("", "0.0.0.0", "and there is no key"),
        ("", "p-0.prefill", "and there is no key"),
        ("secret", "localhost", r"key is 'file:PATH', 'env:NAME' or 'none'$"),
        ("file:", "localhost", "key is 'file:PATH'"),
        ("file:/no/such/file", "localhost", "the key cannot be read from 'file:/no/such/file'"),
        ("env:NO_SUCH_VARIABLE", "localhost", "the key cannot be read from 'env:NO_SUCH_VARIABLE'"),
        ("env:SHORT_KEY", "localhost", "shorter than 32 bytes"),
    ],
)
def test_a_wrong_key_is_named(key: str, host: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHORT_KEY", "secret")
    with pytest.raises(BadOption, match=why) as raised:
        trust(Options(key=key), host, {})
    assert "\n" not in str(raised.value)


# ---- an attacker, beside requests of users


def test_an_attacker_reads_nothing_and_holds_nobody(make: Callable[..., WorkerEngine], wire: Wire) -> None:
    p, d = make("p", 7, trusted=KEY), make("d", 0, trusted=KEY)
    stop, answered = threading.Event(), list[bytes]()

    def attack() -> None:
        r = random.Random(5)
        real = encode(Ask(VERSION, "p", "p", b"x"))
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(f"tcp://127.0.0.1:{p.listener.port}")
            for number in range(10_000):
                forged = (real, encode(Proof(r.randbytes(32))), r.randbytes(r.randrange(300)), real[:9])
                dealer.send_multipart([b"", forged[number % 4]])
            for _ in range(10_000):
                assert dealer.poll(PATIENCE_S * 1000)
                answered.append(dealer.recv_multipart()[-1])
        stop.set()

    attacker = threading.Thread(target=attack, daemon=True)
    attacker.start()
    longest, ended, number = 0.0, list[str](), 0
    while not stop.is_set() or not number:
        number += 1
        d.worker.start(Orders(loads={str(number): p.load(number, [5, 2], [3, 6])}))
        while str(number) not in ended:
            began = time.thread_time()
            p.worker.start(Orders())
            found = d.worker.results()
            longest = max(longest, time.thread_time() - began)
            assert not found.failed
            ended += found.received
            time.sleep(0.001)
    attacker.join()
    assert (d.pool[3] == 7).all() and longest < 0.1
    kinds = {type(decode(text, Answer | Sealed | Challenge | Refusal)) for text in answered}
    assert len(answered) == 10_000 and kinds == {Challenge, Refusal}, "nobody got the ranks"
