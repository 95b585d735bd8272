"""A fault hook as docs/stores.md shows it. The page has this class word for word."""

from __future__ import annotations


class FaultHook:
    """What is to go wrong with the transfers that a worker half begins. The suite sets it."""

    def __init__(self) -> None:
        self.faults: dict[int, tuple[str, int]] = {}  # number of a transfer, -1: every -> what, steps
        self.begun = self.changed = 0
        self.start_delayed = False

    def kvconform_fault(self, what: str, transfer: int, steps: int) -> int:
        """Set a fault. Returns how many transfers faults have changed so far."""
        if what == "none":
            self.faults.clear()
            self.begun = self.changed = 0
            self.start_delayed = False
        elif what == "start":
            self.start_delayed = True
        elif what:
            self.faults[transfer] = what, steps
        return self.changed

    def fault_of_next(self) -> tuple[str, int]:
        """What goes wrong with the transfer that begins now: ("fail", 0), ("delay", 3), ("drop", 0)."""
        what, steps = self.faults.get(self.begun, self.faults.get(-1, ("", 0)))
        self.begun += 1
        self.changed += bool(what)
        return what, steps
