"""The manifest of a suite: every case of a matrix, with what belongs to it, and the rules.

A report has the manifest of the suite that made it. `kvconform list manifest` prints that of this one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from model_matrix.cells import MODELS
from model_matrix.limits import load_limits
from pytest_kvconform import features, loading, rules
from pytest_kvconform.plan import PlannedCase, make_plan
from pytest_kvconform.result import Level
from pytest_kvconform.rules import RuleFacts
from pytest_kvconform.settings import OPTIONS, Settings


class Cases(msgspec.Struct, frozen=True, kw_only=True, order=True, forbid_unknown_fields=True):
    """Cases to which the same belongs. The id of each names its cell."""

    rule: str  # id of the rule that they check
    level: Level  # of the verdict
    features: tuple[str, ...]  # that they need
    limits: tuple[str, ...]  # known limits of vLLM for which a machine may leave them out
    ids: tuple[str, ...]  # sorted


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a suite runs."""

    features: tuple[str, ...]  # the closed list
    settings: dict[str, Any]  # the default of each, by its key in a report
    rules: tuple[RuleFacts, ...]  # sorted by id, those without a case too
    cases: tuple[Cases, ...]  # sorted

    @property
    def by_id(self) -> dict[str, Cases]:
        """Id of each case -> what belongs to it."""
        return {name: group for group in self.cases for name in group.ids}

    @property
    def by_rule(self) -> dict[str, RuleFacts]:
        """Id of each rule -> the rule."""
        return {rule.id: rule for rule in self.rules}

    @property
    def digest(self) -> str:
        """The SHA-256 of the manifest as JSON."""
        return hashlib.sha256(self.json).hexdigest()

    @property
    def json(self) -> bytes:
        """The manifest as JSON with sorted keys."""
        return msgspec.json.encode(self, order="sorted")


def of_suite(matrix: str) -> Manifest:
    """Return the manifest of this suite for a matrix."""
    return of_cases(make_plan(Settings(matrix=matrix), ()).every, rules.load())


def of_cases(every: Sequence[PlannedCase], known: Mapping[str, RuleFacts]) -> Manifest:
    """Return the manifest of these cases and rules."""
    groups: dict[tuple[str, Level, tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for one in every:
        key = one.case.rule, one.level, features.required_features(one), _limits(one)
        groups.setdefault(key, []).append(one.id)
    return Manifest(
        features=tuple(features.load()),
        settings={o.key: list(o.default) if o.repeatable else o.default for o in OPTIONS},
        rules=tuple(
            RuleFacts(id=rule.id, strength=rule.strength, since=rule.since, until=rule.until)
            for _, rule in sorted(known.items())
        ),
        cases=tuple(
            sorted(
                Cases(rule=rule, level=level, features=needed, limits=limits, ids=tuple(sorted(ids)))
                for (rule, level, needed, limits), ids in groups.items()
            )
        ),
    )


def _limits(one: PlannedCase) -> tuple[str, ...]:
    if one.case.rig not in MODELS:
        return ()
    variant = "" if one.variant is None else str(one.variant)
    limits = load_limits(loading.limits_file())
    return tuple(str(limit) for limit in limits if limit.covers(one.cell.family, variant))
