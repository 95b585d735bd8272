"""Request ids with any characters: a client chooses them (X-Request-Id)."""

from __future__ import annotations

from pytest_kvconform.case import case
from pytest_kvconform.result import Blocked, NotApplicable, Violation
from pytest_kvconform.rigs.cluster.scripts.cluster import Cluster, Steps
from pytest_kvconform.rigs.engine.handle import EngineFailed
from pytest_kvconform.suite.protocol.stress._live import hand_over_and_check, plain, prompts_of

# What a client may send, first an id that has nothing unusual.
CHOSEN = (
    "0b7cbf27",
    "tenant:42",
    "a/b?c=d&e#f",
    "two words",
    "{\"id\": 'a|b;c,d'}",
    "100%-sure-7-1234abcd",
    "\u00fcber",
    "long" * 75,
)


@case("KV-IDS-001", applies=plain, rig="scheduler", script=True)
def any_request_id_is_handed_over(cluster: Cluster, variant: None) -> Steps:
    """Requests with unusual ids are loaded by D one after the other, and P frees their blocks."""
    yield from cluster.start()
    for number, chosen in enumerate(CHOSEN):
        prompts = prompts_of(cluster, [2 * cluster.block(cluster.d) + 5], first=number)
        try:
            evidence = yield from hand_over_and_check(cluster, prompts, name=f"cmpl-{chosen}-0")
        except (Violation, NotApplicable, EngineFailed) as raised:
            broken = cluster.ended_by(raised)
            if not number:
                if isinstance(broken, NotApplicable):
                    raise broken from None
                raise Blocked(f"a request with the id {chosen!r} fails, too: {broken}") from None
            happened = broken.finding.happened if isinstance(broken, Violation) else str(broken)
            raise cluster.violation(
                "",
                f"with the id {chosen[:40]!r}, {len(chosen)} characters: {happened}",
                diagnosis="the connector cuts a request id apart, or has no room for it",
            ) from None
    return evidence
