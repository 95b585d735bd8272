"""The workflow of a release: bash runs its commands in a copy of this checkout, without a network."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import pytest_kvconform
from tests.helpers.fixtures import ROOT
from tests.house.checkout import tracked_files

JOBS = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]
COMMANDS = ON_MAIN, AGREE, INSTALL, BUILD, CHECK, LIST = [
    step["run"] for step in JOBS["build"]["steps"] if "run" in step
]
VERSION = "2031.2.3"


@pytest.fixture
def bash(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """bash(command, tag, commit): run a step in the checkout of that version."""
    for file in tracked_files():
        copy = tmp_path / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, copy)
    for name, old, new in (
        ("pytest_kvconform/__init__.py", pytest_kvconform.__version__, VERSION),
        ("CHANGELOG.md", "## [Unreleased]", f"## [Unreleased]\n\n## [{VERSION}]"),
    ):
        (tmp_path / name).write_text((tmp_path / name).read_text().replace(old, new, 1))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PIP_NO_INDEX": "1",  # so the environment of the wheel has the wheel alone
        "PIP_NO_DEPS": "1",
    }

    def run(command: str, tag: str = "", commit: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-e", "-c", command],
            cwd=tmp_path,
            env=environment | {"GITHUB_REF_NAME": tag, "GITHUB_SHA": commit},
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run


def test_a_tag_beside_main_is_not_released(bash, tmp_path: Path) -> None:
    commit = "git -c user.name=kv -c user.email=kv@example.org commit --quiet --allow-empty --message"
    done = bash(f"""
        git init --quiet && {commit} first && git rev-parse HEAD
        {commit} second && git update-ref refs/remotes/origin/main HEAD
        {commit} third && git rev-parse HEAD""")
    on_main, beside = done.stdout.split()
    assert bash(ON_MAIN, commit=on_main).returncode == 0
    done = bash(ON_MAIN, commit=beside)
    assert (done.returncode, done.stdout) == (1, f"commit {beside} does not lie on main\n")
    [checkout] = [step for step in JOBS["build"]["steps"] if "checkout" in step.get("uses", "")]
    assert checkout["with"] == {"fetch-depth": 0}  # all of main's history


def test_tag_version_and_changelog_have_to_agree(bash, tmp_path: Path) -> None:
    assert bash(AGREE, f"v{VERSION}").returncode == 0
    done = bash(AGREE, "v2031.2.4")
    assert (done.returncode, done.stdout) == (1, f"the tag is v2031.2.4, and the version is {VERSION}\n")
    (tmp_path / "CHANGELOG.md").write_text("## [Unreleased]\n")
    done = bash(AGREE, f"v{VERSION}")
    assert (done.returncode, done.stdout) == (1, f"CHANGELOG.md has no section [{VERSION}]\n")


def test_what_is_built_is_checked_and_listed(bash, tmp_path: Path) -> None:
    for command in (BUILD, CHECK, LIST):
        done = bash(command)
        assert done.returncode == 0, done.stdout + done.stderr
    names = sorted(file.name for file in (tmp_path / "dist").iterdir())
    assert names == [f"pytest_kvconform-{VERSION}{end}" for end in ("-py3-none-any.whl", ".tar.gz")]
    listed = json.loads((tmp_path / "sbom.cdx.json").read_text())
    assert listed["bomFormat"] == "CycloneDX"
    assert listed["serialNumber"] and listed["specVersion"]  # actions/attest-sbom refuses a list without
    [ours] = listed["components"]
    assert (ours["name"], ours["version"]) == ("pytest-kvconform", VERSION)
    [source] = ours["externalReferences"]
    wheel = (tmp_path / "dist" / names[0]).read_bytes()
    assert source["hashes"][0]["content"] == hashlib.sha256(wheel).hexdigest()


def test_metadata_that_the_index_would_refuse_end_the_release(bash, tmp_path: Path) -> None:
    project = tmp_path / "pyproject.toml"
    project.write_text(project.read_text().replace('readme = "README.md"', 'readme = "README.rst"'))
    (tmp_path / "README.rst").write_text("A title\n==\n\n.. no-directive::\n")
    assert bash(BUILD).returncode == 0
    done = bash(CHECK)
    assert done.returncode == 1
    assert "failed" in done.stdout.lower()


def test_the_tools_are_those_of_the_tests() -> None:
    words = INSTALL.split()
    assert words[:2] == ["pip", "install"]
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["test"]
    assert set(words[2:]) <= {re.split(r"[>=;]", one)[0] for one in extra}


def test_only_the_job_that_publishes_may_ask_for_the_right_to_it() -> None:
    publish = JOBS["publish"]
    assert (publish["needs"], publish["environment"], publish["permissions"]) == (
        "build",
        "pypi",
        {"id-token": "write"},
    )
    fetched, published = (step["uses"].partition("@")[0] for step in publish["steps"])
    assert (fetched, published) == ("actions/download-artifact", "pypa/gh-action-pypi-publish")
    assert not any("${{" in command for command in COMMANDS)
    signed = {
        step["uses"].partition("@")[0]: step["with"]
        for step in JOBS["build"]["steps"]
        if "attest" in step.get("uses", "")
    }
    assert signed["actions/attest-build-provenance"] == {"subject-path": "dist/*"}
    assert signed["actions/attest-sbom"]["sbom-path"] in LIST
