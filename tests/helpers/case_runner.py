"""Runs of the suite's own cases on a connector, without starting pytest: engines start in a second."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_kvconform import plan
from pytest_kvconform.case_outcome import run_case, with_calls
from pytest_kvconform.features import required_features
from pytest_kvconform.plan import PlannedCase, make_plan, order_by_cell, scenarios_by_cell
from pytest_kvconform.result import (
    CaseResult,
    Evidence,
    Finding,
    Outcome,
)
from pytest_kvconform.rigs.bench import Benches, SubjectFacts, probe_subject, start_zygote
from pytest_kvconform.settings import CPU_FEATURES, Settings
from pytest_kvconform.settings.parsers import words_and_those_before
from pytest_kvconform.subject import resolve
from pytest_kvconform.verdict import Verdict, decide_verdict

CONFIG = '{"kv_connector_extra_config": {"num_threads": 0}}'  # of UCX, per agent, as for NixlConnector itself
PROBE_S = 120.0
# Features of the CPU that these runs, and those of tests/engine/command.py, hide from vLLM:
# TESTS_HIDE_CPU=avx512 make test
HIDDEN = words_and_those_before(*CPU_FEATURES)(os.environ.get("TESTS_HIDE_CPU", "").split())
# registered names
OF_VLLM = (
    "NixlConnector",
    "NixlPushConnector",
    "ExampleConnector",
    "MultiConnector",
    "OffloadingConnector",
    "SimpleCPUOffloadConnector",
)


@dataclass(frozen=True)
class CellRun:
    """The results of the cases of one cell, by the last words of their ids:

    "engines_start", "attention_kv_arrives[n200]".
    """

    results: list[CaseResult] = field(default_factory=list)

    @functools.cached_property
    def verdict(self) -> Verdict:
        return decide_verdict(self.results)

    @property
    def outcomes(self) -> dict[str, str]:
        return {_short(result): result.outcome.value for result in self.results}

    @property
    def failed(self) -> set[str]:
        return {_short(result) for result in self.results if result.outcome is Outcome.FAIL}

    @property
    def findings(self) -> dict[str, Finding]:
        return {_short(result): result.finding for result in self.results if result.finding}

    @property
    def reasons(self) -> dict[str, str]:
        return {_short(result): result.reason for result in self.results if result.reason}

    @property
    def evidence(self) -> dict[str, Evidence]:
        return {_short(result): result.evidence for result in self.results if result.evidence}

    @property
    def wrong(self) -> dict[str, str]:
        """Id of each case that neither passed nor is not applicable -> its outcome, and why."""
        return {
            result.id: f"{result.outcome.value}: {result.finding or result.reason}"
            for result in self.results
            if result.outcome not in (Outcome.PASS, Outcome.NOT_APPLICABLE)
        }


def _short(result: CaseResult) -> str:
    name, _, rest = result.id.rpartition("::")[2].partition("[")
    variant = rest.rstrip("]").partition(f"{result.cell}")[2].lstrip("-")
    return f"{name}[{variant}]" if variant else name


class CaseRunner:
    """One zygote, and a bench per connector.

    `module` has the connectors, `tier` the cases that run on them.
    """

    def __init__(
        self,
        module: str = "tests.wrong_connectors.engine",
        tier: str = "engine",
        families: tuple[str, ...] = (),
        matrix: str = "quick",
        stand_in: bool = False,
    ) -> None:
        self.module, self.tier, self.stand_in = module, tier, stand_in
        settings = Settings(
            connector=f"{module}:Right",
            config=CONFIG,
            tier=(tier,),
            family=families,
            matrix=matrix,
            stand_in=stand_in,
            hide_cpu=HIDDEN,
        )
        self.zygote = start_zygote(settings)
        self.known: dict[str, SubjectFacts] = {}  # by --kv-connector

    def close(self) -> list[str]:
        """End the zygote. Returns sentences about what did not end."""
        return self.zygote.close()

    def probe(self, settings: Settings) -> SubjectFacts:
        """Probe the connector's class, once."""
        if settings.connector not in self.known:
            self.known[settings.connector] = probe_subject(self.zygote.address, resolve(settings), PROBE_S)
        return self.known[settings.connector]

    def run(
        self,
        connector: str,
        family: str,
        topology: str = "P1D1",
        variants: str = "",
        scale: float = 1.0,
        setup: str = "",
        matrix: str = "quick",
        only: Callable[[PlannedCase], bool] = lambda planned: True,
        profile: str = "",
        config: str = CONFIG,
        declared: Mapping[str, Any] | None = None,
    ) -> CellRun:
        """Run the cases of one cell.

        `connector`: a class of the module, MODULE:CLASS, or a name of `OF_VLLM`.

        `declared`: settings that describe the connector, such as {"min_load": 40}.

        `variants` are words that select scenarios; "" selects all. `setup` is "" in the engine rig. `only`
        selects by anything that a planned case has.
        """
        spec = connector if connector in OF_VLLM or ":" in connector else f"{self.module}:{connector}"
        config = "" if spec == connector and config == CONFIG else config
        settings = Settings(
            connector=spec,
            config=config,
            profile=profile,
            tier=(self.tier,),
            family=(family,),
            topology=(topology,),
            matrix=matrix,
            timeout_scale=scale,
            stand_in=self.stand_in,
            hide_cpu=HIDDEN,
            report=str(self.zygote.run_dir / "report"),
            **(declared or {}),
        )
        benches = Benches(
            self.zygote.address, resolve(settings), settings, self.probe(settings), lambda sentence: None
        )
        selected = [
            planned
            for planned in _plan(settings.tier, settings.family, settings.topology, matrix, plan.version)
            if planned.cell.setup == setup
            and only(planned)
            and (planned.variant is None or not variants or str(planned.variant) in variants.split())
        ]
        scenarios = scenarios_by_cell(selected)
        try:
            return CellRun([_result(benches, one, scenarios[one.cell]) for one in selected])
        finally:
            benches.close()


@functools.cache  # a second of a processor for the full matrix
def _plan(
    tier: tuple[str, ...],
    family: tuple[str, ...],
    topology: tuple[str, ...],
    matrix: str,
    version: Callable[..., object],
) -> tuple[PlannedCase, ...]:
    """The cases of a cell in the order in which they run. No connector changes that.

    `version`: what the plan asks for vLLM's version. Some tests give it the rules of another minor.
    """
    settings = Settings(
        connector=OF_VLLM[0], tier=tier, family=family, topology=topology, matrix=matrix, hide_cpu=HIDDEN
    )
    return tuple(order_by_cell(make_plan(settings, ()).selected, settings.seed))


def _result(benches: Benches, planned: PlannedCase, scenarios: Collection[str]) -> CaseResult:
    def body() -> object:
        bench = benches.at(planned.cell, planned.scenarios, scenarios)
        return planned.case.body(bench, planned.variant)

    end = with_calls(run_case(body, planned.case.name), benches.hook_calls())
    return CaseResult(
        id=planned.id,
        rule=planned.case.rule,
        outcome=end.outcome,
        cell=planned.cell,
        reason=end.reason,
        finding=end.finding,
        evidence=end.evidence,
        features=required_features(planned),
        refused=end.refused,
        depends_on=end.depends_on,
    )
