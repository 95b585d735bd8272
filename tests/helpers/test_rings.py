"""The rings of our tests: each has those before it, and what is named runs whole."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from pytest_kvconform import rules
from tests.helpers import rings
from tests.helpers.fixtures import ROOT
from tests.helpers.wrong import DENSE, Theme, Wrong

WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
EVERY = {"a", "b", "c[x]", "c[y]"}


def test_each_folder_of_a_ring_is_there() -> None:
    assert all((rings.TESTS / folder).is_dir() for folder in rings.FIRST)
    assert Path(rings.TESTS.parent, rings.CATALOGUE).is_file()


def test_a_worker_gets_a_theme_of_the_catalogue() -> None:
    tests = [f"{rings.CATALOGUE}::test_c[{theme}-A-{DENSE}-P1D1]" for theme in ("bytes", "two_peers")]
    assert [rings.scope_of(one).partition("::")[2] for one in tests] == ["bytes", "two_peers"]
    assert rings.scope_of("tests/house/test_f.py::test_a[b-c]") == "tests/house/test_f.py"


def test_a_night_runs_all_tests() -> None:
    [on_push, at_night] = [
        step for step in WORKFLOW["jobs"]["test"]["steps"] if "if" in step and "run" in step
    ]
    assert (on_push["if"], on_push["run"]) == ("github.event_name != 'schedule'", ".ci/run")
    assert (at_night["if"], at_night["run"]) == ("github.event_name == 'schedule'", "make test-night")
    assert WORKFLOW[True]["schedule"]  # YAML reads `on` as a truth value


def test_the_command_of_ci_runs_both_other_rings() -> None:
    commands = (ROOT / ".ci" / "run").read_text()
    assert "make test " in commands and "make test-all ARGS=--rest " in commands


def item(folder: str, wrong: Wrong | None = None, marks: Iterable[str] = (), first: bool = True) -> Any:
    """A test of this folder as pytest collects it."""
    theme = Theme("t", "m", "bytes", (), first=first)
    return SimpleNamespace(
        path=Path(rings.TESTS, folder, "test_f.py"),
        callspec=SimpleNamespace(params={"record": wrong, "theme": theme}),
        get_closest_marker=lambda name: name if name in marks else None,
    )


def test_the_first_ring_has_one_wrong_connector_for_each_rule() -> None:
    by_bytes = Wrong("A", {"attention_kv_arrives[n1]": "", "all_blocks_are_freed": ""})
    by_blocks, again = Wrong("B", {"all_blocks_are_freed": ""}), Wrong("C", {"attention_kv_arrives": ""})
    assert rings.rules_found_by(by_bytes) > rings.rules_found_by(again) == {"KV-BYTES-001"}
    proven = set[str]()
    found = [
        item("house"),
        item("bytes"),
        item("wrong_connectors", by_bytes, first=False),
        item("wrong_connectors", by_bytes),
        item("wrong_connectors", by_blocks),
        item("wrong_connectors", again),
        item("house", marks=["night"]),
        item("wrong_connectors", Wrong("D", {}, night=True)),
    ]
    assert [rings.ring_of(one, proven) for one in found] == [0, 1, 1, 0, 1, 1, 2, 2]
    assert proven == rings.rules_found_by(by_bytes) <= rules.load().keys()


@pytest.mark.parametrize(
    ("arguments", "runs"),
    [
        (["--ring=first"], {"a"}),
        (["--ring=all"], {"a", "c[y]"}),
        (["--ring=all", "--rest"], {"c[y]"}),
        ([], EVERY),
        (["--ring=first", "test_f.py"], EVERY),
        (["--ring=first", "-k", "test_b"], {"b"}),
    ],
    ids=["first", "all", "rest", "night", "file", "selected"],
)
@pytest.mark.parametrize("side_by_side", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_a_test_runs_in_its_ring_or_where_it_is_selected(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    side_by_side: tuple[str, ...],
    arguments: list[str],
    runs: set[str],
) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    pytester.makeini("[pytest]\ntestpaths = .")
    folder = pytester.mkpydir("house")
    (folder / "test_a.py").write_text("def test_a(): pass\n")
    pytester.makepyfile(
        test_f="import pytest\n@pytest.mark.night\ndef test_b(): pass\n"
        "@pytest.mark.parametrize('one', [pytest.param('x', marks=pytest.mark.night), 'y'])\n"
        "def test_c(one): pass"
    )
    pytester.makeconftest(
        "from pathlib import Path\nfrom tests.helpers import rings\nfrom tests.helpers.rings import *\n"
        "rings.TESTS = Path(__file__).parent"
    )
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    if "test_f.py" in arguments:
        runs = runs - {"a"}
    done = pytester.runpytest_subprocess("-v", "-p", "xdist", *side_by_side, *arguments)
    passed = {line.partition("::test_")[2].split()[0] for line in done.outlines if "PASSED" in line}
    assert passed == runs, done.outlines
