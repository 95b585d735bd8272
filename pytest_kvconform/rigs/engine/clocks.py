"""Clocks of this process that show another time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

WALL = (("time", time.time), ("time_ns", time.time_ns))
MONOTONIC = (("monotonic", time.monotonic), ("monotonic_ns", time.monotonic_ns))


def set_ahead(seconds: float, monotonic: bool = False) -> None:
    """Let the wall clock show another time from now on, in this process. The monotonic clock stays right
    unless it is set, too.
    """
    for name, clock in (*WALL, *MONOTONIC) if monotonic else WALL:
        setattr(time, name, _ahead(clock, int(seconds * 10**9) if name.endswith("_ns") else seconds))


def _ahead(clock: Callable[[], Any], by: float) -> Callable[[], Any]:
    return lambda: clock() + by
