"""The clauses of the contract between vLLM and a connector, with the rules that test each.

A clause that no rule tests has the reason.

A clause is what vLLM's source relies on at one place, so it may be smaller or larger than a rule.
`clauses.toml` holds tables `[C2]` with the keys of `Clause`. docs/clauses.md is made from it.
"""

from __future__ import annotations

import functools
import re
import tomllib
from pathlib import Path

import msgspec

from pytest_kvconform.rules import CLAUSES, BadRules

FILE = Path(__file__).with_name(CLAUSES)
PARTS = {  # first letters of an id -> what these clauses are about, in the order of docs/clauses.md
    "A": "The class, its construction and its capabilities",
    "B": "The order of start-up, and the shutdown",
    "C": "Calls of the scheduler half",
    "D": "Calls of the worker half in each step",
    "E": "Completion and failure",
    "F": "Which side owns which blocks, and for how long",
    "G": "Tensor and pipeline parallelism",
    "H": "Several KV cache groups",
    "I": "Recurrent states, and hits that differ between KV cache groups",
    "J": "kv_transfer_params",
    "K": "Handshake and side channel",
    "L": "Leases and heartbeats",
    "ML": "Layout and registration of memory",
    "N": "Inside MultiConnector",
}


class Clause(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One thing that vLLM relies on in a connector."""

    id: str  # "C2"
    sentence: str  # what vLLM relies on
    source: str  # "file: name, name; file: name", files relative to vLLM's package
    rules: tuple[str, ...] = ()  # ids of the rules that test it; empty only if `untestable` has the reason
    untestable: str = ""  # why no rule tests it


@functools.cache
def load(path: Path = FILE) -> dict[str, Clause]:
    """Every clause by id, in the order of the file. Raises BadRules."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadRules(f"{path.name}: {error}") from None
    clauses: dict[str, Clause] = {}
    for name, table in tables.items():
        if part_of(name) not in PARTS:
            raise BadRules(
                f"{path.name}: {name}: an id looks like C2, with one of the letters {', '.join(PARTS)}"
            )
        if not isinstance(table, dict) or "id" in table:
            raise BadRules(
                f"{path.name}: {name}: expected a table without the key id, which is the table's name"
            )
        try:
            clause = msgspec.convert({"id": name, **table}, Clause)
        except msgspec.ValidationError as error:
            raise BadRules(f"{path.name}: {name}: {error}") from None
        if bool(clause.rules) == bool(clause.untestable):
            raise BadRules(f"{path.name}: {name}: expected rules or untestable, one of the two")
        clauses[name] = clause
    return clauses


def part_of(clause: str) -> str:
    """Return `ML` for "ML3", and "" for text that is no id of a clause."""
    match = re.fullmatch(r"([A-Z]+)[1-9]\d*", clause)
    return match[1] if match else ""
