"""`kvconform matrix`, the plan as data for a CI matrix, and `kvconform merge`, one report of its shards."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

from model_matrix.cells import parse_topology
from pytest_kvconform import extras, plan, shards
from pytest_kvconform.report import document, terminal
from pytest_kvconform.report.answer import print_lines
from pytest_kvconform.report.failure import settings_of
from pytest_kvconform.report.for_people import write_for_people
from pytest_kvconform.report.merge import BadShards, Shard, merge
from pytest_kvconform.settings import NIGHTLY, OPTIONS, BadSetting, Settings, load

SELECTING = ("matrix", "tier", "level", "family", "topology", "rule", "feature")  # settings that select cases


def add_matrix_arguments(parser: argparse.ArgumentParser) -> None:
    for option in OPTIONS:
        if option.name in SELECTING:
            parser.add_argument(
                f"--{option.key}",
                dest=option.dest,
                metavar=option.metavar,
                help=option.help,
                action="append" if option.repeatable else "store",
            )
    parser.add_argument(
        "--shards",
        metavar="N",
        type=_positive,
        default=1,
        help="divide into N shards, as --kv-shard=I/N does",
    )
    parser.add_argument(
        "--json", action="store_true", help="print a JSON object, in one line, instead of a table"
    )


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 10_000):
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 on, got {text!r}")
    return int(text)


def print_matrix(options: argparse.Namespace) -> int:
    """Print the cells of a plan with what they cost, the expensive ones first.

    The settings are those of a run in this folder: options, KVCONFORM_* and [tool.kvconform].
    """
    given = {option.dest: getattr(options, option.dest) for option in OPTIONS if option.name in SELECTING}
    settings = dataclasses.replace(load(given, os.environ, Path.cwd()), shard="")
    cells = cells_of(plan.make_plan(settings, (), extras.not_installed()), settings.matrix, options.shards)
    names = [f"{number}/{options.shards}" for number in range(1, options.shards + 1)]
    if options.json:
        print(json.dumps({"matrix": settings.matrix, "shards": names, "cells": cells}))
        return 0
    for cell in cells:
        measured = "" if cell["measured"] else "  (declared)"
        print(
            f"{cell['shard']:>5}  {cell['seconds']:8.1f} s  {cell['cases']:5} cases  {cell['cell']}  "
            f"{' '.join(cell['tiers'])}{measured}"
        )
    for name in names if options.shards > 1 else ():
        mine = [cell for cell in cells if cell["shard"] == name]
        seconds, cases = (sum(cell[key] for cell in mine) for key in ("seconds", "cases"))
        print(f"{name:>5}  {seconds:8.1f} s  {cases:5} cases in {len(mine)} cells")
    return 0


def cells_of(made: plan.Plan, matrix: str, count: int) -> list[dict[str, Any]]:
    """Return a row for each group of cases that run in one place. Raises BadSetting for too many shards."""
    cases = shards.groups(made.selected)
    if not cases:
        return []
    try:
        dealt = shards.divide(made.selected, matrix, count)
    except ValueError as error:
        raise BadSetting(f"--shards={count}: {error}") from None
    rows = [
        {
            "cell": str(group.cell),
            "family": group.cell.family,
            "topology": group.cell.topology,
            "setup": group.cell.setup,
            "tiers": list(dict.fromkeys(one.case.tier for one in cases[group])),
            "cases": len(cases[group]),
            "seconds": round(sum(shards.seconds(one, matrix) for one in cases[group]), 1),
            "measured": all(shards.is_measured(one, matrix) for one in cases[group]),
            "shard": f"{number}/{count}",
        }
        | ({"gpus": sum(parse_topology(group.cell.topology))} if matrix == NIGHTLY else {})
        for number, mine in enumerate(dealt, 1)
        for group in mine
    ]
    return sorted(rows, key=lambda row: (-row["seconds"], row["cell"], row["tiers"]))


def print_merged(options: argparse.Namespace) -> int:
    """Write the report of all shards, print the last lines of the run, and return its exit code."""
    folder = Path(options.report or Settings.report)
    found = [Shard(path, document.read(path)) for path in options.reports]
    target = (folder / document.FILE).resolve()
    for one in found:
        if target in (one.path.resolve(), (one.path / document.FILE).resolve()):
            raise BadShards(f"--report={folder}: it has a shard, which the whole report would replace")
    whole = merge(found, options.report)
    try:
        written = document.write(whole, folder)
    except OSError as error:
        raise BadShards(f"{target} cannot be written: {error.strerror}") from None
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    said = write_for_people(whole, folder, settings_of(whole).html, summary)
    lines = [*(f"kvconform: {sentence}" for sentence in said), terminal.title(whole)]
    width = shutil.get_terminal_size().columns
    lines += [line for line, _ in terminal.summary(whole, str(written), width, unicode=True)]
    print_lines(lines)
    return whole.verdict.exit_code
