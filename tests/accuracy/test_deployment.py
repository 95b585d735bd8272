"""Servers that already run: what is asked of them, and what is said where something is missing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_kvconform.case_outcome import CaseEnd, run_case
from pytest_kvconform.plan import make_plan
from pytest_kvconform.result import Cell, Outcome
from pytest_kvconform.rigs.bench import Bench, facts_of_deployment
from pytest_kvconform.rigs.serving import chain
from pytest_kvconform.rigs.serving.data import exam_of
from pytest_kvconform.settings import BadSetting, Settings
from pytest_kvconform.subject import resolve
from tests.helpers.case_runner import CONFIG, CaseRunner

CELL = Cell("llama", "P1D1")
ANSWERED, LOADED = "every_question_is_answered", "each_question_is_loaded"
NOWHERE = "http://127.0.0.1:9"


def ends(case_runner: CaseRunner, settings: Settings) -> dict[str, CaseEnd]:
    """How each case ends on a deployment."""
    subject = resolve(settings)
    facts = facts_of_deployment(case_runner.zygote.address, subject, 60.0)
    bench = Bench(case_runner.zygote.address, subject, settings, facts, lambda sentence: None)
    bench.use(CELL)
    try:
        return {
            planned.name.partition("[")[0]: run_case(
                lambda planned=planned: planned.case.body(bench, planned.variant), planned.name
            )
            for planned in make_plan(settings, ()).selected
        }
    finally:
        bench.close()


def deployed(**urls: str) -> Settings:
    return Settings(connector="NixlConnector", tier=("accuracy",), family=("llama",), **urls)


@pytest.mark.parametrize("with_router", [True, False])
def test_a_deployment_is_asked_as_our_own_servers_are(
    case_runner: CaseRunner, questions: Callable[..., None], with_router: bool
) -> None:
    questions(16)
    settings = Settings(connector="NixlConnector", config=CONFIG, tier=("accuracy",), family=("llama",))
    ours = Bench(
        case_runner.zygote.address, resolve(settings), settings, case_runner.probe(settings), lambda _: None
    )
    exam = exam_of(ours.context, CELL)
    with chain.started(ours.context, CELL, exam.checkpoint, exam.longest + 256) as started:
        servers = {one.role: one.url for one in started.processes}
        urls = {"decode_url": servers["server D"], "gsm8k": str(exam.checkpoint)}
        urls |= {"router_url": started.subject.url} if with_router else {"prefill_url": servers["server P"]}
        found = ends(case_runner, deployed(**urls))
    assert {found[name].outcome for name in (ANSWERED, LOADED)} == {Outcome.PASS}, found
    assert not [name for name, end in found.items() if end.outcome is Outcome.FAIL]


def test_a_deployment_that_does_not_answer_is_named(case_runner: CaseRunner) -> None:
    found = ends(case_runner, deployed(router_url=NOWHERE, decode_url=NOWHERE))
    assert {end.outcome for end in found.values()} == {Outcome.BLOCKED}
    assert f"the decode server cannot be asked: {NOWHERE}/health does not answer" in found[ANSWERED].reason


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"router_url": NOWHERE}, "a deployment is given by --kv-decode-url"),
        ({"decode_url": NOWHERE}, "and --kv-router-url or --kv-prefill-url"),
        ({"decode_url": NOWHERE, "router_url": NOWHERE, "tier": ()}, "add --kv-tier=accuracy"),
        ({"decode_url": NOWHERE, "router_url": NOWHERE, "family": ()}, "--kv-family=ID, one alone"),
    ],
)
def test_a_deployment_that_is_not_complete_is_one_sentence(settings: dict[str, object], says: str) -> None:
    given = {"connector": "NixlConnector", "tier": ("accuracy",), "family": ("llama",)} | settings
    with pytest.raises(BadSetting, match=r"^--kv-") as raised:
        make_plan(Settings(**given), ())
    assert says in str(raised.value)
