"""Run the suite again and again beside busy processes: does any outcome differ from that on an idle machine?

    python ci/loaded_runs.py [-n RUNS] [--busy PROCESSES] [--before REPORT] [ARGUMENTS OF PYTEST...]

The first run is without busy processes, unless REPORT (a report.json, or its folder) is of such a run. Each
busy process computes without end, at normal niceness and in a session of its own, so that Linux gives it as
much of a core as an engine. Printed are, for each run, its seconds, its verdict, and every case whose outcome
is not that of the first run. Exit 1: some outcome differs.

    python ci/loaded_runs.py -n 20 --kv-connector=NixlConnector -n2
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

Outcomes = dict[str, str]
# Ends with its parent, however that ends.
BUSY = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(1000000):
        pass
"""


@contextlib.contextmanager
def busy_processes(number: int) -> Iterator[list[int]]:
    """Keep so many processes busy inside the block. Yields their pids; they end with the block."""
    processes = [
        subprocess.Popen([sys.executable, "-c", BUSY], start_new_session=True) for _ in range(number)
    ]
    try:
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def run(arguments: list[str], output: Path) -> tuple[Outcomes, str, float]:
    """Run pytest. Returns id -> outcome, the word of the verdict and the seconds.

    `output`: folder for the report and what pytest prints.
    """
    began = time.monotonic()
    with (output / "output").open("wb") as file:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
        subprocess.run(
            [*command, f"--kv-report={output}"], stdout=file, stderr=subprocess.STDOUT, check=False
        )
    outcomes, word = read(output)
    return outcomes, word, time.monotonic() - began


def read(path: Path) -> tuple[Outcomes, str]:
    """The outcomes and the verdict of a report. Raises SystemExit if there is none."""
    path = path / "report.json" if path.is_dir() else path
    try:
        report = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path} cannot be read, see the file `output` beside it: {error}") from None
    return {one["id"]: one["outcome"] for one in report["results"]}, report["verdict"]["word"]


def differences(before: Outcomes, now: Outcomes) -> list[str]:
    """A line for every case whose outcome differs."""
    return [
        f"{id}: {before.get(id, 'not run')} -> {now.get(id, 'not run')}"
        for id in sorted(before.keys() | now.keys())
        if before.get(id) != now.get(id)
    ]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("-n", "--runs", type=int, default=1)
    parser.add_argument("--busy", type=int, default=8)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--keep", type=Path, help="folder for reports and output of pytest")
    first, *_ = [*(i for i, word in enumerate(arguments) if word.startswith("--kv-")), len(arguments)]
    options, rest = parser.parse_args(arguments[:first]), arguments[first:]
    folder = options.keep or Path(tempfile.mkdtemp(prefix="loaded-"))
    print(f"reports and output: {folder}; {os.cpu_count()} cores, {options.busy} busy processes", flush=True)
    if options.before:
        before, _ = read(options.before)
    else:
        (folder / "idle").mkdir(parents=True)
        before, word, seconds = run(rest, folder / "idle")
        print(f"idle: {word}, {len(before)} cases, {seconds:.0f} s", flush=True)
    alarms = 0
    with busy_processes(options.busy):
        for number in range(1, options.runs + 1):
            output = folder / str(number)
            output.mkdir(parents=True)
            now, word, seconds = run(rest, output)
            differ = differences(before, now)
            alarms += bool(differ)
            print(f"run {number}: {word}, {len(differ)} cases differ, {seconds:.0f} s", flush=True)
            print("".join(f"  {line}\n" for line in differ), end="", flush=True)
    print(f"{alarms} of {options.runs} runs differ")
    return int(bool(alarms))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
