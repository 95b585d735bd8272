"""What a store must load: every whole block that was saved, for an engine of the same shape.

Of a prompt that no engine saved it must load nothing.
"""

from __future__ import annotations

from model_matrix import parse_topology
from pytest_kvconform.result import Blocked, Cell, Evidence, Finding, NotApplicable, Violation
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.bytes.handover import Received, TransferObservation
from pytest_kvconform.rigs.bytes.specs import side_of
from pytest_kvconform.rigs.scenario import Transfer
from pytest_kvconform.suite._recomputed_tokens import check_computed_once, whole_blocks

SMALL = "D has every whole block before the last token already, and a store may keep only whole blocks"
UNLIKE = (
    "the store loads nothing of what an engine of another shape has saved, and D computes it: a miss is "
    "always right"
)


def is_store(bench: Bench) -> bool:
    """Whether the connector is declared as a store."""
    return bench.subject.profile == "store"


def alike(cell: Cell) -> bool:
    """Whether D is like P: the same tensor parallel size, block size and memory layout."""
    p, d = parse_topology(cell.topology)
    return p == d and side_of(cell, "P") == side_of(cell, "D")


def raise_nothing_loaded(bench: Bench, observed: TransferObservation, transfer: Transfer) -> None:
    """Report that D loaded nothing for a request.

    Raises NotApplicable if that is right, otherwise Blocked.
    """
    if not any(
        whole_blocks(r.length, observed.decoder.block_size) > r.decode.local_tokens for r in observed.requests
    ):
        raise NotApplicable(SMALL)
    if not alike(bench.cell):
        raise NotApplicable(UNLIKE)
    raise Blocked(
        f"depends on kv::bytes/handover::d_computes_only_missing_tokens[{bench.cell}-{transfer}]: D loaded "
        "nothing from the store",
        refused=True,
    )


def check_store_loads(
    bench: Bench, observed: TransferObservation, requests: list[Received], bytes_moved: int
) -> Evidence:
    """Check KV-HANDOVER-002 for a store. `requests`: those of which D should compute only the rest, once."""
    size, external = observed.decoder.block_size, sum(r.decode.external_tokens for r in observed.requests)
    for r in requests:
        due = whole_blocks(r.length, size)
        if not alike(bench.cell) and r.decode.first_computed < due:
            if not external:
                raise NotApplicable(UNLIKE)
            continue
        if r.decode.first_computed < due:
            raise Violation(
                Finding(
                    rule="KV-HANDOVER-002",
                    happened=f"D computed {r.decode.computed_tokens} of {r.length} prompt tokens of "
                    f"{r.name}, from token {r.decode.first_computed} on: P had computed and saved the same "
                    f"prompt, {r.decode.external_tokens} tokens came from the store and "
                    f"{r.decode.local_tokens} from D's own cache",
                    differs=f"D should compute no token before token {due}, the end of the last whole block "
                    f"of {size} tokens",
                    diagnosis="get_num_new_matched_tokens announced nothing of a prompt that was saved"
                    if not r.decode.external_tokens
                    else "get_num_new_matched_tokens announced less than the whole blocks that were saved",
                    check=(
                        "do lookup and save use one key, also if the prompt ends one token after a block?",
                        "is the whole prompt saved, also if it was computed in chunks?",
                        "are blocks kept (request_finished returns True) until a background save ends?",
                    ),
                    declined=""
                    if r.decode.external_tokens
                    else "the store announced nothing, and D computed the prompt",
                )
            )
        check_computed_once(r)
    return Evidence(
        looked_at=sum(r.length for r in observed.requests),
        unit="tokens",
        bytes_moved=bytes_moved,
        external_tokens=external,
        computed_tokens=sum(r.decode.computed_tokens for r in observed.requests),
    )


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
