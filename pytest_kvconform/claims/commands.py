"""`kvconform claim`, `badge` and `register`, and `verify` of the folder of a claim."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path

from pytest_kvconform import declaration
from pytest_kvconform.claims import SEEDS, badge, registry, reports, run
from pytest_kvconform.claims.reports import is_claim as is_claim
from pytest_kvconform.report.answer import print_lines
from pytest_kvconform.report.document import BadReport, Report
from pytest_kvconform.report.files import write_file
from pytest_kvconform.report.origin.compare import made_by

_FOLDER = "kv-claim"
CLAIM_HELP = f"folder that kvconform claim has written, such as {_FOLDER}"


def add_claim_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kvconform claim`."""
    parser.add_argument("--connector", metavar="NAME|MODULE:CLASS", default="", help="as --kv-connector")
    parser.add_argument(
        "--seed", type=int, choices=SEEDS, action="append", help="this run alone; default: all of them"
    )
    parser.add_argument(
        "-n", "--jobs", metavar="N", type=int, default=0, help="cells side by side; needs pytest-xdist"
    )
    parser.add_argument(
        "-o", "--output", metavar="DIR", type=Path, default=Path(_FOLDER), help="default: %(default)s"
    )


def run_claim(options: argparse.Namespace) -> int:
    """Run the suite for each seed, and return the exit code of the worst run."""
    return run.run(options.connector, options.seed or SEEDS, options.output, options.jobs)


def print_badges(options: argparse.Namespace) -> int:
    """Write the files of a claim and print their paths. Raises BadReport if it has none."""
    claim: Path = options.claim
    found = reports.read(claim)
    if sentence := next(_problems(claim, found), ""):
        raise BadReport(sentence)
    made = badge.files(found, reports.hashes(claim))
    for path in _present(claim):
        if path.name not in made:
            path.unlink()  # of a claim that was here before
    for name, content in made.items():
        print(_write(claim / name, content))
    return 0


def print_verified(claim: Path) -> int:
    """Check the reports of a claim, and compute its files again. Print what does not follow."""
    found = reports.read(claim)
    if sentences := list(_doubts(claim, found)):
        print_lines(sentences)
        return 1
    words = ", ".join(f"{level} {word}" for level, word in badge.levels(list(found.values())).items())
    print(f"{words}: the {len(_present(claim))} files follow from the {len(found)} reports of the claim")
    print_lines(made_by(found[SEEDS[0]]))
    return 0


def add_register_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kvconform register`."""
    parser.add_argument("claim", metavar="CLAIM", type=Path, help=CLAIM_HELP)
    parser.add_argument("--project", metavar="URL", required=True, help="of the connector's repository")
    parser.add_argument("--commit", metavar="SHA", required=True, help="of the project, which ran")
    parser.add_argument(
        "--reproduce", metavar="COMMAND", required=True, help="makes the claim in a checkout of the commit"
    )
    parser.add_argument(
        "-o", "--output", metavar="DIR", type=Path, default=Path(registry.FOLDER), help="default: %(default)s"
    )


def register(options: argparse.Namespace) -> int:
    """Write the entry of a claim that verifies, and print its path. Raises BadReport for others."""
    found = reports.read(options.claim)
    if sentence := next(_doubts(options.claim, found), ""):
        raise BadReport(sentence)
    name, content = registry.make(
        found,
        reports.hashes(options.claim),
        options.project,
        options.commit,
        options.reproduce,
        options.output,
    )
    print(_write(options.output / name, content))
    return 0


def _write(path: Path, content: bytes) -> Path:
    try:
        return write_file(path, content)
    except OSError as error:
        raise BadReport(f"{path} cannot be written: {error.strerror}") from None


def _doubts(claim: Path, found: Mapping[int, Report]) -> Iterator[str]:
    """Yield a sentence for each thing that is wrong with a claim, its files included."""
    if sentences := list(_problems(claim, found)):
        yield from sentences
        return
    made = badge.files(found, reports.hashes(claim))
    for path in _present(claim):
        if path.read_bytes() != made.get(path.name):
            yield f"{path} does not follow from the reports: write it again with kvconform badge"


def _problems(claim: Path, found: Mapping[int, Report]) -> Iterator[str]:
    yield from reports.problems(claim, found)
    if any(report.day for report in found.values()):
        until = badge.expires(list(found.values()))
        if until < declaration.today():
            yield f"the claim expired on {until}: run kvconform claim again"


def _present(claim: Path) -> list[Path]:
    return sorted(path for pattern in badge.PATTERNS for path in claim.glob(pattern))
