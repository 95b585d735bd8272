"""Short texts of answers, and what is kept of many calls, without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_kvconform.case_outcome import MOST_CALLS
from pytest_kvconform.rigs.history import Call, Recorder
from pytest_kvconform.rigs.hook_calls import MOST_CHARACTERS, NEAR, LastCalls, raised, short
from pytest_kvconform.rigs.vllm_setup.hooks import ERRORS, RECVING, UPDATE


@dataclass
class Metadata:
    loads: dict[str, Any] = field(default_factory=dict)
    empty: tuple[str, ...] = ()
    clock: float = 7.5


class Hostile:
    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        raise OSError(name)

    def __repr__(self) -> str:
        raise OSError("no text")


class Unprintable(Exception):
    def __str__(self) -> str:
        raise OSError("no text")


ANSWERS = [
    (None, ""),
    ((63, True), "(63, True)"),
    ((False, None), "(False, None)"),
    ({"b", "a"}, "{'a', 'b'}"),
    ([1, 2, 3, 4, 5], "[1, 2, 3, 2 more]"),
    ({"key": Hostile()}, "{'key'}"),
    (Metadata({"r-1": object()}), "Metadata(loads: {'r-1'})"),
    (Metadata(), "Metadata()"),
    (((((1,),),),), "(((tuple)))"),
    ((Hostile(),), "(Hostile)"),
    (Hostile(), "Hostile"),
]


@pytest.mark.parametrize(("value", "text"), ANSWERS, ids=[text or "nothing" for _, text in ANSWERS])
def test_an_answer_is_a_short_text(value: Any, text: str) -> None:
    assert short(value) == text


def test_a_long_answer_is_cut() -> None:
    assert len(short("x" * 10**6)) == len(raised(ValueError("x" * 10**6))) == MOST_CHARACTERS
    assert raised(KeyError("r-1")) == "raised KeyError: 'r-1'"
    assert raised(Unprintable()) == "raised Unprintable: (OSError in Unprintable.__str__)"
    assert raised(OSError("\ud800")) == "raised OSError: \\ud800"


def test_equal_calls_of_the_last_steps_are_one_record() -> None:
    last = LastCalls("D")
    for number in range(100):
        for hook in ("build_connector_meta", "get_transfer_results"):
            last.note(float(number), hook, (), "")
    assert [(call.hook, call.at, call.times) for call in last.take()] == [
        ("build_connector_meta", 0.0, 100),
        ("get_transfer_results", 0.0, 100),
    ]
    assert last.take() == []
    for number in range(NEAR + 1):
        last.note(0.0, "on_new_request", (), str(number))
    last.note(1.0, "on_new_request", (), "0")
    assert len(last.take()) == NEAR + 2


def test_no_more_than_the_last_records_are_kept() -> None:
    last = LastCalls("D", rank=1)
    for number in range(MOST_CALLS + 5):
        last.note(0.0, "save_kv_layer", (), str(number))
    taken = last.take()
    assert (len(taken), taken[0].answer, taken[0].rank) == (MOST_CALLS, "5", 1)


class OddHalf:
    """Answers that vLLM cannot use."""

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> int:
        return 7

    def update_connector_output(self, output: Any) -> None:
        output.finished_recving = 5

    def request_finished(self, request: Any, blocks: list[int]) -> tuple[bool, None]:
        return True, None


def test_an_answer_that_vllm_cannot_use_is_passed_on() -> None:
    half, recorder, told = OddHalf(), Recorder("D"), list[Call]()
    recorder.watch(half)
    recorder.listeners = dict.fromkeys(
        ("get_num_new_matched_tokens", UPDATE, "request_finished"), told.append
    )
    request = SimpleNamespace(request_id="r-1", num_tokens=9, status=SimpleNamespace(name="FINISHED_STOPPED"))
    assert half.get_num_new_matched_tokens(request, 3) == 7  # type: ignore[arg-type]
    output = SimpleNamespace(finished_sending=None, finished_recving={"r-1"}, failed_recving=set())
    half.update_connector_output(output)
    assert half.request_finished(request, [4]) == (True, None)
    assert (output.finished_recving, recorder.local_hits) == (5, {"r-1": 3})
    [read, ended] = told == recorder.calls and told
    assert (read.arguments[RECVING], read.result[RECVING]) == (("r-1",), ())
    assert (ended.arguments, ended.result) == (
        {"blocks": ((4,),), "status": "FINISHED_STOPPED"},
        (True, False),
    )


class Rank:
    def bind_connector_metadata(self, metadata: Any) -> None: ...

    def wait_for_layer_load(self, name: str) -> None: ...

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set()


def test_steps_and_polls_are_counted_from_an_earlier_look_on() -> None:
    rank, recorder = Rank(), Recorder("D", rank=1)
    recorder.watch(rank)

    def steps(layers: Sequence[str]) -> None:
        rank.bind_connector_metadata(None)
        for name in layers:
            rank.wait_for_layer_load(name)
        rank.get_block_ids_with_load_errors()

    steps(["a", "b"])
    before = recorder.history()
    for layers in ([], ["a", "b"], []):
        steps(layers)
    since = recorder.history().since(before)
    assert (since.idle_steps, since.counts[ERRORS], since.calls, since.rank) == (2, 3, (), 1)


class Half:
    def get_transfer_results(self, finished: set[str]) -> str:
        return self.get_block_ids_with_load_errors()

    def get_block_ids_with_load_errors(self) -> str:
        return "inner"

    def shutdown(self) -> None:
        raise OSError("gone")


def test_the_outermost_call_of_a_half_is_noted_until_its_shutdown() -> None:
    half, recorder = Half(), Recorder("P", 0)
    recorder.watch(half)
    assert half.get_transfer_results({"r-2", "r-1"}) == "inner"
    with pytest.raises(OSError, match="gone"):
        half.shutdown()
    assert [(call.hook, call.requests, call.answer) for call in recorder.last.take()] == [
        ("get_transfer_results", ("r-1", "r-2"), "'inner'"),
        ("shutdown", (), "raised OSError: gone"),
    ]
    assert vars(half) == {}
