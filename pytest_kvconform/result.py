"""Records of the result of one case: outcome, finding and evidence; and the exceptions that a case raises.

All records are frozen msgspec structs, so that they travel between processes and into `report.json`
unchanged. Functions at the end make texts that records can hold of objects of the connector.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

# Levels of the verdict. Every rule has one, in its table, and every feature, in features.toml. The level of
# a case is the last one among that of its rule and those of the features that the case needs. A comparison of
# bytes is `core` for a model with one kind of KV cache, `hybrid` for gemma3, and `heterogeneous` for gemma3
# at P1D2. A fault stays `resilient` wherever it happens.
Level = Literal["core", "hybrid", "heterogeneous", "resilient", "accurate"]
LEVELS: dict[Level, str] = {  # what a connector of the level does right, in the order of the table
    "core": "bytes, outputs, blocks, and the life of requests and engines, with one kind of KV cache and "
    "equal P and D",
    "hybrid": "the same for models with several kinds of KV cache: windows, states, MLA beside others, draft",
    "heterogeneous": "the same where P and D differ: in tensor parallel size, block size or layout",
    "resilient": "faults, leases, restarts, clocks and hostile parameters harm only their own request",
    "accurate": "questions that a router sends to P and D are answered as D alone answers them",
}
QUESTIONS = "each question"  # note of the accuracy tier: a sign for each question, in their order


class Outcome(StrEnum):
    """How one case ended. Every case starts as FAIL, so that a case that does not reach its end is a FAIL."""

    PASS = "PASS"
    FAIL = "FAIL"
    WARNING = "WARNING"  # the connector broke a rule that is a SHOULD; the verdict counts it
    NOT_APPLICABLE = "NOT-APPLICABLE"  # declared unsupported, and refused cleanly
    BLOCKED = "BLOCKED"  # applies, but could not run here; the reason names what to change
    KNOWN = "KNOWN"  # a declared known failure: strict, with issue and expiry
    HARNESS = "HARNESS"  # an error of the suite or of the machine


class HookCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a hook of the connector, or several equal ones."""

    at: float  # when the first one began: seconds since the first call that the finding has
    side: str  # "P", "D"; of the scheduler rig, and of several engines of a role, with their number: "D1"
    rank: int | None = None  # of the worker half; None: the scheduler half
    hook: str
    requests: tuple[str, ...] = ()  # ids of the requests that it is about
    given: str = ""  # whole numbers among the arguments, or what is in the metadata of a step
    answer: str = ""  # short text of what it returned, "raised ..." for an exception; "": None
    times: int = 1


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One violation of one rule, in sentences for a person. Empty fields are not printed."""

    rule: str  # id of the rule that is broken
    happened: str  # one sentence: what the connector did
    differs: str = ""  # how many words differ, and where
    picture: tuple[str, ...] = ()  # rows: layer and plane; columns: blocks
    diagnosis: str = ""  # one sentence: the likely cause
    check: tuple[str, ...] = ()  # what to look at; empty: the list of the rule
    log: tuple[str, ...] = ()  # last lines that the process logged, if it died
    signature: str = ""  # equal for failures with one cause; empty: `diagnosis`, or else `happened`
    # how the connector declined cleanly, with its message if any; empty: it did not decline
    declined: str = ""
    # last calls of hooks on P and D; in a report, of the first case of each cause alone
    calls: tuple[HookCall, ...] = ()


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """Proof that a case compared something.

    A PASS without evidence is an error of the suite: outcome HARNESS.
    """

    looked_at: int  # how many things the case compared; never 0 in a PASS
    unit: str  # of `looked_at`: "bytes", "tokens", "blocks", ...
    bytes_moved: int = 0  # bytes in D's cache that equal P's and that D did not compute
    external_tokens: int = 0  # tokens that the connector announced to D as loaded from outside
    computed_tokens: int = 0  # prompt tokens that D computed
    notes: dict[str, float | int | str] = {}  # further numbers, by name


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
    reason: str = ""  # one sentence: why it did not pass; empty if the finding tells it
    finding: Finding | None = None  # for FAIL, WARNING and KNOWN, and for a declared refusal
    evidence: Evidence | None = None  # for PASS
    seconds: float = 0.0
    features: tuple[str, ...] = ()  # features without which the case has no meaning
    level: Level | Literal[""] = ""  # of the verdict; "": written by a suite that had no levels
    # the connector declined cleanly: it reported so, delivered no wrong byte, did not die or hang
    refused: bool = False
    depends_on: str = ""  # of BLOCKED: what failed before, see `Blocked`
    case_outcome: Outcome | None = None  # outcome of the case, if applying the declaration changed it
    declaration_rule: str = ""  # KV-DECLARE rule that is broken

    def without_calls(self) -> CaseResult:
        """Return the result with a finding without calls of hooks, if it has one."""
        if self.finding is None or not self.finding.calls:
            return self
        return replace(self, finding=replace(self.finding, calls=()))


class Violation(Exception):
    """Raised by a case: the connector broke a rule.

    The connector may have declined cleanly, that is, without wrong bytes, a crash or a hang. This is
    allowed if a feature that the case needs is declared unsupported. `Finding.declined` then tells how the
    connector declined.
    """

    def __init__(self, finding: Finding):
        super().__init__(finding.happened)
        self.finding = finding


class Blocked(Exception):
    """Raised by a case: it applies, but cannot run here.

    The message names what is missing or which case failed.

    `refused`: that other case failed because the connector declined cleanly, see Violation. `depends_on`:
    what failed before, and is reported elsewhere: the id of a case or of a rule, or a cell whose engines
    failed. "": nothing did.
    """

    def __init__(self, message: str = "", refused: bool = False, depends_on: str = ""):
        super().__init__(message)
        self.refused, self.depends_on = refused, depends_on


def blocked_by(case: str, why: str = "", refused: bool = False) -> Blocked:
    """The Blocked of a case that needs what another one checks, which failed. `case`: its id."""
    return Blocked(f"depends on {case}" + (f": {why}" if why else ""), refused, case)


class NotApplicable(Exception):
    """Raised by a case: the connector does not promise what the case checks.

    `refused`: the connector declined cleanly: it gave nothing when it was asked for a hand-over.
    """

    def __init__(self, message: str = "", refused: bool = False):
        super().__init__(message)
        self.refused = refused


class HarnessError(Exception):
    """Raised by a rig: an error of the suite or of the machine, not of the connector."""


class ProcessKilled(HarnessError):
    """Raised by a rig: a process of the run was killed, and not by the run. No later case of this pytest
    process runs.
    """

    def __init__(self, what: str, pid: int):
        """`what`: the process, as the subject of a sentence."""
        super().__init__(
            f"{what} (process {pid}) was killed by SIGKILL, exit code 137, which the suite did not send: "
            "most likely the machine ran out of memory; a smaller -n or fewer cells (--kv-family) need less"
        )


def last_level(levels: Iterable[Level]) -> Level:
    """Return the level that comes last in `LEVELS`."""
    return max(levels, key=list(LEVELS).index)


# ---- texts of objects that are not the suite's: those of the connector, whose methods may raise ------------


def message_of(error: BaseException) -> str:
    """Return the message of an exception, or what its class does instead."""
    try:
        return utf8(str(error))
    except Exception as broken:
        return f"({type(broken).__name__} in {type(error).__name__}.__str__)"


def first_line(error: BaseException, longest: int) -> str:
    """Return the first line of the message of an exception, at most so many characters; "" without one."""
    return (message_of(error).strip().splitlines() or [""])[0][:longest]


def repr_of(value: Any) -> str:
    """Return repr(value), or the name of its class if that raises."""
    try:
        return utf8(repr(value))
    except Exception as broken:
        return f"a {type(value).__name__}, whose repr raises {type(broken).__name__}"


def attribute_of(value: Any, name: str, without: Any = None) -> Any:
    """Return an attribute, or `without` if there is none or if looking it up raises."""
    try:
        return getattr(value, name, without)
    except Exception:
        return without


def utf8(text: str) -> str:
    """Return the text itself, with escapes for what UTF-8 cannot hold."""
    return text.encode(errors="backslashreplace").decode()
