"""A hand-over comes to its end, and D loads what P has computed."""

from __future__ import annotations

from msgspec.structs import replace

from pytest_kvconform.case import case
from pytest_kvconform.result import Evidence, Finding, Violation
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.scenario import Scenario
from pytest_kvconform.suite._outcomes import check_all_ended, last_logged_exception
from pytest_kvconform.suite.engine._observations import completed, hits, loads_of, moved, observe
from pytest_kvconform.suite.engine._scenarios import everything, transfers


@case("KV-HANDOVER-001", variants=everything)
def completes(bench: Bench, scenario: Scenario) -> Evidence:
    """Every request ends, and no engine dies, hangs or raises on the way."""
    observed = observe(bench, scenario)
    check_all_ended(observed)
    ends = [r.got.finish for r in observed.requests if r.got]
    wrong = [
        f"{r.name} ended with {r.got.finish} after {len(r.got.tokens)} tokens"
        for r in observed.requests
        if r.got and (r.got.finish != "length" or len(r.got.tokens) != scenario.max_tokens)
    ]
    if wrong:
        happened = f"{'; '.join(wrong)}; {scenario.max_tokens} tokens were requested"
        ended = [r for r in observed.requests if r.got and r.got.finish == "error"]
        clean = observed.declined and len(ended) == len(wrong)
        finding = Finding(
            rule="KV-HANDOVER-001",
            happened=happened,
            diagnosis=last_logged_exception(observed),
            log=observed.logged,
            declined="these requests ended with an error, and no word is wrong" if clean else "",
        )
        raise Violation(finding)
    return Evidence(looked_at=max(1, len(ends)), unit="requests", bytes_moved=moved(observed))


@case("KV-HANDOVER-002", variants=transfers)
def d_computes_only_missing_tokens(bench: Bench, scenario: Scenario) -> Evidence:
    """D loads KV, and computes only the tokens that it did not load: counted in the scheduler's own output,
    not in the connector's answers.
    """
    observed = completed(bench, scenario)
    loads = loads_of(bench, observed)
    loads.check()
    return replace(loads.evidence(moved(observed)), notes=hits(observed))


@case("KV-HANDOVER-003", variants=transfers)
def d_loads_all_whole_blocks(bench: Bench, scenario: Scenario) -> Evidence:
    """D loads every whole block of the prompt, unless the connector declares how much it loads."""
    observed = completed(bench, scenario)
    loads = loads_of(bench, observed)
    loads.check_all_whole_blocks(
        f"kv::engine/handover::d_computes_only_missing_tokens[{bench.cell}-{scenario}]"
    )
    return loads.evidence(moved(observed))
