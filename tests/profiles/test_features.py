"""No connector that is right in what it declares is INCOMPLETE, whatever its profile and its features.

Each feature that a profile can have is tested by a case that a right connector passes, and a feature that no
case could test cannot be declared true.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from pytest_kvconform import features
from pytest_kvconform.apply_declaration import Criteria, apply_declaration
from pytest_kvconform.declaration import block_to_paste, check_possible
from pytest_kvconform.declarations import bundled_declarations
from pytest_kvconform.kv_config import STORES as STORE_PROFILES
from pytest_kvconform.settings import PROFILES, BadSetting, Settings
from pytest_kvconform.subject import resolve
from pytest_kvconform.verdict import decide_verdict
from tests.helpers.case_runner import CaseRunner
from tests.helpers.fixtures import ROOT, importable_from, must_be_installed
from tests.profiles.witnesses import STORES, WITNESSES, Witness, every

EVERY = tuple(features.load())


def possible(profile: str) -> set[str]:
    return {name for name, feature in features.load().items() if profile not in feature.impossible}


# ---- the plan ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", PROFILES)
def test_each_feature_that_a_profile_can_have_has_cases_that_test_it(profile: str) -> None:
    shown: set[str] = set()
    for witness in (one for one in WITNESSES if one.profile == profile):
        planned = list(witness.planned())
        assert {one.name.partition("[")[0] for one in planned} == {
            name.partition("[")[0] for name in witness.names
        }
        assert len(planned) == len(witness.names), witness
        needed = {name for one in planned for name in features.required_features(one)}
        assert set(witness.features.split()) <= needed, witness
        shown |= set(witness.features.split())
    assert shown == possible(profile)


def test_only_known_profiles_exclude_features() -> None:
    for name, feature in features.load().items():
        assert set(feature.impossible) < set(PROFILES), name


# ---- what cannot be declared ------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("way", ["pyproject", "declare"])
def test_a_feature_that_no_case_could_test_is_refused(profile: str, way: str, tmp_path: Path) -> None:
    for name in EVERY:
        file = tmp_path / f"{name}.toml"
        file.write_text(f"[features]\n{name} = true")
        more = {"declare": str(file)} if way == "declare" else {"features": json.dumps({name: True})}
        settings = Settings(connector="m:C", profile=profile, **more)
        if name in possible(profile):
            assert resolve(settings).features == {name: ""}
            continue
        with pytest.raises(BadSetting) as refused:
            resolve(settings)
        reason = features.load()[name].impossible[profile]
        table = "pyproject.toml: tool.kvconform.features" if way == "pyproject" else f"{file}: features"
        assert str(refused.value).endswith(
            f"{table}.{name} is true, but the profile is {profile}: {reason}; write "
            f'{name} = {{ unsupported = "{reason}" }}'
        )


@pytest.mark.parametrize("profile", PROFILES)
def test_what_is_to_be_declared_can_be_declared(profile: str, tmp_path: Path) -> None:
    file = tmp_path / "declaration.toml"
    file.write_text(block_to_paste({}, profile).replace("tool.kvconform.", ""))
    declared = resolve(Settings(connector="m:C", profile=profile, declare=str(file))).features
    assert {name for name, why in declared.items() if not why} == possible(profile)
    assert declared.keys() == set(EVERY)


@pytest.mark.parametrize("name", bundled_declarations())
def test_our_own_declarations_declare_what_can_be_tested(name: str) -> None:
    ours = bundled_declarations()[name]
    trues = {feature: "" for feature, value in ours.features.items() if value is True}
    check_possible(trues, ours.profile, name)
    if ours.profile in STORE_PROFILES:  # with which the user runs it as the other kind of store
        for profile in STORE_PROFILES:
            check_possible(resolve(Settings(connector=name, profile=profile)).features, profile, name)


# ---- real runs --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runners() -> Iterator[dict[str, CaseRunner]]:
    must_be_installed()
    families = {one.tier: [] for one in WITNESSES}
    for one in WITNESSES:
        families[one.tier].append(one.cell.split()[0])
    with importable_from(ROOT):
        made = {
            tier: CaseRunner(STORES, tier, tuple(dict.fromkeys(names)), "full")
            for tier, names in families.items()
        }
        yield made
        assert [sentence for runner in made.values() for sentence in runner.close()] == []


def results_of(runners: dict[str, CaseRunner], witness: Witness, folder: Path) -> list[msgspec.Struct]:
    """The results of the cases of a witness, all of which passed."""
    family, topology, setup = witness.cell.split()
    extra = {"num_threads": 0} if witness.profile == "p2p" else {"shared_storage_path": str(folder)}
    names = {one.id for one in witness.planned()}
    run = runners[witness.tier].run(
        witness.connector,
        family,
        topology,
        setup=setup,
        matrix=witness.matrix,
        profile=witness.profile,
        config=json.dumps({"kv_connector_extra_config": extra}),
        declared={"declare": _declaration(witness.profile, folder)},
        only=lambda planned: planned.id in names,
    )
    assert run.outcomes == dict.fromkeys(witness.names, "PASS"), (witness, run.findings, run.reasons)
    return list(run.results)


def _declaration(profile: str, folder: Path) -> str:
    file = folder / "declaration.toml"
    text = block_to_paste({}, profile).replace("tool.kvconform.", "")
    file.write_text('lease = "kv_lease_duration"\n' + text)
    return str(file)


@pytest.mark.parametrize("profile", PROFILES)
def test_right_connectors_of_a_profile_conform_with_every_feature(
    runners: dict[str, CaseRunner], profile: str, tmp_path: Path
) -> None:
    results = [
        result
        for witness in WITNESSES
        if witness.profile == profile
        for result in results_of(runners, witness, tmp_path)
    ]
    declared = {name: "" if name in possible(profile) else "impossible" for name in EVERY}
    criteria = Criteria(features=declared)
    applied = [apply_declaration(result, criteria) for result in results]
    verdict = decide_verdict(applied, None, (), criteria)
    assert verdict.word == "CONFORMS", verdict.headline
    observed = {row.name: row.observed for row in verdict.features if row.declared == "supported"}
    assert {name for name, one in observed.items() if one != "works"} == set()


@pytest.mark.parametrize(
    ("profile", "store", "tier"),
    [
        ("store", "WholeBlocks", "protocol"),
        ("same-engine", "InMemory", "protocol"),
        ("store", "WholeBlocks", "bytes"),
    ],
)
def test_no_case_tests_what_cannot_be_declared(
    runners: dict[str, CaseRunner], profile: str, store: str, tier: str, tmp_path: Path
) -> None:
    """Of a store no case about leases, restarts and next turns applies."""
    never = {"lease", "peer-restart", "bidirectional"}
    names = {
        one.id
        for one in every("full")
        if one.case.tier == tier and not never.isdisjoint(features.required_features(one))
    }
    run = runners[tier].run(
        store,
        "llama3_1_8b",
        setup="b16",
        matrix="full",
        profile=profile,
        config=json.dumps({"kv_connector_extra_config": {"shared_storage_path": str(tmp_path)}}),
        only=lambda planned: planned.id in names,
    )
    assert set(run.outcomes.values()) == {"NOT-APPLICABLE"}, run.findings
