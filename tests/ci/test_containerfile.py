"""The Containerfile: what it copies is enough to install the suite, and its commands run in a shell.

No test builds the image: that needs a container engine, and a network.
"""

from __future__ import annotations

import io
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from dockerfile_parse import DockerfileParser
from packaging.specifiers import SpecifierSet

from tests.docs.pages import PAGES, blocks
from tests.helpers.fixtures import ROOT
from tests.house.checkout import tracked_files

from .shell import Shell

FILE = ROOT / "Containerfile"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
STEPS = [
    (step["instruction"], step["value"])
    for step in DockerfileParser(fileobj=io.BytesIO(FILE.read_bytes())).structure
    if step["instruction"] != "COMMENT"
]
NOTES = '#!/bin/sh\necho "$(basename "$0") $*" >> calls\n'


def of(instruction: str) -> list[str]:
    return [value for name, value in STEPS if name == instruction]


ARGUMENTS = dict(value.split("=", 1) for value in of("ARG"))


def test_the_base_has_a_python_that_the_suite_supports() -> None:
    [base] = of("FROM")
    version = re.fullmatch(r"docker\.io/library/python:(3\.\d+)-slim-bookworm", base)
    assert version and version[1] in SpecifierSet(PROJECT["requires-python"])


def test_the_suite_can_be_built_from_what_is_copied(tmp_path: Path) -> None:
    """The wheel has every file of the packages, and no folder of the checkout is needed besides."""
    suite = tmp_path / "suite"
    suite.mkdir()
    tracked = tracked_files()
    for *sources, target in map(shlex.split, of("COPY")):
        for source in sources:
            place = Path(str(tmp_path) + target)
            place = place / source if target.endswith("/") else place
            mine = [file for file in tracked if file.is_relative_to(ROOT / source)]
            assert mine, source
            for file in mine:
                copy = place / file.relative_to(ROOT / source) if file != ROOT / source else place
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(file, copy)
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(tmp_path),
        str(suite),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    [wheel] = tmp_path.glob("*.whl")
    packages = ("pytest_kvconform", "model_matrix", "reference_connector")
    assert {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name} == {
        str(file.relative_to(ROOT)) for file in tracked if file.relative_to(ROOT).parts[0] in packages
    }


@pytest.mark.parametrize(
    ("given", "installed"),
    [
        ({}, "--torch-backend=cpu /suite[cpu,accuracy]"),
        ({"EXTRAS": "cuda", "TORCH_BACKEND": "auto"}, "--torch-backend=auto /suite[cuda]"),
    ],
    ids=["cpu", "gpu"],
)
def test_the_commands_install_what_the_arguments_name(
    tmp_path: Path, given: dict[str, str], installed: str
) -> None:
    """The installers note their words here, and `rm` removes nothing."""
    assert given.keys() <= ARGUMENTS.keys()
    shell = Shell(tmp_path, dict.fromkeys(("apt-get", "rm", "pip", "uv"), NOTES), **ARGUMENTS | given)
    for command in of("RUN"):
        done = shell(command)
        assert (done.returncode, done.stderr) == (0, "")
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call for call in calls if not call.startswith("rm ")] == [
        "apt-get update",
        "apt-get install --yes --no-install-recommends g++ libgomp1 libnuma1 make",
        "pip install --no-cache-dir uv",
        f"uv pip install --system --no-cache --compile-bytecode {installed}",
    ]


def test_the_example_names_arguments_and_extras_that_exist() -> None:
    [example] = [block for block in blocks(PAGES["docs/operators.md"], "sh") if "podman" in block]
    comment = "".join(line[2:].strip() + "\n" for line in FILE.read_text().splitlines() if line[:1] == "#")
    named = dict(re.findall(r"--build-arg (\w+)=(\S+)", example + comment))
    assert named.keys() == ARGUMENTS.keys()
    extras = {extra for value in (ARGUMENTS["EXTRAS"], named["EXTRAS"]) for extra in value.split(",")}
    assert extras <= PROJECT["optional-dependencies"].keys()
    assert f"{of('WORKDIR')[0]}" in example
