"""How a hand-over ended. Every rig needs this: engines fail, requests wait and logs look alike everywhere."""

from __future__ import annotations

from typing import Protocol

from pytest_kvconform.result import Blocked, Finding, Violation
from pytest_kvconform.rigs.engine.handle import SUITE, EngineFailed
from pytest_kvconform.rigs.engine.messages import LOADING, Unfinished, listed


class Ended(Protocol):
    """What an observation of any rig holds about the end of a hand-over."""

    @property
    def failed(self) -> EngineFailed | None: ...
    @property
    def excuse(self) -> str: ...
    @property
    def stuck(self) -> tuple[Unfinished, ...]: ...
    @property
    def logged(self) -> tuple[str, ...]: ...
    @property
    def request_s(self) -> float: ...


def check_all_ended(observed: Ended) -> None:
    """Check the part of KV-HANDOVER-001 that needs no answers.

    Raises Violation if an engine failed or a request is stuck, Blocked if the same happens without the
    connector.
    """
    if observed.excuse:
        raise Blocked(observed.excuse)
    if observed.failed:
        raise Violation(
            Finding(
                rule="KV-HANDOVER-001",
                happened=observed.failed.sentence,
                differs="; ".join(observed.failed.stack),
                diagnosis=observed.failed.sentence,
                log=observed.failed.log,
            )
        )
    if observed.stuck:
        raise Violation(
            Finding(
                rule="KV-HANDOVER-001",
                happened=f"{listed(observed.stuck)} after {observed.request_s:.0f} s",
                diagnosis=last_logged_exception(observed)
                or (
                    "the connector never reported the load as finished"
                    if observed.stuck[0].status == LOADING
                    else ""
                ),
                log=observed.logged,
            )
        )


def last_logged_exception(observed: Ended) -> str:
    """Return the last exception that an engine logged but did not raise here, or what the suite knows of it.

    The last one is nearest to the end of the request.
    """
    role, _, reported = (observed.logged or ("",))[-1].partition(": ")
    if role == SUITE:
        return reported
    return f"{role} logged {reported}" if reported else ""
