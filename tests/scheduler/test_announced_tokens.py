"""Announced tokens that vLLM drops, or lets load later: rules since vLLM 0.33.

On an older vLLM `wrong_connectors/announced.py` brings what its scheduler lacks.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from pytest_kvconform import plan
from pytest_kvconform.plan import load_module
from tests.helpers.case_runner import CellRun

from .checks import MODULES

MODULE = "protocol/steps/announced_tokens"
DROPPED, DEFERRED = "dropped_announcement_starts_no_load", "load_is_ordered_when_it_may_begin"
WRONG = [
    (
        "LoadsWhatItAnnounced",
        f"{DROPPED}[no_hit] {DROPPED}[hit]",
        r"update_state_after_alloc got 0 tokens, and the metadata names blocks \[\d+",
    ),
    (
        "PlansForOneStep",
        f"{DEFERRED}[later]",
        r"came a step after get_num_new_matched_tokens had announced \d+ tokens, and no step of \d+ orders",
    ),
    (
        "KeepsWhatItAnnounced",
        f"{DEFERRED}[never]",
        r"and before update_state_after_alloc: request_finished_all_groups returned \(True, None\), and no",
    ),
]


@pytest.fixture(autouse=True)
def _minor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan has the rules of this minor."""
    monkeypatch.setattr(plan, "version", lambda *names: "0.33.0")


@pytest.mark.parametrize(("connector", "fails", "said"), WRONG, ids=[wrong[0] for wrong in WRONG])
def test_a_mistake_is_found_by_its_case_alone_and_named(
    run_cases: Callable[..., CellRun], connector: str, fails: str, said: str
) -> None:
    modules = (MODULE, "protocol/matched_tokens", "protocol/aborts", "protocol/request_finished")
    run = run_cases(connector, "llama3_1_8b", matrix="quick", only=lambda planned: planned.module in modules)
    assert run.failed == set(fails.split()), run.findings
    for finding in run.findings.values():
        assert re.search(said, finding.happened), finding.happened
        assert "\n" not in finding.happened and len(finding.happened) < 500


def test_every_rule_of_these_cases_has_a_mistake() -> None:
    names = {wrong[1].partition("[")[0] for wrong in WRONG}
    assert {case.name for case in load_module(MODULE)[1]} == names
    assert MODULE not in MODULES


@pytest.mark.parametrize(
    ("connector", "cell"),
    [
        ("Right", {"family": "llama3_1_8b", "topology": "P1D2"}),
        ("SureLater", {"family": "llama3_1_8b"}),
        ("ReferenceConnector", {"family": "llama3_1_8b"}),
        ("ReferenceConnector", {"family": "gemma3_1b"}),
        ("ReferenceConnector", {"family": "qwen3_5_35b_a3b", "topology": "P2D2"}),
    ],
)
def test_a_right_connector_passes(
    run_cases: Callable[..., CellRun], connector: str, cell: dict[str, str]
) -> None:
    run = run_cases(connector, **cell, only=lambda planned: planned.module == MODULE)
    assert set(run.outcomes.values()) == {"PASS"}, (run.findings, run.reasons)
    assert len(run.outcomes) == 4
