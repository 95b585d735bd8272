"""What engines still hold when no request is left. Every rig reads this from vLLM's own scheduler."""

from __future__ import annotations

from collections.abc import Callable

from pytest_kvconform.kv_config import turn_lease
from pytest_kvconform.result import Blocked, Evidence, Finding, Violation
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.cluster.release import Release
from pytest_kvconform.rigs.engine.messages import Usage

SAVES = "the connector never reported the end of a save, so the scheduler keeps the blocks that are saved"
NOT_NOTIFIED = (
    "the connector has not reported in finished_sending that P may free them: D has not notified P that it "
    "has read the blocks, or will not, or P does not act on it"
)
LOADS = (
    "the connector has not reported that D may free them: the end of a load in finished_recving, or of a "
    "request whose blocks it keeps in finished_sending"
)


def turn_lease_s(bench: Bench) -> float:
    """Return the seconds for which D keeps what no next turn reads, as its engines are configured."""
    return turn_lease.turn_lease_s(bench.subject, bench.context.transfer_config("D"))


def why_d_keeps(bench: Bench, usage: Usage, waited_s: float, otherwise: str) -> str:
    """Return why D still holds requests after a wait: for a later one, if it has returned kv_transfer_params
    with each of them, or `otherwise`. Raises Blocked if D may do so, for longer than that.
    """
    if not usage.requests or not set(usage.requests) <= set(usage.promised):
        return otherwise
    return turn_lease.why_kept_for_later(bench.subject, bench.context.transfer_config("D"), waited_s)


def check_all_freed(
    usages: dict[str, Usage],
    released: Release | None,
    bytes_moved: int,
    store: bool = False,
    rule_of_p: str = "KV-BLOCKS-001",
    d_keeps: Callable[[Usage, float, str], str] = lambda usage, waited_s, otherwise: otherwise,
) -> Evidence:
    """Check KV-BLOCKS-001: engines hold nothing after every request has ended. Raises Violation.

    `usages`: role -> what it holds. `store`: P hands nothing over, and saves. `rule_of_p`: the rule that
    blocks which P keeps break. `d_keeps`: `why_d_keeps` of the bench, whose Blocked is raised.
    """
    waited_s, took_s = (released.waited_s, released.took_s) if released else (0.0, 0.0)
    may_keep: Blocked | None = None
    # D first: what P keeps may only break a SHOULD. A store saves on P, and P and D may be one engine.
    for role, usage in sorted(usages.items(), reverse=store):
        held = usage.total_blocks - usage.free_blocks
        groups = [f"group {g}: {', '.join(names)}" for g, names in enumerate(usage.group_requests) if names]
        if held or usage.requests or groups:
            diagnosis = SAVES if store else NOT_NOTIFIED
            if role == "D":
                try:
                    diagnosis = d_keeps(usage, waited_s, LOADS)
                except Blocked as blocked:  # P is judged all the same
                    may_keep = blocked
                    continue
            raise Violation(
                Finding(
                    rule=rule_of_p if role == "P" else "KV-BLOCKS-001",
                    happened=f"{waited_s:.3g} s after the last token {role} still holds "
                    f"{held} of "
                    f"{usage.total_blocks} blocks and {len(usage.requests)} requests",
                    differs="; ".join(groups),
                    diagnosis=diagnosis,
                    signature=f"{role} keeps blocks",
                )
            )
        if usage.unfinished:
            raise Violation(
                Finding(
                    rule="KV-BLOCKS-001",
                    happened=f"{role} holds no blocks and no requests, but its scheduler still reports "
                    "unfinished work",
                    diagnosis="has_pending_push_work, or a finished request that is never reported, keeps "
                    "the engine stepping",
                )
            )
    if may_keep:
        raise may_keep
    return Evidence(
        looked_at=sum(usage.total_blocks for usage in usages.values()),
        unit="blocks",
        bytes_moved=bytes_moved,
        notes={"seconds": round(took_s, 3)},
    )
