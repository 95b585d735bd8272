"""How much longer does the suite take on a wrong connector that makes it wait?

    python ci/bench_slow.py [CLASS...] [-- ARGUMENTS OF PYTEST...]       default: every class, one process

The classes are in ci/slow_connectors.py. Without arguments of pytest the matrix is one geometry and one
tiny model (MATRIX). Printed are, for each class, its seconds, the ratio to the seconds of `Right`, and the
verdict.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
CLASSES = (
    "Right",
    "KeepsBlocksOnP",
    "NeverNotifies",
    "LoadsNeverEnd",
    "HangsInHook",
    "HangsInShutdown",
)
MATRIX = ("--kv-family=llama3_1_8b,llama",)


def run(name: str, arguments: tuple[str, ...]) -> tuple[float, str]:
    """Run the quick matrix of one class. Returns its seconds and the last words of pytest and the verdict."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "pytest",
            f"--kv-connector=slow_connectors:{name}",
            f"--kv-declare={ROOT / 'reference_connector' / 'declaration.toml'}",
            f"--kv-report={folder}",
            "-p",
            "no:cacheprovider",
            "-q",
            *arguments,
        ]
        path = os.pathsep.join([str(ROOT / "ci"), str(ROOT), os.environ.get("PYTHONPATH", "")])
        began = time.monotonic()
        done = subprocess.run(
            command,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        seconds = time.monotonic() - began
        report = json.loads((Path(folder) / "report.json").read_bytes())
        return seconds, f"{report['verdict']['word']}: {done.stdout.strip().splitlines()[-1].strip('= ')}"


def main(arguments: list[str]) -> int:
    at = arguments.index("--") if "--" in arguments else len(arguments)
    names, more = arguments[:at] or list(CLASSES), tuple(arguments[at + 1 :]) or MATRIX
    right = 0.0
    for name in names:
        seconds, words = run(name, more)
        right = right or (seconds if name == "Right" else 0.0)
        ratio = f"{seconds / right:5.2f}" if right else "    -"
        print(f"{name:<16} {seconds:6.1f} s  ratio {ratio}  {words}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
