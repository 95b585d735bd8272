"""Benchmarks of the suite itself, as ratios within one run.

They test nothing: docs/benchmarks.md has the numbers.

    python ci/bench.py [start] [cell] [quick] [bytes] [bytes-full]        default: all but the last

    start        two plain `LLM(...)` starts, one after the other, each in its own process; TP 1 and TP 2
    cell         one more P/D cell, from a running zygote to the end of its first hand-over; P1D1 and P2D2
    bytes        the quick matrix of the byte tier: checked hand-overs, seconds, CPU seconds, by cell
    bytes-full   the full matrix of the byte tier
    quick        a whole quick run, as `make conform CONNECTOR=NixlConnector`: first verdict, end, peak memory
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from model_matrix import ensure_checkpoint, load_families

FAMILY = "llama"
PLAIN = """
import sys
from vllm import LLM
if __name__ == "__main__":
    LLM(model=sys.argv[1], tensor_parallel_size=int(sys.argv[2]), skip_tokenizer_init=True, max_model_len=256,
        dtype="float32", enforce_eager=True, block_size=32, num_gpu_blocks_override=96)
"""
# sitecustomize of every process
MEND = """
from pytest_kvconform.rigs.vllm_setup.optional_packages import mend_imports
mend_imports()
"""


def start(tensor_parallel: int) -> float:
    """Measure the seconds of two plain engine starts, as a user would make them.

    The environment is made to work, but not made fast.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(MEND)
        (Path(folder) / "plain.py").write_text(PLAIN)
        environment = os.environ | {
            "PYTHONPATH": folder,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # or vLLM refuses TP 2 on a machine with one NUMA node
        }
        command = [
            sys.executable,
            str(Path(folder) / "plain.py"),
            str(ensure_checkpoint(load_families()[FAMILY])),
            str(tensor_parallel),
        ]
        began = time.monotonic()
        for _ in range(2):
            subprocess.run(
                command,
                env=environment,
                check=True,
                timeout=300,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        return time.monotonic() - began


def cell(topology: str) -> float:
    """Measure the seconds from a running zygote to the end of the first hand-over of a cell."""
    from pytest_kvconform.result import Cell
    from pytest_kvconform.rigs import bench
    from pytest_kvconform.rigs.scenario import Prompt, Scenario, tokens
    from pytest_kvconform.settings import Settings
    from pytest_kvconform.subject import Subject

    settings, subject = (
        Settings(connector="NixlConnector", family=(FAMILY,)),
        Subject(spec="NixlConnector", connector="NixlConnector"),
    )
    zygote = bench.start_zygote(settings)
    try:
        facts = bench.probe_subject(zygote.address, subject, 300)
        table = bench.Benches(zygote.address, subject, settings, facts, lambda sentence: None)
        began = time.monotonic()
        found = table.engine.observe(Cell(FAMILY, topology), Scenario("first", (Prompt(tokens(100)),)))
        took = time.monotonic() - began - found.seconds["oracle"]
        assert not found.stuck, found.stuck
        table.close()
        return took
    finally:
        zygote.close()


def quick(*more: str) -> tuple[float, float, float, str, dict[str, Any]]:
    """Run the quick matrix of NixlConnector.

    Returns (seconds to the first verdict, seconds in all, peak memory in GB as the sum of proportional set
    sizes, last line, report).
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-v",
            "-n2",
            "--kv-connector=NixlConnector",
            f"--kv-report={folder}",
            "-p",
            "no:cacheprovider",
            *more,
        ]
        began, first, peak, last = time.monotonic(), 0.0, 0.0, ""
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder
        )
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        while process.poll() is None:
            time.sleep(0.25)
            for line in process.stdout.readlines():
                if not first and any(word in line for word in (" PASSED", " FAILED", " BLOCKED", " ERROR")):
                    first = time.monotonic() - began
                last = line.strip() or last
            peak = max(peak, memory(process.pid))
        return (
            first,
            time.monotonic() - began,
            peak,
            last,
            json.loads((Path(folder) / "report.json").read_bytes()),
        )


def by_cell(report: dict[str, Any]) -> list[str]:
    """Lines, one a cell: checked hand-overs, seconds of its cases, and of the first case."""
    rows: dict[str, list[Any]] = {}
    for result in report["results"]:
        row = rows.setdefault("{family}-{topology}.{setup}".format(**result["cell"]), [0, []])
        row[1].append(result["seconds"])
        if "::completes[" in result["id"] and result["outcome"] == "PASS":
            row[0] += result["evidence"]["looked_at"]
    lines = [
        f"{cell:<30} {n:4} hand-overs {sum(s):6.1f} s, of them starting {max(s):5.1f} s"
        for cell, (n, s) in sorted(rows.items())
    ]
    number = sum(count for count, _ in rows.values())
    seconds = sum(sum(of_cell) for _, of_cell in rows.values())
    return [
        *lines,
        f"{'in all':<30} {number:4} hand-overs {seconds:6.1f} s of cases",
    ]


def cpu() -> float:
    """CPU seconds of all processes that this one has waited for, and of their children.

    A busy machine lengthens CPU seconds less than seconds.
    """
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def memory(pid: int) -> float:
    """GB of a process and of all that descend from it, shared pages counted once."""
    total = 0.0
    me = psutil.Process(pid)
    for one in (me, *me.children(recursive=True)):
        try:
            lines = Path(f"/proc/{one.pid}/smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        except (OSError, StopIteration):
            continue  # it ended just now
    return total / 1e6


def main(wanted: list[str]) -> int:
    seconds: dict[str, float] = {}
    jobs: dict[str, list[tuple[str, Callable[[], float]]]] = {
        "start": [(f"two LLM(...) starts, TP {tp}", partial(start, tp)) for tp in (1, 2)],
        "cell": [(f"one more cell, {topology}", partial(cell, topology)) for topology in ("P1D1", "P2D2")],
    }
    for name in wanted or ["start", "cell", "quick", "bytes"]:
        for title, job in jobs.get(name, []):
            seconds[title] = job()
            print(f"{title:<32} {seconds[title]:7.2f} s", flush=True)
        if name == "quick":
            first, whole, peak, last, _ = quick()
            print(
                f"quick run: first verdict {first:.1f} s, whole {whole:.1f} s, peak {peak:.2f} GB\n  {last}",
                flush=True,
            )
        if name.startswith("bytes"):
            before = cpu()
            first, whole, peak, last, report = quick(
                "--kv-tier=bytes", f"--kv-matrix={name.partition('-')[2] or 'quick'}"
            )
            print("\n".join(by_cell(report)))
            took = f"first verdict {first:.1f} s, whole {whole:.1f} s, CPU {cpu() - before:.1f} s"
            print(f"{name}: {took}, peak {peak:.2f} GB\n  {last}", flush=True)
    for tp in (1, 2):
        plain, ours = seconds.get(f"two LLM(...) starts, TP {tp}"), seconds.get(f"one more cell, P{tp}D{tp}")
        if plain and ours:
            print(f"ratio at TP {tp}: 1/{plain / ours:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
