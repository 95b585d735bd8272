"""Servers that already run: what is asked of them, and what is said where something is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_kvconform.case_outcome import CaseEnd, run_case
from pytest_kvconform.plan import make_plan
from pytest_kvconform.result import Blocked, Cell, Outcome
from pytest_kvconform.rigs.bench import Benches, facts_of_deployment
from pytest_kvconform.rigs.serving import chain
from pytest_kvconform.rigs.serving.data import exam_of
from pytest_kvconform.rigs.serving.messages import Answers, Prompt
from pytest_kvconform.rigs.serving.metrics import Counters
from pytest_kvconform.rigs.serving.observation import Look, Runs
from pytest_kvconform.settings import BadSetting, Settings
from pytest_kvconform.subject import resolve
from pytest_kvconform.suite.accuracy.evidence import _due, _require_loads_by_totals
from tests.helpers.case_runner import CONFIG, CaseRunner

CELL = Cell("llama", "P1D1")
ANSWERED, LOADED = "every_question_is_answered", "each_question_is_loaded"
NOWHERE = "http://127.0.0.1:9"


def ends(
    case_runner: CaseRunner, settings: Settings, progress: Callable[[str], None] = lambda sentence: None
) -> dict[str, CaseEnd]:
    """How each case ends on a deployment."""
    subject = resolve(settings)
    facts = facts_of_deployment(settings, case_runner.zygote.address, subject, 60.0)
    benches = Benches(case_runner.zygote.address, subject, settings, facts, progress)
    bench = benches.at(CELL)
    try:
        return {
            planned.name.partition("[")[0]: run_case(
                lambda planned=planned: planned.case.body(bench, planned.variant), planned.name
            )
            for planned in make_plan(settings, ()).selected
        }
    finally:
        benches.close()


def deployed(**urls: str) -> Settings:
    return Settings(connector="NixlConnector", tier=("accuracy",), family=("llama",), **urls)


@pytest.mark.parametrize("with_router", [True, False])
def test_a_deployment_is_asked_as_our_own_servers_are(
    case_runner: CaseRunner, questions: Callable[..., None], with_router: bool
) -> None:
    questions(16)
    settings = Settings(connector="NixlConnector", config=CONFIG, tier=("accuracy",), family=("llama",))
    ours = Benches(
        case_runner.zygote.address, resolve(settings), settings, case_runner.probe(settings), lambda _: None
    )
    exam = exam_of(ours.context, CELL)
    with chain.started(ours.context, CELL, replace(exam, longest=exam.longest + 256)) as started:
        servers = {one.role: one.url for one in started.processes}
        urls = {"decode_url": servers["server D"], "gsm8k": str(exam.checkpoint)}
        urls |= {"router_url": started.subject.url} if with_router else {"prefill_url": servers["server P"]}
        found = ends(case_runner, deployed(**urls))
    assert {found[name].outcome for name in (ANSWERED, LOADED)} == {Outcome.PASS}, found
    assert not [name for name, end in found.items() if end.outcome is Outcome.FAIL]


def test_a_deployment_that_does_not_answer_is_named(case_runner: CaseRunner) -> None:
    found = ends(case_runner, deployed(router_url=NOWHERE, decode_url=NOWHERE))
    assert {end.outcome for end in found.values()} <= {Outcome.BLOCKED, Outcome.NOT_APPLICABLE}
    assert f"the decode server cannot be asked: {NOWHERE}/health does not answer" in found[ANSWERED].reason


def test_a_store_needs_a_server_that_does_not_load(case_runner: CaseRunner) -> None:
    store = replace(deployed(router_url=NOWHERE, decode_url=NOWHERE), profile="store")
    found = ends(case_runner, store)
    assert "give --kv-baseline-url" in found[ANSWERED].reason


@pytest.mark.parametrize("name", ["test", "train"])
def test_both_files_of_questions_are_looked_at(case_runner: CaseRunner, tmp_path: Path, name: str) -> None:
    for one in ("test", "train"):
        line = '{"question": "How many?", "answer": "#### 2"}\n'
        (tmp_path / f"{one}.jsonl").write_text(line * 3 + line[:9] * (one == name))
    found = ends(case_runner, deployed(router_url=NOWHERE, decode_url=NOWHERE, gsm8k=str(tmp_path)))
    assert f"--kv-gsm8k: {tmp_path / name}.jsonl, line 4:" in found[ANSWERED].reason


@pytest.mark.parametrize("looks", [1, 4])
@pytest.mark.parametrize(("beyond", "shown"), [(0, True), (63, True), (64, False)])
def test_sums_show_a_load_of_each_question_in_each_look(looks: int, beyond: int, shown: bool) -> None:
    """Prompts of 70 tokens: 64 in whole blocks, and 6 that D computes in any case."""
    alone = Counters(external=0, local=0, computed=0)
    own = 6 * 16 + beyond
    asked = Answers(answers=(), prompts=(70,) * 16)
    look = Look(
        asked, (asked, asked), Counters(external=70 * 16 - own, local=0, computed=own), (alone, alone)
    )
    subject = resolve(deployed())
    for one in (look,) * looks:
        if shown:
            _require_loads_by_totals(subject, one, Runs((look,) * looks, 16))
        else:
            with pytest.raises(Blocked, match="cannot show that each question was loaded"):
                _require_loads_by_totals(subject, one, Runs((look,) * looks, 16))


@pytest.mark.parametrize(("profile", "drafts", "due"), [("store", 9, 48), ("store", 0, 64), ("p2p", 9, 64)])
def test_a_store_need_not_bring_the_last_block_to_a_d_that_speculates(
    profile: str, drafts: int, due: int
) -> None:
    asked, counted = Answers(answers=()), Counters(external=0, local=0, computed=0, drafted=drafts)
    runs = Runs((Look(asked, (asked, asked), counted, (counted, counted)),), 16)
    subject = resolve(replace(deployed(), profile=profile))
    assert _due(subject, Prompt("", 70, 0, 0, 70), runs) == due


def test_questions_of_the_hub_are_asked_for_online() -> None:
    code = (
        "import datasets, huggingface_hub.constants as hub\n"
        "from pytest_kvconform.rigs.serving.evaluation import go_online\n"
        "assert hub.HF_HUB_OFFLINE and datasets.config.HF_DATASETS_OFFLINE\n"
        "go_online()\n"
        "print(hub.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE, datasets.config.HF_DATASETS_OFFLINE)"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["False"] * 3, done.stderr


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
