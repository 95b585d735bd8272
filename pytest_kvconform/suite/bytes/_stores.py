"""What a store must load: every whole block that was saved, for an engine of the same shape.

Of a prompt that no engine saved it must load nothing.
"""

from __future__ import annotations

from pytest_kvconform.result import Finding, NotApplicable, Violation
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.bytes.specs import alike
from pytest_kvconform.rigs.cluster.transfer import Received, TransferObservation
from pytest_kvconform.suite._recomputed_tokens import whole_blocks

SMALL = "D has every whole block before the last token already, and a store may keep only whole blocks"
UNLIKE = (
    "the store loads nothing of what an engine of another shape has saved, and D computes it: a miss is "
    "always right"
)


def is_store(bench: Bench) -> bool:
    """Whether the connector is declared as a store."""
    return bench.subject.is_store


def check_store_may_miss(bench: Bench, observed: TransferObservation) -> None:
    """Raise NotApplicable if it is right that D loaded nothing for a request."""
    if not any(
        whole_blocks(r.length, observed.decoder.block_size) > r.decode.local_tokens for r in observed.requests
    ):
        raise NotApplicable(SMALL)
    if not alike(bench.cell):
        raise NotApplicable(UNLIKE)


def requests_of_store(bench: Bench, observed: TransferObservation) -> tuple[Received, ...]:
    """Return the requests of which the store must load something. For an engine of another shape these are
    the requests of which it did. Raises NotApplicable if there is none.
    """
    if alike(bench.cell):
        return observed.requests
    found = tuple(r for r in observed.requests if r.decode.external_tokens)
    if not found:
        raise NotApplicable(UNLIKE)
    return found


def check_nothing_invented(observed: TransferObservation) -> None:
    """Raise Violation (KV-BYTES-001) if P loaded KV of a prompt that no engine had computed before.

    P's prompts are new to every store. The first of them shares nothing with any other. After a preemption P
    may load what it saved.
    """
    first = observed.requests[0] if observed.requests and observed.transfer.preempt != "P" else None
    if first is not None and first.prefill.external_tokens:
        raise Violation(
            Finding(
                rule="KV-BYTES-001",
                happened=f"P loaded {first.prefill.external_tokens} of {first.length} tokens of "
                f"{first.name}, a prompt that no engine had computed or saved",
                diagnosis="the store takes one prompt for another: the key of the lookup does not depend on "
                "every token",
                check=("is every token of the prefix part of the key, and not only some or their number?",),
            )
        )
