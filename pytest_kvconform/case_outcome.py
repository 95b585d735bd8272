"""`run_case`: the only place that makes an outcome of what a case returned or raised."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec.structs import replace

from pytest_kvconform.result import (
    Blocked,
    Evidence,
    Finding,
    HarnessError,
    HookCall,
    NotApplicable,
    Outcome,
    ProcessKilled,
    Violation,
    message_of,
    utf8,
)

MOST_CALLS = 60  # of hooks of one side, in a finding
Record = TypeVar("Record", Evidence, Finding)


class CaseEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How one case ended, before the declaration is applied.

    A case of the scheduler rig sends it from its process.
    """

    outcome: Outcome
    evidence: Evidence | None = None  # of PASS
    finding: Finding | None = None  # of FAIL
    reason: str = ""  # one sentence, of BLOCKED, NOT-APPLICABLE and HARNESS
    refused: bool = False  # the connector declined cleanly: see `result.CaseResult`
    depends_on: str = ""  # of BLOCKED: what failed before, see `result.Blocked`
    defect: str = ""  # of HARNESS: the traceback
    # The connector has waited for reports of its own workers, which the workers of the case cannot make.
    unheard: bool = False
    waited_for: str = ""  # what the case has waited for in vain for seconds: requests, saves, `RELEASES`
    # what the case asks engines of the cluster before it can go on; None: nothing. See own_workers/memory.py
    asks: Any = None
    ends_run: bool = False  # a process was killed: no later case of this pytest process runs


def run_case(body: Callable[[], object], name: str) -> CaseEnd:
    """Run a case.

    `body` returns Evidence, returns the CaseEnd of a case that ran in another process, or raises.

    Any exception that no case is meant to raise is HARNESS, pytest.skip() and SystemExit included.
    KeyboardInterrupt is passed on.
    """
    try:
        returned = body()
        if isinstance(returned, CaseEnd):
            return returned
        if not isinstance(returned, Evidence) or returned.looked_at <= 0:
            what = "compared nothing" if isinstance(returned, Evidence) else f"returned {returned!r}"
            raise HarnessError(f"the case {name} passed without evidence: it {what}")
        return CaseEnd(outcome=Outcome.PASS, evidence=_plain(returned))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return end_of(error)


def end_of(error: BaseException) -> CaseEnd:
    """The end of a case that raised this."""
    if isinstance(error, Violation):
        try:
            finding = _plain(error.finding)
        except Exception as wrong:
            ours = HarnessError(f"a finding of {error.finding.rule} is no text: {wrong}")
            return end_of(ours.with_traceback(error.__traceback__))
        return CaseEnd(outcome=Outcome.FAIL, finding=finding, refused=bool(finding.declined))
    if isinstance(error, Blocked):
        reason = message_of(error) or "no reason was given"
        return CaseEnd(
            outcome=Outcome.BLOCKED, reason=reason, refused=error.refused, depends_on=error.depends_on
        )
    if isinstance(error, NotApplicable):
        return CaseEnd(outcome=Outcome.NOT_APPLICABLE, reason=message_of(error), refused=error.refused)
    defect = utf8("".join(traceback.format_exception(error)))
    killed = isinstance(error, ProcessKilled)
    return CaseEnd(
        outcome=Outcome.HARNESS, reason=_sentence(error), defect="" if killed else defect, ends_run=killed
    )


def error_of(end: CaseEnd) -> Exception:
    """The exception with which something ended in another process: the inverse of `end_of`."""
    if end.finding is not None:
        return Violation(end.finding)
    if end.outcome is Outcome.BLOCKED:
        return Blocked(end.reason, end.refused, end.depends_on)
    if end.outcome is Outcome.NOT_APPLICABLE:
        return NotApplicable(end.reason, end.refused)
    return HarnessError(f"{end.reason}\n{end.defect}")


def with_calls(end: CaseEnd, calls: Iterable[HookCall]) -> CaseEnd:
    """The end of a case, whose finding has these calls: the last ones of each side, in their order.

    `at` of `calls` is a time of the clock. A finding that has calls keeps them.
    """
    if end.finding is None or end.finding.calls:
        return end
    sides: dict[str, list[HookCall]] = {}
    for call in sorted(calls, key=lambda call: call.at):
        sides.setdefault(call.side, []).append(call)
    last = sorted((call for mine in sides.values() for call in mine[-MOST_CALLS:]), key=lambda call: call.at)
    calls = tuple(replace(call, at=round(call.at - last[0].at, 4)) for call in last)
    return replace(end, finding=replace(end.finding, calls=calls))


def _plain(record: Record) -> Record:
    """The record with Python's own types, as a report has them. A connector may answer with NumPy's, and with
    texts that no report can hold.
    """
    return msgspec.convert(_written(msgspec.to_builtins(record, enc_hook=_builtin)), type(record))


def _written(value: Any) -> Any:
    """The same with texts that UTF-8 can hold."""
    if isinstance(value, str):
        return utf8(value)
    if isinstance(value, dict):
        return {_written(key): _written(one) for key, one in value.items()}
    return [_written(one) for one in value] if isinstance(value, list | tuple) else value


def _builtin(value: Any) -> float | int | str:
    for kind in (str, float, int):
        if isinstance(value, kind):  # of a class of its own
            return kind(value)
    if isinstance(value, np.floating):
        return float(value)
    return int(value) if isinstance(value, np.integer | np.bool_) else str(value)


def _sentence(error: BaseException) -> str:
    """Return the first line of an exception, with its class unless it is a HarnessError.

    The message of a HarnessError is a whole sentence.
    """
    text = (message_of(error).strip().splitlines() or [""])[0]
    if isinstance(error, HarnessError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
