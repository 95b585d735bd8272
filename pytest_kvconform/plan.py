"""Which cases there are, what they are called, and in which order they run. Nothing here knows pytest.

An id is `kv::<tier>/<module>::<case>[<family>-<topology>-<variant>]`, of the byte rig `[<geometry>-<topology>.<setup>-<variant>]`. Every
prefix that ends at one of its separators selects: the tier `kv::engine`, the module `kv::engine/bytes`, the case
`kv::engine/bytes::attention_kv_arrives`. A variant of None adds no word.
"""

from __future__ import annotations

import fnmatch
import importlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from pytest_kvconform import features, loading, rules
from pytest_kvconform.case import Case
from pytest_kvconform.result import Cell
from pytest_kvconform.setting_parsers import did_you_mean
from pytest_kvconform.settings import BadSetting, Settings

PREFIX = "kv::"
TIERS = (
    "interface",
    "protocol",
    "bytes",
    "engine",
    "accuracy",
)  # from cheap to dear: the first answer comes early


class BadSuite(Exception):
    """A file of the suite breaks the suite's own rules: a defect of this project."""


@dataclass(frozen=True)
class PlannedCase:
    """One case at one cell with one variant: one item of a run, one line of the report."""

    module: str  # "engine/bytes"
    case: Case
    cell: Cell
    variant: Any

    @property
    def name(self) -> str:
        words = [str(self.cell)] + ([] if self.variant is None else [str(self.variant)])
        return f"{self.case.name}[{'-'.join(words)}]"

    @property
    def id(self) -> str:
        return f"{PREFIX}{self.module}::{self.name}"


@dataclass(frozen=True)
class Plan:
    """What one run could do and was asked to do."""

    asked: tuple[PlannedCase, ...]  # what settings and kv:: arguments leave
    manifest: tuple[str, ...]  # ids of all cases that the matrix has when nothing is left out, sorted


def make_plan(settings: Settings, arguments: Sequence[str]) -> Plan:
    """The cases of the run. `arguments` are those that begin with kv::; none means everything.

    Raises BadSetting for a tier, family, topology, rule, feature or argument that matches nothing, BadSuite for a file without cases.
    """
    tiers = sorted({module.split("/")[0] for module in module_names()}, key=tier_order)
    for tier in settings.tier:
        if tier not in tiers:
            raise BadSetting(
                f"--kv-tier: there is no tier {tier!r}{did_you_mean(tier, tiers)}; there are {', '.join(tiers)}"
            )
    for pattern in settings.rule:
        if not fnmatch.filter(rules.load(), pattern):
            raise BadSetting(
                f"--kv-rule: no rule is called {pattern!r}{did_you_mean(pattern, rules.load())}; see: kvconform list rules"
            )
    for name in settings.feature:
        if name not in features.load():
            known = features.load()
            raise BadSetting(
                f"--kv-feature: there is no feature {name!r}{did_you_mean(name, known)}; there are {', '.join(known)}"
            )
    every = _cases_of(loading.expand_matrix(settings.matrix), settings.matrix)
    asked = every
    if settings.family or settings.topology:
        try:
            asked = _cases_of(
                loading.expand_matrix(settings.matrix, settings.family, settings.topology), settings.matrix
            )
        except ValueError as error:
            raise BadSetting(f"--kv-family, --kv-topology: {error}") from None
    asked = [
        planned
        for planned in asked
        if (not settings.tier or planned.case.tier in settings.tier)
        and (
            not settings.rule
            or any(fnmatch.fnmatchcase(planned.case.rule, pattern) for pattern in settings.rule)
        )
        and (
            not settings.feature or not set(settings.feature).isdisjoint(features.required_features(planned))
        )
    ]
    return Plan(
        tuple(_selected_by(asked, arguments, every)),
        tuple(sorted({planned.id for planned in [*every, *asked]})),
    )


def module_names() -> list[str]:
    """`<tier>/<module>` for every file of cases, tiers from cheap to dear, then by name. What begins with _ holds no cases."""
    root = loading.package_folder(loading.suite_package())
    paths = [path.relative_to(root).with_suffix("") for path in root.glob("*/*.py")]
    names = [path.as_posix() for path in paths if not any(part.startswith(("_", ".")) for part in path.parts)]
    return sorted(names, key=lambda name: (tier_order(name.split("/")[0]), name))


def load_module(name: str) -> tuple[ModuleType, tuple[Case, ...]]:
    """The module "<tier>/<module>" and its cases in the order of the file. Raises BadSuite if it has none."""
    module = importlib.import_module(f"{loading.suite_package()}.{name.replace('/', '.')}")
    found = [
        function.kv_case
        for function in vars(module).values()
        if isinstance(getattr(function, "kv_case", None), Case) and function.__module__ == module.__name__
    ]
    if not found:
        raise BadSuite(f"{name}.py: no function has @case; a file that holds no cases begins with _")
    return module, tuple(found)


def tier_order(tier: str) -> tuple[int, str]:
    """Sorts tiers from cheap to dear."""
    return (TIERS.index(tier) if tier in TIERS else len(TIERS), tier)


def _cases_of(places: Iterable[Any], matrix: str) -> list[PlannedCase]:
    cells: dict[str, list[Cell]] = {}
    for place in places:
        cells.setdefault(place.rig, []).append(Cell(place.family, place.topology, place.setup))
    planned = [
        PlannedCase(module, case, cell, variant)
        for module in module_names()
        for case in load_module(module)[1]
        for cell in cells.get(case.rig, ())
        if case.applies(cell)
        for variant in case.variants(cell, matrix)
    ]
    ids = [one.id for one in planned]
    if twice := sorted({name for name in ids if ids.count(name) > 1}) if len(set(ids)) < len(ids) else []:
        raise BadSuite(f"{twice[0]}: two cases have this id")
    return planned


def _selected_by(
    asked: list[PlannedCase], arguments: Sequence[str], every: list[PlannedCase]
) -> list[PlannedCase]:
    """Those that an argument selects. One that names nothing in the whole suite is a mistake; one that other settings exclude is not."""
    if not arguments:
        return asked
    names = [
        PREFIX.rstrip(":"),
        PREFIX,
        *dict.fromkeys(prefix for planned in every + asked for prefix in _selectors(planned)),
    ]
    known = set(names)
    for argument in arguments:
        if argument not in known:
            raise BadSetting(
                f"there is no case, module or tier {argument}{did_you_mean(argument, names)}; see: kvconform list cases"
            )
    wanted = set(arguments)
    return [planned for planned in asked if wanted & {PREFIX, *_selectors(planned)}]


def _selectors(planned: PlannedCase) -> tuple[str, str, str, str]:
    """Every argument that selects the case, short of kv:: itself: tier, module, case, id."""
    module = f"{PREFIX}{planned.module}"
    return module.rpartition("/")[0], module, f"{module}::{planned.case.name}", planned.id


# ---- order -------------------------------------------------------------------------------------------------------------------


def order_by_cell(planned: Sequence[PlannedCase], seed: int) -> list[PlannedCase]:
    """One cell after the other, so that its engines are started once, however a shuffling plugin left the cases.

    Seed 0 keeps the order in which cells and cases come. Any other seed shuffles cells, and the cases of each, the same way every time.
    """
    by_cell: dict[Cell, list[PlannedCase]] = {}
    for one in planned if seed == 0 else sorted(planned, key=lambda one: one.id):
        by_cell.setdefault(one.cell, []).append(one)
    groups = list(by_cell.values())
    if seed:
        shuffle = random.Random(seed).shuffle
        shuffle(groups)
        for group in groups:
            shuffle(group)
    return [one for group in groups for one in group]


def cell_of_id(name: str) -> str:
    """`gemma3-P1D2` of an id; "" if it is no id of ours."""
    if not name.startswith(PREFIX) or "[" not in name:
        return ""
    return "-".join(name.partition("[")[2].rstrip("]").split("-")[:2])
