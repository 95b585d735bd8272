"""Text of one failure, and of many failures with one cause."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_kvconform.apply_declaration import shown_finding
from pytest_kvconform.report.document import Report
from pytest_kvconform.result import CaseResult, Outcome
from pytest_kvconform.rules import Rule
from pytest_kvconform.settings import OPTIONS, Settings

_ID = re.compile(r"(?P<case>.+)\[(?P<cell>[^-\]]+-[^-\]]+)-(?P<variant>.+)\]")
# settings of a whole run; the connector stands in front of the others
_NOT_AGAIN = ("connector", "report", "html", "shard", "claim")


def failure_text(result: CaseResult, rules: dict[str, Rule], settings: Settings) -> str:
    """Return the sections of a FAIL or a WARNING as one text, and where the report is."""
    if shown_finding(result) is None:
        return result.reason or f"{result.id} failed without a reason"
    rows = [
        *failure_sections(result, rules, settings),
        ("report", [str(Path(settings.report) / "report.json")]),
    ]
    lines = [
        f"{name if n == 0 else '':<11}{line}".rstrip() for name, texts in rows for n, line in enumerate(texts)
    ]
    return "\n".join(lines)


def failure_sections(
    result: CaseResult, rules: Mapping[str, Rule], settings: Settings
) -> list[tuple[str, Sequence[str]]]:
    """Return (name, lines) of rule, happened, known, differs, diagnosis, check, log and again, in this order.

    A section may have no lines. A result without a finding has its reason alone, and again.
    """
    again = ("again", [rerun_command(settings, result.id)])
    finding = shown_finding(result)
    if finding is None:
        return [("reason", [result.reason]), again]
    rule = rules.get(finding.rule)
    return [
        (
            "rule",
            [rule.sentence, f"{rule.id} {rule.strength}, {rule.minors}"] if rule else [finding.rule],
        ),
        ("happened", [finding.happened]),
        ("known", [result.reason] if result.reason and not result.declaration_rule else []),
        ("differs", [line for line in (finding.differs, *finding.picture) if line]),
        ("diagnosis", [finding.diagnosis] if finding.diagnosis else []),
        ("check", [f"- {line}" for line in (finding.check or (rule.check if rule else ()))]),
        ("log", list(finding.log)),
        again,
    ]


def failure_line(result: CaseResult) -> str:
    """Return one line: the rule and what went wrong of a FAIL or a WARNING, and the reason of any other."""
    finding = shown_finding(result)
    if finding is None or result.outcome not in (Outcome.FAIL, Outcome.WARNING):
        return result.reason
    return f"{finding.rule}: {finding.diagnosis or finding.happened}"


def rerun_command(settings: Settings, *arguments: str) -> str:
    """Return the command that runs these ids again in this project.

    It repeats settings of the command line and of the environment, but not those of pyproject.toml. Of a
    header it has the name alone.
    """
    words = ["pytest", f"--kv-connector={settings.connector}"]
    if settings.deployed:  # a deployment needs both, whatever is selected
        words += [f"--kv-tier={','.join(settings.tier)}", f"--kv-family={','.join(settings.family)}"]
    for option in OPTIONS:
        value = getattr(settings, option.name)
        if value == option.default or settings.origins.get(option.name) == "pyproject.toml":
            continue
        if option.is_secret:
            words += [f"{option.flag}={one}" for one in option.shown(value)]
        elif option.name not in _NOT_AGAIN and not option.repeatable and option.flag:
            # not of a repeatable one: an id selects the case by itself
            words.append(option.flag if option.switch else f"{option.flag}={value}")
    return shlex.join([*words, *arguments])


def settings_of(report: Report) -> Settings:
    """Return the settings with which the run was made, as far as this suite knows them."""
    known = {option.key: option for option in OPTIONS}
    given = {key: one for key, one in report.settings.items() if key in known}
    values: dict[str, Any] = {
        known[key].name: tuple(one.value) if isinstance(one.value, list) else one.value
        for key, one in given.items()
    }
    return Settings(**values, origins={known[key].name: one.origin for key, one in given.items()})


def compress_ids(ids: Iterable[str]) -> list[str]:
    """Return lines in which ids that differ only in the variant are one:
    `kv::a/b::c[gemma3-P1D1-{n63,n95}]`.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for name in ids:
        match = _ID.fullmatch(name)
        groups.setdefault((match["case"], match["cell"]) if match else (name, ""), []).append(
            match["variant"] if match else ""
        )
    lines = []
    for (case, cell), variants in groups.items():
        if not cell:
            lines.append(case)
        elif len(variants) == 1:
            lines.append(f"{case}[{cell}-{variants[0]}]")
        else:
            lines.append(f"{case}[{cell}-{{{','.join(variants)}}}]")
    return lines
