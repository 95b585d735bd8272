"""The part of docs/badges.md that shows docs/claims: a folder for each connector and minor of vLLM."""

from __future__ import annotations

import json
import tarfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pytest_kvconform.claims import SEEDS
from pytest_kvconform.report.document import FILE

FOLDER = Path(__file__).parent / "claims"
ARCHIVE = "reports.tar.xz"  # of the reports of a folder
HEAD = ("vLLM", "suite", "day", "tiers", "verdict", "cases", "badges")
WORDS = {
    "PASS": "pass",
    "WARNING": "with warnings",
    "FAIL": "fail",
    "BLOCKED": "blocked",
    "NOT-APPLICABLE": "not applicable",
}


def folders() -> list[Path]:
    """Return the folder of each claim, and of each run that is kept instead of one."""
    return sorted(path for path in FOLDER.glob("*/vllm-*"))


def reports(folder: Path) -> dict[str, bytes]:
    """Return the content of each report of a claim, by its name in the archive."""
    with tarfile.open(folder / ARCHIVE) as archive:
        files = {name: archive.extractfile(name) for name in archive.getnames()}
        return {name: file.read() for name, file in files.items() if file}


def read(folder: Path) -> list[dict[str, Any]]:
    """Return the reports of a folder in the order of their seeds: three of a claim, one of a run."""
    found = reports(folder)
    return [json.loads(found[name]) for seed in SEEDS if (name := f"seed-{seed}/{FILE}") in found]


def kept_claims(table: Callable[[tuple[str, ...], list[tuple[str, ...]]], str]) -> str:
    """Return a table for each connector, with one row for each minor of vLLM."""
    parts = []
    for connector in sorted({folder.parent for folder in folders()}):
        rows = [_row(folder) for folder in folders() if folder.parent == connector]
        parts.append(f"\n`docs/claims/{connector.name}`:\n\n{table(HEAD, rows)}\n")
    return "".join(parts)


def _row(folder: Path) -> tuple[str, ...]:
    found = read(folder)
    badges = [
        f"![{level}](claims/{folder.parent.name}/{folder.name}/{file.name})"
        for file in sorted(folder.glob("badge-*.svg"))
        for level in [file.name.split("-")[1]]
    ]
    first = found[0]
    return (
        first["environment"]["vllm"],
        f"`{first['commits']['suite'][:8]}`",
        first["day"],
        ", ".join(f"`{tier}`" for tier in first["settings"]["tier"]["value"]) or "all",
        " ".join(dict.fromkeys(report["verdict"]["word"] for report in found)),
        "; ".join(dict.fromkeys(_outcomes(report) for report in found)),
        " ".join(badges) or "none: no claim",
    )


def _outcomes(report: dict[str, Any]) -> str:
    """How many cases of a run ended in which way."""
    counts = Counter(report["verdict"]["counts"])
    return ", ".join(f"{counts[word]} {meaning}" for word, meaning in WORDS.items() if counts[word])
