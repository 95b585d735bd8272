"""The wheel is built from this checkout, and has all that a user needs."""

from __future__ import annotations

import configparser
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import pytest_kvconform

from .checkout import ROOT, tracked_files

PACKAGES = ("pytest_kvconform", "model_matrix", "reference_connector")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    place = tmp_path_factory.mktemp("wheel")
    # No isolation: the extra `test` brings the build backend, so this needs no network.
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(place), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    [file] = place.glob("*.whl")
    return zipfile.ZipFile(file)


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
    assert set(data.get_all("Provides-Extra")) == {"accuracy", "cpu", "cuda", "lmcache", "mooncake", "test"}
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
