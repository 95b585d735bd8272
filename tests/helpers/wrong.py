"""A wrong connector, and all that the suite must report about it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pytest_kvconform.plan import load_module


@dataclass(frozen=True)
class Wrong:
    """One mistake, the cell on which it shows, and what the cases of that cell report.

    Every other case passes.

    A key of `fails` is "case", "case[variant]", or a pattern of these where a test says so. Its value is a
    pattern of the finding; "" matches any finding. Where a folder always uses one cell, its tests give the
    defaults by `partial`.
    """

    connector: str
    fails: Mapping[str, str]
    family: str = "llama3_1_8b"  # or the geometry of a family
    topology: str = "P1D1"
    variants: str = ""  # words; "" selects all
    setup: str = ""  # this and matrix: "" is what the fixture `run_cases` of the folder has
    matrix: str = ""
    scale: float = 1.0  # of deadlines: small where the test has to wait for one of them
    rules: str = ""  # words: all rules that findings name, first that of `fails`; "": not compared
    blocked: Collection[str] = ()  # cases that cannot run
    unsure: Collection[str] = ()  # cases that the test does not look at
    night: bool = False  # it runs at night alone, see rings.py

    def __str__(self) -> str:
        return f"{self.connector}-{self.rules or self.family}-{self.topology}"

    @property
    def cell(self) -> dict[str, Any]:
        """Arguments of `CaseRunner.run` besides the connector."""
        chosen = {"variants": self.variants, "setup": self.setup, "matrix": self.matrix}
        return {
            "family": self.family,
            "topology": self.topology,
            "scale": self.scale,
            **{name: value for name, value in chosen.items() if value},
        }


def modules_about(cases: Iterable[str], modules: Iterable[str]) -> tuple[str, ...]:
    """Of these modules ("<tier>/<module>") those with one of these cases: "case", or "case[variant]"."""
    names = {case.partition("[")[0] for case in cases}
    return tuple(one for one in modules if names & {case.name for case in load_module(one)[1]})


def on(cases: str, says: str) -> dict[str, str]:
    """Several cases, given as words, whose findings match one pattern."""
    return dict.fromkeys(cases.split(), says)
