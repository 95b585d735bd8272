"""Two samples of one prompt: two requests of D have the kv_transfer_params of one hand-over."""

from __future__ import annotations

from pytest_kvconform.case import case
from pytest_kvconform.result import Blocked, Evidence, NotApplicable
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.context import Deadlines
from pytest_kvconform.suite._peer_observations import (
    COMPUTED,
    STUCK,
    WRONG,
    check_right,
    completed,
    evidence,
    one_rank,
    outcome_of,
    violation,
)

SECOND = "the second of two samples of one prompt, which came after the load of the first one,"
AFTER = "the request of D after two samples of one prompt"
# outcome -> the rule that it breaks, and why it is likely so
BREAKS = {
    WRONG: (
        "KV-BYTES-001",
        "P frees the blocks when the first sample has been loaded, and D does not know that they are gone",
    ),
    STUCK: ("KV-HANDOVER-001", "D waits without a deadline for a P that has freed the blocks"),
}


@case("KV-BYTES-001", rig="peers", applies=one_rank, scenarios=("two_samples",))
def second_sample_loads_right_bytes_or_none(bench: Bench, variant: None) -> Evidence:
    """D loads a prompt for one sample. P frees and overwrites the blocks, and the second sample comes.

    D may compute it, or end it with an error, and may then load nothing from this P for a while.
    """
    lease_s = bench.peers.lease_s
    observed = completed(bench, "two_samples", "KV-BYTES-001")
    if outcome_of(observed.decodes["first"]) == COMPUTED:  # other cases say whether it may
        raise NotApplicable("D computed the first of two samples, and loaded nothing that P could free")
    first = check_right("KV-BYTES-001", observed, lease_s, {"first": "the first of two samples"})
    ended = observed.decodes["second"]
    what, age = outcome_of(ended), ended.ended - ended.prefill_added
    if what == WRONG and age > lease_s and not 0 < observed.numbers["freed"] < lease_s:
        raise Blocked(
            f"P kept its blocks, {SECOND} ended {age:.1f} s after P's request had come, and the lease is "
            f"{lease_s:.0f} s: --kv-timeout-scale makes it longer"
        )
    late = f"did not end within {Deadlines.scaled(bench.settings.timeout_scale).request:.0f} s"
    if what in BREAKS:
        rule, diagnosis = BREAKS[what]
        stale = "loaded what P had written into the blocks since, and ended without an error"
        raise violation(rule, f"{SECOND} {late if what == STUCK else stale}", observed, ended, diagnosis)
    after = observed.decodes["after"]
    if (last := outcome_of(after)) in BREAKS:
        words = late if last == STUCK else "loaded wrong bytes"
        raise violation(BREAKS[last][0], f"{AFTER} {words}", observed, after)
    return evidence(first, "rows", observed, second=what, **observed.numbers)
