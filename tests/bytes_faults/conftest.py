"""One background process for all tests of this folder, and the cases about faults alone."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_kvconform.plan import make_plan
from pytest_kvconform.result import Blocked, CaseResult, Evidence, Finding, HarnessError, NotApplicable, Outcome, Violation
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.process_facts import descendants_of
from pytest_kvconform.settings import Settings
from pytest_kvconform.subject import resolve
from tests.engine.conftest import _installed  # noqa: F401 - these tests run real engines, too
from tests.engine.judged import Judged, Jury

ROOT = Path(__file__).parents[2]
LEASE = '{"kv_connector_extra_config": {"num_threads": 0, "kv_lease_duration": 2}}'  # seconds; NixlConnector itself gets it from the suite
END_S = 5.0  # that processes may take to be gone when a bench was closed


class FaultJury(Jury):
    """Runs the cases of bytes/faults, and no other."""

    def judge_faults(self, connector: str, family: str, topology: str, variants: str, scale: float) -> Judged:
        """Outcomes of one cell; `variants` are words that select transfers, "" means all."""
        spec, config = (connector, "") if connector == "NixlConnector" else (f"{self.module}:{connector}", LEASE)
        settings = Settings(
            connector=spec, config=config, tier=("bytes",), family=(family,), topology=(topology,), matrix="full", timeout_scale=scale
        )
        bench = Bench(self.zygote.address, resolve(settings), settings, self.probe(settings), lambda sentence: None)
        results = []
        try:
            for planned in make_plan(settings, ("kv::bytes/faults",)).asked:
                if variants and str(planned.variant) not in variants.split():
                    continue
                outcome, reason, finding, evidence = Outcome.PASS, "", None, None
                bench.use(planned.cell)
                try:
                    evidence = planned.case.body(bench, planned.variant)
                except Violation as error:
                    outcome, finding = Outcome.FAIL, error.finding
                except (Blocked, NotApplicable, HarnessError) as error:
                    outcome, reason = _ASIDE[type(error)], str(error)
                results.append(_result(planned.id, planned.case.rule, outcome, reason, finding, evidence))
        finally:
            bench.close()
        return Judged(results)


_ASIDE = {Blocked: Outcome.BLOCKED, NotApplicable: Outcome.NOT_APPLICABLE, HarnessError: Outcome.HARNESS}


def _result(name: str, rule: str, outcome: Outcome, reason: str, finding: Finding | None, evidence: Evidence | None) -> CaseResult:
    return CaseResult(id=name, rule=rule, outcome=outcome, reason=reason, finding=finding, evidence=evidence)


@pytest.fixture(scope="package")
def jury() -> Iterator[FaultJury]:
    """One zygote, from which the engines of every test are forked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(ROOT)])  # where the module of a connector is looked for first
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
        jury = FaultJury("tests.bytes_faults.faulty_connectors", "bytes", ("llama3_1_8b", "gpt_oss_20b"))
        yield jury
    assert jury.close() == []


@pytest.fixture
def judge(jury: FaultJury) -> Iterator[Callable[..., Judged]]:
    """judge("IgnoresRelease", "llama3_1_8b", "P1D1", "lingers", 1.0) -> what each case says. No process of an engine stays."""
    yield jury.judge_faults
    deadline = time.monotonic() + END_S
    while left := descendants_of(jury.zygote.process.pid):
        assert time.monotonic() < deadline, f"processes are left: {left}"
        time.sleep(0.02)
