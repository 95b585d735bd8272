"""The three reports of a claim: where they are, and why a folder is no claim that has badges."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from pytest_kvconform.claims import SEEDS, is_fixed
from pytest_kvconform.report import check, document
from pytest_kvconform.report.document import BadReport, Report
from pytest_kvconform.report.merge import differences
from pytest_kvconform.report.origin.commits import is_commit, lacks_commit, needs_commit

_OF_A_RUN = ("seed", "report", "html")  # settings that differ between the runs of a claim


def folder_of(claim: Path, seed: int) -> Path:
    """Return the folder of the report of a seed."""
    return claim / f"seed-{seed}"


def is_claim(path: Path) -> bool:
    """Whether a path is the folder of a claim, whole or not."""
    return any(folder_of(path, seed).is_dir() for seed in SEEDS)


def read(claim: Path) -> dict[int, Report]:
    """Return seed -> its report. Raises BadReport if there is no claim, or a report is missing."""
    if not is_claim(claim):
        first = folder_of(claim, SEEDS[0]).name
        raise BadReport(f"{claim} is no claim: it has no folder {first}; make one with kvconform claim")
    return {seed: document.read(folder_of(claim, seed)) for seed in SEEDS}


def hashes(claim: Path) -> dict[int, str]:
    """Return seed -> the SHA-256 of the file of its report. Another suite would write other bytes."""
    files = {seed: folder_of(claim, seed) / document.FILE for seed in SEEDS}
    return {seed: hashlib.sha256(file.read_bytes()).hexdigest() for seed, file in files.items()}


def problems(claim: Path, reports: Mapping[int, Report]) -> Iterator[str]:
    """Yield a sentence for each reason why the reports have no badges."""
    for seed, report in reports.items():
        path = folder_of(claim, seed)
        wrong, unknown = check.sentences(path, report)
        for sentence in (*_no_claim(seed, report), *wrong, *filter(None, [unknown])):
            yield f"{path}: {sentence}"
    first = folder_of(claim, SEEDS[0])
    for seed in SEEDS[1:]:
        for sentence in differences(reports[SEEDS[0]], reports[seed], _OF_A_RUN):
            yield f"{first} and {folder_of(claim, seed)} are not of one claim: {sentence}"


def _no_claim(seed: int, report: Report) -> Iterator[str]:
    """Yield why one report is not that of a claim with this seed."""
    values = {key: setting.value for key, setting in report.settings.items()}
    facts, selection = report.facts or {}, report.selection
    if values.get("claim") is not True:
        yield "the run was no claim: start it with kvconform claim"
    for key, default in report.manifest.settings.items() if report.manifest else ():
        if is_fixed(key) and (value := values.get(key)) != default:
            yield f"setting {key} is {value!r}, and a claim has the default"
    commit = report.commits.get("suite", "")
    if report.manifest and needs_commit(report.suite) and not is_commit(commit):
        yield f"its suite {report.suite} is of no release, and has {lacks_commit(commit)}"
    if values.get("seed") != seed:
        yield f"its seed is {values.get('seed')}, not {seed}"
    if not_run := len({*selection.manifest}.difference(result.id for result in report.results)):
        yield f"{not_run} of {len(selection.manifest)} cases did not run"
    if report.verdict.word in ("INCOMPLETE", "HARNESS"):
        yield f"the verdict is {report.verdict.headline}"
    if facts.get("stand_in"):
        yield f"a part of the suite stood in for a GPU: {facts['stand_in']}"
    if facts.get("device") not in ("cpu", "cuda") or not re.match(r"\d+\.\d+", str(facts.get("vllm"))):
        yield "the report names no vLLM or no device"
    if report.day is None or not report.digest:
        yield "the report has no day or no digest"
