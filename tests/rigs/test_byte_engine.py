"""The byte engine by itself: a right hand-over is clean, and a single wrong byte is found.

This holds whatever the scheduler does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from model_matrix.geometries import load_geometries
from pytest_kvconform.kvspace.kinds import GARBLED
from pytest_kvconform.rigs.bytes.messages import PACKED, Check
from pytest_kvconform.rigs.bytes.overwriter import NUMBERS
from pytest_kvconform.rigs.launch import launch_zygote, wait_for_zygote

from .byte_pair import Pair, prompt

GEOMETRIES = ("llama3_1_8b", "gemma3_1b", "kimi_linear_48b")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of one zygote, from which the engines of every test are forked."""
    zygote = launch_zygote(
        [], {word for name in GEOMETRIES for word in load_geometries()[name].architectures}
    )
    wait_for_zygote(zygote.address, 90.0)
    yield zygote.address
    assert zygote.close() == []


@pytest.fixture
def start(address: str) -> Iterator[Callable[..., Pair]]:
    """Begin a pair of engines that ends with the test."""
    pairs: list[Pair] = []

    def begin(*args: Any, **kwargs: Any) -> Pair:
        pairs.append(Pair(address, *args, **kwargs))
        return pairs[-1]

    yield begin
    for pair in pairs:
        pair.end()


@pytest.fixture(scope="module")
def llama(address: str) -> Iterator[Pair]:
    """P at tensor parallel size 2, D at 1."""
    pair = Pair(address, "llama3_1_8b", (2, 1))
    yield pair
    pair.end()


@pytest.fixture(autouse=True)
def _clean_pools(request: pytest.FixtureRequest) -> None:
    """Each test of shared engines begins with empty pools and prefix caches."""
    if "llama" in request.fixturenames:
        pair = request.getfixturevalue("llama")
        pair.requests.clear()
        for engine in pair.engines:
            engine.poison()
            engine.audit()


def _assert_clean(checks: tuple[Check, ...], ranks: int, tokens: int) -> None:
    assert [check.rank for check in checks] == list(range(ranks))
    for check in checks:
        assert check.clean, check.pool.words
        assert check.computed == tokens and check.rows_due > 0 and check.bytes_due > 0


@pytest.mark.parametrize("length", [1, 31, 32, 33, 300])
def test_hand_over_is_clean(llama: Pair, length: int) -> None:
    (checks,) = llama.hand_over(prompt(length))
    if length > 1:  # of one token D loads the KV and then computes it again
        _assert_clean(checks, 1, length - 1)
    assert llama.audit() == []


@pytest.mark.parametrize(("topology", "ranks"), [((1, 2), 2), ((2, 4), 4)])
def test_clean_on_every_rank(start: Callable[..., Pair], topology: tuple[int, int], ranks: int) -> None:
    pair = start("llama3_1_8b", topology)
    (checks,) = pair.hand_over(prompt(200))
    _assert_clean(checks, ranks, 199)
    assert pair.audit() == []


def test_pools_take_memory_when_they_are_written(llama: Pair) -> None:
    maps = [line.split() for line in Path(f"/proc/{llama.d.process.pid}/maps").read_text().splitlines()]
    ends = [
        [int(end, 16) for end in words[0].split("-")] for words in maps if "/memfd:kvconform-poison" in words
    ]
    pool = 30 * 32 * 8 * 2 * 256 * 32  # blocks, tokens, heads, planes, bytes, layers
    mapped = sum(end - start for start, end in ends)
    # the pool and its shadow; some builds of Python have no files in memory
    assert mapped >= 2 * pool if hasattr(os, "memfd_create") else mapped == 0


@pytest.mark.parametrize("side", ["p", "d"])
def test_flipped_byte_is_found_where_it_is(llama: Pair, side: str) -> None:
    names = llama.decode([prompt(100)], llama.prefill(prompt(100)), max_tokens=3)
    _assert_clean(llama.d.pop_checks(names[0]), 1, 99)
    engine = getattr(llama, side)
    assert all(check.clean for check in engine.audit())
    # A block of this geometry is 32 tokens x heads x 2 planes x 256 bytes.
    token = 2 * 256 * (4 if side == "p" else 8)
    block = next(b for b in range(1, 24) if _holds(engine, b))
    engine.flip(0, "model.layers.3.self_attn.attn", block, 5 * token + 2 * 512 + 256 + 17)
    found = [check for check in engine.audit() if not check.clean]
    assert len(found) == 1 and found[0].rank == 0 and found[0].pool.words == {GARBLED: 1}
    runs = found[0].pool.runs[found[0].pool.runs["kind"] == GARBLED]
    region = found[0].pool.regions[int(runs["region"][0])]
    assert region.layer == "model.layers.3.self_attn.attn" and runs["words"].tolist() == [1]
    assert [int(runs[name][0]) for name in ("block", "slot", "row", "plane", "lane")] == [block, 5, 2, 1, 2]
    assert all(check.clean for check in engine.audit()), "reported once"
    llama.release()


def test_wrong_byte_that_is_handed_over_is_found_on_d(llama: Pair) -> None:
    params = llama.prefill(prompt(100))
    (handed,) = params
    assert handed is not None
    block = handed["remote_block_ids"][0][1]
    llama.p.flip(1, "model.layers.7.self_attn.attn", block, 9 * 4 * 512 + 512)  # token 32 + 9, head 4 + 1, K
    (name,) = llama.decode([prompt(100)], params)
    (check,) = llama.d.pop_checks(name)
    assert check.pool.words == {GARBLED: 1} and check.computed == 99
    wrong = check.pool.runs[check.pool.runs["kind"] == GARBLED][0]
    assert check.pool.regions[int(wrong["region"])].layer == "model.layers.7.self_attn.attn"
    stands = wrong["expected"]
    assert [int(stands[name]) for name in ("layer", "token", "head", "plane", "lane")] == [7, 41, 5, 0, 0]
    llama.release()
    assert [check.rank for check in llama.audit()] == [1], "P has it, too"


def _holds(engine: Any, block: int) -> bool:
    """Whether a block has the KV of a whole block of tokens.

    Then a flipped byte of its first layer is garbled data.
    """
    engine.flip(0, "model.layers.0.self_attn.attn", block, 31 * 512)
    return any(GARBLED in check.pool.words for check in engine.audit())


def test_chunked_prefill(llama: Pair) -> None:
    llama.p.budget(64)
    (checks,) = llama.hand_over(prompt(300))
    llama.p.budget(0)
    _assert_clean(checks, 1, 299)
    assert llama.audit() == []


def test_shared_prefix_and_local_hit(llama: Pair) -> None:
    one, two = prompt(200, 0), prompt(260, 1, shared=130)
    first, second = llama.hand_over(one, two)
    _assert_clean(first, 1, 199)
    _assert_clean(second, 1, 259)
    (again,) = llama.hand_over(prompt(290, 2, shared=170))  # D has 5 blocks of it
    _assert_clean(again, 1, 289)
    assert again[0].local == 160
    assert llama.audit() == []


def test_preempted_on_either_side(llama: Pair) -> None:
    tokens = prompt(250)
    llama.p.budget(96)
    source = llama.request(tokens, "p", {"do_remote_decode": True, "do_remote_prefill": False})
    llama.p.add(source)
    llama.p.step()
    llama.p.preempt(source.id)
    llama.p.step()
    assert llama.p.trace(source.id).status == "PREEMPTED"
    llama.p.poison()  # the prefix cache, too, so that all is computed again
    params = llama.run(llama.p, [source.id])[source.id].kv_transfer_params
    llama.p.budget(0)
    assert llama.p.trace(source.id).computed_tokens == 96 + 250
    target = llama.request(tokens, "d", params, max_tokens=4)
    llama.d.add(target)
    while not llama.d.step().outputs:
        llama.p.step()
    llama.d.preempt(target.id)
    llama.d.step()
    assert llama.d.trace(target.id).status == "PREEMPTED"
    llama.run(llama.d, [target.id])
    _assert_clean(llama.d.pop_checks(target.id)[:1], 1, 249)
    llama.release()
    assert llama.audit() == []


def test_freed_blocks_are_given_to_another_request(llama: Pair) -> None:
    llama.p.source()
    llama.p.reuse(True)
    first, second = llama.hand_over(prompt(100), prompt(150, 1))
    while not llama.p.overwritten():
        llama.p.step()
    llama.p.reuse(False)
    _assert_clean(first, 1, 99)
    _assert_clean(second, 1, 149)
    assert llama.audit() == []
    blocks: dict[bool, set[int]] = {False: set(), True: set()}
    for (_, owner), table in llama.p.source().tables.items():
        blocks[owner in NUMBERS] |= {block for block in table if block}
    assert blocks[False] and blocks[False] <= blocks[True]


def test_blocks_of_a_request_that_overwrites_in_several_steps_are_not_overwritten_again(llama: Pair) -> None:
    llama.p.source()
    llama.p.budget(32)  # one block a step
    llama.p.reuse(True)
    llama.hand_over(prompt(150))
    while not llama.p.overwritten():
        llama.p.step()
    llama.p.reuse(False)
    llama.p.budget(0)
    overwriters = {owner for _, owner in llama.p.source().tables if owner in NUMBERS}
    assert len(overwriters) == 1


def test_key_of_the_window_that_is_not_sent(start: Callable[..., Pair]) -> None:
    pair = start("gemma3_1b", (1, 1), (140, 150), max_model_len=608)
    ((check,),) = pair.hand_over(prompt(543))
    assert not check.pool.wrong and not check.clean
    assert {(m.window, m.tokens) for m in check.missing} == {(512, (31,))} and sum(
        len(m.layers) for m in check.missing
    ) == 22
    (checks,) = pair.hand_over(prompt(544))
    _assert_clean(checks, 1, 543)
    assert pair.audit() == []


def test_states(start: Callable[..., Pair]) -> None:
    # vLLM starts no such model on CPUs: its CPU_MLA has no blocks as long as those that fit the states
    pair = start("kimi_linear_48b", (1, 1), (9, 10), max_model_len=500, content=PACKED)
    (checks,) = pair.hand_over(prompt(200))
    _assert_clean(checks, 1, 199)
    assert {region.kind for region in checks[0].pool.regions} == {"attention", "state"}
    assert pair.audit() == []


def test_synchronous_load(start: Callable[..., Pair], tmp_path: Path) -> None:
    """vLLM's ExampleConnector: layers are saved one by one, and loaded within the step that reads them."""
    transfer = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    pair = start("llama3_1_8b", transfer=transfer, roles="PP")
    pair.prefill(prompt(200))
    (name,) = pair.decode([prompt(200)], [None])
    trace = pair.d.trace(name)
    assert trace.external_tokens == 192 and not trace.asynchronous
    _assert_clean(pair.d.pop_checks(name), 1, 192)
    assert pair.audit() == []


def test_shutdown_leaves_nothing(start: Callable[..., Pair]) -> None:
    pair = start("llama3_1_8b", (1, 2))
    pair.hand_over(prompt(40))
    for engine in pair.engines:
        left = engine.shutdown()
        assert (left.threads, left.listening, left.children, left.error) == ((), (), (), "")
