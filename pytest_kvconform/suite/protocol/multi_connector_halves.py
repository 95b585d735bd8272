"""Both halves of the connector inside vLLM's MultiConnector: loads of another connector, and shutdown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pytest_kvconform.case import case
from pytest_kvconform.result import Cell, Evidence, NotApplicable
from pytest_kvconform.rigs.scheduler.fake_connector import (
    is_fake,
    multi_connector_children,
    with_fake_connector,
)
from pytest_kvconform.rigs.scheduler.live.config import LiveSpec
from pytest_kvconform.rigs.scheduler.live.fake_loads import write_fake_loads
from pytest_kvconform.rigs.scheduler.live.pair import live_engines
from pytest_kvconform.rigs.scheduler.rig import Rig
from pytest_kvconform.rigs.scheduler.violations import HookRaised, SchedulerStopped
from pytest_kvconform.rigs.scheduler.worker_half import WorkerHalf
from pytest_kvconform.suite.interface.shutdown import once_nothing
from pytest_kvconform.suite.protocol.stress._live import decode, loaded, plain, prefill, prompts_of, settle

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
REPORTS = ("finished_recving", "failed_recving")  # of KVConnectorTransferResults, about loads


def _loads(cell: Cell, matrix: str) -> tuple[str, ...]:
    return LOADS if matrix != "quick" else LOADS[:4]


@case("KV-MULTI-007", applies=plain, variants=_loads, rig="scheduler")
def loads_of_another_connector_are_not_reported(rig: Rig, how: str) -> Evidence:
    """The fake connector loads a request of D, and reports the load as loaded, as failed or by its blocks.

    The connector reports nothing about it, and loads the next request as it has loaded one before.
    """
    ends, _, where = how.partition("-")
    policy = "recompute" if ends == "recomputed" else "fail"
    p = LiveSpec("P", fake=where, policy=policy)
    d = LiveSpec("D", engine=1, port=1, fake=where, policy=policy)
    with live_engines(rig, p, d) as live:
        write_fake_loads(live.d)
        reported = set[str]()
        for engine in live.engines:
            engine.do(_watch_reports, reported)
        subject, _ = multi_connector_children(live.d.side)
        _hand_over(live, 0)
        theirs = _load_by_fake(live, 1, "failed" if ends == "recomputed" else ends, where)
        try:
            live.settle(lambda: live.d.ended([theirs]), "the request that the fake connector loads")
            _require_own_reports(live, theirs, ends, reported)
            return _hand_over(live, 2)
        except SchedulerStopped:
            if any(call.result[0] for call in subject.calls_of("request_finished", theirs)):
                raise NotApplicable(KEPT) from None
            raise


def _require_own_reports(live: Any, theirs: str, ends: str, reported: set[str]) -> None:
    """Raise Violation if the subject has reported the request that the fake connector loads."""
    finish, what = live.d.finishes([theirs])[theirs], f"the fake connector reported its load as {ends}"
    if (finish == "error") != (ends in ("failed", "invalid")):
        raise live.rig.violation(
            "",
            f"{what}, and {theirs} ended with {finish!r}",
            diagnosis="the connector reports a load that is another's",
        )
    live.check()
    if theirs in reported and ends != "recomputed":  # D may load it with the subject then
        raise live.rig.violation("", f"{what}, and {live.rig.subject.connector} reported {theirs}, too")


def _hand_over(live: Any, owner: int) -> Evidence:
    """Let P compute a prompt, and D load it with the subject."""
    prompts = prompts_of(live, [3 * live.rig.host.spec.memory["D"].block + 5], owner)
    ids = decode(live, prompts, prefill(live, prompts))
    settle(live, ids, released=False)  # P may keep what the fake connector has loaded: see KV-HIT-001
    return loaded(live, ids)


def _load_by_fake(live: Any, owner: int, ends: str, where: str) -> str:
    """Add a request to D that the fake connector loads. Returns its id.

    Before the subject, it wins over it: then P has computed the prompt, and hands it over.
    """
    [fake] = [one for one in _children(live.d.side.connector) if is_fake(one)]
    prompts = prompts_of(live, [3 * live.rig.host.spec.memory["D"].block + 5], owner)
    ids = prefill(live, prompts) if where == "first" else {}
    fake.loads, fake.ends = True, ends
    if where == "first":
        [id] = decode(live, prompts, ids)
        return id
    added: str = live.d.add(prompts[owner], owner, loads_from=live.p.spec.engine)
    return added


def _children(connector: Any) -> list[Any]:
    """The two connectors inside MultiConnector."""
    return list(connector.sub_connectors)


def _watch_reports(engine: Any, found: set[str]) -> None:
    """Add all requests to `found` that the subject's worker half reports from now on.

    The engine's step raises Violation if MultiConnector cannot unite what it reports with other reports.
    """
    [subject] = [one for one in _children(engine.half.connector) if not is_fake(one)]
    results, errors = subject.get_transfer_results, subject.get_block_ids_with_load_errors

    def get_transfer_results(finished_req_ids: set[str]) -> Any:
        answer = results(finished_req_ids)
        for field in REPORTS:
            _unite(engine.rig, f"get_transfer_results().{field}", getattr(answer, field), found.update)
        return answer

    def get_block_ids_with_load_errors() -> Any:
        answer = errors()
        _unite(engine.rig, "get_block_ids_with_load_errors()", answer, lambda found: set() | found)
        return answer

    subject.get_transfer_results = get_transfer_results
    subject.get_block_ids_with_load_errors = get_block_ids_with_load_errors


def _unite(rig: Rig, what: str, answer: Any, unite: Callable[[Any], Any]) -> None:
    """Unite a report with others, as MultiConnector does. Raises Violation if that raises."""
    try:
        unite(answer)
    except TypeError:
        raise rig.violation(
            "",
            f"{what} is {str(answer)[:80]}, a {type(answer).__name__}, which MultiConnector cannot unite "
            "with the set of another connector",
            diagnosis="a hook of the worker half returns no set",
        ) from None


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
        [fake], [subject] = ([one for one in _children(multi) if is_fake(one) is it] for it in (True, False))
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
