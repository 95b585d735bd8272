"""Compare two reports case by case: did a change of the suite change what the cases find?

    python ci/compare_reports.py BEFORE AFTER [--renamed FILE]      report.json files, or their folders

FILE has lines OLD-PREFIX<TAB>NEW-PREFIX: an id of BEFORE that begins with the one begins with the other in
AFTER. The lines apply in their order, so an id may be renamed twice.

Compared are the rule, the outcome, the features and the evidence of each case. Durations are left out: notes
whose key is `seconds` or ends with `_s`. The script reads plain JSON, so that a report of an older suite can
be compared, in which three keys of a result had other names (OLDER). Exit 1: something differs. Exit 2: a
report cannot be read.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

OLDER = {"features": "needs", "case_outcome": "said", "declaration_rule": "against"}
PLAIN = ("rule", "outcome", "refused")
EVIDENCE = ("looked_at", "unit", "bytes_moved", "external_tokens", "computed_tokens")
MISSING = "(not there)"

Observed = dict[str, Any]  # what is compared of one case, by name


def observed_cases(path: Path, renamed: list[tuple[str, str]]) -> dict[str, Observed]:
    """What is compared of every case of a report, by id. Raises OSError, ValueError or KeyError."""
    report = json.loads((path / "report.json" if path.is_dir() else path).read_bytes())
    return {rename(result["id"], renamed): observed_result(result) for result in report["results"]}


def read_renamed(path: Path | None) -> list[tuple[str, str]]:
    lines = path.read_text().splitlines() if path else []
    pairs = [line.split("\t") for line in lines if line.strip()]
    if wrong := [pair for pair in pairs if len(pair) != 2]:
        raise ValueError(f"{path}: expected OLD-PREFIX<TAB>NEW-PREFIX, got {wrong[0]}")
    return [(old, new) for old, new in pairs]


def rename(id: str, renamed: list[tuple[str, str]]) -> str:
    for old, new in renamed:
        if id.startswith(old):
            id = new + id.removeprefix(old)
    return id


def observed_result(result: dict[str, Any]) -> Observed:
    found = {name: result[name] for name in PLAIN}
    found |= {name: result[name] if name in result else result[older] for name, older in OLDER.items()}
    evidence = result["evidence"] or {}
    found |= {name: evidence.get(name, MISSING) for name in EVIDENCE}
    notes = evidence.get("notes", {})
    return found | {
        f"note {key!r}": value for key, value in notes.items() if key != "seconds" and not key.endswith("_s")
    }


def differences(before: dict[str, Observed], after: dict[str, Observed]) -> list[tuple[str, str, Any, Any]]:
    """(id, what differs, before, after), by id. A case that only one report has differs in "case" alone."""
    found: list[tuple[str, str, Any, Any]] = []
    for id in sorted(before.keys() | after.keys()):
        if id not in before or id not in after:
            old, new = ("(there)" if id in one else MISSING for one in (before, after))
            found.append((id, "case", old, new))
            continue
        for name in dict.fromkeys([*before[id], *after[id]]):
            pair = before[id].get(name, MISSING), after[id].get(name, MISSING)
            if pair[0] != pair[1]:
                found.append((id, name, *pair))
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--renamed", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    try:
        before = observed_cases(options.before, read_renamed(options.renamed))
        after = observed_cases(options.after, [])
    except (OSError, ValueError, KeyError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    found = differences(before, after)
    for id, name, old, new in found:
        print(f"{id}  {name}: {old} -> {new}")
    counts = Counter(name for _, name, *_ in found)
    print(f"{len(before)} cases before, {len(after)} after, {len({id for id, *_ in found})} of them differ")
    for name, count in counts.most_common():
        print(f"  {count} x {name}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
