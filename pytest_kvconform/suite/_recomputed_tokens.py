"""What D had to compute of prompts that P has computed.

Every rig counts this in the scheduler's own output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pytest_kvconform.result import Evidence, Finding, Violation
from pytest_kvconform.rigs.engine.messages import Trace


class HandedOver(Protocol):
    """One request of an observation."""

    @property
    def name(self) -> str: ...
    @property
    def length(self) -> int: ...
    @property
    def prefill(self) -> Trace: ...
    @property
    def decode(self) -> Trace: ...


def check_recomputed_tokens(requests: Sequence[HandedOver], block_size: int, bytes_moved: int) -> Evidence:
    """Check KV-HANDOVER-002.

    A connector that moves whole blocks of `block_size` tokens may leave the rest of the last block to D.
    Raises Violation.
    """
    for r in requests:
        due = whole_blocks(r.length, block_size)
        if not r.prefill.handed_over:
            raise Violation(
                Finding(
                    rule="KV-HANDOVER-002",
                    happened=f"P finished {r.name} and returned no kv_transfer_params",
                    diagnosis="request_finished returned None for its params, so D does not know where the "
                    "KV is",
                    declined="P handed nothing over",
                )
            )
        if r.decode.first_computed < due:
            # D computed the prompt itself, so no wrong bytes were used
            clean = not r.decode.external_tokens or r.decode.first_computed <= r.decode.local_tokens
            raise Violation(
                Finding(
                    rule="KV-HANDOVER-002",
                    happened=f"D computed {r.decode.computed_tokens} of {r.length} prompt tokens of "
                    f"{r.name}, "
                    f"from token {r.decode.first_computed} on: "
                    f"{r.decode.external_tokens} came from the connector and {r.decode.local_tokens} from "
                    "D's own cache",
                    differs=f"D should compute no token before token {due}",
                    diagnosis="D recomputed the prompt: get_num_new_matched_tokens announced nothing"
                    if not r.decode.external_tokens
                    else "the load failed and D recomputed the prompt"
                    if r.decode.external_tokens + r.decode.local_tokens >= due
                    else "get_num_new_matched_tokens announced less than P had",
                    signature="D recomputed what P had",
                    declined="D loaded nothing, and computed the prompt" if clean else "",
                )
            )
        check_computed_once(r)
    return Evidence(
        looked_at=sum(r.length for r in requests),
        unit="tokens",
        bytes_moved=bytes_moved,
        external_tokens=sum(r.decode.external_tokens for r in requests),
        computed_tokens=sum(r.decode.computed_tokens for r in requests),
    )


def whole_blocks(length: int, block_size: int) -> int:
    """Return how many tokens of a prompt D must not recompute.

    These are all but the last one, from which D samples, rounded down to whole blocks.
    """
    return (length - 1) // block_size * block_size


def check_computed_once(r: HandedOver) -> None:
    """Raise Violation unless D computed each token of the prompt's rest once.

    The rest begins with the first token that D computed, and ends with the prompt.
    """
    if r.decode.computed_tokens != r.length - r.decode.first_computed:
        raise Violation(
            Finding(
                rule="KV-HANDOVER-002",
                happened=f"D computed {r.decode.computed_tokens} prompt tokens of {r.name} "
                f"from token {r.decode.first_computed} on, of {r.length} tokens: some of them twice",
            )
        )
