"""When the plugin acts; and nothing in the user's project can change the suite."""

from __future__ import annotations

import pytest


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
        "import pytest\ndef pytest_collection_modifyitems(items):\n  for i in items: "
        "i.add_marker(pytest.mark.skip)"
    )
    run = kv()
    assert (run.code, run.word) == (10, "INCOMPLETE")
    pytester.makeconftest("def pytest_collection_modifyitems(items): del items[1:]")
    run = kv()
    assert "selection: 1 of 13" in run.lines


def test_cells_are_regrouped_after_a_shuffling_plugin(kv, pytester):
    pytester.makeconftest(
        "import random\ndef pytest_collection_modifyitems(items): items.sort(key=lambda i: i.name); "
        "random.Random(3).shuffle(items)"
    )
    run = kv("-v")
    assert sorted(run.cells) == ["gemma3-P1D1", "gemma3-P1D2", "llama-P1D1"]
    assert run.word == "CONFORMS"
