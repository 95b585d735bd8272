"""Transfers of two turns, and observations with which cases about them begin."""

from __future__ import annotations

from collections.abc import Callable

from model_matrix import parse_topology
from pytest_kvconform.kv_config import BIDIRECTIONAL
from pytest_kvconform.kvspace.kinds import COLLATERAL
from pytest_kvconform.kvspace.pools.diagnose import count_pool, diagnose_pool
from pytest_kvconform.kvspace.pools.draw import draw_pool
from pytest_kvconform.result import Blocked, Cell, Finding, NotApplicable, blocked_by
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.bytes.messages import Check
from pytest_kvconform.rigs.bytes.specs import block_size
from pytest_kvconform.rigs.cluster.transfer import Received
from pytest_kvconform.rigs.cluster.two_turns import TurnObservation, prompt_of_next_turn
from pytest_kvconform.rigs.context import LONGER
from pytest_kvconform.rigs.engine.router import RENDEZVOUS
from pytest_kvconform.rigs.scenario import Prompt, Transfer, Turn, lengthened, tokens
from pytest_kvconform.suite._load_amount import observe_long_enough
from pytest_kvconform.suite.bytes._observations import completed
from pytest_kvconform.suite.bytes._stores import is_store
from pytest_kvconform.suite.bytes._transfers import has_state, longest_length

MORE = 23  # tokens of the second prompt behind the answer
ROOM = 3  # requests whose KV an engine of two turns has at once
NEXT, SAME_P, OVERWRITTEN, SHORTER = "next_turn", "same_p", "overwritten", "shorter"
NO_TURN = "no_turn"  # none comes: the longest transfer of the cell shows what becomes of D's blocks
PREEMPTED, ABORTED_ON_P, ABORTED_ON_D = "preempted", "aborted_on_p", "aborted_on_d"
LATE = {"late-fail": "fail", "late-recompute": "recompute"}  # kv_load_failure_policy
MAY_FAIL = (*LATE, SHORTER)  # whose request P may end with an error
ALL = (NEXT, SAME_P, OVERWRITTEN, PREEMPTED, ABORTED_ON_P, ABORTED_ON_D, *MAY_FAIL)
NO_PARAMS = (
    "D returned no kv_transfer_params at the end of its request, with which a router could lead P to D"
)
COMPUTES = "kv::bytes/turns/next_turn::p_computes_only_missing_tokens"
ENDS = "kv::bytes/turns/next_turn::both_turns_end"


def _made(cell: Cell, name: str) -> Transfer:
    """The transfer of two turns of this name. The answer fills whole blocks, where none is as large as those
    of a model with states.
    """
    b = max(block_size(cell, role) for role in "PD")
    first, answer = (b + 37, 20) if has_state(cell) else (3 * b + b // 4 + 3, 2 * b + 5)
    prompts = (Prompt(tokens(first)),)
    if name == SAME_P:  # so many that it is worth a load, whatever P has itself
        return Transfer(name, prompts, turn=Turn(answer=5 * b + 5, more=MORE, forgets=False))
    if name == OVERWRITTEN:
        return Transfer(name, prompts, reuse=True, turn=Turn(answer=answer, more=MORE))
    if name == PREEMPTED:
        return Transfer(name, prompts, preempt="P", turn=Turn(answer=answer, more=MORE + 32))
    if name == SHORTER:
        return Transfer(name, prompts, turn=Turn(answer=answer, more=-(b + 3)))
    if name in LATE:
        late = Turn(answer=answer, more=MORE, late=True)
        return Transfer(name, prompts, reuse=True, fails=True, policy=LATE[name], turn=late)
    abort = {ABORTED_ON_P: "P", ABORTED_ON_D: "D"}.get(name, "")
    return Transfer(name, prompts, abort=abort, turn=Turn(answer=answer, more=MORE))


def _once(cell: Cell, matrix: str) -> bool:
    """Whether a cell has the transfers about what happens to the requests: it does not depend on ranks."""
    alone = parse_topology(cell.topology) == (1, 1) and cell.setup in ("b16", "mla64")
    return alone and (matrix != "quick" or cell.family == "llama3_1_8b")


def named(
    *names: str, everywhere: tuple[str, ...] = (NEXT, NO_TURN)
) -> Callable[[Cell, str], list[Transfer]]:
    """Return the variants of a case: those of these transfers that a cell has.

    `everywhere`: those that every cell has. The others do not depend on ranks.
    """

    def variants(cell: Cell, matrix: str) -> list[Transfer]:
        return [_made(cell, name) for name in names if name in everywhere or _once(cell, matrix)]

    return variants


# ---- observations ------------------------------------------------------------------------------------------


def require_a_keeper(bench: Bench) -> None:
    """Raise NotApplicable unless D keeps something for the next turn, or is declared to do so.

    A transfer that other cases need anyway shows what D returns at the end of a request.
    """
    if is_store(bench):
        raise NotApplicable("a store hands nothing over: P finds in it what D has saved")
    if bench.subject.handover == RENDEZVOUS and not bench.subject.hook:
        raise NotApplicable("in a rendezvous the router gives P nothing of what D returns", refused=True)
    if bench.subject.features.get(BIDIRECTIONAL) == "":
        return
    ended = completed(bench, longest_length(bench.cell, bench.settings.matrix), refused=True)
    if not any(r.decode.keeps_for_others for r in ended.requests):
        raise NotApplicable(NO_PARAMS, refused=True)


def observe_turns(bench: Bench, transfer: Transfer) -> TurnObservation:
    """Observe two turns, whatever their outcome. Prompts are long enough for the connector's loads.

    Raises NotApplicable where the connector keeps nothing for a next turn, and is not declared to do so.
    """
    require_a_keeper(bench)

    def to_add(found: TurnObservation) -> int:
        completed = found.on_p is not None and found.on_p.finish == "length"
        if transfer.name not in (NEXT, SAME_P) or not completed or loads(found):
            return 0
        return LONGER if loads(_observe(bench, transfer, LONGER)) else 0

    block = block_size(bench.cell, "P")
    return observe_long_enough(bench.subject, block, lambda by: _observe(bench, transfer, by), to_add)[0]


def loads(observed: TurnObservation) -> bool:
    """Whether P loaded something of D."""
    return observed.on_p is not None and observed.on_p.decode.external_tokens > 0


def _observe(bench: Bench, transfer: Transfer, by: int) -> TurnObservation:
    long = lengthened(transfer, by)
    room = ROOM * (len(prompt_of_next_turn(long)) + 16)
    return bench.bytes.observe_turns(bench.cell, long, room)


def ended(bench: Bench, transfer: Transfer) -> TurnObservation:
    """Observe two turns in which every request came to its end. Otherwise raises Blocked."""
    observed = observe_turns(bench, transfer)
    if observed.excuse:
        raise Blocked(observed.excuse)
    if observed.failed or observed.stuck:
        raise blocked_by(f"{ENDS}[{bench.cell}-{transfer}]", refused=observed.declined)
    require_first_turn(bench, observed)
    return observed


def require_first_turn(bench: Bench, observed: TurnObservation) -> None:
    """Raise Blocked if D's request of the first turn ended with an error: cases about one turn tell why."""
    if any(r.finish == "error" for r in observed.requests[:1]):
        raise blocked_by(f"kv::bytes/handover::completes[{bench.cell}]", refused=True)


def with_both_turns(bench: Bench, transfer: Transfer) -> tuple[TurnObservation, Received]:
    """Observe two turns in which P loaded something of D, and its request. Otherwise raises Blocked."""
    observed = ended(bench, transfer)
    loaded = observed.on_p
    if loaded is None or loaded.finish == "error" or not loads(observed):
        name = transfer.name if transfer.name == SAME_P else NEXT
        raise blocked_by(f"{COMPUTES}[{bench.cell}-{name}]", "P loaded nothing of D", refused=True)
    return observed, loaded


def whole_blocks_of_d(bench: Bench, observed: TurnObservation) -> int:
    """Return how many tokens of the first turn are in whole blocks of P and D. D has not computed the last
    token that it has generated.
    """
    first = observed.first
    turn = observed.transfer.turn
    assert first is not None
    assert turn is not None
    size = max(block_size(bench.cell, role) for role in "PD")
    return (first.prompt_tokens + turn.answer - 1) // size * size


def wrong_on_p(observed: TurnObservation, r: Received, check: Check, rule: str) -> Finding:
    """Describe for a person what is wrong in the pool of one rank of P after a load from D."""
    missing = f"; {len(check.missing)} groups have no block for a token that P reads" * bool(check.missing)
    aside = "; bytes have changed that were not due" * bool(check.pool.words.get(COLLATERAL))
    return Finding(
        rule=rule,
        happened=f"{r.name} of {r.length} tokens: rank {check.rank} of P should have of D the KV of tokens "
        f"{check.local} to {check.computed - 1}; the connector had announced {r.decode.external_tokens} "
        f"tokens{missing}{aside}",
        differs=count_pool(check.pool),
        picture=draw_pool(check.pool),
        diagnosis=diagnose_pool(check.pool, source=observed.on_d),
    )
