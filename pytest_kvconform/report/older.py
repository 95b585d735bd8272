"""Reports of earlier suites: what they tell in a sentence alone becomes the field of today."""

from __future__ import annotations

import re

from msgspec.structs import replace

from pytest_kvconform.result import CaseResult, Outcome

_DEPENDS_ON = re.compile(
    r"(?:.*, and the case )?"  # before it: the declaration that makes the case not applicable
    r"(?:depends on (\S+::\w+(?:\[[^\]]+\])?|KV-\S+-\d+)|an engine of (\S+) failed before)"
)


def with_fields(result: CaseResult) -> CaseResult:
    """Return the result with `depends_on`, which earlier suites wrote into its reason alone."""
    blocked = (result.case_outcome or result.outcome) is Outcome.BLOCKED
    if not blocked or result.depends_on or not (found := _DEPENDS_ON.match(result.reason)):
        return result
    return replace(result, depends_on=found[1] or found[2])
