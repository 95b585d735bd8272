"""What travels between the harness, an engine whose worker halves are watched, and its ranks. Frozen records, pickled."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np


class Report(msgspec.Struct, frozen=True):
    """What one rank's worker half said in one step: get_transfer_results and get_block_ids_with_load_errors."""

    step: int
    sending: tuple[str, ...]  # finished_sending
    recving: tuple[str, ...]  # finished_recving
    failed: tuple[str, ...]  # failed_recving
    blocks: tuple[int, ...]  # blocks that failed to load
    idle: bool  # no token was computed in this step


@dataclass(frozen=True)
class Watched:
    """One rank since its engine was built."""

    rank: int
    reports: tuple[Report, ...]  # steps in which something was said
    steps: int
    idle: int  # of these, without a token to compute
    asked: int  # calls of get_block_ids_with_load_errors
    loads: (
        np.ndarray
    )  # float64 [call, (start, seconds)] of start_load_kv; start in seconds of the machine's monotonic clock

    def said(self, field: str, request: str) -> list[Report]:
        """The reports that name a request in `field`: "sending", "recving" or "failed"."""
        return [report for report in self.reports if request in getattr(report, field)]

    def longest_load(self, first: float, end: float) -> float:
        """Seconds of the longest call of start_load_kv that began in [first, end); 0 if there was none."""
        within = self.loads[(self.loads[:, 0] >= first) & (self.loads[:, 0] < end)]
        return float(within[:, 1].max()) if len(within) else 0.0
