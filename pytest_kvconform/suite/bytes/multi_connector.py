"""The connector inside vLLM's MultiConnector, beside a fake connector: statistics, and loads that fail.

Whole hand-overs, of both halves and all ranks. The tier "protocol" has the cases about each hook.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from pytest_kvconform.case import case
from pytest_kvconform.result import Blocked, Cell, Evidence, Finding, NotApplicable, Violation, blocked_by
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.cluster.transfer import TransferObservation
from pytest_kvconform.rigs.engine.messages import listed
from pytest_kvconform.rigs.scenario import Transfer
from pytest_kvconform.rigs.vllm_setup.statistics import UNMEASURED, UNREGISTERED, StatisticsTrace
from pytest_kvconform.suite.bytes._fault_transfers import failing
from pytest_kvconform.suite.bytes._observations import completed, finding, moved, observe, wrong_words
from pytest_kvconform.suite.bytes._transfers import longest_length
from pytest_kvconform.suite.bytes.statistics import check_no_stage_raised
from pytest_kvconform.suite.bytes.transport_faults import every_request_ends, next_transfer_is_right

PLACES = ("first", "last")  # of the fake connector
LOADS = "KV-MULTI-001"  # the rule that it loads as it does alone
WHAT = {
    UNREGISTERED: "KVConnectorFactory has no class {name}: call KVConnectorFactory.register_connector"
    '("{name}", __name__, "{name}") where the module of the class is imported',
    UNMEASURED: "{name} reports statistics and has no Prometheus metrics: return some in build_prom_metrics",
}


def _one_group(cell: Cell) -> bool:
    """Whether this is a cell for questions that do not depend on the model: with one rank of D, or two."""
    return (cell.family, cell.setup) == ("llama3_1_8b", "b16") and cell.topology in ("P1D1", "P1D2")


def _places(cell: Cell, matrix: str) -> tuple[str, ...]:
    """Both places; beside several ranks one in the quick matrix."""
    return PLACES if matrix != "quick" or cell.topology == "P1D1" else PLACES[1:]


def _transfers(cell: Cell, matrix: str) -> list[Transfer]:
    """Variants: a prompt of several blocks, in both places."""
    return [replace(longest_length(cell, matrix), name=one, fake=one) for one in _places(cell, matrix)]


def _failing_transfers(cell: Cell, matrix: str) -> list[Transfer]:
    """Variants: a transfer of which a load fails, in both places."""
    first = failing(cell, matrix)[:1]
    return [replace(one, name=place, fake=place) for one in first for place in _places(cell, matrix)]


def _beside(transfer: Transfer) -> str:
    where = "behind" if transfer.fake == "first" else "before"
    return f"inside MultiConnector, {where} a fake connector"


def _completed(bench: Bench, transfer: Transfer) -> TransferObservation:
    """Observe a transfer inside MultiConnector. Raises Violation if D does not load as it does alone."""
    observed, where = observe(bench, transfer), f"{_beside(transfer)}: "
    if observed.excuse:
        raise Blocked(observed.excuse)
    if observed.failed or observed.stuck or observed.refused:
        failed = observed.failed
        what = failed.sentence if failed else listed(observed.stuck) or observed.refused
        raise Violation(
            Finding(
                rule=LOADS,
                happened=where + what,
                differs="; ".join(failed.stack) if failed else "",
                diagnosis="a hand-over that completes alone does not complete there",
                log=failed.log if failed else observed.logged,
            )
        )
    for r in observed.requests:
        for check in r.checks:
            if wrong_words(check, "attention"):
                wrong = finding(bench, observed, r, check, LOADS)
                raise Violation(msgspec.structs.replace(wrong, happened=where + wrong.happened))
    return observed


def _traces(bench: Bench, transfer: Transfer) -> tuple[TransferObservation, dict[str, StatisticsTrace]]:
    """Return a transfer inside MultiConnector, and the traces of the sides on which the connector reports
    statistics. Raises NotApplicable if it reports none alone, and Blocked if they do not arrive alone.
    """
    alone = longest_length(bench.cell, bench.settings.matrix)
    traces = dict(zip("PD", completed(bench, alone).statistics, strict=True))
    if any(trace.stage for trace in traces.values()):
        raise blocked_by(f"kv::bytes/statistics::statistics_reach_the_front_end[{bench.cell}-{alone}]")
    sides = [role for role, trace in traces.items() if trace.reported]
    if not sides:
        raise NotApplicable(f"{bench.subject.connector} reports no statistics of a transfer")
    observed = _completed(bench, transfer)
    found = dict(zip("PD", observed.statistics, strict=True))
    return observed, {role: found[role] for role in sides}


def _evidence(observed: TransferObservation, traces: dict[str, StatisticsTrace]) -> Evidence:
    return Evidence(
        looked_at=sum(trace.reported for trace in traces.values()),
        unit="statistics",
        bytes_moved=moved(observed),
        notes={f"log of {role}": trace.line or "nothing" for role, trace in traces.items()},
    )


@case("KV-MULTI-005", applies=_one_group, variants=_transfers)
def statistics_reach_the_front_end(bench: Bench, transfer: Transfer) -> Evidence:
    """Statistics of both connectors are rebuilt, added up, logged and recorded in the front end."""
    observed, traces = _traces(bench, transfer)
    check_no_stage_raised("KV-MULTI-005", f"{_beside(transfer)},", traces)
    return _evidence(observed, traces)


@case("KV-MULTI-006", applies=_one_group, variants=_transfers)
def front_end_knows_the_connector(bench: Bench, transfer: Transfer) -> Evidence:
    """MultiConnector's front end finds the class of the connector by its name, and its metrics."""
    observed, traces = _traces(bench, transfer)
    for role, trace in traces.items():
        if not trace.stage and bench.facts.name not in trace.children:
            happened = (
                f"{_beside(transfer)}, {role} reported no statistics of a transfer, and it does so alone"
            )
            diagnosis = "get_kv_connector_stats returns None there"
            raise Violation(Finding(rule="KV-MULTI-006", happened=happened, diagnosis=diagnosis))
        for lack in trace.lacks:
            what = WHAT[lack.what].format(name=lack.name)
            raise Violation(
                Finding(
                    rule="KV-MULTI-006",
                    happened=f"{_beside(transfer)}, vLLM's front end raised {lack.error} over the statistics "
                    f"of {role}, which ends it. {what}",
                    diagnosis="vLLM asks no connector for that, and MultiConnector does not do without it",
                    signature=lack.what,
                )
            )
    return _evidence(observed, traces)


@case("KV-MULTI-007", applies=_one_group, variants=_failing_transfers)
def failed_load_ends_its_request_alone(bench: Bench, transfer: Transfer) -> Evidence:
    """A load of the connector fails: only its request ends, and the next one is loaded."""
    [alone, *_] = failing(bench.cell, bench.settings.matrix)
    for body in (every_request_ends, next_transfer_is_right):
        try:
            body(bench, alone)
        except Violation:
            case = f"kv::bytes/transport_faults::{body.__name__}[{bench.cell}-{alone}]"
            raise blocked_by(case) from None
    try:
        evidence = every_request_ends(bench, transfer)
        next_transfer_is_right(bench, transfer)
    except Violation as broken:
        happened = f"{_beside(transfer)}: {broken.finding.happened}"
        raise Violation(
            msgspec.structs.replace(broken.finding, rule="KV-MULTI-007", happened=happened)
        ) from None
    assert isinstance(evidence, Evidence)
    return evidence
