"""Observations with which most engine cases begin: a hand-over that reached its end."""

from __future__ import annotations

from collections.abc import Sequence

from model_matrix import Family, load_families, parse_topology
from pytest_kvconform.result import Blocked, HarnessError, NotApplicable, blocked_by
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.cluster.observation import Observation, RequestObservation
from pytest_kvconform.rigs.scenario import Scenario, lengthened
from pytest_kvconform.suite._load_amount import loads as loads_kv
from pytest_kvconform.suite._load_amount import observe_long_enough, tokens_to_add
from pytest_kvconform.suite._recomputed_tokens import Loads
from pytest_kvconform.suite.bytes._stores import UNLIKE
from pytest_kvconform.suite.engine._scenarios import lengths


def moved(observed: Observation) -> int:
    """Return how many bytes in D's cache equal P's and were not computed by D."""
    return sum(
        r.rows.compared_bytes
        for r in observed.requests
        if r.rows and not r.rows.wrong and r.decode.external_tokens
    )


def hits(observed: Observation) -> dict[str, float]:
    """Return how much of the prompts D had in its prefix cache, and what it got beside it; {}: nothing."""
    hit = sum(r.decode.local_tokens for r in observed.requests)
    states = sum(r.state_bytes for r in observed.requests if not r.state_wrong)
    rate = hit / sum(r.length for r in observed.requests)
    found = {"hit tokens": hit, "hit rate": round(rate, 3), "bytes pulled": moved(observed) + states}
    return found if hit else {}


def drafts(observed: Observation) -> dict[str, float]:
    """Return how many tokens D drafted, and how many of them became output. Empty if D drafted none."""
    drafted = sum(r.decode.drafted for r in observed.requests)
    accepted = sum(r.decode.accepted for r in observed.requests)
    return {"draft tokens": drafted, "accepted": accepted} if drafted else {}


def require_drafts(family: Family, requests: Sequence[RequestObservation]) -> None:
    """Raise HarnessError if D has a draft model and drafted nothing: each step then gave one token."""
    steps = max((len(r.got.tokens) for r in requests if r.got), default=0)
    if family.draft and steps > 1 and not any(r.decode.drafted for r in requests):
        raise HarnessError(
            f"D generated {steps} tokens in as many steps and drafted none, although {family.id} has a draft "
            "model: vLLM has turned speculation off"
        )


def observe(bench: Bench, scenario: Scenario) -> Observation:
    """Observe a scenario, whatever its outcome. Its prompts are long enough for the connector's loads."""
    block = load_families()[bench.cell.family].block_size
    if not scenario.due:
        return _observe(bench, scenario, 0)

    def to_add(found: Observation) -> int:
        if scenario.abort:
            return 0
        return tokens_to_add(bench.subject, block, found, lambda by: _longest(bench, by))

    return observe_long_enough(bench.subject, block, lambda by: _observe(bench, scenario, by), to_add)[0]


def _observe(bench: Bench, scenario: Scenario, by: int) -> Observation:
    return bench.engine.observe(bench.cell, lengthened(scenario, by), by)


def _longest(bench: Bench, by: int) -> Observation:
    """Observe the cell's longest prompt, with more tokens."""
    longest = max(lengths(bench.cell, bench.settings.matrix), key=lambda one: len(one.prompts[0].tokens))
    return _observe(bench, longest, by)


def loads_of(bench: Bench, observed: Observation) -> Loads:
    """Return what D loaded in a scenario. Of a store whose D has another size than P these are the requests
    for which D loaded something. Raises NotApplicable if there is none.
    """
    p, d = parse_topology(bench.cell.topology)
    requests = observed.requests
    if bench.subject.is_store and p != d:
        requests = tuple(r for r in requests if r.decode.external_tokens)
        if not requests:
            raise NotApplicable(UNLIKE)
    return Loads(
        bench.subject,
        requests,
        (observed.prefiller, observed.decoder),
        lambda: loads_kv(_longest(bench, 0)),
        drafts=load_families()[bench.cell.family].draft is not None,
    )


def completed(bench: Bench, scenario: Scenario) -> Observation:
    """Observe a scenario in which every request came to its end. Otherwise raises Blocked.

    If the connector gave a load up, P may keep until the lease ends what D did not read.
    """
    observed = observe(bench, scenario)
    if observed.excuse:
        raise Blocked(observed.excuse)
    if observed.failed or observed.stuck or observed.refused:
        case = f"kv::engine/handover::completes[{bench.cell}-{scenario}]"
        raise blocked_by(case, refused=observed.declined)
    return observed
