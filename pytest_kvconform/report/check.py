"""What `kvconform verify` checks: a report against itself, and against the suite that made it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from pytest_kvconform import plan, rules
from pytest_kvconform.report.answer import escaped, print_lines
from pytest_kvconform.report.consistency import inconsistencies
from pytest_kvconform.report.digest import altered
from pytest_kvconform.report.document import FILE, Report, read
from pytest_kvconform.report.origin.compare import Unknown, made_by, problems
from pytest_kvconform.report.origin.manifest import Manifest


def sentences(path: Path, report: Report) -> tuple[list[str], str]:
    """Return a sentence for each thing that is wrong with a report, which was read from this path.

    Returns also why its manifest could not be compared with that of the suite that made it; "": it was.
    """
    file = path / FILE if path.is_dir() else path
    edited = altered(file)
    found, unknown = [*inconsistencies(report)], ""
    if report.manifest is not None:
        found += _beside_manifest(report, report.manifest)
    try:
        found += problems(report)
    except Unknown as error:
        unknown = str(error)
    return [*found, *([edited] if edited else [])], unknown


def print_checked(path: Path) -> int:
    """Check the report of a file or a folder, and print what is wrong. Returns the exit code."""
    report = read(path)
    wrong, unknown = sentences(path, report)
    if wrong:
        print_lines(wrong)
        return 1
    print(f"{report.verdict.word}: the verdict follows from the {len(report.results)} results of the report")
    if unknown:
        print(f"the manifest is not compared: {escaped(unknown)}", file=sys.stderr)
    else:
        print_lines(made_by(report))
    return 0


def _beside_manifest(report: Report, manifest: Manifest) -> Iterator[str]:
    """Yield a sentence for each part of a report that differs from its own manifest: the cases that can run
    here, the reason of each that is left out, the names of settings, and the rule, the cell, the features and
    the level of results.
    """
    belongs = manifest.by_id
    here = {*report.selection.manifest, *report.selection.not_in_manifest}
    if lacking := sorted(belongs.keys() - here):
        yield f"{len(lacking)} cases of the suite are not in the manifest, the first is {lacking[0]}"
    if strange := sorted(here - belongs.keys()):
        yield f"{len(strange)} cases of the manifest are not in the suite, the first is {strange[0]}"
    if differ := sorted(report.settings.keys() ^ manifest.settings):
        yield f"settings: {', '.join(differ)} is not both in the settings and in the manifest"
    if report.should != rules.should(manifest.by_rule):
        yield "should: the rules of strength SHOULD are not those of the suite"
    yield from _without_reason(report, manifest)
    for result in report.results:
        if (group := belongs.get(result.id)) is None:
            continue
        of_case = {"rule": group.rule, "features": group.features, "level": group.level}
        for key, expected in of_case.items():
            if getattr(result, key) != expected:
                yield f"{result.id}: {key} of the result is not {key} of the case"
        cell = result.id.partition("[")[2].rstrip("]")
        if not f"{cell}-".startswith(f"{result.cell}-"):
            yield f"{result.id}: cell of the result is not cell of the case"


def _without_reason(report: Report, manifest: Manifest) -> Iterator[str]:
    """Yield a sentence for each case that the report leaves out of the selection, and the suite would not."""
    why = rules.not_in_force(manifest.by_rule, report.environment.get("vllm") or "")
    belongs = manifest.by_id
    for limit in report.selection.limits:
        for name in limit.ids:
            group = belongs.get(name)
            if group and not why.get(group.rule) and limit.limit not in group.limits:
                yield f"{name} is left out, but the suite knows no limit of vLLM for it"
    for name in report.selection.not_installed:
        if not name.startswith(f"{plan.PREFIX}{plan.ACCURACY}/"):
            yield f"{name} is left out, but it needs no packages of the {plan.ACCURACY} tier"
