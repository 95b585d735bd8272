"""D's output equals its output after a perfect hand-over."""

from __future__ import annotations

from model_matrix import load_families
from pytest_kvconform.case import case
from pytest_kvconform.result import Evidence, Finding, Violation
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.cluster.observation import first_difference
from pytest_kvconform.rigs.scenario import Scenario
from pytest_kvconform.suite.engine._observations import completed, drafts, loads_of, moved, require_drafts
from pytest_kvconform.suite.engine._scenarios import handovers, has_state


@case("KV-OUTPUT-001", variants=handovers)
def outputs_match_the_oracle(bench: Bench, scenario: Scenario) -> Evidence:
    """Tokens and log-probabilities are those of the oracle's run: the harness copies the KV there.

    Both runs use the same two engines; of a store, the oracle's are others, without the connector. A prompt
    is not compared if nothing of it is due or loaded, and D computes more than its last token: after a
    perfect hand-over D computes the last token alone, which rounds otherwise. With recurrent states it rounds
    otherwise also if a load is due, and D loads nothing while it loads for another request.
    """
    observed = completed(bench, scenario)
    loads, worst = loads_of(bench, observed), 0.0
    compared = [
        r
        for r in observed.requests
        if r.decode.first_computed >= r.length - 1
        or r.decode.external_tokens
        or (loads.are_due(r) and not has_state(bench.cell))
    ]
    if not compared:
        loads.require_some()  # raises NotApplicable
    for r in compared:
        assert r.got is not None
        assert r.want is not None
        difference = first_difference(r.got, r.want, observed.tolerance)
        worst = max(worst, difference.largest)
        if difference.position is not None:
            raise Violation(
                Finding(
                    rule="KV-OUTPUT-001",
                    happened=f"{r.name} of {r.length} tokens: {difference.sentence}",
                    differs=f"tolerance {observed.tolerance:.3g} ({observed.tolerance_source}); "
                    f"tokens {list(r.got.tokens)}, with the oracle {list(r.want.tokens)}",
                    diagnosis="D's KV or state is not P's when it computes "
                    f"{'the last prompt token' if difference.position == 0 else 'a later token'}",
                    signature="outputs differ from the oracle's",
                )
            )
    require_drafts(load_families()[bench.cell.family], observed.requests)
    return Evidence(
        looked_at=sum(len(r.got.logprobs) for r in compared if r.got),
        unit="tokens",
        bytes_moved=moved(observed),
        notes={
            "largest difference": worst,
            "tolerance": observed.tolerance,
            "noise": observed.noise,
            **drafts(observed),
        },
    )
