"""Deployments behind gateways: one that hides what D counts, and one that wants a key."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

import model_matrix.cells
from pytest_kvconform.report import document, terminal
from pytest_kvconform.result import Outcome
from pytest_kvconform.rigs.bench import Benches, facts_of_deployment
from pytest_kvconform.rigs.serving import chain, data
from pytest_kvconform.rigs.serving.data import exam_of
from pytest_kvconform.rigs.serving.metrics import CONFIG, SOURCE, Refused, get
from pytest_kvconform.settings import Settings
from pytest_kvconform.subject import resolve
from tests.accuracy.test_deployment import ANSWERED, CELL, LOADED, deployed, ends
from tests.helpers.case_runner import CONFIG as NO_THREADS
from tests.helpers.case_runner import CaseRunner
from tests.helpers.gateway import gateway

QUESTIONS = 16
KEY = {"Authorization": "Bearer sesame"}
NEVER = {Outcome.FAIL, Outcome.HARNESS}


class Servers(NamedTuple):
    """Servers of this suite, taken for a deployment."""

    prefill: str
    decode: str
    router: str
    gsm8k: str  # folder with the questions


@pytest.fixture(scope="module")
def servers(case_runner: CaseRunner) -> Iterator[Servers]:
    settings = Settings(connector="NixlConnector", config=NO_THREADS, tier=("accuracy",), family=("llama",))
    found = model_matrix.cells.load_accuracy_matrices()
    fewer = msgspec.structs.replace(found, questions=dict.fromkeys(found.questions, QUESTIONS))
    bench = Benches(
        case_runner.zygote.address, resolve(settings), settings, case_runner.probe(settings), lambda _: None
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "load_accuracy_matrices", lambda: fewer)
        exam = exam_of(bench.context, CELL)
        longer = replace(exam, longest=exam.longest + 256)
        with chain.started(bench.context, CELL, longer) as started:
            urls = {one.role: one.url for one in started.processes}
            yield Servers(urls["server P"], urls["server D"], urls["router"], str(exam.checkpoint))


def asked(servers: Servers, decode: str, **more: str) -> Settings:
    """The settings of a run on a deployment whose D is at an address."""
    urls = {} if "prefill_url" in more else {"router_url": servers.router}
    return deployed(gsm8k=servers.gsm8k, decode_url=decode, **urls, **more)


@pytest.mark.parametrize("metric", [SOURCE, f"{SOURCE.removesuffix('_total')}_total{{", CONFIG])
def test_what_d_does_not_count_is_no_zero(case_runner: CaseRunner, servers: Servers, metric: str) -> None:
    with gateway(servers.decode, without=metric) as decode:
        found = ends(case_runner, asked(servers, decode))
    assert {end.outcome for end in found.values()} == {Outcome.BLOCKED, Outcome.NOT_APPLICABLE}, found
    name = metric.rstrip("{")
    assert f"{decode}/metrics of the decode server has no {name}" in found[LOADED].reason
    assert "without --disable-log-stats" in found[LOADED].reason


def test_a_baseline_that_does_not_count_may_load(case_runner: CaseRunner, servers: Servers) -> None:
    with gateway(servers.decode, without=SOURCE) as baseline:
        found = ends(case_runner, asked(servers, servers.decode, baseline_url=baseline))
    assert f"{baseline}/metrics of the baseline server has no {SOURCE}" in found[LOADED].reason
    assert found[LOADED].outcome is Outcome.BLOCKED


def test_the_key_reaches_all_servers(
    case_runner: CaseRunner, servers: Servers, capfd: pytest.CaptureFixture[str]
) -> None:
    """As many questions as the folder has are asked, though the matrix has more."""
    seen, said = list[tuple[str, dict[str, str]]](), list[str]()
    with (
        gateway(servers.decode, demands=KEY, seen=seen) as decode,
        gateway(servers.prefill, demands=KEY) as prefill,
        gateway(servers.router, demands=KEY | {"X-Tenant": "a"}) as router,
    ):
        settings = replace(
            deployed(gsm8k=servers.gsm8k, decode_url=decode, router_url=router, prefill_url=prefill),
            api_key="sesame",
            header=("X-Tenant: a",),
        )
        found = ends(case_runner, settings, said.append)
    assert {found[name].outcome for name in (ANSWERED, LOADED)} == {Outcome.PASS}, found
    assert not [name for name, end in found.items() if end.outcome in NEVER]
    assert {path for path, _ in seen} >= {"/health", "/metrics", "/v1/models", "/v1/completions"}
    assert any(f" of {QUESTIONS} questions answered by the subject" in line for line in said), said
    assert not [line for line in said if "sesame" in line]
    assert "sesame" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("key", "says"),
    [("", "wants a key, and none was sent"), ("wrong", "refuses the key that was sent (Authorization)")],
)
@pytest.mark.parametrize("guarded", ["decode", "router"])
def test_a_key_that_is_missing_or_wrong_is_one_sentence(
    case_runner: CaseRunner, servers: Servers, key: str, says: str, guarded: str
) -> None:
    with gateway(getattr(servers, guarded), demands=KEY) as behind:
        urls = {"decode_url": servers.decode, "router_url": servers.router} | {f"{guarded}_url": behind}
        found = ends(case_runner, replace(deployed(gsm8k=servers.gsm8k, **urls), api_key=key))
    assert {end.outcome for end in found.values()} == {Outcome.BLOCKED, Outcome.NOT_APPLICABLE}, found
    server = "decode server" if guarded == "decode" else "router"
    assert found[ANSWERED].reason == (
        f"the {server} {says}: {behind}/health answers 401 Unauthorized; set OPENAI_API_KEY in the "
        "environment, or --kv-header, to what it wants"
    )


def test_a_router_that_is_started_here_sends_the_key_alone(case_runner: CaseRunner, servers: Servers) -> None:
    """vLLM's own servers ask for a key below /v1 alone; a gateway may ask for more."""
    with (
        gateway(servers.decode, demands=KEY, only="/v1/") as decode,
        gateway(servers.prefill, demands=KEY, only="/v1/") as prefill,
        gateway(servers.prefill, demands=KEY) as strict,
    ):
        with_key = replace(asked(servers, decode, prefill_url=prefill), api_key="sesame")
        found = ends(case_runner, with_key)
        assert {found[name].outcome for name in (ANSWERED, LOADED)} == {Outcome.PASS}, found
        found = ends(case_runner, replace(with_key, prefill_url=strict))
    assert "vllm-router cannot ask the prefill server" in found[ANSWERED].reason
    assert "give --kv-router-url" in found[ANSWERED].reason


@pytest.mark.parametrize(
    ("page", "shown"),
    [
        ('{"version": "0.31.7"}', "vLLM 0.31.7 "),
        ("", "vLLM of an unknown version "),
        ('{"version": "a b"}', "vLLM of an unknown version "),
        ("[1]", "vLLM of an unknown version "),
    ],
)
def test_the_headline_names_the_vllm_of_the_deployment(
    case_runner: CaseRunner, servers: Servers, page: str, shown: str
) -> None:
    with gateway(servers.decode, pages={"/version": page}) as decode:
        settings = asked(servers, decode)
        facts = facts_of_deployment(settings, case_runner.zygote.address, resolve(settings), 60.0)
    report = document.make_report(settings, resolve(settings), msgspec.to_builtins(facts), (), (), (), ())
    title = terminal.title(report)
    assert f" · {shown}" in title
    assert title.endswith(" · deployed servers")


def test_a_key_goes_to_no_address_that_a_server_names(servers: Servers, tmp_path: Path) -> None:
    seen = list[tuple[str, dict[str, str]]]()
    with (
        gateway(servers.decode, seen=seen) as elsewhere,
        gateway(servers.decode, redirects={"/health": f"{elsewhere}/health"}) as decode,
    ):
        get(f"{decode}/health", 5.0, KEY)
    assert [path for path, _ in seen] == ["/health"]
    assert not [headers for _, headers in seen if "Authorization" in headers]


def test_the_code_of_a_refusal_is_kept(servers: Servers) -> None:
    with gateway(servers.decode, demands=KEY) as decode, pytest.raises(Refused) as raised:
        get(f"{decode}/health", 5.0)
    assert raised.value.code == 401
