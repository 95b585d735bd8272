"""Run the whole suite on every right connector of an unusual design. Each must conform.

    python ci/right_connectors.py [NAME ...] [--out FOLDER] [--keep] [-- ARGUMENTS OF PYTEST]

tests/right_connectors/right.toml lists them. A name selects a class or a module of that list. The arguments
after `--` go to pytest: `--kv-matrix=full`, `-n 2`. One line each: exit code, seconds, the verdict. The
reports stay in FOLDER (default: kv-right). With `--keep` the counts of each run also replace those of the
same matrix in docs/right_connectors.json, which docs/regenerate.py shows in docs/design.md. Exit 1: one
does not conform. Exit 2: a name is unknown.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "right_connectors" / "right.toml"
REFERENCE = ROOT / "reference_connector" / "declaration.toml"
RUNS = ROOT / "docs" / "right_connectors.json"
LIMIT_S = 3600.0  # for one run


def selected(names: list[str]) -> dict[str, dict[str, Any]]:
    """`module.Class` -> its entry in the list, of what the names select; no name selects all.

    Raises KeyError for a name that selects nothing.
    """
    table = tomllib.loads(TABLE.read_text())
    every = {
        f"{module}.{name}": entry for module, entries in table.items() for name, entry in entries.items()
    }
    for name in names:
        if not any(name in one.split(".") for one in every):
            raise KeyError(name)
    return {one: entry for one, entry in every.items() if not names or set(names) & set(one.split("."))}


def declaration(lines: str) -> str:
    """The declaration of the reference connector below these lines: in TOML, tables come last.

    The last line may be the name of a file beside the list, whose declaration then takes its place.
    """
    more, _, file = lines.rpartition("\n")
    if file.endswith(".toml"):
        return f"{more}\n{TABLE.with_name(file).read_text()}"
    return f"{lines}\n{REFERENCE.read_text()}"


def run(one: str, entry: dict[str, Any], out: Path, arguments: list[str]) -> tuple[int, float, str]:
    """Run the suite on a right connector. Returns the exit code, the seconds, and the line with the verdict.

    A run that is not over after LIMIT_S seconds is killed, and counts as exit code 124.
    """
    module, _, name = one.rpartition(".")
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.json").unlink(missing_ok=True)
    (out / "declaration.toml").write_text(declaration(entry.get("declare", "")))
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
        f"--kv-connector=tests.right_connectors.{module}:{name}",
        f"--kv-declare={out / 'declaration.toml'}",
        f"--kv-report={out}",
        *entry.get("arguments", ()),
        *arguments,
    ]
    begun = time.monotonic()
    with (out / "output").open("w") as output:
        try:
            code = subprocess.run(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output, timeout=LIMIT_S
            ).returncode
        except subprocess.TimeoutExpired:
            code = 124
    words = ("CONFORMS", "VIOLATES", "INCOMPLETE", "HARNESS")
    found = [line for line in (out / "output").read_text().splitlines() if line.startswith(words)]
    return code, time.monotonic() - begun, found[-1] if found else "no verdict"


def keep(one: str, report: dict[str, Any]) -> None:
    """Write what came out of a run into docs/right_connectors.json, unless its verdict is HARNESS."""
    if report["verdict"]["word"] == "HARNESS":
        return
    runs = json.loads(RUNS.read_bytes())
    runs.setdefault(one, {})[report["settings"]["matrix"]["value"]] = {
        "verdict": report["verdict"]["word"],
        "counts": report["verdict"]["counts"],
        "vllm": report["environment"]["vllm"],
        "day": report["day"],
    }
    RUNS.write_text(json.dumps(runs, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def main() -> int:
    own, given = sys.argv[1:], []
    if "--" in own:
        own, given = own[: own.index("--")], own[own.index("--") + 1 :]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--out", type=Path, default=Path("kv-right"))
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args(own)
    if options.keep and not re.fullmatch(r"(-n ?\w+ ?|--kv-matrix=\w+ ?)*", " ".join(given)):
        parser.error("--keep is for whole runs: only -n and --kv-matrix may stand after --")
    try:
        connectors = selected(options.names)
    except KeyError as name:
        print(f"no right connector is called {name}: see {TABLE.relative_to(ROOT)}", file=sys.stderr)
        return 2
    codes = []
    for one, entry in connectors.items():
        code, seconds, verdict = run(one, entry, options.out.resolve() / one, given)
        codes.append(code)
        print(f"{one:32} exit {code:<3} {seconds:5.0f} s  {verdict}", flush=True)
        report = options.out.resolve() / one / "report.json"
        if options.keep and report.exists():
            keep(one, json.loads(report.read_bytes()))
    print(f"{codes.count(0)} of {len(codes)} conform")
    return int(not codes or any(codes))


if __name__ == "__main__":
    sys.exit(main())
