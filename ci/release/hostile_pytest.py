"""Run the built wheel in an empty folder and in a hostile project, with each of some versions of pytest.

    python ci/release/hostile_pytest.py [--pytest 8.4 ...] [--keep DIR] [ARGUMENTS OF PYTEST...]

The wheel is built from this checkout. Each version of pytest gets an environment of its own, with the wheel
and pytest-xdist. All other packages, such as vLLM, are those of the Python that runs this script. Each
environment has four runs: in an empty folder and in a hostile one, in one process and with two workers. All
runs have to agree in exit code, ids, outcomes and verdict. Exit 1: one of them differs from the first.

    python ci/release/hostile_pytest.py --kv-connector=NixlConnector --kv-family=gemma3_1b \\
        --kv-topology=P1D1 --kv-tier=interface,protocol,bytes
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
VERSIONS = ("8.4", "9.0", "9.2")
RUN_S, BUILD_S = 1800, 600
HOSTILE = {
    "conftest.py": """
import pytest
collect_ignore_glob = ["*"]

@pytest.fixture(autouse=True)
def everywhere(): raise RuntimeError("an autouse fixture ran")

def pytest_ignore_collect(collection_path, config): return True

def pytest_collection_modifyitems(config, items):
    items.reverse()
    config.hook.pytest_deselected(items=items[1:])
    del items[1:]
    items[0].add_marker(pytest.mark.skip)

def pytest_runtest_setup(item): pytest.skip("not today")
""",
    "pyproject.toml": """
[tool.pytest.ini_options]
addopts = "-p no:cacheprovider --strict-markers --strict-config -qq --tb=no -rA --import-mode=importlib"
testpaths = ["nowhere"]
python_files = ["nothing_*.py"]
norecursedirs = ["*"]
usefixtures = ["nowhere"]
xfail_strict = true
""",
    "test_theirs.py": "def test_theirs(): assert False",
}


def make_environment(folder: Path, pytest: str, wheel: Path) -> Path:
    """Return the Python of a new environment. Raises CalledProcessError if pip finds no such pytest."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    install = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    subprocess.run([*install, f"pytest=={pytest}.*", "pytest-xdist"], check=True, timeout=BUILD_S)
    subprocess.run([*install, "--no-deps", "--no-index", wheel], check=True, timeout=BUILD_S)
    [site] = folder.glob("lib/python3*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))  # they come after the packages above
    return python


def judged(python: Path, folder: Path, arguments: list[str]) -> tuple[Any, ...]:
    """Run pytest in a folder. Returns exit code, manifest, selected ids, id -> outcome, and the verdict."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "CI")}
    with (folder / "output").open("wb") as output:
        done = subprocess.run(
            [python, "-m", "pytest", *arguments],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=RUN_S,
            check=False,
        )
    report = json.loads((folder / "kv-report" / "report.json").read_bytes())
    outcomes = {result["id"]: result["outcome"] for result in report["results"]}
    selection = report["selection"]
    return done.returncode, selection["manifest"], selection["selected"], outcomes, report["verdict"]["word"]


def differences(first: tuple[Any, ...], other: tuple[Any, ...]) -> list[str]:
    """Return a line for each thing in which two runs differ."""
    names = ("exit code", "manifest", "selection", "outcomes", "verdict")
    found = [name for name, one, two in zip(names, first, other, strict=True) if one != two]
    moved = {*first[3].items()} ^ {*other[3].items()}
    return [*found, *sorted(f"{name} is {outcome} in one of them" for name, outcome in moved)[:10]]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pytest", nargs="+", default=VERSIONS, metavar="VERSION", help=" ".join(VERSIONS))
    parser.add_argument("--keep", type=Path, metavar="DIR", help="folder for environments and output")
    options, arguments = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as temporary:
        place = (options.keep or Path(temporary)).resolve()
        build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", place / "dist", ROOT]
        subprocess.run(build, check=True, timeout=BUILD_S, stdout=subprocess.DEVNULL)
        [wheel] = (place / "dist").glob("*.whl")
        runs: list[tuple[Any, ...]] = []
        bad = 0
        for version in options.pytest:
            python = make_environment(place / f"pytest-{version}", version, wheel)
            for name, files in (("empty", {}), ("hostile", HOSTILE)):
                for workers in ([], ["-n", "2"]):
                    folder = place / f"{name}-{version}-{len(workers)}"
                    folder.mkdir()
                    for file, text in files.items():
                        (folder / file).write_text(text)
                    runs.append(found := judged(python, folder, [*arguments, *workers]))
                    differ = differences(runs[0], found)
                    bad += bool(differ)
                    where = f"pytest {version}, {name} folder, {' '.join(workers) or 'one process'}"
                    what = f"exit code {found[0]}, {found[4]}, {len(found[3])} results"
                    print(f"{where}: {what}", *differ, sep="\n  ", flush=True)
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
