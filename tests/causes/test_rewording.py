"""No outcome depends on the words of a sentence: the same runs with other words end alike."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pytest_kvconform import features
from pytest_kvconform.apply_declaration import Criteria, apply_declaration
from pytest_kvconform.plan import PlannedCase
from pytest_kvconform.result import CaseResult
from tests.causes.wording import patches
from tests.helpers.case_runner import CaseRunner
from tests.helpers.fixtures import ROOT, importable_from, must_be_installed

BYTES, PROTOCOL = "bytes", "protocol"
# tier, connector, family, topology, setup, scale of deadlines, part of the ids of the cases that run
RUNS = [
    (BYTES, "DeclinesTwoRanks", "llama3_1_8b", "P1D2", "b16", 1.0, ("/start::", "/handover::", "n15]")),
    (BYTES, "DeclinesTwoRanks", "llama3_1_8b", "P1D2", "b16", 1.0, ("/transport_faults::",)),
    (BYTES, "DiesWithTwoRanks", "llama3_1_8b", "P1D2", "b16", 1.0, ("/start::", "/handover::", "n15]")),
    (BYTES, "NeedsAPackage", "llama3_1_8b", "P1D1", "b16", 1.0, ("/start::", "/handover::")),
    (BYTES, "ForgetsLoads", "llama3_1_8b", "P1D1", "b16", 0.1, ("/start::", "/handover::", "n15]")),
    (BYTES, "WithoutHma", "kimi_linear_48b", "P1D1", "mla64", 1.0, ("/start::", "/handover::")),
    (PROTOCOL, "ForgetsLoads", "llama3_1_8b", "P1D1", "b16", 0.1, ("/stress/many", "/stress/preemption")),
    (PROTOCOL, "RaisesWhenItEnds", "llama3_1_8b", "P1D1", "b16", 1.0, ("/request_finished",)),
]
Ends = dict[str, tuple[object, ...]]


@pytest.fixture(scope="module")
def runners() -> Iterator[dict[str, CaseRunner]]:
    must_be_installed()
    with importable_from(ROOT):
        runner = CaseRunner("tests.causes.failing", BYTES, ("llama3_1_8b", "kimi_linear_48b"), "full")
        other = copy.copy(runner)
        other.tier = PROTOCOL
        yield {BYTES: runner, PROTOCOL: other}
        assert runner.close() == []


@contextmanager
def other_words() -> Iterator[None]:
    """Patch this process. `tests.causes.reworded` patches those of engines."""
    with pytest.MonkeyPatch.context() as patch:
        for one, init in patches():
            patch.setattr(one, "__init__", init)
        yield


def ends(results: list[CaseResult]) -> Ends:
    """Id -> all of a result that is no sentence, and the outcome if all of the connector is unsupported."""
    unsupported = Criteria(features=dict.fromkeys(features.load(), "why"))
    return {
        one.id: (
            one.outcome,
            one.refused,
            one.depends_on,
            one.finding and one.finding.rule,
            (declared := apply_declaration(one, unsupported)).outcome,
            declared.declaration_rule,
        )
        for one in results
    }


@pytest.mark.parametrize(("tier", "connector", "family", "topology", "setup", "scale", "parts"), RUNS)
def test_other_words_change_no_outcome(
    runners: dict[str, CaseRunner],
    tier: str,
    connector: str,
    family: str,
    topology: str,
    setup: str,
    scale: float,
    parts: tuple[str, ...],
) -> None:
    def only(planned: PlannedCase) -> bool:
        return any(part in planned.id for part in parts)

    profile = "store" if connector == "WithoutHma" else ""
    cell = {"setup": setup, "scale": scale, "matrix": "full", "only": only, "config": "", "profile": profile}
    plain = runners[tier].run(connector, family, topology, **cell)
    with other_words():
        other = runners[tier].run(f"tests.causes.reworded:{connector}", family, topology, **cell)
    assert ends(other.results) == ends(plain.results)
    said = {one.reason for one in other.results if one.reason}
    assert said.isdisjoint(one.reason for one in plain.results) or not said
    assert other.verdict.word == plain.verdict.word
