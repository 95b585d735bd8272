"""Statistics of transfers, from the workers to the log line and to Prometheus.

The engines of the byte rig report them as vLLM's do; `StatisticsPath` is vLLM's own front end.
"""

from __future__ import annotations

from pytest_kvconform.case import case
from pytest_kvconform.result import Cell, Evidence, Finding, NotApplicable, Violation
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.scenario import Transfer
from pytest_kvconform.rigs.vllm_setup.statistics import StatisticsTrace
from pytest_kvconform.suite.bytes._observations import completed, moved
from pytest_kvconform.suite.bytes._transfers import longest_length, transfers

# What vLLM does when a stage raises.
ENDS = {
    "msgpack": "the thread that sends outputs to the front end ends, and every request waits for ever",
    "build_prom_metrics": "the API server does not start",
    "reduce": "the log of statistics ends, and LLM.generate raises",
    "log": "the log of statistics ends, and LLM.generate raises",
    "is_empty": "the log of statistics ends, and LLM.generate raises",
}
HANDLER = "the output handler of the front end ends, and every request fails"


def one_transfer(cell: Cell, matrix: str) -> list[Transfer]:
    """Variants: a transfer of several blocks, and two requests at once."""
    two = [transfer for transfer in transfers(cell, matrix) if transfer.name == "two_at_once"]
    return [longest_length(cell, matrix), *two]


def _traces(bench: Bench, transfer: Transfer) -> tuple[int, dict[str, StatisticsTrace]]:
    """Return the bytes that a transfer moved, and the traces of the sides with statistics."""
    observed = completed(bench, transfer)
    found = dict(zip("PD", observed.statistics, strict=True))
    told = {role: trace for role, trace in found.items() if trace.reported or trace.stage}
    if not told:
        raise NotApplicable(f"{bench.subject.connector} reports no statistics of a transfer")
    return moved(observed), told


def check_no_stage_raised(rule: str, when: str, traces: dict[str, StatisticsTrace]) -> None:
    """Raise Violation of `rule` for a side whose statistics have raised. `when`: in words, "after n17"."""
    for role, trace in traces.items():
        if trace.stage:
            raise Violation(
                Finding(
                    rule=rule,
                    happened=f"{when} the statistics of {role} raised {trace.error} in {trace.stage}: "
                    f"{ENDS.get(trace.stage, HANDLER)}",
                    diagnosis=f"{trace.stage} of the connector's statistics raises",
                )
            )


@case("KV-STATS-001", variants=one_transfer)
def statistics_reach_the_front_end(bench: Bench, transfer: Transfer) -> Evidence:
    """After a transfer no part of the way of the statistics raises: msgpack, rebuild, add up, log, record."""
    bytes_moved, traces = _traces(bench, transfer)
    check_no_stage_raised("KV-STATS-001", f"after {transfer}", traces)
    return Evidence(
        looked_at=sum(trace.reported for trace in traces.values()),
        unit="statistics",
        bytes_moved=bytes_moved,
        notes={f"log of {role}": trace.line or "nothing" for role, trace in traces.items()},
    )


@case("KV-STATS-002", variants=one_transfer)
def statistics_of_transfers_are_logged(bench: Bench, transfer: Transfer) -> Evidence:
    """What a connector reports of a transfer is logged, and recorded if the connector has metrics."""
    bytes_moved, traces = _traces(bench, transfer)
    for role, trace in traces.items():
        lost = ""
        if not trace.rebuilt:
            lost = "build_kv_connector_stats returns None for them, and vLLM does not log them"
        elif not trace.stage and trace.metrics and trace.line and not trace.samples:
            lost = f"they are logged, and all {len(trace.metrics)} of its Prometheus metrics are still 0"
        if lost:
            raise Violation(
                Finding(
                    rule="KV-STATS-002",
                    happened=f"{role} reported statistics in {trace.reported} steps of {transfer}: {lost}",
                    diagnosis="statistics are collected and lost",
                )
            )
    return Evidence(
        looked_at=sum(trace.reported for trace in traces.values()),
        unit="statistics",
        bytes_moved=bytes_moved,
        notes={f"samples of {role}": trace.samples for role, trace in traces.items()},
    )
