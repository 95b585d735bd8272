"""Faulty transfers: which faults of the transport the cases about faults set, in which cells."""

from __future__ import annotations

from pytest_kvconform.result import Cell
from pytest_kvconform.rigs.cluster.faults import leaves_traces
from pytest_kvconform.rigs.scenario import (
    LATE,
    NEVER,
    POLL,
    POST,
    REVERSED,
    STATUS,
    TWICE,
    Faults,
    Prompt,
    Transfer,
    tokens,
)

# faults on one transfer hit the first prompt
PROMPTS = (Prompt(tokens(20)), Prompt(tokens(36, seed=1)))
# the first block of the first prompt is that of a request which runs on D
SHARED = (Prompt(tokens(36), warm=17), PROMPTS[1])
# rounds, in each of which both engines step once: everything else that can happen has happened by then
SLOW = 20


def _slow(name: str, *faults: Faults, reuse: bool = False, policy: str = "fail") -> Transfer:
    """Build a transfer whose faults delay or repeat something."""
    return Transfer(name, PROMPTS, faults=faults, reuse=reuse, policy=policy)


def _failed(name: str, *faults: Faults, policy: str = "fail", beside: bool = False) -> Transfer:
    """Build a transfer whose faults let a load fail. `beside`: another request has a block of it, too."""
    prompts = SHARED if beside else PROMPTS
    return Transfer(name, prompts, faults=faults, fails=True, policy=policy, beside=beside)


FIRST = (0,)
# Faults by cell: one rank each; several ranks of D; several transfers of one rank of D, and several KV cache
# groups. Each policy for failed loads has a pair of engines in a cell. The first cell has both, for those
# of one rank. Transfers whose blocks P keeps until its lease ends come first: the lease runs while the others
# are made.
TRANSFERS: dict[tuple[str, str, str], tuple[Transfer, ...]] = {
    ("llama3_1_8b", "P1D1", "b16"): (
        # the other request is still loading
        _failed("failed", Faults(transfers=FIRST, fail=STATUS, hold=2), Faults(hold=SLOW)),
        _failed("not_begun", Faults(transfers=FIRST, fail=POST), beside=True),
        # P and D are alike here, so that a store loads, too
        _failed("recomputed", Faults(transfers=FIRST, fail=STATUS, hold=2), policy="recompute"),
        _failed("lingers", Faults(transfers=FIRST, fail=POLL, linger=SLOW)),
        _slow("not_notified", Faults(notifications=NEVER)),
        _slow("slow", Faults(hold=SLOW)),
        _slow("reported_late", Faults(late=SLOW)),
        _slow("twice", Faults(notifications=TWICE)),
        _slow("twice_late", Faults(notifications=TWICE, delay=SLOW)),
        _slow("notified_late", Faults(notifications=LATE, delay=SLOW)),
    ),
    ("llama3_1_8b", "P1D2", "b16"): (
        _failed(
            "failed_rank",
            Faults(ranks=(1,), transfers=FIRST, fail=STATUS),
            Faults(ranks=(0,), hold=SLOW),
            policy="recompute",
        ),
        _slow("slow_rank", Faults(ranks=(1,), hold=SLOW), reuse=True, policy="recompute"),
        _slow(
            "twice_slow_rank",
            Faults(ranks=(1,), hold=SLOW),
            Faults(notifications=TWICE),
            reuse=True,
            policy="recompute",
        ),
        _slow("reversed", Faults(notifications=REVERSED, delay=SLOW), policy="recompute"),
    ),
    ("gpt_oss_20b", "P2D1", "b16"): (
        _failed("failed_handle", Faults(transfers=(1,), fail=POST), Faults(transfers=FIRST, hold=SLOW)),
        _slow("slow_handle", Faults(transfers=FIRST, hold=SLOW), reuse=True),
    ),
}


# Cells of models with recurrent states, in which each transfer of a load is slow or fails in turn, and
# nothing else goes wrong. A connector may read states in transfers of their own, which loads of the cells
# above have not. The kv_load_failure_policy of each, and the matrices that it is in: states are megabytes a
# layer.
STATES: dict[tuple[str, str, str], tuple[str, tuple[str, ...]]] = {
    ("kimi_linear_48b", "P1D1", "mla64"): ("fail", ("quick", "full")),
    ("qwen3_5_35b_a3b", "P2D2", "b16"): ("fail", ("full",)),
}


# NIXL is not known to repeat a notification by itself, so a transfer that needs only
# this fault is not in every run.
NOT_QUICK = ("twice_slow_rank",)


def all_transfers(cell: Cell, matrix: str) -> tuple[Transfer, ...]:
    found = TRANSFERS.get((cell.family, cell.topology, cell.setup), ())
    return tuple(transfer for transfer in found if matrix != "quick" or transfer.name not in NOT_QUICK)


def policy_of(cell: Cell, matrix: str) -> str:
    """The kv_load_failure_policy of a cell's engines; "": no transfer is slow or fails there by itself."""
    key = cell.family, cell.topology, cell.setup
    if key in TRANSFERS:
        return TRANSFERS[key][0].policy
    policy, matrices = STATES.get(key, ("", ()))
    return policy if matrix in matrices else ""


def failing(cell: Cell, matrix: str) -> list[Transfer]:
    return [transfer for transfer in all_transfers(cell, matrix) if transfer.fails]


def reusing(cell: Cell, matrix: str) -> list[Transfer]:
    return [transfer for transfer in all_transfers(cell, matrix) if transfer.reuse and not _repeats(transfer)]


def repeating(cell: Cell, matrix: str) -> list[Transfer]:
    return [transfer for transfer in all_transfers(cell, matrix) if transfer.reuse and _repeats(transfer)]


def not_reusing(cell: Cell, matrix: str) -> list[Transfer]:
    return [transfer for transfer in all_transfers(cell, matrix) if not transfer.reuse]


def waited_for(cell: Cell, matrix: str) -> list[Transfer]:
    """Variants: all transfers but those in which several handles fail.

    There P keeps the same blocks until its lease ends, and the wait takes two seconds.
    """
    return [
        transfer for transfer in all_transfers(cell, matrix) if not transfer.fails or cell.topology != "P2D1"
    ]


def leaving_traces(cell: Cell, matrix: str) -> list[Transfer]:
    return [transfer for transfer in all_transfers(cell, matrix) if leaves_traces(transfer)]


def _repeats(transfer: Transfer) -> bool:
    return any(faults.notifications == TWICE for faults in transfer.faults)
