"""What vLLM's factory constructs is tested, and what it refuses is refused, with vLLM's reason."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib.util import spec_from_file_location
from pathlib import Path

import pytest

from pytest_kvconform.rigs.bench import BadSubject
from pytest_kvconform.rigs.probe_subject import _can_be_found
from pytest_kvconform.settings import Settings
from tests.helpers.case_runner import CaseRunner, CellRun

MODULE = "tests.wrong_connectors.interface.constructors"
TAKEN = (
    "PassesAllOn",
    "HasADefault",
    "ByPlaceAlone",
    "HasNone",
    "IsMadeByNew",
    "IsDecorated",
    "IsDecoratedWell",
)
OF_VLLM = (
    r"vLLM's factory refuses it: Connector \w+ uses deprecated 2-argument constructor signature\. .* must "
    r"accept kv_cache_config as the third constructor argument .*"
)
OF_PYTHON = r"vLLM's factory calls \w+\(vllm_config, role, kv_cache_config\), and Python refuses it: "
REFUSED = {
    "TakesTwo": OF_VLLM,
    "TakesNoKeyword": OF_VLLM,
    "ByKeywordAlone": f"{OF_PYTHON}too many positional arguments",
    "TakesMoreKeywords": f"{OF_PYTHON}too many positional arguments",
    "TakesFour": f"{OF_PYTHON}missing a required argument: 'metrics'",
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_the_factory_constructs_is_tested(run_cases: Callable[..., CellRun], name: str) -> None:
    case = "base_class_gets_constructor_arguments"  # of both halves, which the factory constructs
    run = run_cases(f"{MODULE}:{name}", "llama3_1_8b", only=lambda planned: planned.case.name == case)
    assert run.outcomes == {f"{case}[{half}]": "PASS" for half in ("scheduler", "worker")}, run.findings


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_refuses_is_refused_with_its_reason(case_runner: CaseRunner, name: str) -> None:
    with pytest.raises(BadSubject) as raised:
        case_runner.probe(Settings(connector=f"{MODULE}:{name}"))
    assert re.fullmatch(REFUSED[name], str(raised.value))


def test_a_package_that_only_a_finder_finds_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An editable install may bring a finder, and have no folder in sys.path."""
    (tmp_path / "found_elsewhere.py").write_text("raise RuntimeError('it is imported')")

    class Finder:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> object:
            place = tmp_path / f"{name}.py"
            return spec_from_file_location(name, place) if place.exists() else None

    assert not _can_be_found("found_elsewhere")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    assert _can_be_found("found_elsewhere")
    assert "found_elsewhere" not in sys.modules
