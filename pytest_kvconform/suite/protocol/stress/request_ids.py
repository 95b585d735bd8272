"""Request ids with any characters: a client chooses them (X-Request-Id)."""

from __future__ import annotations

from pytest_kvconform.case import case
from pytest_kvconform.result import Blocked, Evidence, NotApplicable, Violation
from pytest_kvconform.rigs.scheduler.live.pair import live_engines
from pytest_kvconform.rigs.scheduler.rig import Rig
from pytest_kvconform.suite.protocol.stress._live import decode, loaded, plain, prefill, prompts_of, settle

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


@case("KV-IDS-001", applies=plain, rig="scheduler")
def any_request_id_is_handed_over(rig: Rig, variant: None) -> Evidence:
    """Requests with unusual ids are loaded by D one after the other, and P frees their blocks."""
    with live_engines(rig) as live:
        block = rig.host.spec.memory["D"].block
        ids: list[str] = []
        for number, chosen in enumerate(CHOSEN):
            prompts = prompts_of(live, [2 * block + 5], first=number)
            try:
                ids += decode(live, prompts, prefill(live, prompts, name=f"cmpl-{chosen}-0"))
                settle(live, ids[-1:])
                evidence = loaded(live, ids[-1:])
            except (Violation, NotApplicable) as broken:
                if not number:
                    if isinstance(broken, NotApplicable):
                        raise
                    raise Blocked(f"a request with the id {chosen!r} fails, too: {broken}") from None
                happened = broken.finding.happened if isinstance(broken, Violation) else str(broken)
                raise rig.violation(
                    "",
                    f"with the id {chosen[:40]!r}, {len(chosen)} characters: {happened}",
                    diagnosis="the connector cuts a request id apart, or has no room for it",
                ) from None
        return evidence
