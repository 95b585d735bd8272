"""Two connectors side by side: what the first one refuses or gets wrong, and how the second one does it.

    python ci/side_by_side.py REPORT... > table.md      folders of runs, or their report.json

Reports of one connector are joined. The connector of the first report is the one whose trouble is listed,
combination by combination; of the other connector the very cases that failed or were blocked count. Cells of
one model with one rule, cause and result share a row. A table that would show nothing is an error. Runs with
KV-OUTPUT-001 get a second table: log-probabilities.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Collection
from pathlib import Path

from model_matrix import load_families
from pytest_kvconform.report.document import BadReport, read
from pytest_kvconform.result import CaseResult, Outcome

Results = dict[str, CaseResult]  # by id
Row = tuple[str, ...]


class Vacuous(ValueError):
    """Reports that no table can be made of. The message is one sentence."""


def joined(paths: list[str]) -> list[tuple[str, Results]]:
    """Both connectors with their results, in the order of the reports. Raises BadReport, Vacuous."""
    found: dict[str, Results] = defaultdict(dict)
    for report in (read(Path(path)) for path in paths):
        found[report.subject.connector] |= {result.id: result for result in report.results if result.cell}
    if len(found) != 2:
        raise Vacuous(
            f"reports of two connectors are compared, and these are of {', '.join(found) or 'none'}"
        )
    return list(found.items())


def outcomes(one: Results, two: Results) -> list[Row]:
    """Make the rows of the first table. Raises Vacuous.

    Model, its combinations, rule, outcomes of the cases, why, and their outcomes with the other connector.
    """
    # Results by (cell, rule). A blocked result is filed under the case that it depends on, if that is known.
    bad: dict[tuple[str, str], list[CaseResult]] = defaultdict(list)
    for result in sorted(one.values(), key=lambda result: _case_outcome(result) is Outcome.BLOCKED):
        if _case_outcome(result) in (Outcome.FAIL, Outcome.BLOCKED):
            bad[str(result.cell), _rule_of_first(result, one, bad)].append(result)
    if not bad:
        raise Vacuous(f"the first connector passes all of its {len(one)} cases: there is nothing to list")
    rows: dict[Row, list[tuple[str, str, list[CaseResult]]]] = defaultdict(list)
    for (cell, rule), results in sorted(bad.items()):
        if missing := [result.id for result in results if result.id not in two]:
            raise Vacuous(
                f"the second connector has not run {len(missing)} of the cases that are listed, "
                f"the first is {missing[0]}"
            )
        theirs, first = [two[result.id] for result in results], results[0]
        if not any(
            _case_outcome(r) is not Outcome.PASS or (r.evidence and r.evidence.bytes_moved) for r in theirs
        ):
            raise Vacuous(f"{cell}: the second connector passes {rule} and has moved no byte")
        why = " ".join(
            (first.finding.diagnosis or first.finding.happened if first.finding else first.reason).split()
        )
        model, _, place = cell.partition("-")
        rows[f"`{model}`", rule, re.sub(r"\d+", "#", why), *sorted({_word(r) for r in theirs})].append(
            (place, why, results)
        )
    table: list[Row] = []
    for (model, rule, *_), cells in rows.items():
        results = [result for *_, some in cells for result in some]
        places, named = (
            ", ".join(place for place, *_ in cells),
            list(dict.fromkeys(_handover(r.id).rpartition("-")[2] for r in results)),
        )
        cases = f"{rule}: {', '.join(named)}" if len(named) < 8 else rule
        table.append(
            (
                model,
                places,
                cases,
                _count(results),
                cells[0][1],
                _count([two[result.id] for result in results]),
            )
        )
    return table


def _rule_of_first(result: CaseResult, results: Results, bad: Collection[tuple[str, str]]) -> str:
    """The rule of a result, or of the case that it depends on, or that a start or a hand-over of its cell
    broke. `bad`: the cells and rules of what has failed.
    """
    if _case_outcome(result) is not Outcome.BLOCKED:
        return result.rule
    if (first := results.get(result.depends_on)) and (str(first.cell), first.rule) in bad:
        return first.rule
    broken = (rule for rule in ("KV-START-001", "KV-HANDOVER-001") if (str(result.cell), rule) in bad)
    return next(broken, result.rule)


def _case_outcome(result: CaseResult) -> Outcome:
    """The outcome of the case, before the declaration is applied."""
    return result.case_outcome or result.outcome


def _word(result: CaseResult) -> str:
    return "refused" if result.refused else _case_outcome(result).value


def _count(results: list[CaseResult]) -> str:
    """ "2 FAIL, 7 PASS (3.1 MB)".

    MB are of what arrived right, counted once for all cases of one hand-over.
    """
    moved: dict[str, int] = defaultdict(int)
    for result in results:
        moved[_handover(result.id)] = max(
            moved[_handover(result.id)], result.evidence.bytes_moved if result.evidence else 0
        )
    size = f" ({sum(moved.values()) / 1e6:.1f} MB)"
    return ", ".join(
        f"{n} {word}" + size * (word == "PASS") for word, n in Counter(map(_word, results)).items()
    )


def _handover(id: str) -> str:
    """ "gemma3-P1D1-n63" of "kv::engine/outputs::outputs_match_the_oracle[gemma3-P1D1-n63]"."""
    return id.partition("[")[2][:-1]


def differences(one: Results, two: Results) -> list[Row]:
    """Make the rows of the second table; the last row is all other hand-overs.

    Model, window, block, tokens, topologies, largest difference of a log-probability, and that of the other
    one. Hand-overs that one of them does not bring to an end are left out: they are in the first table.
    """
    pairs = {
        _handover(id): pair
        for id in one.keys() & two.keys()
        if one[id].rule == "KV-OUTPUT-001"
        and not any(map(math.isnan, pair := (_largest(one[id]), _largest(two[id]))))
    }
    rows: dict[tuple[str, str, str, str], list[str]] = defaultdict(list)
    for handover, pair in sorted(
        pairs.items(),
        key=lambda item: [int(word) if word.isdigit() else word for word in re.split(r"(\d+)", item[0])],
    ):
        if any(pair):
            family, topology, name = handover.split("-")
            rows[family, name, f"{pair[0]:.3g}", f"{pair[1]:.3g}"].append(topology)
    known, rest = load_families(), sum(pair == (0, 0) for pair in pairs.values())
    found = [
        (
            f"`{family}`",
            str(known[family].sliding_window),
            str(known[family].block_size),
            name,
            ", ".join(places),
            *numbers,
        )
        for (family, name, *numbers), places in rows.items()
    ]
    return [*found, (f"{rest} other hand-overs", "", "", "", "", "0", "0")] if pairs else []


def _largest(result: CaseResult) -> float:
    """The largest difference from the oracle that a case saw; nan if it did not get so far."""
    found = re.search(
        r"differ by up to ([\d.]+(?:e[+-]\d+)?)", result.finding.happened if result.finding else ""
    )
    return (
        float(found[1])
        if found
        else float(result.evidence.notes["largest difference"] if result.evidence else "nan")
    )


def _table(head: Row, rows: list[Row]) -> str:
    return "\n".join(
        "| " + " | ".join(word.replace("|", "\\|") for word in line) + " |"
        for line in [head, ("---",) * len(head), *rows]
    )


def main(paths: list[str]) -> int:
    try:
        (one, first), (two, second) = joined(paths)
        print(
            _table(
                ("model", "combinations", "rule: hand-overs", one, "because", two), outcomes(first, second)
            )
        )
        if rows := differences(first, second):
            print("\n" + _table(("model", "window", "block", "hand-over", "topologies", one, two), rows))
    except (BadReport, Vacuous) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
