"""Every byte of KV that D's next forward reads is P's.

The rig reads D's cache before that forward, in logical coordinates.
"""

from __future__ import annotations

from dataclasses import replace

from pytest_kvconform.case import case
from pytest_kvconform.kvspace.kinds import NAMES, intervals
from pytest_kvconform.kvspace.rows.diagnose import count_rows, diagnose_rows
from pytest_kvconform.kvspace.rows.draw import draw_rows
from pytest_kvconform.kvspace.rows.window import missing_window
from pytest_kvconform.result import Evidence, Finding, Violation, blocked_by
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.cluster.observation import Observation
from pytest_kvconform.rigs.scenario import Scenario
from pytest_kvconform.suite._freed_windows import require_freed_windows
from pytest_kvconform.suite.engine._observations import completed, loads_of, moved
from pytest_kvconform.suite.engine._scenarios import has_state, has_window, transfers


def _with_loaded_kv(bench: Bench, scenario: Scenario) -> Observation:
    """Observe a scenario: the requests for which D loaded KV. What D computed itself proves nothing about the
    connector.

    Raises Blocked if D should have loaded something, NotApplicable if it is right that D loaded nothing.
    """
    observed = completed(bench, scenario)
    loads = loads_of(bench, observed)
    case = f"kv::engine/handover::d_computes_only_missing_tokens[{bench.cell}-{scenario}]"
    try:
        loads.check()
    except Violation as broken:
        if not all(r.decode.external_tokens for r in observed.requests):
            raise blocked_by(case, str(broken), bool(broken.finding.declined)) from None
    loads.require_some()
    observed = replace(observed, requests=tuple(r for r in observed.requests if r.decode.external_tokens))
    for r in observed.requests:
        if r.rows is None or r.decode.first_computed <= 0 or not r.decode.external_tokens:
            raise blocked_by(case, f"D loaded nothing for {r.name}", refused=True)
    return observed


@case("KV-BYTES-001", variants=transfers)
def attention_kv_arrives(bench: Bench, scenario: Scenario) -> Evidence:
    """Rows that are due and have a block on D equal P's, bit for bit."""
    observed = _with_loaded_kv(bench, scenario)
    for r in observed.requests:
        assert r.rows is not None
        if r.rows.wrong:
            raise Violation(
                Finding(
                    rule="KV-BYTES-001",
                    happened=f"{r.name}: D should have the KV of {r.decode.first_computed} tokens in its "
                    f"cache; the connector had announced {r.decode.external_tokens} of them",
                    differs=count_rows(r.rows),
                    picture=draw_rows(r.rows),
                    diagnosis=diagnose_rows(r.rows),
                    signature=", ".join(name for kind, name in NAMES.items() if r.rows.count(kind)),
                )
            )
    return Evidence(
        looked_at=sum(r.rows.compared_bytes for r in observed.requests if r.rows),
        unit="bytes",
        bytes_moved=sum(r.rows.compared_bytes for r in observed.requests if r.rows),
        external_tokens=sum(r.decode.external_tokens for r in observed.requests),
    )


@case("KV-WINDOW-001", applies=has_window, variants=transfers)
def sliding_window_is_complete(bench: Bench, scenario: Scenario) -> Evidence:
    """Every token of every window that D's next forward reads has a block on D.

    None of them lies on the null block.
    """
    require_freed_windows(bench)
    observed = _with_loaded_kv(bench, scenario)
    looked_at = 0
    for r in observed.requests:
        assert r.rows is not None
        looked_at += sum(due.end - due.first for due in r.rows.due if due.window)
        if gap := missing_window(r.rows):
            raise Violation(
                Finding(
                    rule="KV-WINDOW-001",
                    happened=f"{r.name} of {r.length} tokens: {gap.sentence}",
                    differs=count_rows(r.rows),
                    picture=draw_rows(r.rows),
                    diagnosis=gap.cause,
                    signature=gap.cause,
                )
            )
    return Evidence(
        looked_at=looked_at,
        unit="tokens",
        bytes_moved=moved(observed),
        external_tokens=sum(r.decode.external_tokens for r in observed.requests),
    )


@case("KV-STATE-001", applies=has_state, variants=transfers)
def recurrent_state_arrives(bench: Bench, scenario: Scenario) -> Evidence:
    """The recurrent state with which D continues is P's, after exactly the tokens that D does not compute."""
    observed = _with_loaded_kv(bench, scenario)
    for r in observed.requests:
        state_tokens, continues_at = r.state_tokens
        if state_tokens != continues_at:
            raise Violation(
                Finding(
                    rule="KV-STATE-001",
                    happened=f"{r.name}: P's state is the one after {state_tokens} tokens, and D continues "
                    f"at token {continues_at}",
                    diagnosis=f"D runs {state_tokens - continues_at:+d} tokens through a state that includes "
                    "them already"
                    if state_tokens > continues_at
                    else "D skips tokens that the state does not include",
                )
            )
        if r.state_wrong:
            layers = sorted({layer for layer, *_ in r.state_wrong})
            parts = sorted({f"{segment} {NAMES[kind]}" for _, segment, kind, _, _ in r.state_wrong})
            raise Violation(
                Finding(
                    rule="KV-STATE-001",
                    happened=f"{r.name}: the state of {len(layers)} layers differs from P's, first in "
                    f"{layers[0]}",
                    differs="; ".join(
                        f"{segment}: {wrong} of {total} channels"
                        for layer, segment, _, wrong, total in r.state_wrong
                        if layer == layers[0]
                    ),
                    diagnosis=f"{', '.join(parts)}",
                )
            )
    return Evidence(
        looked_at=sum(r.state_bytes for r in observed.requests),
        unit="bytes",
        bytes_moved=sum(r.state_bytes for r in observed.requests),
    )


@case("KV-BYTES-002", variants=transfers)
def unowned_blocks_are_unchanged(bench: Bench, scenario: Scenario) -> Evidence:
    """Blocks that belong to no request do not change, the null block included."""
    observed = _with_loaded_kv(bench, scenario)
    for r in observed.requests:
        if r.changed_blocks:
            null = (
                "; block 0 is the null block, which every window reads as empty"
                if 0 in r.changed_blocks
                else ""
            )
            raise Violation(
                Finding(
                    rule="KV-BYTES-002",
                    happened=f"while {r.name} was loaded, blocks {intervals(r.changed_blocks)} of D changed, "
                    f"which belong to no request{null}",
                    diagnosis="the connector wrote outside the blocks of the request",
                )
            )
    return Evidence(looked_at=observed.decoder.num_blocks, unit="blocks", bytes_moved=moved(observed))
