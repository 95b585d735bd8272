"""The contract, one record a rule, in TOML files by theme in this folder. `kvconform explain ID` prints one.

A file holds tables `[KV-BYTES-001]` with the keys of `Rule`; the table's name is the id. Ids are never used again for something else.
`clauses.toml` is no file of rules: it says which rules test which clause of vLLM's contract, see `clauses.py`.
"""

from __future__ import annotations

import functools
import re
import tomllib
from pathlib import Path
from typing import Literal

import msgspec

from pytest_kvconform import loading as parts

_ID = re.compile(r"KV-[A-Z0-9]+-\d{3}")
CLAUSES = "clauses.toml"


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One clause of the contract."""

    id: str  # "KV-BYTES-001"
    sentence: str  # the requirement, said so that a connector's author can follow it
    strength: Literal["MUST", "SHOULD"]
    since: str  # vLLM version that asks for it first
    source: str  # file in vLLM, or issue
    done: str  # what the suite does to see
    check: tuple[str, ...] = ()  # if this fails, check
    until: str = ""  # vLLM version that does not ask for it any more
    untestable: str = ""  # why no case checks it; such a rule has none


class BadRules(ValueError):
    """A file of rules cannot be read. The message names the file and the key: a defect of this project."""


def load(folder: Path | None = None) -> dict[str, Rule]:
    """Every rule by id, sorted. `folder` defaults to this one. Raises BadRules."""
    return _read(folder or parts.rules_folder())


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
    return dict(sorted(rules.items()))
