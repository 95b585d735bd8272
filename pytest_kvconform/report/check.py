"""What `kvconform verify` checks: a report against itself, and against the suite that wrote it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from model_matrix.cells import MODELS
from model_matrix.limits import load_limits
from pytest_kvconform import __version__, features, loading, plan, rules
from pytest_kvconform.report.consistency import inconsistencies
from pytest_kvconform.report.digest import altered
from pytest_kvconform.report.document import FILE, Report
from pytest_kvconform.settings import Settings


def sentences(path: Path, report: Report) -> list[str]:
    """Return a sentence for each thing that is wrong with a report, which was read from this path."""
    file = path / FILE if path.is_dir() else path
    edited = altered(file)
    return [*inconsistencies(report), *_compare_with_suite(report), *([edited] if edited else [])]


def _compare_with_suite(report: Report) -> list[str]:
    """Return a sentence for each part of the manifest and the results that differs from the suite.

    Of a result rule, cell, features and level are compared.

    Another version of the suite has other cases, so its reports are not compared.
    """
    if report.suite != __version__:
        return []
    known = plan.make_plan(Settings(matrix=report.settings["matrix"].value), ())
    planned = {one.id: one for one in known.selected}
    # a known limit of the machine, or a package that it lacks, takes cases out of the manifest, there or here
    of_suite = {*known.manifest, *known.left_out}
    of_report = {*report.selection.manifest, *report.selection.not_in_manifest}
    lacking, strange = sorted(of_suite - of_report), sorted(of_report - of_suite)
    found = []
    if report.should != rules.should(rules.load()):
        found.append("should: the rules of strength SHOULD are not those of the suite")
    if lacking:
        found.append(f"{len(lacking)} cases of the suite are not in the manifest, the first is {lacking[0]}")
    if strange:
        found.append(f"{len(strange)} cases of the manifest are not in the suite, the first is {strange[0]}")
    found += _without_reason(report, planned)
    for result in report.results:
        if (one := planned.get(result.id)) is not None:
            expected = {
                "rule": one.case.rule,
                "cell": one.cell,
                "features": features.required_features(one),
                "level": one.level,
            }
            found += [
                f"{result.id}: {key} of the result is not {key} of the case"
                for key, value in expected.items()
                if getattr(result, key) != value
            ]
    return found


def _without_reason(report: Report, planned: Mapping[str, plan.PlannedCase]) -> Iterator[str]:
    """Yield a sentence for each case that the report leaves out of the manifest, and the suite would not."""
    why = rules.not_in_force(rules.load(), report.environment.get("vllm") or "")
    limits = load_limits(loading.limits_file())
    for name in (name for limit in report.selection.limits for name in limit.ids):
        one = planned.get(name)
        if one is None or why.get(one.case.rule):
            continue
        variant = "" if one.variant is None else str(one.variant)
        if not (one.case.rig in MODELS and any(limit.covers(one.cell.family, variant) for limit in limits)):
            yield f"{name} is left out, but the suite knows no limit of vLLM for it"
    for name in report.selection.not_installed:
        if not name.startswith(f"{plan.PREFIX}{plan.ACCURACY}/"):
            yield f"{name} is left out, but it needs no packages of the {plan.ACCURACY} tier"
