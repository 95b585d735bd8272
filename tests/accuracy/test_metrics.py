"""What servers count, and what a metric that is missing means: never zero."""

from __future__ import annotations

import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_kvconform.result import Blocked
from pytest_kvconform.rigs import launch
from pytest_kvconform.rigs.serving.evaluation import _note_prompts
from pytest_kvconform.rigs.serving.messages import Answer, Answers
from pytest_kvconform.rigs.serving.metrics import (
    ACCEPTED,
    DRAFTED,
    GENERATED,
    SOURCE,
    Counters,
    Uncounted,
    Unreachable,
    get,
    is_bytes_moved,
    read_block_size,
    read_counters,
    read_moved,
)
from pytest_kvconform.rigs.serving.observation import Look, Runs
from pytest_kvconform.subject import resolve
from pytest_kvconform.suite.accuracy import answers, evidence
from tests.accuracy.test_deployment import deployed

METRICS = """\
# TYPE vllm:prompt_tokens_by_source counter
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 650.0
vllm:prompt_tokens_by_source_total{engine="0",source="local_cache_hit"} 0.0
vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} 300.0
vllm:prompt_tokens_by_source_total{engine="1",source="external_kv_transfer"} 50.0
# TYPE vllm:nixl_bytes_transferred histogram
vllm:nixl_bytes_transferred_bucket{engine="0",le="+Inf"} 1.0
vllm:nixl_bytes_transferred_count{engine="0"} 1.0
vllm:nixl_bytes_transferred_sum{engine="0"} 1.376256e+06
"""
MOVED = "vllm:nixl_bytes_transferred_sum"
NOTHING = Counters(external=0, local=0, computed=0)


def without(text: str) -> str:
    return "".join(line for line in METRICS.splitlines(True) if text not in line)


def runs(*looks: dict[str, Any]) -> Runs:
    """Looks at 16 prompts of 70 tokens, whose 64 tokens in whole blocks D has loaded."""
    asked = Answers(
        answers=tuple(Answer(n, "", True, True) for n in range(16)),
        prompts=looks[0].pop("prompts", (70,) * 16),
    )
    counted = {"external": 64 * 16, "local": 0, "computed": 6 * 16}
    found = [
        Look(
            asked,
            (asked, asked),
            Counters(**counted, **{name: value for name, value in look.items() if name != "by_p"}),
            (NOTHING, NOTHING),
            moved_by_p=look.get("by_p"),
        )
        for look in looks
    ]
    return Runs(tuple(found), 16)


def bench_of(found: Runs) -> Any:
    """A bench that has observed this."""
    observed = SimpleNamespace(runs=found, failed="", refusal="", file="")
    serving = SimpleNamespace(observe=lambda cell: observed)
    return SimpleNamespace(serving=serving, subject=resolve(deployed()), cell="llama-P1D1")


def test_the_block_size_is_a_label() -> None:
    line = 'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="None"} 1.0\n'
    assert read_block_size(f"# TYPE vllm:cache_config_info gauge\n{line}") == 16
    with pytest.raises(Uncounted, match="has no vllm:cache_config_info with a block_size"):
        read_block_size(METRICS)


def test_counters_are_sums_over_engines() -> None:
    counters = read_counters(METRICS)
    assert (counters.external, counters.local, counters.computed) == (350, 0, 650)
    assert counters.moved == {MOVED: 1376256} == read_moved(METRICS)
    assert counters.since(counters).external == 0
    assert (counters + counters).external == 700


@pytest.mark.parametrize(
    ("text", "lacks"),
    [
        (without("by_source"), f"has no {SOURCE}, "),
        (without("external"), f'has no {SOURCE} of the source "external_kv_transfer", '),
        (without("cache_hit"), f'has no {SOURCE} of the source "local_cache_hit", '),
        (METRICS.replace("650.0", "NaN"), f'has no {SOURCE} of the source "local_compute", '),
        ("", f"has no {SOURCE}, "),
        ("<html>Sign in</html>", "is no text of Prometheus's metrics"),
    ],
)
def test_what_is_not_counted_is_told_and_not_zero(text: str, lacks: str) -> None:
    with pytest.raises(Uncounted, match=f"^{lacks}"):
        read_counters(text)


def test_drafts_that_are_not_counted_stay_so() -> None:
    counted = read_counters(f"{METRICS}# TYPE {GENERATED} counter\n{GENERATED} 7.0\n")
    assert (counted.generated, counted.drafted, counted.accepted) == (7, None, None)
    more = counted + counted
    assert (more.generated, more.drafted, more.accepted) == (14, None, None)
    assert (counted + NOTHING).generated is None
    assert counted.since(NOTHING).generated is None


def test_bytes_of_each_side_and_of_each_look_are_added() -> None:
    """A counter that appears later has counted nothing before: Prometheus's counters begin at 0."""
    first, second = NOTHING, Counters(external=0, local=0, computed=0, moved={"b": 2})
    assert (first + second).moved == (second + first).moved == {"b": 2}
    assert second.since(first).moved == {"b": 2}
    found = runs({"moved": {"a": 1}, "by_p": {"c": 3}}, {"moved": {"b": 2}, "by_p": {"c": 3}})
    assert found.moved == {"a": 1, "b": 2, "c": 6}


@pytest.mark.parametrize("by_p", [None, {}])
def test_bytes_that_p_may_count_are_not_zero(by_p: dict[str, int] | None) -> None:
    """P of a push counts them. It is not known here, or counts nothing at all."""
    found = bench_of(runs({"moved": {MOVED: 0}, "by_p": by_p}))
    with pytest.raises(Blocked, match="give --kv-prefill-url"):
        evidence.moved_bytes_are_counted(found, None)
    counted = bench_of(runs({"moved": {MOVED: 0}, "by_p": {MOVED: 5}}))
    assert evidence.moved_bytes_are_counted(counted, None).bytes_moved == 5


def test_prompts_that_the_answers_do_not_measure_are_not_empty() -> None:
    subject, found = resolve(deployed()), runs({})
    evidence._require_loads_by_totals(subject, found.looks[0], found)
    unknown = runs({"prompts": (70,) * 15 + (None,)})
    with pytest.raises(Blocked, match=r"usage\.prompt_tokens"):
        evidence._require_loads_by_totals(subject, unknown.looks[0], unknown)


@pytest.mark.parametrize(
    ("answer", "tokens"),
    [
        ({"usage": {"prompt_tokens": 70}}, 70),
        ({"usage": {}}, None),
        ({"usage": None}, None),
        ({"usage": {"prompt_tokens": None}}, None),
        ({}, None),
    ],
)
def test_the_length_of_a_prompt_is_what_the_answer_tells(answer: dict[str, Any], tokens: int | None) -> None:
    model = SimpleNamespace(parse_generations=lambda outputs, **kwargs: outputs)
    prompts = _note_prompts(model)
    model.parse_generations([answer])
    assert prompts == [tokens]


@pytest.mark.parametrize("lacks", [DRAFTED, ACCEPTED, GENERATED])
def test_drafts_of_a_d_that_does_not_count_them_are_not_refused(lacks: str) -> None:
    names = {DRAFTED: "drafted", ACCEPTED: "accepted", GENERATED: "generated"}
    counted = dict.fromkeys(names.values(), 9) | {names[lacks]: None}
    with pytest.raises(Blocked, match=f"have no {lacks}"):
        answers._drafts(Counters(external=0, local=0, computed=0, **counted))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "moved"),
    [
        ("vllm:nixl_bytes_transferred_sum", True),
        ("vllm:kv_offload_load_bytes_total", True),
        ("vllm:nixl_bytes_transferred_count", False),
        ("vllm:estimated_read_bytes_per_gpu_total", False),
        ("process_resident_memory_bytes", False),
    ],
)
def test_metrics_of_bytes_are_known_by_their_names(name: str, moved: bool) -> None:
    assert is_bytes_moved(name) is moved


def test_loopback_is_not_asked_through_a_proxy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Healthy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "example.org")
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert launch.environment(tmp_path)["NO_PROXY"] == "example.org,127.0.0.1,localhost"
    with HTTPServer(("127.0.0.1", 0), Healthy) as answering:
        threading.Thread(target=answering.handle_request, daemon=True).start()
        assert get(f"http://127.0.0.1:{answering.server_port}/health", 5.0) == ""


def test_a_server_that_does_not_answer_is_named() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/health"
        with pytest.raises(Unreachable, match=rf"^{url} does not answer: "):
            get(url, 1.0)
