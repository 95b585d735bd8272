"""What cases about peers begin with: a story that was told to its end, and words for what outcome_of of its requests."""

from __future__ import annotations

from pytest_kvconform.kvspace.pools.diagnose import count_pool, diagnose_pool
from pytest_kvconform.kvspace.pools.draw import draw_pool
from pytest_kvconform.result import Blocked, Cell, Evidence, Finding, HarnessError, NotApplicable, Violation
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.peers.scenario_engines import NO_TRANSFER, Ended, EngineSeen, StorySeen
from pytest_kvconform.suite.bytes._observations import wrong_words
from pytest_kvconform.suite.bytes._stores import is_store

RIGHT, COMPUTED, REFUSED, WRONG, STUCK = (
    "right",
    "computed",
    "refused",
    "wrong",
    "stuck",
)  # what outcome_of of a request


def one_rank(cell: Cell) -> bool:
    """Whether P and D have one rank each: in this cell many engines run side by side."""
    return cell.topology == "P1D1"


def observe(bench: Bench, name: str) -> StorySeen:
    """A story, whatever outcome_of of it. Raises NotApplicable for a store."""
    has_peers(bench)
    return bench.peers.observe(bench.cell, name)


def has_peers(bench: Bench) -> None:
    """Raises NotApplicable for a store."""
    if is_store(bench):
        raise NotApplicable("a store has no peers: whoever saved a prompt may be gone")


def completed(bench: Bench, name: str, rule: str, owns: str) -> StorySeen:
    """A story that was told to its end.

    Raises Violation if one of the engines `owns` failed, or if P did not come as far as a hand-over; NotApplicable where the connector
    need not have what the story is about; Blocked if an engine failed that is another case's to judge, or nothing can be said.
    """
    observed = observe(bench, name)
    if observed.failed:
        if not observed.begun or observed.broken not in owns.split():
            raise Blocked(f"an engine had failed in another story: {observed.failed.sentence}")
        raise Violation(
            Finding(
                rule=rule,
                happened=observed.failed.sentence,
                differs="; ".join(observed.failed.stack),
                diagnosis=observed.failed.sentence,
                log=observed.failed.log,
            )
        )
    if observed.stuck:
        raise Blocked(observed.stuck)
    if observed.missing == NO_TRANSFER:
        raise Blocked(observed.missing)
    if observed.missing:
        raise NotApplicable(observed.missing)
    return observed


def engine(observed: StorySeen, name: str) -> EngineSeen:
    """What an engine did in all stories. Raises Blocked if it is gone: another case says why."""
    if name not in observed.engines:
        raise Blocked(f"engine {name} failed in another story, and what it had reported is lost")
    return observed.engines[name]


def outcome_of(ended: Ended) -> str:
    """RIGHT: D was given every byte. COMPUTED: D did it itself. REFUSED: the request ended with an error. Otherwise WRONG or STUCK."""
    if not ended.finish:
        return STUCK
    if ended.finish == "error":
        return REFUSED
    if not ended.trace.external_tokens or ended.trace.first_computed <= ended.trace.local_tokens:
        return COMPUTED
    if not sum(check.rows_due for check in ended.checks):
        raise HarnessError("D was given something and no rank looked at what")
    return WRONG if any(wrong_words(check, "attention") for check in ended.checks) else RIGHT


def seconds(ended: Ended) -> float:
    """How long a request took."""
    return ended.ended - ended.added


def violation(
    rule: str, happened: str, observed: StorySeen, ended: Ended | None = None, diagnosis: str = ""
) -> Violation:
    """A broken rule; with the picture of what stands wrong in D's pool, if a request was given wrong bytes."""
    wrong = next((check for check in (ended.checks if ended else ()) if check.pool.wrong), None)
    return Violation(
        Finding(
            rule=rule,
            happened=happened,
            differs=count_pool(wrong.pool) if wrong else "",
            picture=draw_pool(wrong.pool) if wrong else (),
            diagnosis=diagnosis or (diagnose_pool(wrong.pool) if wrong else ""),
            log=observed.logged[-4:],
        )
    )


def check_right(rule: str, observed: StorySeen, lease_s: float, requests: dict[str, str]) -> int:
    """Rows that D was given. `requests`: name in the story -> how it is called in a sentence. Raises Violation if one is not RIGHT.

    A request that ended longer after P's than a lease is may find anything, or be refused for that: then it is Blocked, since it is the
    machine that is slow.
    """
    for name, words in requests.items():
        ended = observed.requests[name]
        if (what := outcome_of(ended)) == RIGHT:
            continue
        if what != STUCK and (age := ended.ended - ended.handed) > lease_s:
            slow = f"ended {age:.1f} s after P's request had come, and the lease is {lease_s:.0f} s"
            raise Blocked(f"{words} {slow}: --kv-timeout-scale makes it longer")
        raise violation(
            rule, f"{words} {_WORDS[what]}", observed, ended, "" if what == WRONG else _last(observed)
        )
    return sum(check.rows_due for name in requests for check in observed.requests[name].checks)


_WORDS = {
    COMPUTED: "was computed by D, although P had it",
    REFUSED: "ended with an error",
    WRONG: "was given wrong bytes",
    STUCK: "did not end",
}


def _last(observed: StorySeen) -> str:
    role, _, reported = (observed.logged or ("",))[-1].partition(": ")
    return f"{role[:1]} logged {reported}" if reported else ""


def evidence(looked_at: int, unit: str, observed: StorySeen, **notes: float | int | str) -> Evidence:
    """Proof of what was looked at, with the seconds of every request."""
    times = {f"{name}_s": round(seconds(ended), 3) for name, ended in observed.requests.items()}
    moved = sum(
        check.bytes_due
        for ended in observed.requests.values()
        for check in ended.checks
        if not check.pool.wrong
    )
    return Evidence(looked_at=looked_at, unit=unit, bytes_moved=moved, notes={**times, **notes})
