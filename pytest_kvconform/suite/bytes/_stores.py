"""What a store owes: every whole block that was saved, to an engine of the same shape, and nothing of a prompt that nobody has saved."""

from __future__ import annotations

from model_matrix import parse_topology
from pytest_kvconform.result import Blocked, Cell, Evidence, Finding, NotApplicable, Violation
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.bytes.handover import Received, TransferObservation
from pytest_kvconform.rigs.bytes.specs import side_of
from pytest_kvconform.rigs.scenario import Transfer
from pytest_kvconform.suite._recomputed_tokens import check_computed_once, whole_blocks

SMALL = "D has every whole block before the last token already, and a store may keep whole blocks only"
UNLIKE = "the store gives nothing of what an engine of another shape has saved, and D computes it: a miss is always right"


def is_store(bench: Bench) -> bool:
    """Whether the subject is declared to be one."""
    return bench.subject.profile == "store"


def alike(cell: Cell) -> bool:
    """Whether D is P started again: the same tensor parallel size, block size and memory layout."""
    p, d = parse_topology(cell.topology)
    return p == d and side_of(cell, "P") == side_of(cell, "D")


def nothing_given(bench: Bench, observed: TransferObservation, transfer: Transfer) -> None:
    """Called when D was given nothing for a request. Raises NotApplicable where that is right, else Blocked."""
    if not any(
        whole_blocks(r.length, observed.decoder.block_size) > r.decode.local_tokens for r in observed.requests
    ):
        raise NotApplicable(SMALL)
    if not alike(bench.cell):
        raise NotApplicable(UNLIKE)
    raise Blocked(
        f"stands on kv::bytes/handover::d_computes_only_missing_tokens[{bench.cell}-{transfer}]: the store gave D nothing",
        refused=True,
    )


def check_store_loads(
    bench: Bench, observed: TransferObservation, requests: list[Received], bytes_moved: int
) -> Evidence:
    """Judge KV-HANDOVER-002 for a store. `requests`: those of which D was to compute the rest only, once."""
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
                    happened=f"D computed {r.decode.computed_tokens} of {r.length} prompt tokens of {r.name}, from token "
                    f"{r.decode.first_computed} on: P had computed and saved the same prompt, {r.decode.external_tokens} tokens came from "
                    f"the store and {r.decode.local_tokens} from D's own cache",
                    differs=f"it had to compute none before token {due}, the end of the last whole block of {size} tokens",
                    diagnosis="get_num_new_matched_tokens announced nothing of a prompt that was saved"
                    if not r.decode.external_tokens
                    else "get_num_new_matched_tokens announced less than the whole blocks that were saved",
                    check=(
                        "is a prompt looked up under the key under which it was saved, also when it ends one token behind a block?",
                        "is the whole prompt saved, also when it was computed in chunks?",
                        "a store that saves in the background: does it keep the blocks (request_finished returns True) until it has?",
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
    """Raise Violation (KV-BYTES-001) if P was given KV of a prompt that nobody had computed before.

    P's prompts are new to every store. The first of them shares nothing with any other, and after a preemption P may load what it saved.
    """
    first = observed.requests[0] if observed.requests and observed.transfer.preempt != "P" else None
    if first is not None and first.prefill.external_tokens:
        raise Violation(
            Finding(
                rule="KV-BYTES-001",
                happened=f"P was given {first.prefill.external_tokens} of {first.length} tokens of {first.name}, a prompt that nobody had "
                "computed or saved",
                diagnosis="the store takes one prompt for another: what it looks up does not depend on every token",
                check=("is every token of the prefix part of the key, and not only some, or their number?",),
            )
        )
