"""Both halves of the connector inside vLLM's MultiConnector: loads of another connector, and shutdown."""

from __future__ import annotations

from typing import Any

from pytest_kvconform.case import case
from pytest_kvconform.result import Cell, Evidence, NotApplicable, Violation
from pytest_kvconform.rigs.cluster.scripts.cluster import Cluster, Steps, Wanted
from pytest_kvconform.rigs.engine.handle import EngineFailed
from pytest_kvconform.rigs.engine.stopped import STOPS
from pytest_kvconform.rigs.scheduler.fake_connector import is_fake, with_fake_connector
from pytest_kvconform.rigs.scheduler.rig import Rig
from pytest_kvconform.rigs.scheduler.violations import HookRaised
from pytest_kvconform.rigs.scheduler.worker_half import WorkerHalf
from pytest_kvconform.suite.interface.shutdown import once_nothing
from pytest_kvconform.suite.protocol.stress._live import hand_over_and_check, plain, prompts_of

# How the fake connector's load ends, and its place. After "recomputed" D is to compute the request.
LOADS = (
    "failed-first",
    "recomputed-first",
    "loaded-last",
    "invalid-last",
    "loaded-first",
    "failed-last",
)
SHUTDOWNS = (
    "ends-first",
    "raises-first",
    "ends-last",
    "raises-last",
)  # how the fake connector ends, and its place
KEPT = (
    "the connector keeps the blocks of the request that the fake connector loads, and vLLM's scheduler frees "
    "them with the first report of the two, and asserts on the second one"
)


def _loads(cell: Cell, matrix: str) -> tuple[str, ...]:
    return LOADS if matrix != "quick" else LOADS[:4]


@case("KV-MULTI-007", applies=plain, variants=_loads, rig="scheduler", script=True)
def loads_of_another_connector_are_not_reported(cluster: Cluster, how: str) -> Steps:
    """The fake connector loads a request of D, and reports the load as loaded, as failed or by its blocks.

    The connector reports nothing about it, and loads the next request as it has loaded one before.
    """
    ends, _, where = how.partition("-")
    policy = "recompute" if ends == "recomputed" else "fail"
    yield from cluster.start(*(Wanted(role, fake=where, policy=policy) for role in "PD"))
    for engine in cluster.engines:
        yield from engine.call("watch_reports", cluster.rule)
    theirs, d = "", cluster.d
    try:
        yield from _hand_over(cluster, 0)
        theirs = yield from _load_by_fake(cluster, 1, "failed" if ends == "recomputed" else ends, where)
        waits_for = "the request that the fake connector loads"
        yield from cluster.settle(lambda: cluster.ended(d, [theirs]), waits_for)
        yield from _require_own_reports(cluster, theirs, ends)
        return (yield from _hand_over(cluster, 2))
    except EngineFailed as failed:
        raise _stopped(cluster, failed, theirs) from None


def _stopped(cluster: Cluster, failed: EngineFailed, theirs: str) -> Exception:
    """What the case raises whose engine has failed. `theirs`: the request that the fake connector loads."""
    raised, d = cluster.ended_by(failed), cluster.d.handle
    stopped = isinstance(raised, Violation) and raised.finding.rule == STOPS
    if stopped and theirs and not (d.dead or d.asked) and d.trace(theirs).delayed_free:
        return NotApplicable(KEPT)
    return raised


def _require_own_reports(cluster: Cluster, theirs: str, ends: str) -> Steps:
    """Raise Violation if the subject has reported the request that the fake connector loads."""
    finish, what = cluster.finish(cluster.d, theirs), f"the fake connector reported its load as {ends}"
    if (finish == "error") != (ends in ("failed", "invalid")):
        raise cluster.violation(
            "",
            f"{what}, and {theirs} ended with {finish!r}",
            diagnosis="the connector reports a load that is another's",
        )
    yield from cluster.check()
    for engine in cluster.engines:
        reported = yield from engine.call("reported")
        if theirs in reported and ends != "recomputed":  # D may load it with the subject then
            raise cluster.violation("", f"{what}, and {cluster.subject.connector} reported {theirs}, too")


def _hand_over(cluster: Cluster, owner: int) -> Steps:
    """Let P compute a prompt, and D load it with the subject."""
    prompts = prompts_of(cluster, [3 * cluster.block(cluster.d) + 5], owner)
    # P may keep what the fake connector has loaded: see KV-HIT-001
    return (yield from hand_over_and_check(cluster, prompts, released=False))


def _load_by_fake(cluster: Cluster, owner: int, ends: str, where: str) -> Steps:
    """Add a request to D that the fake connector loads. Returns its id.

    Before the subject, it wins over it: then P has computed the prompt, and hands it over.
    """
    d, prompts = cluster.d, prompts_of(cluster, [3 * cluster.block(cluster.d) + 5], owner)
    prefills = (yield from cluster.prefill(prompts)) if where == "first" else {}
    yield from d.call("load_by_fake", ends)
    if where == "first":
        [id] = yield from cluster.decode(prompts, prefills)
        return id
    return (yield from cluster.add(d, prompts[owner], owner))


@case("KV-MULTI-008", applies=plain, variants=lambda cell, matrix: SHUTDOWNS, rig="scheduler")
def shutdown_ends_both_connectors(rig: Rig, how: str) -> Evidence:
    """vLLM shuts MultiConnector down: shutdown() of both connectors is called on both halves, that of the
    connector raises nothing, and no port is left, also if the fake connector's raises.
    """
    what, _, where = how.partition("-")
    half = WorkerHalf(rig, "P")
    half.config.kv_transfer_config = with_fake_connector(where)(half.config.kv_transfer_config)
    side = half.start()
    halves = {
        "worker": (half.connector, half.shutdown),
        "scheduler": (side.connector, side.scheduler.shutdown),
    }
    for name, (multi, end) in halves.items():
        first, second = multi.sub_connectors
        fake, subject = (first, second) if is_fake(first) else (second, first)
        fake.raises, ends = what == "raises", _watch_shutdown(subject)
        try:
            half.recorder.call(f"shutdown of the {name} half", end)
        except HookRaised as raised:
            if not is_fake(raised.error) and not any(ends):
                raise
        inside = f"inside MultiConnector, {'behind' if where == 'first' else 'before'} a fake connector, "
        if raised_by_subject := next(filter(None, ends), ""):
            others = "" if fake.shutdowns else ", and shutdown() of the other connector was not called"
            raise rig.violation(
                "",
                f"{inside}shutdown() of the {name} half raised {raised_by_subject}{others}",
                diagnosis="shutdown() of the connector raises there",
            )
        for who, calls in ((rig.subject.connector, len(ends)), ("the fake connector", fake.shutdowns)):
            if not calls:
                raise rig.violation("", f"{inside}shutdown() of {who} was not called on the {name} half")
    if left := once_nothing(rig, half.listening_ports):
        raise rig.violation("", f"after the shutdown of MultiConnector the process still listens on {left}")
    return Evidence(looked_at=2 * len(halves), unit="calls of shutdown()")


def _watch_shutdown(subject: Any) -> list[str]:
    """Return a list that gets what each call of shutdown() raises; "": nothing."""
    own, ends = subject.shutdown, list[str]()

    def shutdown() -> None:
        ends.append("")
        try:
            own()
        except BaseException as error:
            ends[-1] = f"{type(error).__name__}: {error}"
            raise

    subject.shutdown = shutdown
    return ends
