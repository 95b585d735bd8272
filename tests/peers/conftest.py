"""One zygote for all tests of this folder, and the cases about peers and ranks alone."""

from __future__ import annotations

from collections.abc import Callable, Collection

from pytest_kvconform.result import CaseResult
from tests.helpers.case_runner import CaseRunner, CellRun
from tests.helpers.fixtures import fixtures
from tests.helpers.wrong import SECONDS
from tests.wrong_connectors.judging import run_until_told, word
from tests.wrong_connectors.table.peers import LEASE, LEASE_S, LONGER, MODULES

Reported = dict[str, tuple[str, str]]  # "case[variant]" -> outcome, and the reason or what happened and why


def runs_of_peer_cases(case_runner: CaseRunner) -> Callable[..., Reported]:
    def run_cases(
        connector: str,
        topology: str,
        scale: float = 1.0,
        lease_s: int = LEASE_S,
        modules: tuple[str, ...] = MODULES,
        config: str = LEASE,
        judged: Collection[str] | None = (),
        shows: str = "",
    ) -> Reported:
        """Run the cases of one cell; `judged` and `shows`: see `run_until_told`."""

        def run(seconds: int) -> CellRun:
            return case_runner.run(
                connector,
                "llama3_1_8b",
                topology,
                scale=scale,
                setup="b16",
                matrix="full",
                config=config.replace(SECONDS, str(seconds)),
                only=lambda planned: planned.module in modules,
            )

        leases = LONGER if judged is None or judged else (lease_s,)
        found = run_until_told(run, leases, judged, shows)
        return dict(zip(found.outcomes, map(reported, found.results), strict=True))

    return run_cases


def reported(result: CaseResult) -> tuple[str, str]:
    if result.finding is None:
        return result.outcome.value, result.reason
    return word(result), f"{result.finding.happened}\n{result.finding.diagnosis}"


case_runner, run_cases = fixtures(
    lambda: CaseRunner("tests.wrong_connectors.peers", "protocol", ("llama3_1_8b",), "full"),
    runs_of_peer_cases,
)
