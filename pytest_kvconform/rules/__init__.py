"""The rules of the contract, in one TOML file a theme. `kvconform explain ID` prints one rule.

A file holds tables `[KV-BYTES-001]` with the keys of `Rule`. The name of the table is the id of the rule. An
id is never used again for another rule. `clauses.toml` holds no rules but the clauses of vLLM's contract,
with the rules that test each of them: see `clauses.py`.
"""

from __future__ import annotations

import functools
import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from pytest_kvconform import loading
from pytest_kvconform.result import Level
from pytest_kvconform.rigs.vllm_setup.compat import is_development

_ID = re.compile(r"KV-[A-Z0-9]+-\d{3}")
CLAUSES = "clauses.toml"


class RuleFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What decides of which rules a run has cases, and what a broken rule is."""

    id: str  # "KV-BYTES-001"
    strength: Literal["MUST", "SHOULD"]
    since: str  # first minor of vLLM, of those that the suite knows, that requires it: "0.31"
    until: str = ""  # first minor of vLLM that does not require it any more

    @property
    def minors(self) -> str:
        """The minors of vLLM for which the rule holds, in words."""
        return f"since vLLM {self.since}" + (f", no longer since {self.until}" if self.until else "")

    def why_not(self, version: str) -> str:
        """Return why the rule does not hold for a version of vLLM; "": it holds."""
        minor = _minor(version)
        if _minor(self.since) <= minor and not (self.until and minor >= _minor(self.until)):
            return ""
        return f"{self.id}, which holds {self.minors}"


class Rule(RuleFacts, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One requirement of the contract."""

    sentence: str  # the requirement, for authors of connectors
    level: Level  # of the verdict; the features that a case needs may put the case into a later one
    caller: str = ""  # "file: Class.function" in vLLM that relies on the rule; every MUST names one
    breaks: str = ""  # what vLLM does when the rule is broken; every MUST says so
    source: str  # file in vLLM, or issue
    done: str  # what the suite does to test it
    check: tuple[str, ...] = ()  # if this fails, check
    untestable: str = ""  # why no case checks it; such a rule has none


class BadRules(ValueError):
    """A file of rules cannot be read, which is a defect of this project.

    The message names the file and the key.
    """


def load(folder: Path | None = None) -> dict[str, Rule]:
    """Return every rule by id, sorted. `folder` defaults to this one. Raises BadRules."""
    return _read(folder or loading.rules_folder())


def should(rules: Mapping[str, RuleFacts]) -> tuple[str, ...]:
    """Return the ids of the rules of strength SHOULD: a connector that breaks one gets a warning."""
    return tuple(rule.id for rule in rules.values() if rule.strength == "SHOULD")


def _minor(version: str) -> tuple[float, ...]:
    """Return the first two numbers of a version. vLLM's main comes after every release."""
    return (math.inf,) if is_development(version) else tuple(map(int, re.findall(r"\d+", version)[:2]))


def not_in_force(rules: Mapping[str, RuleFacts], version: str) -> dict[str, str]:
    """Return the ids of the rules that do not hold for a version of vLLM, each with the reason.

    None for "", and for a version older than every rule: such a vLLM is not supported, which the probe says.
    """
    if not version or all(_minor(version) < _minor(rule.since) for rule in rules.values()):
        return {}
    return {name: why for name, rule in rules.items() if (why := rule.why_not(version))}


@functools.cache
def _read(folder: Path) -> dict[str, Rule]:
    rules: dict[str, Rule] = {}
    for path in sorted(path for path in folder.glob("*.toml") if path.name != CLAUSES):
        try:
            tables = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise BadRules(f"{path.name}: {error}") from None
        for name, table in tables.items():
            if not _ID.fullmatch(name):
                raise BadRules(f"{path.name}: {name}: an id looks like KV-BYTES-001")
            if name in rules:
                raise BadRules(f"{path.name}: {name}: another file has a rule of this id")
            if not isinstance(table, dict) or "id" in table:
                raise BadRules(
                    f"{path.name}: {name}: expected a table without the key id, which is the table's name"
                )
            try:
                rules[name] = msgspec.convert({"id": name, **table}, Rule)
            except msgspec.ValidationError as error:
                raise BadRules(f"{path.name}: {name}: {error}") from None
            for key in ("caller", "breaks"):
                if rules[name].strength == "MUST" and not getattr(rules[name], key):
                    raise BadRules(
                        f"{path.name}: {name}: {key} is missing: a rule is a MUST only where vLLM breaks, "
                        "hangs, leaks or answers wrongly; else it is a SHOULD"
                    )
    return dict(sorted(rules.items()))
