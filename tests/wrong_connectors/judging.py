"""What the cases report about a connector of the catalogue, and where that differs from its record."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from pytest_kvconform.result import CaseResult, Outcome
from tests.helpers.case_runner import CaseRunner, CellRun
from tests.helpers.wrong import FOLDER, NO_FAILURE, SECONDS, Record, Right, Theme, case_of, is_named

# What a case says that is BLOCKED because this machine was too slow to tell.
SLOW = ("--kv-timeout-scale", "machine was too slow", "on this machine even if P is not stopped")
NO_MISTAKE = ("PASS", "NOT-APPLICABLE", "BLOCKED")


def run_record(
    theme: Theme, record: Record, runner: CaseRunner, folder: Path, at_night: bool = False
) -> CellRun:
    """Run the cases of a theme on a connector. `folder`: an empty one, for what it saves."""
    cell = {**theme.cell, **record.cell, "only": theme.selects(record, at_night)}
    config = cell.pop("config", None)

    def run(lease_s: int = 0) -> CellRun:
        given = {} if config is None else {"config": config.replace(FOLDER, str(folder))}
        if lease_s:
            given["config"] = given["config"].replace(SECONDS, str(lease_s))
        return runner.run(record.connector, **cell, **given)

    if not theme.leases:
        return run()
    judged = record.fails or record.passes.split()
    shows = (record.rules or "FAIL") if record.fails else "PASS" if judged else ""
    return run_until_told(run, theme.leases, judged or None, shows)


def run_until_told(
    run: Callable[[int], CellRun], leases: Collection[int], judged: Collection[str] | None, shows: str
) -> CellRun:
    """Run cases with longer and longer leases, until this machine is fast enough to judge.

    `judged`: cases that must not be BLOCKED because this machine was too slow. None: all.
    `shows`: what these cases report if the mistake shows, see `word`. On a busy machine it may need a longer
    lease. What another run found counts where the machine was too slow before, and where it found a mistake.
    """
    found, unsettled = dict[str, CaseResult](), set[str]()
    for lease_s in leases:
        once = run(lease_s)
        new = dict(zip(once.outcomes, once.results, strict=True))
        kept = {name for name in found if name not in unsettled and word(new[name]) in NO_MISTAKE}
        found = new | {name: found[name] for name in kept}
        cases = found.keys() if judged is None else judged
        unsettled = {name for name, result in found.items() if is_too_slow(result)}
        unsettled |= {name for name in cases if shows not in ("", word(found[name]))}
        if unsettled.isdisjoint(cases):
            break
    return CellRun(list(found.values()))


def word(result: CaseResult) -> str:
    """The outcome of a case, or the rule that a finding names in place of the case's own."""
    if result.finding and result.finding.rule != result.rule:
        return result.finding.rule
    return result.outcome.value


def is_too_slow(result: CaseResult) -> bool:
    """Whether a case is BLOCKED because this machine was too slow to tell."""
    return result.outcome is Outcome.BLOCKED and any(words in result.reason for words in SLOW)


def deviations(theme: Theme, record: Record, run: CellRun) -> list[str]:
    """Where the results differ from the record, one sentence each."""
    results = dict(zip(run.outcomes, run.results, strict=True))
    looked_at = {
        name: result
        for name, result in results.items()
        if not is_named(name, {*theme.unsure, *record.unsure})
    }
    due = {
        name
        for name, result in looked_at.items()
        if is_named(name, record.fails) and result.outcome is not Outcome.NOT_APPLICABLE
    }
    found = [
        f"no case is called {key} here" for key in record.fails if not any(is_named(n, [key]) for n in due)
    ]
    passed = {name for name, result in results.items() if result.outcome is Outcome.PASS}
    passed |= {*map(case_of, passed)}
    other = {*record.fails, *record.blocked, *record.not_applicable}
    due_to_pass = {*record.passes.split(), *record.cases.split()} - other
    found += [f"{name} does not pass: {_why(results.get(name))}" for name in due_to_pass - passed]
    due_one = isinstance(record, Right) and not (record.blocked or record.not_applicable)
    found += ["no case passes"] if due_one and not passed else []
    for name, result in looked_at.items():
        if name in due:
            expected = {"FAIL"}
        elif theme.leases and is_too_slow(result):
            continue
        elif is_named(name, record.blocked):
            expected = {"BLOCKED"}
        elif is_named(name, record.not_applicable):
            expected = {"NOT-APPLICABLE"}
        elif result.id.removeprefix("kv::").partition("::")[0] in theme.loose:
            expected = {*NO_FAILURE.split()}
        else:
            expected = {*theme.others.split()} - ({"FAIL"} if isinstance(record, Right) else set())
        if result.outcome.value not in expected:
            found.append(f"{name} is {result.outcome.value}, not {' or '.join(expected)}: {_why(result)}")
    for said in (record.blocked, record.not_applicable):
        for key, pattern in said.items() if isinstance(said, Mapping) else ():
            reasons = [result.reason for name, result in results.items() if is_named(name, [key])]
            if not reasons or not all(re.search(pattern, reason) for reason in reasons):
                found.append(f"the reason of {key} is not {pattern!r}: {reasons}")
    loaded = sum(one.external_tokens + one.bytes_moved for one in run.evidence.values())
    found += ["nothing is loaded"] if record.loads and not loaded else []
    return [*found, *_of_findings(theme, record, results, due), *_of_verdict(record, run)]


def _of_findings(theme: Theme, record: Record, results: dict[str, CaseResult], due: set[str]) -> list[str]:
    """What is not as the record has it in rules and sentences."""
    found, given = [], record.rules.split()
    findings = {name: result.finding for name, result in results.items() if result.finding}
    for name in due & findings.keys():
        finding = findings[name]
        rule = given[0] if given else results[name].rule if theme.own_rules else finding.rule
        if finding.rule != rule:
            found.append(f"{name} names {finding.rule}, not {rule}: {finding}")
        text = f"{finding.happened}\n{finding.diagnosis}"
        for key, says in record.fails.items():
            if is_named(name, [key]) and not re.search(says, text, re.MULTILINE | re.DOTALL):
                found.append(f"{name} does not report {says!r}: {text}")
    if given and (named := {finding.rule for finding in findings.values()}) != set(given):
        found.append(f"rules {sorted(named)} are named, not {record.rules}")
    found += [
        f"{name} does not report it in one sentence: {text}"
        for name, finding in findings.items()
        for text in (finding.happened, finding.diagnosis)
        if "\n" in text or len(text) > theme.longest > 0
    ]
    return found


def _of_verdict(record: Record, run: CellRun) -> list[str]:
    """A run of a right connector may show too little for a verdict."""
    verdict = (run.verdict.word, run.verdict.exit_code)
    return [f"the verdict is {verdict}"] if record.fails and verdict != ("VIOLATES", 1) else []


def _why(result: CaseResult | None) -> str:
    return str(result and (result.finding or result.reason))
