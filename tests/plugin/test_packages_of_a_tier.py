"""Packages of the accuracy tier that are not installed: a run leaves the tier out in words, or is BLOCKED."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_kvconform import cli, doctor, extras, plan
from pytest_kvconform.report import document, markdown
from pytest_kvconform.settings import Settings
from tests.small_suite.runs import Run

Kv = Callable[..., Run]
SENTENCE = "interface: left out, install pytest-kvconform[accuracy] (3 cases)"


@pytest.fixture
def lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier of the small suite stands for the accuracy tier, whose packages are not installed."""
    monkeypatch.setattr(plan, "ACCURACY", "interface")
    monkeypatch.setattr(extras, "not_installed", lambda *modules: ("lm-eval[api]", "scipy"))


@pytest.mark.usefixtures("lacking")
def test_a_run_leaves_the_tier_out_in_words(kv: Kv, capsys: pytest.CaptureFixture[str]) -> None:
    run = kv("--kv-claim")
    assert (run.code, run.word) == (0, "CONFORMS"), run.text
    assert SENTENCE in run.lines
    selection = run.report["selection"]
    assert len(selection["not_installed"]) == 3
    assert not [name for name in selection["manifest"] if name.startswith("kv::interface")]
    assert SENTENCE in markdown.job_summary(document.read(run.path))
    assert cli.main(["verify", str(run.path)]) == 0, capsys.readouterr()


@pytest.mark.usefixtures("lacking")
@pytest.mark.parametrize(
    "argument",
    ["--kv-tier=interface", "--kv-tier=engine,interface", "kv::interface", "--kv-rule=KV-ANSWER-*"],
)
def test_a_tier_that_is_asked_for_is_not_left_out(kv: Kv, argument: str) -> None:
    run = kv(argument)
    assert "left out" not in run.text
    assert any(name.startswith("interface/") for name in run.outcomes)


def test_with_the_packages_the_tier_is_part_of_a_run() -> None:
    names = plan.make_plan(Settings(), ()).manifest
    of_tier = {name for name in names if name.startswith("kv::accuracy")}
    assert of_tier
    without = plan.make_plan(Settings(), (), ["scipy"])
    assert set(without.not_installed) == of_tier == set(names) - set(without.manifest)
    assert not of_tier & {one.id for one in without.selected}


def test_every_module_of_the_extra_is_named() -> None:
    text = (Path(plan.__file__).parents[1] / "pyproject.toml").read_text()
    [extra] = [part.partition("]\n")[0] for part in text.split("\naccuracy = [")[1:]]
    assert all(f'"{distribution}' in extra for distribution in extras.PACKAGES.values())


@pytest.mark.usefixtures("lacking")
def test_doctor_says_what_the_tier_lacks() -> None:
    found = doctor.Import(True, "runs on cpu")
    lines = doctor.advice({"vllm": "0.32.0"}, {"vllm": found, "nixl": found}, [])
    assert (
        "missing  lm-eval[api], scipy, for the accuracy tier; pip install 'pytest-kvconform[accuracy]'"
        in lines
    )
