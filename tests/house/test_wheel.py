"""The wheel is built from this checkout, and has all that a user needs; the source distribution has all."""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import pytest_kvconform

from .checkout import ROOT, tracked_files

PACKAGES = ("pytest_kvconform", "model_matrix", "reference_connector")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution, and the wheel that was built from it."""
    place = tmp_path_factory.mktemp("dist")
    # No isolation: the extra `test` brings the build backend, so this needs no network.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(place), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return place


@pytest.fixture(scope="module")
def wheel(built: Path) -> zipfile.ZipFile:
    [file] = built.glob("*.whl")
    return zipfile.ZipFile(file)


@pytest.fixture(scope="module")
def unpacked(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the source distribution."""
    [file] = built.glob("*.tar.gz")
    place = tmp_path_factory.mktemp("source")
    with tarfile.open(file) as packed:
        packed.extractall(place, filter="data")
    [folder] = place.iterdir()
    return folder


def metadata(wheel: zipfile.ZipFile) -> Message:
    [name] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return Parser().parsestr(wheel.read(name).decode())


def test_every_file_of_the_packages_is_in_it(wheel: zipfile.ZipFile) -> None:
    ours = {str(file.relative_to(ROOT)) for file in tracked_files()}
    expected = {name for name in ours if name.startswith(tuple(f"{package}/" for package in PACKAGES))}
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == expected
    assert {"pytest_kvconform/py.typed", "model_matrix/py.typed"} <= packed
    assert any(name.startswith("model_matrix/families/") and name.endswith(".toml") for name in packed)


def test_its_metadata(wheel: zipfile.ZipFile) -> None:
    data = metadata(wheel)
    assert data["Name"] == "pytest-kvconform"
    assert data["Version"] == pytest_kvconform.__version__
    assert data["License-Expression"] == "Apache-2.0"
    extras = {"accuracy", "cpu", "cuda", "docs", "lmcache", "mooncake", "ray", "test"}
    assert set(data.get_all("Provides-Extra")) == extras
    assert any(name.endswith("/licenses/LICENSE") for name in wheel.namelist())


def test_its_entry_points(wheel: zipfile.ZipFile) -> None:
    [name] = [name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt")]
    points = configparser.ConfigParser()
    points.read_string(wheel.read(name).decode())
    assert points["pytest11"]["kvconform"] == "pytest_kvconform.plugin"
    assert points["console_scripts"]["kvconform"] == "pytest_kvconform.cli:main"


def test_it_works_from_an_empty_folder(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """The wheel alone has all modules and data files that the plugin needs."""
    wheel.extractall(tmp_path / "site")
    code = (
        f"import sys; sys.path[:] = [{str(tmp_path / 'site')!r}] + [p for p in sys.path if p not in "
        f"('', {str(ROOT)!r})]\n"
        "import pytest_kvconform.plugin, model_matrix\n"
        "print(pytest_kvconform.__file__); print(model_matrix.__file__); "
        "print(*sorted(model_matrix.load_families()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    plugin, matrix, families = done.stdout.splitlines()
    assert plugin.startswith(str(tmp_path))
    assert matrix.startswith(str(tmp_path))
    assert "llama" in families


def test_the_source_distribution_is_the_checkout(unpacked: Path) -> None:
    packed = {str(file.relative_to(unpacked)) for file in unpacked.rglob("*") if file.is_file()}
    assert packed - {"PKG-INFO"} == {str(file.relative_to(ROOT)) for file in tracked_files()}


def test_tests_run_from_the_source_distribution(unpacked: Path) -> None:
    tests = [
        "tests/house/test_sizes.py::test_the_checks_see_the_files",
        "tests/plugin/test_activation.py::test_a_path_of_the_users_is_respected",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=unpacked,
        env=os.environ | {"PYTHONPATH": str(unpacked)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed in " in done.stdout.splitlines()[-1]


def test_the_version_is_of_the_calendar_and_the_changelog_has_it() -> None:
    """A version that is not released ends in .dev0. It may have a section: what the release is to bring."""
    changelog = (ROOT / "CHANGELOG.md").read_text()
    sections = re.findall(r"^## \[(.+)\]$", changelog, re.MULTILINE)
    assert sections[0] == "Unreleased"
    released = [tuple(map(int, section.split("."))) for section in sections[1:]]
    assert all(len(one) == 3 and 1 <= one[1] <= 12 for one in released)
    assert released == sorted(released, reverse=True)
    version, _, unreleased = pytest_kvconform.__version__.partition(".dev")
    numbers = tuple(map(int, version.split(".")))
    if unreleased:
        assert unreleased == "0" and len(numbers) == 3 and numbers >= released[0]
    else:
        assert numbers == released[0]
