"""What one case can say: its outcome, its finding, its evidence. Every other part of the plugin speaks in these records.

All records are frozen msgspec structs, so that they travel between processes and into `report.json` unchanged.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Outcome(StrEnum):
    """How one case ended. A case that never reached its end is FAIL: that is where every case starts."""

    PASS = "PASS"
    FAIL = "FAIL"
    NOT_APPLICABLE = "NOT-APPLICABLE"  # declared unsupported, and refused cleanly
    BLOCKED = "BLOCKED"  # applies, but could not run here; the reason says what to change
    KNOWN = "KNOWN"  # a declared known failure: strict, with issue and expiry
    HARNESS = "HARNESS"  # our fault


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One violation of one rule, said for a person. Empty fields are left out of what is printed."""

    rule: str  # id of the rule that is broken
    happened: str  # one sentence: what the connector did
    differs: str = ""  # how many words differ, and where
    picture: tuple[str, ...] = ()  # rows: layer and plane; columns: blocks
    diagnosis: str = ""  # one sentence: why it is likely so
    check: tuple[str, ...] = ()  # what to look at; empty: the rule's own list
    log: tuple[str, ...] = ()  # last lines that the process wrote, if it died
    signature: str = ""  # equal for failures with one cause; empty: the diagnosis, else what happened
    declined: str = (
        ""  # how the connector declined cleanly, in its own words where it had any; empty: it did not
    )


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """Proof that a case looked at something. A case that passes without any is a failure of the suite, and is reported as FAIL."""

    looked_at: int  # how many things were compared; never 0 in a PASS
    unit: str  # of what: "bytes", "tokens", "blocks", ...
    bytes_moved: int = 0  # bytes that stand in D's cache, equal P's, and were not computed by D
    external_tokens: int = 0  # tokens D was told it need not compute
    computed_tokens: int = 0  # prompt tokens D computed all the same
    notes: dict[str, float | int | str] = {}  # further numbers worth keeping, by name


class Cell(msgspec.Struct, frozen=True):
    """One point of the model matrix. Cases of one cell share its engines."""

    family: str  # "gemma3"; of the byte rig "gemma3_1b", a real geometry of it
    topology: str  # "P1D2": tensor parallel size of prefill and decode
    setup: str = ""  # of the byte rig: block sizes, layouts and dtype of both sides, by name

    def __str__(self) -> str:
        return f"{self.family}-{self.topology}" + (f".{self.setup}" if self.setup else "")


class CaseResult(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the report."""

    id: str  # "kv::engine/bytes::attention_kv_arrives[gemma3-P1D2-n63]"; can be pasted back
    rule: str  # the rule the case checks
    outcome: Outcome
    cell: Cell | None = None
    reason: str = ""  # one sentence for NOT-APPLICABLE, BLOCKED, KNOWN and HARNESS, and for a FAIL that a declaration makes one
    finding: Finding | None = None  # for FAIL and KNOWN, and for a refusal that was declared
    evidence: Evidence | None = None  # for PASS
    seconds: float = 0.0
    features: tuple[str, ...] = ()  # features without which the case has no meaning
    refused: bool = (
        False  # the connector declined: it said so, nothing wrong was delivered, nothing died or hung
    )
    case_outcome: Outcome | None = (
        None  # what the case itself said, where the declaration makes another outcome of it
    )
    declaration_rule: str = ""  # rule of the declaration that is broken


class Violation(Exception):
    """Raised by a case: the connector broke a rule. It may have done so by declining cleanly: without wrong bytes, a crash or a hang. That
    is right where what the case needs is declared as unsupported, and the finding says how it `declined`.
    """

    def __init__(self, finding: Finding):
        super().__init__(finding.happened)
        self.finding = finding


class Blocked(Exception):
    """Raised by a case: it applies, but cannot run here. The message says what is missing or which case failed before it.

    `refused`: that case failed because the connector declined cleanly, see Violation.
    """

    def __init__(self, message: str = "", refused: bool = False):
        super().__init__(message)
        self.refused = refused


class NotApplicable(Exception):
    """Raised by a case: what it looks at is none of the connector's promises.

    `refused`: the connector declined it cleanly, by giving nothing where it was asked for a hand-over.
    """

    def __init__(self, message: str = "", refused: bool = False):
        super().__init__(message)
        self.refused = refused


class HarnessError(Exception):
    """Raised by a rig: this project, or the machine, is at fault, and not the connector."""
