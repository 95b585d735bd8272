"""D shuts down while it loads, and P does not answer: on the real transport."""

from __future__ import annotations

from pytest_kvconform.case import case
from pytest_kvconform.result import Evidence
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.context import REQUEST_S
from pytest_kvconform.suite._peer_observations import completed, evidence, one_rank, violation

RULE = "KV-SHUTDOWN-004"


@case(RULE, rig="peers", applies=one_rank)
def nothing_is_written_after_shutdown(bench: Bench, variant: None) -> Evidence:
    """P's process is stopped during a load, and D shuts down. That ends, and nothing is written later."""
    observed = completed(bench, "shutdown_during_load", RULE, "D13")
    numbers, when = observed.numbers, "D shut down during a load, and P's process stood still"
    if not numbers["returned"]:
        raise violation(
            RULE,
            f"{when}: shutdown() had not returned after {REQUEST_S * bench.settings.timeout_scale:.0f} s",
            observed,
            diagnosis="shutdown() waits without a deadline for a transfer that does not end",
        )
    if numbers["raised"]:
        raise violation(RULE, f"{when}: shutdown() raised an exception", observed)
    if numbers["written"]:
        raise violation(
            RULE,
            f"{when}: {numbers['written']:.0f} bytes of D's KV cache changed after shutdown() had returned",
            observed,
            diagnosis="shutdown() leaves a transfer or a thread that goes on writing, and vLLM releases this "
            "memory next",
        )
    return evidence(1, "shutdowns", observed, loading=int(numbers["loading"]))
