"""Run the suite on the connectors that exist, and keep what came out for the page docs/connectors.md.

    python ci/connectors/run.py [CONNECTOR ...] [--out FOLDER] [--dry]

connectors.toml beside it lists them; default: each that it says how to run. The command of each is `make
conform`, which sets up what the connector needs in a virtual environment. Its report stays in
FOLDER/CONNECTOR (default: kv-connectors). A run's numbers replace the row of this connector in
docs/connectors.json, and page.py writes the page. `--dry` prints the commands alone. Exit 1: a run had no
report, or no case of it could run. Exit 2: a connector is not listed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from page import ROOT, ROWS, TABLE, command, listed

LIMIT_S = 7200.0  # for one run


def reason(blocked: dict[str, Any]) -> str:
    """Why a case was blocked. The id of the case that failed differs from case to case."""
    case = blocked["depends_on"]
    return blocked["reason"].replace(case, "another case") if case.startswith("kv::") else blocked["reason"]


def row(report: dict[str, Any], seconds: float) -> dict[str, Any]:
    """What the page tells of a report. `seconds`: of the command."""
    tiers: dict[str, Counter[str]] = {}
    blocked: Counter[str] = Counter()
    rules: Counter[str] = Counter()
    for one in report["results"]:
        outcome = one["outcome"]
        tier = one["id"].removeprefix("kv::").split("/")[0]
        tiers.setdefault(tier, Counter())[outcome] += 1
        if outcome == "BLOCKED":
            blocked[reason(one)] += 1
        if outcome in ("FAIL", "WARNING"):
            rules[one["declaration_rule"] or (one["finding"] or {}).get("rule") or one["rule"]] += 1
    return {
        "vllm": report["environment"]["vllm"],
        "seconds": round(seconds),
        "cores": len(os.sched_getaffinity(0)),
        "verdict": report["verdict"]["word"],
        "tiers": {tier: dict(sorted(counts.items())) for tier, counts in sorted(tiers.items())},
        "rules": dict(sorted(rules.items())),
        "blocked": dict(blocked.most_common()),
    }


def run(connector: str, entry: dict[str, Any], out: Path) -> dict[str, Any] | None:
    """Run the suite on a connector. Returns its row, or None if the run made no report."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.json").unlink(missing_ok=True)
    begun = time.monotonic()
    with (out / "output").open("w") as output:
        process = subprocess.Popen(
            command(connector, entry),
            cwd=ROOT,
            env=os.environ | {"KVCONFORM_REPORT": str(out)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LIMIT_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()
    try:
        report = json.loads((out / "report.json").read_bytes())
    except (OSError, ValueError):
        return None
    return row(report, time.monotonic() - begun)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="CONNECTOR")
    parser.add_argument("--out", type=Path, default=Path("kv-connectors"))
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args(arguments)
    table = {name: entry for name, entry in listed().items() if "not_run" not in entry}
    if unknown := [name for name in options.names if name not in table]:
        place = TABLE.relative_to(ROOT)
        print(f"{unknown[0]} is none of those that can be run: {', '.join(table)} ({place})", file=sys.stderr)
        return 2
    without = 0
    for name in options.names or table:
        print(shlex.join(command(name, table[name])), flush=True)
        if options.dry:
            continue
        out = options.out.resolve() / name
        found = run(name, table[name], out)
        if found is None:
            without += 1
            print(f"  no report: see {out / 'output'}", flush=True)
            continue
        if all(set(outcomes) == {"BLOCKED"} for outcomes in found["tiers"].values()):
            without += 1
            print(f"  no case could run: {next(iter(found['blocked']), 'there is none')}", flush=True)
            continue
        print(f"  {found['verdict']}, {found['seconds']} s", flush=True)
        rows = json.loads(ROWS.read_bytes()) if ROWS.exists() else {}
        rows[name] = found
        ROWS.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return int(bool(without))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
