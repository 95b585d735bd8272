"""Reports of a step in which a worker failed come with those of the next: a rule since vLLM 0.33.

On an older vLLM `wrong_connectors/failed_steps.py` brings what its aggregator lacks.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_kvconform import plan
from tests.peers.conftest import Reported

CASE = "reports_of_a_failed_step_may_come_later"


@pytest.fixture(autouse=True)
def _minor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan has the rules of this minor."""
    monkeypatch.setattr(plan, "version", lambda *names: "0.33.0")


def _run(run_cases: Callable[..., Reported], connector: str) -> Reported:
    return run_cases(connector, "P1D2", modules=("protocol/peers/rank_reports",), judged=None)


@pytest.mark.parametrize(
    ("connector", "said"),
    [
        ("CountsRanks", "rank 0 has reported twice"),
        ("CountsStatistics", "statistics of a rank came twice"),
    ],
)
def test_a_mistake_is_caught_by_its_case_alone(
    run_cases: Callable[..., Reported], connector: str, said: str
) -> None:
    found = _run(run_cases, connector)
    assert {name for name, (outcome, _) in found.items() if outcome != "PASS"} == {CASE}, found
    outcome, words = found[CASE]
    assert outcome == "FAIL"
    assert "D raised AssertionError" in words and said in words, words


@pytest.mark.parametrize("connector", ["Right", "Reference"])
def test_a_right_connector_passes(run_cases: Callable[..., Reported], connector: str) -> None:
    found = _run(run_cases, connector)
    assert CASE in found
    assert {name: what for name, what in found.items() if what[0] != "PASS"} == {}
