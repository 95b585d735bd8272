"""Console script `kvconform`: questions that need no run of the suite, and a connector to start from.

Exit codes: 0 yes; 1 no (the reports differ, the verdict does not follow, nothing can run here); 2 a wrong
question. `merge` ends as the run would: 0, 1, 10 or 11; 2 if the reports are not the shards of one run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model_matrix.cells import EVERY_MATRIX
from pytest_kvconform import __version__, doctor, features, loading, plan, rules, starter
from pytest_kvconform.claims.commands import (
    CLAIM_HELP,
    add_claim_arguments,
    add_register_arguments,
    is_claim,
    print_badges,
    print_verified,
    register,
    run_claim,
)
from pytest_kvconform.report import check, document, page
from pytest_kvconform.report.answer import escaped, print_lines, write_no_more
from pytest_kvconform.report.merge import BadShards
from pytest_kvconform.report.origin import manifest
from pytest_kvconform.result import LEVELS
from pytest_kvconform.rules import clauses
from pytest_kvconform.settings import OPTIONS, BadSetting, Settings
from pytest_kvconform.settings.parsers import did_you_mean
from pytest_kvconform.shards.commands import add_matrix_arguments, print_matrix, print_merged

_MANIFEST = "manifest"
_REPORT = f"report.json, or its folder, such as {Settings.report}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. An error prints one sentence to stderr."""
    options = _parser().parse_args(arguments)
    try:
        code = int(options.run(options))
        if sys.stdout is not None:
            sys.stdout.flush()  # here, and not where Python ends, an error becomes a sentence
        return code
    except (BadSetting, plan.BadSuite, rules.BadRules, document.BadReport, BadShards) as error:
        print(f"kvconform: {escaped(str(error))}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `kvconform list cases | head`
        write_no_more()
        return 0
    except OSError as error:  # `kvconform list cases > /dev/full`
        write_no_more()
        print(f"kvconform: the output cannot be written: {error.strerror or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("kvconform: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    """The parser of `_COMMANDS`. Its namespaces have the parser of every command, for `completion`."""
    parser = argparse.ArgumentParser(
        prog="kvconform",
        description=(
            "Questions about the conformance of vLLM KV connectors. To test one: pytest --kv-connector=..."
        ),
    )
    parser.add_argument("--version", action="version", version=f"pytest-kvconform {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in _COMMANDS:
        one = commands.add_parser(command.name, help=command.help, description=command.help)
        one.set_defaults(run=command.run, parser=parser, commands=commands.choices.values())
        for add in command.arguments:
            add(one)
    return parser


# ---- list -------------------------------------------------------------------------------------------------


def _list(options: argparse.Namespace) -> int:
    if options.what == _MANIFEST:
        print(manifest.of_suite(options.matrix).json.decode())
        return 0
    for row in _columns(_LISTS[options.what](options.matrix)):
        print(row)
    return 0


def _cases(matrix: str) -> list[Sequence[str]]:
    return [
        (planned.id, planned.case.rule) for planned in plan.make_plan(Settings(matrix=matrix), ()).selected
    ]


def _rules(matrix: str) -> list[Sequence[str]]:
    return [(rule.id, rule.strength, rule.level, rule.sentence) for rule in rules.load().values()]


def _clauses(matrix: str) -> list[Sequence[str]]:
    return [
        (clause.id, " ".join(clause.rules) or "not tested", clause.sentence)
        for clause in clauses.load().values()
    ]


def _families(matrix: str) -> list[Sequence[str]]:
    topologies: dict[str, dict[str, None]] = {}  # several rigs may have the same cell
    for place in loading.expand_matrix(matrix):
        topologies.setdefault(place.family, {})[
            place.topology + (f".{place.setup}" if place.setup else "")
        ] = None
    return [(family, " ".join(words)) for family, words in topologies.items()]


def _settings(matrix: str) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = [("flag", "environment", "[tool.kvconform]", "values", "default", "")]
    for option in OPTIONS:
        rows.append(
            (
                option.flag or "-",
                option.variable or "-",
                option.key,
                option.metavar or "-",
                option.shown_default or "-",
                option.help,
            )
        )
    return rows


_LISTS: dict[str, Callable[[str], list[Sequence[str]]]] = {
    "cases": _cases,
    "clauses": _clauses,
    "rules": _rules,
    "families": _families,
    "features": lambda matrix: [
        (name, feature.level, feature.meaning) for name, feature in features.load().items()
    ],
    "levels": lambda matrix: list(LEVELS.items()),
    "settings": _settings,
}


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


# ---- explain, verify, diff --------------------------------------------------------------------------------


def _explain(options: argparse.Namespace) -> int:
    known = rules.load()
    if (clause := clauses.load().get(options.rule.upper())) is not None:
        print(f"{clause.id}\n\n  {clause.sentence}\n\nsource   {clause.source}")
        print(f"rules    {' '.join(clause.rules)}" if clause.rules else f"untested {clause.untestable}")
        return 0
    rule = known.get(_rule_of_case(options.rule) if options.rule.startswith("kv::") else options.rule.upper())
    if rule is None:
        for what, names in (("feature", [*features.load()]), ("level", [*LEVELS])):
            if options.rule in names:
                raise BadSetting(f"{options.rule} is a {what}, and no rule; see: kvconform list {what}s")
        raise BadSetting(
            f"there is no rule {options.rule}{did_you_mean(options.rule.upper(), known)}; see: "
            "kvconform list rules"
        )
    print(f"{rule.id}  {rule.strength}, {rule.minors}, level {rule.level}\n\n  {rule.sentence}\n")
    for name, text in (("caller", rule.caller), ("breaks", rule.breaks), ("source", rule.source)):
        if text:
            print(f"{name:<9}{text}")
    print(f"done     {rule.done}")
    for number, line in enumerate(rule.check):
        print(f"{'check' if number == 0 else '':<9}- {line}")
    checking = sorted(
        {
            planned.id.partition("[")[0]
            for planned in plan.make_plan(Settings(), ()).selected
            if planned.case.rule == rule.id
        }
    )
    for number, case in enumerate(checking):
        print(f"{'cases' if number == 0 else '':<9}{case}")
    return 0


def _rule_of_case(name: str) -> str:
    """Return the id of the rule of a case. Raises BadSetting for several cases with several rules."""
    full = plan.make_plan(Settings(matrix="full"), (name,))
    found = sorted({planned.case.rule for planned in full.selected})
    if not found:
        why = sorted({str(why) for id, why in full.limited if id.partition("[")[0] == name.partition("[")[0]})
        raise BadSetting(f"{name} has no case that can run here: {'; '.join(why)}")
    if len(found) != 1:
        raise BadSetting(f"{name} has cases of {len(found)} rules: {', '.join(found)}")
    return found[0]


def _verify(options: argparse.Namespace) -> int:
    if is_claim(options.report):
        return print_verified(options.report)
    return check.print_checked(options.report)


def _html(options: argparse.Namespace) -> int:
    report, given = document.read(options.report), options.report
    path = options.output or (given if given.is_dir() else given.parent) / page.FILE
    try:
        print(page.write(report, path))
    except OSError as error:
        raise document.BadReport(f"{path} cannot be written: {error.strerror}") from None
    return 0


def _diff(options: argparse.Namespace) -> int:
    before, after = document.read(options.before), document.read(options.after)
    old = {result.id: result.outcome.value for result in before.results}
    new = {result.id: result.outcome.value for result in after.results}
    changed = [
        (name, old.get(name, "-"), new.get(name, "-"))
        for name in sorted(old | new)
        if old.get(name) != new.get(name)
    ]
    lines = []
    for name in sorted(before.environment | after.environment):
        was, now = before.environment.get(name), after.environment.get(name)
        if was != now:
            lines.append(f"{name}: {was or 'not installed'} -> {now or 'not installed'}")
    lines += _columns([(escaped(name), f"{was} -> {now}") for name, was, now in changed])
    words = (before.verdict.word, after.verdict.word)
    lines.append(
        f"{len(changed)} of {len(old | new)} cases changed; verdict {' -> '.join(dict.fromkeys(words))}"
    )
    print_lines(lines)
    return 1 if changed or words[0] != words[1] else 0


# ---- new --------------------------------------------------------------------------------------------------


def _new(options: argparse.Namespace) -> int:
    subject = f"{options.name}:{starter.class_name(options.name)}"
    what = (
        "the connector, which hands KV over in files",
        "what it declares, for the suite",
        "a CI job for GitHub",
        "kv-report/, where each run writes its report",
    )
    for path, words in zip(starter.write(options.name, Path.cwd()), what, strict=False):
        print(f"wrote {path}: {words}")
    print(f"next: pytest --kv-connector={subject} --kv-family=llama --kv-topology=P1D1 kv::engine/bytes")
    return 0


# ---- completion -------------------------------------------------------------------------------------------


def _completion(options: argparse.Namespace) -> int:
    import shtab  # here, so that the other commands do not load it

    paths = {"DIR": shtab.DIRECTORY}  # metavar of an option for a folder
    for action in (action for one in options.commands for action in one._actions):
        if action.type is Path or action.metavar in paths:
            vars(action)["complete"] = paths.get(str(action.metavar), shtab.FILE)
        elif action.metavar == "ID":
            action.choices = [*rules.load(), *clauses.load()]
    print(shtab.complete(options.parser, options.shell))
    return 0


# ---- all commands -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Command:
    """One command."""

    name: str
    run: Callable[[argparse.Namespace], int]  # returns the exit code
    help: str
    arguments: tuple[Callable[[argparse.ArgumentParser], object], ...] = ()  # each adds some


def _argument(*names: str, **options: Any) -> Callable[[argparse.ArgumentParser], object]:
    return lambda parser: parser.add_argument(*names, **options)


def _path(name: str, help: str, metavar: str = "REPORT", **options: Any) -> Callable[[Any], object]:
    return _argument(name, metavar=metavar, type=Path, help=help, **options)


_COMMANDS = (
    _Command(
        "doctor",
        lambda options: doctor.main(),
        "print what is installed, what can run here, and what is missing",
    ),
    _Command(
        "list",
        _list,
        "list cases, rules, levels, clauses, families, features or settings; manifest: all cases with what "
        "belongs to them, as JSON",
        (
            _argument("what", choices=[*sorted(_LISTS), _MANIFEST]),
            _argument(
                "--matrix",
                choices=EVERY_MATRIX,
                default="quick",
                help="for cases, families and the manifest (default: %(default)s)",
            ),
        ),
    ),
    _Command(
        "explain",
        _explain,
        "print one rule, or one clause of vLLM's contract, with all details; of a case: its rule",
        (_argument("rule", metavar="ID", help="of a rule, a clause or a case"),),
    ),
    _Command(
        "verify",
        _verify,
        "recompute the verdict of a report, or of a claim and its badges, and print what does not follow",
        (_path("report", f"{_REPORT}, or {CLAIM_HELP}"),),
    ),
    _Command(
        "claim", run_claim, "run the whole suite as a claim, once for each seed", (add_claim_arguments,)
    ),
    _Command(
        "badge",
        print_badges,
        "write the badges of a claim, and a predicate for an attestation",
        (_path("claim", CLAIM_HELP, "CLAIM"),),
    ),
    _Command("register", register, "write the entry of a claim for the registry", (add_register_arguments,)),
    _Command(
        "html",
        _html,
        "draw a report as a page for people, one HTML file",
        (
            _path("report", _REPORT),
            _argument(
                "-o",
                "--output",
                metavar="FILE",
                type=Path,
                help=f"default: {page.FILE} in the folder of the report",
            ),
        ),
    ),
    _Command(
        "merge",
        print_merged,
        "make one report of all shards of a run, and print its verdict",
        (
            _path("reports", f"of each shard: {_REPORT}", nargs="+"),
            _argument(
                "--report",
                metavar="DIR",
                default="",
                help=f"folder for report.json (default: {Settings.report})",
            ),
        ),
    ),
    _Command(
        "matrix",
        print_matrix,
        "print the cells that a run has, what each costs, and its shard",
        (add_matrix_arguments,),
    ),
    _Command(
        "diff",
        _diff,
        "print what changed from one report to another",
        (
            _path("before", f"the earlier one: {_REPORT}", "A"),
            _path("after", f"the later one: {_REPORT}", "B"),
        ),
    ),
    _Command(
        "new",
        _new,
        "write a small connector that conforms, its declaration and a CI job into this folder",
        (_argument("name", metavar="NAME", help="of the module, such as my_connector"),),
    ),
    _Command(
        "completion",
        _completion,
        "print the script with which a shell completes kvconform",
        (_argument("shell", choices=("bash", "zsh")),),
    ),
)


if __name__ == "__main__":
    sys.exit(main())
