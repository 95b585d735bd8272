"""Every id is an argument; every option changes something; nothing of the user's can change the suite."""

from __future__ import annotations

import pytest


def ids(run) -> list[str]:
    return [line for line in run.lines if line.startswith("kv::")]


def collect(kv, *arguments, **how):
    return ids(kv("--collect-only", "-q", *arguments, **how))


# ---- ids -----------------------------------------------------------------------------------------------------------------------


def test_every_prefix_of_an_id_is_an_argument(kv):
    every = collect(kv)
    assert len(every) == 13
    assert collect(kv, "kv::") == every
    assert set(collect(kv, "kv::engine")) == {name for name in every if name.startswith("kv::engine/")}
    assert set(collect(kv, "kv::engine/bytes")) == {
        name for name in every if name.startswith("kv::engine/bytes")
    }
    assert set(collect(kv, "kv::engine/bytes::arrive")) == {name for name in every if "::arrive[" in name}
    for name in every:
        assert collect(kv, name) == [name]


def test_two_arguments_are_one_selection(kv):
    assert (
        len(
            collect(
                kv, "kv::interface", "kv::interface/answers::hello", "kv::engine/bytes::window[gemma3-P1D1]"
            )
        )
        == 4
    )


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        ("kv::engin", "kv::engine"),
        ("kv::engine/byte", "kv::engine/bytes"),
        ("kv::engine/bytes::arive", "kv::engine/bytes::arrive"),
        ("kv::engine/bytes::arrive[llama-P1D1-n64]", "kv::engine/bytes::arrive[llama-P1D1-n63]"),
        ("kv::engine/bytes::not_a_case", ""),
    ],
)
@pytest.mark.parametrize("workers", [(), ("-n2",)], ids=["one", "n2"])
def test_an_argument_that_names_nothing(kv, argument, hint, workers):
    run = kv(argument, *workers)
    assert run.code == 4
    assert f"ERROR: there is no case, module or tier {argument}" in run.text
    assert f"(did you mean {hint}?)" in run.text or not hint
    assert "Traceback" not in run.text


def test_ids_are_the_same_in_a_subfolder_and_can_be_pasted_there(kv, pytester, monkeypatch):
    pytester.makepyprojecttoml("[tool.pytest.ini_options]\n")
    sub = pytester.mkdir("sub")
    every = collect(kv)
    monkeypatch.chdir(sub)
    assert collect(kv) == every
    assert collect(kv, "../kv::interface") == collect(kv, "kv::interface")


def test_files_that_begin_with_an_underscore_hold_no_cases(kv):
    assert not any("_help" in name for name in collect(kv))


def test_a_file_without_cases_is_a_defect_of_the_suite(kv, pytester, monkeypatch):
    package = pytester.mkpydir("otherkv")
    (package / "cells.py").write_text(
        "from fakekv.cells import Place\ndef expand(matrix, families=(), topologies=()): return [Place('llama', 'P1D1')]"
    )
    (package / "bench.py").write_text("from fakekv.bench import *")
    (package / "rules").mkdir()
    (package / "suite" / "engine").mkdir(parents=True)
    (package / "suite" / "engine" / "empty.py").write_text("def forgotten(bench, variant): pass")
    run = kv(plain=True)
    assert run.code == 5
    monkeypatch.setenv("_KVCONFORM_TEST_PACKAGE", "otherkv")
    monkeypatch.syspath_prepend(pytester.path)
    run = kv()
    assert run.code == 11
    assert "engine/empty.py: no function has @case" in run.text


@pytest.mark.parametrize(
    "arguments",
    [
        ("-k", "hello"),
        ("-k", "not arrive and not window"),
        ("--deselect", "kv::engine/bytes"),
        ("--deselect=kv::engine",),
        ("-m", "not x"),
    ],
)
def test_pytests_own_selection_works(kv, arguments, pytester):
    pytester.makepyprojecttoml("[tool.pytest.ini_options]\nmarkers = ['x']")
    run = kv(*arguments)
    assert run.code == 0
    assert len(run.outcomes) == (13 if "-m" in arguments else 3)
    assert ("selection: 3 of 13" in run.lines) == ("-m" not in arguments)


def test_last_failed(kv):
    kv(deeds={"arrive(gemma3-P1D2-n63*": "violate"})
    assert collect(kv, "--lf") == ["kv::engine/bytes::arrive[gemma3-P1D2-n63]"]


# ---- each option does something ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        (["--kv-tier=interface"], 3),
        (["--kv-tier=interface,engine"], 13),
        (["--kv-tier=interface", "--kv-tier=engine"], 13),
        (["--kv-family=llama"], 3),
        (["--kv-family=llama,gemma3"], 13),
        (["--kv-topology=P1D2"], 5),
        (["--kv-topology=P1D2", "--kv-family=gemma3"], 5),
        (["--kv-rule=KV-BYTES-002"], 2),
        (["--kv-rule=KV-BYTES-*"], 10),
        (["--kv-feature=tp-heterogeneous"], 5),
        (["--kv-feature=tp-heterogeneous,sliding-window"], 10),
        (["--kv-feature=mla"], 0),
        (["--kv-matrix=full"], 16),
        (["--kv-matrix=full", "--kv-family=llama", "--kv-topology=P1D2"], 3),
    ],
)
def test_options_that_select(kv, arguments, count):
    assert len(collect(kv, *arguments)) == count


def test_the_summary_says_what_was_left_out(kv):
    assert "selection: 2 of 13" in kv("--kv-rule=KV-BYTES-002").lines
    assert not any("selection" in line for line in kv().lines)


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        (
            "--kv-tier=engin",
            "--kv-tier: there is no tier 'engin' (did you mean engine?); there are interface, engine",
        ),
        ("--kv-rule=KV-BYTE-001", "--kv-rule: no rule is called 'KV-BYTE-001' (did you mean KV-BYTES-001?)"),
        (
            "--kv-feature=sliding-windw",
            "--kv-feature: there is no feature 'sliding-windw' (did you mean sliding-window?); there are full-attention, mla",
        ),
        ("--kv-declare=nowhere.toml", "--kv-declare: nowhere.toml: there is no such file"),
        ("--kv-family=gemma", "there is no family called 'gemma' (did you mean gemma3?)"),
        ("--kv-matrix=ful", "--kv-matrix: expected quick or full, got 'ful' (did you mean full?)"),
        ("--kv-device=tpu", "--kv-device: expected auto or cpu or cuda, got 'tpu'"),
        ("--kv-timeout-scale=0", "--kv-timeout-scale: expected a number above 0, got '0'"),
        ("--kv-seed=-1", "--kv-seed: expected a whole number from 0 on, or last, got '-1'"),
        ("--kv-seed=last", "--kv-seed: there is no previous run whose seed could be used"),
        ("--kv-config=nowhere.json", "--kv-config: 'nowhere.json' is neither a JSON object nor a file"),
        ('--kv-config={"a": }', "--kv-config: line 1 column 7: Expecting value"),
        ("--kv-config=[1]", "--kv-config: expected a JSON object, got list"),
        ('--kv-config={"kv_connector": "Other"}', "kv_connector is 'Other'"),
        (
            "--kv-connector=my.mod.Class",
            "'my.mod.Class' is neither NAME nor MODULE:CLASS (did you mean my.mod:Class?)",
        ),
        ("--kv-connector=", "--kv-connector: name a connector"),
    ],
)
def test_a_bad_value_is_one_sentence(kv, argument, says):
    run = kv(argument)
    assert run.code == 4
    assert says in run.text
    assert "Traceback" not in run.text
    assert run.log == [] or run.log[-1] == "zygote closed"


def test_config_device_timeout_profile_and_handover_reach_the_bench(kv, pytester):
    pytester.makepyprojecttoml('[tool.kvconform]\nhandover = "rendezvous"\nprofile = "p2p"')
    run = kv(
        '--kv-config={"kv_connector": "C", "kv_port": 1}',
        "--kv-device=cpu",
        "--kv-timeout-scale=2.5",
        "--kv-seed=4",
    )
    assert run.code == 0
    assert "probe C {'kv_port': 1} p2p rendezvous" in run.log
    assert "probe deadline 300" in run.log
    assert "bench device cpu seed 4 timeout-scale 2.5" in run.log
    assert run.report["settings"]["handover"] == {"value": "rendezvous", "origin": "pyproject.toml"}


def test_seed_shuffles_the_same_way_each_time_and_last_means_last(kv):
    plain = kv("-v").ran
    first, again = kv("-v", "--kv-seed=7"), kv("-v", "--kv-seed=last")
    assert any("seed 7" in line for line in again.lines)
    assert first.ran == again.ran != plain
    assert sorted(first.ran) == sorted(plain)
    assert len(first.cells) == 3
    assert {kv("-v", f"--kv-seed={seed}").cells[0] for seed in range(1, 9)} > {"llama-P1D1"}


def test_report_goes_where_it_is_told(kv, pytester):
    run = kv("--kv-report=out/here")
    assert (pytester.path / "out/here/report.json").is_file()
    assert "report: out/here/report.json" in run.lines


# ---- when the plugin acts ------------------------------------------------------------------------------------------------------


def test_without_a_connector_nothing_changes(kv, pytester):
    pytester.makepyfile("def test_mine(): pass")
    pytester.makepyprojecttoml('[tool.kvconform]\nconnector = "m:C"')
    run = kv("-v", plain=True)
    assert run.code == 0
    assert "1 passed" in run.lines[-1]
    assert "kv" not in run.text.replace("pytest_kvconform", "")
    assert not run.path.exists()


@pytest.mark.parametrize("place", ["environment", "toml"])
def test_an_environment_variable_or_a_case_as_argument_are_enough(kv, pytester, monkeypatch, place):
    pytester.makepyfile("def test_mine(): assert False")
    if place == "environment":
        monkeypatch.setenv("KVCONFORM_CONNECTOR", "m:FromEnvironment")
        run = kv(plain=True)
    else:
        pytester.makepyprojecttoml('[tool.kvconform]\nconnector = "m:FromToml"')
        run = kv("kv::", plain=True)
    assert run.code == 0
    assert len(run.outcomes) == 13
    assert run.report["subject"]["connector"] == {"environment": "FromEnvironment", "toml": "FromToml"}[place]


def test_a_case_without_any_connector_is_a_usage_error(kv):
    run = kv("kv::engine", plain=True)
    assert run.code == 4
    assert "name a connector" in run.text


def test_an_option_without_a_connector_is_a_usage_error(kv):
    run = kv("--kv-matrix=full", plain=True)
    assert run.code == 4
    assert "--kv-matrix does nothing without --kv-connector" in run.text


def test_a_path_of_the_users_is_respected(kv, pytester):
    pytester.makepyfile(test_mine="def test_mine(): pass")
    run = kv("test_mine.py")
    assert (run.code, run.word) == (10, "INCOMPLETE")
    assert "1 passed" in run.lines[-1]


def test_collect_only_starts_nothing(kv):
    run = kv("--collect-only", "-q")
    assert run.code == 0
    assert run.log == []
    assert not run.path.exists()


# ---- a hostile project ---------------------------------------------------------------------------------------------------------

HOSTILE_INI = """
[tool.pytest.ini_options]
testpaths = ["nowhere"]
python_files = ["check_*.py"]
python_functions = ["verify_*"]
python_classes = ["Verify"]
norecursedirs = ["suite", "engine", "interface", "fakekv", "*"]
"""
HOSTILE_CONFTEST = """
import pytest
collect_ignore_glob = ["*"]

@pytest.fixture
def bench(): return None

@pytest.fixture
def variant(): return "mine"

@pytest.fixture(autouse=True)
def everywhere(): raise RuntimeError("an autouse fixture ran")

def pytest_ignore_collect(collection_path, config): return True

def pytest_collection_modifyitems(items):
    items.reverse()
    for item in items:
        item.add_marker(pytest.mark.xfail)
"""


def test_settings_fixtures_and_marks_of_the_user_have_no_say(kv, pytester):
    pytester.makepyprojecttoml(HOSTILE_INI)
    pytester.makeconftest(HOSTILE_CONFTEST)
    pytester.mkdir("nowhere")
    run = kv(deeds={"window*": "violate"})
    assert (run.code, run.word) == (1, "VIOLATES")
    assert len(run.outcomes) == 13
    assert sum(outcome == "PASS" for outcome in run.outcomes.values()) == 11
    assert "2 failed, 11 passed" in run.lines[-1]


def test_a_conftest_that_drops_or_skips_cases_cannot_make_it_green(kv, pytester):
    pytester.makeconftest(
        "import pytest\ndef pytest_collection_modifyitems(items):\n  for i in items: i.add_marker(pytest.mark.skip)"
    )
    run = kv()
    assert (run.code, run.word) == (10, "INCOMPLETE")
    pytester.makeconftest("def pytest_collection_modifyitems(items): del items[1:]")
    run = kv()
    assert "selection: 1 of 13" in run.lines


def test_cells_are_regrouped_after_a_shuffling_plugin(kv, pytester):
    pytester.makeconftest(
        "import random\ndef pytest_collection_modifyitems(items): items.sort(key=lambda i: i.name); random.Random(3).shuffle(items)"
    )
    run = kv("-v")
    assert sorted(run.cells) == ["gemma3-P1D1", "gemma3-P1D2", "llama-P1D1"]
    assert run.word == "CONFORMS"


# ---- help ----------------------------------------------------------------------------------------------------------------------


def test_help_lists_exactly_these_options(kv):
    run = kv("--help", plain=True)
    flags = [line.split()[0].partition("=")[0] for line in run.lines if line.strip().startswith("--kv-")]
    assert flags == [
        "--kv-connector",
        "--kv-config",
        "--kv-declare",
        "--kv-tier",
        "--kv-family",
        "--kv-topology",
        "--kv-rule",
        "--kv-feature",
        "--kv-matrix",
        "--kv-device",
        "--kv-timeout-scale",
        "--kv-seed",
        "--kv-report",
        "--kv-claim",
    ]
    assert run.log == []
