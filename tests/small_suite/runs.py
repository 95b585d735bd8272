"""The fixtures `kv` and `claimed`: runs of the plugin on the small suite `fakekv`, which starts nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_kvconform import declaration, features
from pytest_kvconform.report.origin import commits

HERE = Path(__file__).parent  # fakekv and shuffles are found here
TODAY = declaration.today()  # of all runs, those in other processes, too, though midnight passes meanwhile

COMMIT = "5eed" * 10


def declare(path: Path, unsupported: dict[str, str], more: str = "") -> Path:
    """Write a declaration of every feature."""
    lines = [
        f"{name} = {{ unsupported = '{unsupported[name]}' }}" if name in unsupported else f"{name} = true"
        for name in features.load()
    ]
    path.write_text("\n".join([more, "[features]", *lines]))
    return path


def impossible(profile: str) -> dict[str, str]:
    """Features that no connector of a profile can have -> why."""
    known = features.load()
    return {name: known[name].impossible[profile] for name in known if profile in known[name].impossible}


class Run:
    """One finished pytest run in an empty project."""

    def __init__(self, result: pytest.RunResult, folder: Path, log: Path):
        self.code, self.lines, self.errors = int(result.ret), result.outlines, result.errlines
        self.text = "\n".join([*result.outlines, *result.errlines])
        self.log = log.read_text().splitlines() if log.exists() else []
        self.path, self.declared = folder / "kv-report" / "report.json", folder / "declared.toml"

    @property
    def report(self) -> dict[str, Any]:
        return json.loads(self.path.read_bytes())

    @property
    def word(self) -> str:
        return self.report["verdict"]["word"]

    @property
    def outcomes(self) -> dict[str, str]:
        return {result["id"].removeprefix("kv::"): result["outcome"] for result in self.report["results"]}

    @property
    def ran(self) -> list[str]:
        """Ids in the order in which they were started; needs -v."""
        return list(
            dict.fromkeys(line.split()[0] for line in self.lines if line.startswith("kv::") and "[" in line)
        )

    @property
    def cells(self) -> list[str]:
        """Cells in the order in which the bench started them."""
        return [line.split()[-1] for line in self.log if " starts " in line]


@pytest.fixture
def kv(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """Run pytest in the folder of `pytester`: kv(*arguments, deeds={glob: deed}, bench="what fails").

    A run has `--kv-connector=m:C`, unless `plain`. With `apart` the run is a process of its own.
    `unsupported` is a feature -> why; all other features are declared as supported, unless `undeclared`.
    """
    monkeypatch.setattr(declaration, "today", lambda: TODAY)
    monkeypatch.setattr(commits, "of_suite", lambda: COMMIT)  # files of a tree may differ from its commit
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.setenv("PYTHONPATH", f"{HERE}:{HERE.parents[1]}")
    monkeypatch.setenv("FAKEKV_TODAY", str(TODAY))
    monkeypatch.setenv("_KVCONFORM_TEST_PACKAGE", "fakekv")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # what else is installed here has no say
    for name in (
        "PYTEST_ADDOPTS",
        "GITHUB_STEP_SUMMARY",
        "CI",
        "PYTEST_XDIST_WORKER",
        "PYTEST_XDIST_TESTRUNUID",
    ):
        monkeypatch.delenv(name, raising=False)
    log = pytester.path / "bench.log"

    def run(
        *arguments: str,
        deeds: dict[str, str] | None = None,
        bench: str = "",
        plain: bool = False,
        apart: bool = False,
        unsupported: dict[str, str] | None = None,
        undeclared: bool = False,
    ) -> Run:
        log.unlink(missing_ok=True)
        monkeypatch.setenv(
            "KVCONFORM_DECLARE",
            "" if undeclared else str(declare(pytester.path / "declared.toml", unsupported or {})),
        )
        monkeypatch.setenv("FAKEKV_LOG", str(log))
        monkeypatch.setenv("FAKEKV", json.dumps(deeds or {}))
        monkeypatch.setenv("FAKEKV_BENCH", bench)
        subject = () if plain else ("--kv-connector=m:C",)
        plugins = ["-p", "pytest_kvconform.plugin", *(("-p", "xdist.plugin") if "-n2" in arguments else ())]
        # xdist gives its workers the sys.path with which this process began, so
        # its runs need one of their own.
        runpytest = (
            pytester.runpytest_subprocess if apart or "-n2" in arguments else pytester.runpytest_inprocess
        )
        return Run(runpytest(*plugins, *subject, *arguments), pytester.path, log)

    return run


@pytest.fixture
def claimed(kv: Callable[..., Run], pytester: pytest.Pytester) -> Callable[..., Path]:
    """claimed(*arguments, ...): the folder of a claim of the small suite."""

    def run(*arguments: str, claim: str = "--kv-claim", **how: Any) -> Path:
        for seed in (1, 2, 3):
            kv(claim, f"--kv-seed={seed}", f"--kv-report=claim/seed-{seed}", *arguments, **how)
        return pytester.path / "claim"

    return run
