"""How a hand-over ended. The same for every rig: engines fail, requests wait and logs speak alike."""

from __future__ import annotations

from typing import Protocol

from pytest_kvconform.result import Finding, Violation
from pytest_kvconform.rigs.context import REQUEST_S
from pytest_kvconform.rigs.engine.handle import EngineFailed


class Ended(Protocol):
    """An observation of any rig."""

    @property
    def failed(self) -> EngineFailed | None: ...
    @property
    def stuck(self) -> tuple[str, ...]: ...
    @property
    def logged(self) -> tuple[str, ...]: ...


def came_to_an_end(seen: Ended, timeout_scale: float) -> None:
    """Judge the part of KV-HANDOVER-001 that needs no look at the answers. Raises Violation if an engine failed or a request is stuck."""
    if seen.failed:
        raise Violation(
            Finding(
                rule="KV-HANDOVER-001",
                happened=seen.failed.sentence,
                differs="; ".join(seen.failed.stack),
                diagnosis=seen.failed.sentence,
                log=seen.failed.log,
            )
        )
    if seen.stuck:
        raise Violation(
            Finding(
                rule="KV-HANDOVER-001",
                happened=f"{'; '.join(seen.stuck)} after {REQUEST_S * timeout_scale:.0f} s",
                diagnosis=said_last(seen)
                or ("the connector never reported the load as finished" if "REMOTE" in seen.stuck[0] else ""),
                log=seen.logged,
            )
        )


def said_last(seen: Ended) -> str:
    """What an engine wrote to its log about an exception that nobody raised here; the last one is nearest to the end of the request."""
    role, _, said = (seen.logged or ("",))[-1].partition(": ")
    return f"{role} logged {said}" if said else ""
