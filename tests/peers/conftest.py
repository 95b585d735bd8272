"""One zygote for all tests of this folder, and the cases about peers and ranks alone."""

from __future__ import annotations

from collections.abc import Callable, Collection

from pytest_kvconform.result import CaseResult, Outcome
from tests.helpers.case_runner import CaseRunner
from tests.helpers.fixtures import fixtures

MODULES = tuple(f"protocol/peers/{name}" for name in ("unreachable", "lease", "rank_reports", "unread"))
# Seconds. The suite gives NixlConnector itself a lease.
LEASE = '{"kv_connector_extra_config": {"num_threads": 0, "kv_lease_duration": %d}}'
LEASE_S = 4  # a second more than the suite's own: tests run beside one another
# Leases of a connector whose mistake must show, one after the other, while the machine is too slow to tell.
# The suite makes a lease longer itself where the user has not given it one, as these tests do.
LONGER = (LEASE_S, *[2 * LEASE_S] * 4)
# What a case says that is BLOCKED because this machine was too slow to tell.
SLOW = ("--kv-timeout-scale", "machine was too slow", "on this machine even if P is not stopped")
NO_MISTAKE = ("PASS", "EMPTY", "NOT-APPLICABLE", "BLOCKED")
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
        """Run the cases of one cell. A FAIL with another rule than the case's is the name of that rule.

        `judged`: cases that must not be BLOCKED because this machine was too slow; see LONGER. None: all.
        `shows`: what these cases report if the mistake shows. On a busy machine it may need a longer lease.
        What another run found counts where the machine was too slow before, and where it found a mistake.
        """
        found, unsettled = Reported(), set[str]()
        for longer in LONGER if judged is None or judged else (lease_s,):
            new = run_once(connector, topology, scale, longer, modules, config)
            kept = {name for name in found if name not in unsettled and new[name][0] in NO_MISTAKE}
            found = new | {name: found[name] for name in kept}
            cases = found.keys() if judged is None else judged
            unsettled = too_slow(found) | {one for one in cases if shows not in ("", found[one][0])}
            if unsettled.isdisjoint(cases):
                break
        return found

    def run_once(
        connector: str, topology: str, scale: float, lease_s: int, modules: tuple[str, ...], config: str
    ) -> Reported:
        run = case_runner.run(
            connector,
            "llama3_1_8b",
            topology,
            scale=scale,
            setup="b16",
            matrix="full",
            config=config % lease_s,
            only=lambda planned: planned.module in modules,
        )
        return dict(zip(run.outcomes, map(reported, run.results), strict=True))

    return run_cases


def too_slow(found: Reported) -> set[str]:
    """The cases that are BLOCKED because this machine was too slow to tell."""
    return {
        name
        for name, (outcome, reason) in found.items()
        if outcome == "BLOCKED" and any(words in reason for words in SLOW)
    }


def reported(result: CaseResult) -> tuple[str, str]:
    if result.finding is None:
        empty = result.outcome is Outcome.PASS and not (result.evidence and result.evidence.looked_at)
        return "EMPTY" if empty else result.outcome.value, result.reason
    name = "FAIL" if result.finding.rule == result.rule else result.finding.rule
    return name, f"{result.finding.happened}\n{result.finding.diagnosis}"


case_runner, run_cases = fixtures(
    lambda: CaseRunner("tests.peers.wrong_connectors", "protocol", ("llama3_1_8b",), "full"),
    runs_of_peer_cases,
)
