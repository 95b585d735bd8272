"""What `make test` leaves to the run of a night is what tests/nightly.toml lists, and nothing by mistake."""

from __future__ import annotations

import pytest
import yaml

from tests.helpers import nightly
from tests.helpers.fixtures import ROOT

WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
ALL = {"a", "b", "c[x]", "c[y]"}


def test_each_line_of_the_list_names_tests(pytestconfig: pytest.Config) -> None:
    """A run of some files or tests alone knows only whether the others exist."""
    collected = pytestconfig.stash[nightly.COLLECTED]
    selected = any("::" in argument for argument in pytestconfig.args)
    known = set() if selected else {test.partition("::")[0] for test in collected}
    for one in nightly.listed():
        file = one.partition("::")[0]
        assert (ROOT / file).exists()
        assert file not in known or any(nightly.is_listed(test, {one}) for test in collected), one


def test_a_night_runs_all_tests() -> None:
    [on_push, at_night] = [
        step for step in WORKFLOW["jobs"]["test"]["steps"] if "if" in step and "run" in step
    ]
    assert (on_push["if"], on_push["run"]) == ("github.event_name != 'schedule'", ".ci/run")
    assert (at_night["if"], at_night["run"]) == (
        "github.event_name == 'schedule'",
        "make test ARGS=--nightly",
    )
    assert WORKFLOW[True]["schedule"]  # YAML reads `on` as a truth value


@pytest.mark.parametrize(
    ("arguments", "runs"),
    [([], {"a", "c[y]"}), (["--nightly"], ALL), (["test_f.py"], ALL), (["-k", "test_b"], {"b"})],
    ids=["whole", "night", "file", "selected"],
)
@pytest.mark.parametrize("side_by_side", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_a_listed_test_runs_at_night_or_where_it_is_selected(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    side_by_side: tuple[str, ...],
    arguments: list[str],
    runs: set[str],
) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    pytester.makeini("[pytest]\ntestpaths = .")
    pytester.makepyfile(
        test_f="import pytest\ndef test_a(): pass\ndef test_b(): pass\n"
        "@pytest.mark.parametrize('one', 'xy')\ndef test_c(one): pass"
    )
    pytester.makeconftest(
        "from tests.helpers.nightly import *\nfrom tests.helpers import nightly\n"
        "nightly.listed = lambda: {'test_f.py::test_b', 'test_f.py::test_c[x]'}"
    )
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    done = pytester.runpytest_subprocess("-v", "-p", "xdist", *side_by_side, *arguments)
    passed = {line.partition("test_f.py::test_")[2].split()[0] for line in done.outlines if "PASSED" in line}
    assert passed == runs, done.outlines
