"""Write what the cases of each rig and family cost, from reports of whole runs of the reference connector.

    python ci/shards/costs.py REPORT ...

`--kv-shard` divides a run by these costs (pytest_kvconform/shards/costs.toml). Only the ratios matter. A
shard computes its part from the installed file, so all shards of a run need one version of the suite.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from pytest_kvconform.plan import load_module
from pytest_kvconform.report.document import Report, read

FILE = Path(__file__).parents[2] / "pytest_kvconform" / "shards" / "costs.toml"
HEAD = """\
# Seconds that one case costs, with its share of the engines of its cell, by rig and by family or geometry.
# `python ci/shards/costs.py REPORT` wrote them from the quick run of the reference connector, on two cores.
# `other` is the mean of the rig: what a family costs that is not in the quick matrix.

# Declared, and not measured: no real checkpoint of the nightly matrix has been served. Every case counts the
# same.
[nightly]
other = 75.0
"""


def costs(reports: Sequence[Report]) -> str:
    """Return the text of costs.toml."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for result in (result for report in reports for result in report.results):
        assert result.cell is not None
        module, _, case = result.id.partition("[")[0].removeprefix("kv::").partition("::")
        [rig] = [one.rig for one in load_module(module)[1] if one.name == case]
        found[rig][result.cell.family].append(result.seconds)
    lines = [HEAD]
    for rig, families in sorted(found.items()):
        every = [second for seconds in families.values() for second in seconds]
        lines += [f"[{rig}]", f"other = {_mean(every)}", "", f"[{rig}.families]"]
        lines += [f"{family} = {_mean(seconds)}" for family, seconds in sorted(families.items())]
        lines.append("")
    return "\n".join(lines)


def _mean(seconds: Sequence[float]) -> float:
    """The mean with two significant digits: machines differ by more."""
    return float(f"{sum(seconds) / len(seconds):.2g}")


def main(paths: Sequence[str]) -> int:
    if not paths:
        print(__doc__, file=sys.stderr)
        return 2
    FILE.write_text(costs([read(Path(path)) for path in paths]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
