"""When the plugin acts; and nothing in the user's project can change the suite."""

from __future__ import annotations

import re

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


COLLECTED = "def pytest_collection_modifyitems(config, items):\n  "
DROPS = {
    "all": f"{COLLECTED}items.clear()",
    "all but one, and tells": f"{COLLECTED}config.hook.pytest_deselected(items=items[1:])\n  del items[1:]",
    "the last thing": f"import pytest\n@pytest.hookimpl(trylast=True)\n{COLLECTED}del items[3:]",
    "around": "import pytest\n@pytest.hookimpl(wrapper=True, tryfirst=True)\n"
    "def pytest_collection_modifyitems(items):\n  yield\n  del items[:4]",
    "by copies": f"{COLLECTED}items[:] = [items[0]] * len(items)",
    "by a copy": f"{COLLECTED}items[1] = items[0]",
    "by skips": f"import pytest\n{COLLECTED}for i in items: i.add_marker(pytest.mark.skip)",
    "by a mark of the session": "import pytest\ndef pytest_sessionstart(session):\n  "
    "session.add_marker(pytest.mark.skip(reason='mine'))",
    # pytest calls hooks of a plugin for each case, and those of a conftest not: no case lies in its folder
    "by conditions": """
        import pytest
        class Theirs:
            def pytest_itemcollected(self, item):
                item.add_marker(pytest.mark.skipif(True, reason="mine"))
        def pytest_configure(config): config.pluginmanager.register(Theirs())
        """,
    "by expected failures": f"import pytest\n{COLLECTED}"
    "for i in items: i.add_marker(pytest.mark.xfail(run=False))",
    "order": f"{COLLECTED}items.reverse()",
}
SETTINGS = {
    "patterns": HOSTILE_INI,
    "strict": """
        [tool.pytest.ini_options]
        addopts = "--strict-markers --strict-config -p no:cacheprovider"
        xfail_strict = true
        filterwarnings = ["error"]
        usefixtures = ["nowhere"]
        """,
    "odd": """
        [tool.pytest.ini_options]
        addopts = "-qq --tb=no -rA -p no:logging -p no:doctest --import-mode=importlib --assert=plain --nf"
        python_files = "["
        console_output_style = "count"
        cache_dir = "/dev/null"
        """,
    "modules": """
        [tool.pytest.ini_options]
        addopts = "--doctest-modules --pyargs --capture=no --junitxml=junit.xml --ff -m 'not slow'"
        """,
}
DEEDS = {"window(gemma3-P1D2*": "violate", "hello(llama*": "blocked"}


def judged(run):
    """What a run says: its code, its cases, their outcomes, and the verdict."""
    return run.code, run.report["selection"], run.outcomes, run.report["verdict"]


@pytest.mark.parametrize("conftest", DROPS.values(), ids=DROPS)
def test_a_conftest_that_drops_marks_or_moves_cases_has_no_say(kv, pytester, conftest):
    plain = kv(deeds=DEEDS)
    pytester.makeconftest(conftest)
    hostile = kv(deeds=DEEDS)
    assert judged(hostile) == judged(plain)
    assert "deselected" not in hostile.text
    told = any(re.search(r"left \d+ cases out, which run nevertheless", line) for line in hostile.lines)
    assert told == any(word in conftest for word in ("del ", "clear", "items[0]"))


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_settings_of_pytest_have_no_say(kv, pytester, settings):
    plain = kv(deeds=DEEDS)
    pytester.makepyprojecttoml(settings)
    assert judged(kv(deeds=DEEDS)) == judged(plain)


def test_workers_of_xdist_ignore_the_project_too(kv, pytester):
    plain = kv(deeds=DEEDS)
    pytester.makepyprojecttoml(SETTINGS["strict"])
    pytester.makeconftest(DROPS["all but one, and tells"])
    hostile = kv("-n2", deeds=DEEDS)
    assert judged(hostile) == judged(plain)
    assert sum("left 12 cases out, which run nevertheless" in line for line in hostile.lines) == 1


def test_options_select_cases_in_spite_of_a_conftest(kv, pytester):
    pytester.makeconftest(DROPS["all but one, and tells"])
    run = kv("-k", "hello")
    assert (run.code, len(run.outcomes)) == (0, 3)
    assert "3 passed, 10 deselected" in run.lines[-1]


CUTS = {
    "runs nothing": "def pytest_runtest_protocol(item, nextitem): return True",
    "forgets": "import pytest\n@pytest.hookimpl(tryfirst=True)\n"
    "def pytest_collection_finish(session): session.items.clear()",
    "finishes first": "import pytest\n@pytest.hookimpl(tryfirst=True)\n"
    "def pytest_collection_finish(session): del session.items[1:]",
    "around everything": """
        import pytest
        class Late:
            @pytest.hookimpl(wrapper=True, tryfirst=True)
            def pytest_collection_modifyitems(self, items):
                yield
                del items[1:]
        def pytest_sessionstart(session): session.config.pluginmanager.register(Late())
        """,
    "before everything": """
        import pytest
        class Late:
            @pytest.hookimpl(wrapper=True, tryfirst=True)
            def pytest_collection_modifyitems(self, items):
                del items[1:]
                yield
        def pytest_sessionstart(session): session.config.pluginmanager.register(Late())
        """,
    "whole tiers": """
        import pytest
        @pytest.hookimpl(wrapper=True)
        def pytest_make_collect_report(collector):
            report = yield
            if collector.nodeid == "kv":
                report.result = report.result[:1]
            return report
        """,
}


@pytest.mark.parametrize("workers", [(), ("-n2",)], ids=["one", "n2"])
@pytest.mark.parametrize("conftest", CUTS.values(), ids=CUTS)
def test_a_conftest_that_cuts_what_is_to_run_leaves_the_run_incomplete(kv, pytester, conftest, workers):
    pytester.makeconftest(conftest)
    run = kv("-k", "hello or arrive", *workers)
    assert (run.code, run.word) == (10, "INCOMPLETE")
    assert len(run.report["selection"]["selected"]) >= 11 > len(run.outcomes)


def test_cells_are_regrouped_after_a_shuffling_plugin(kv, pytester):
    pytester.makeconftest(
        "import random\ndef pytest_collection_modifyitems(items): items.sort(key=lambda i: i.name); "
        "random.Random(3).shuffle(items)"
    )
    run = kv("-v")
    assert sorted(run.cells) == ["gemma3-P1D1", "gemma3-P1D2", "llama-P1D1"]
    assert run.word == "CONFORMS"
