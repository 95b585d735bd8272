"""The commit of the suite and of a connector: from a checkout, or from what pip has noted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_kvconform.report.origin import commits
from tests.origin.checkouts import Checkout

HASH = "0123456789abcdef" * 2 + "01234567"


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    made = Checkout(tmp_path / "repository")
    package = made.folder / "my_package" / "inner"
    package.mkdir(parents=True)
    for file in (package.parent / "__init__.py", package / "__init__.py", package / "mod.py"):
        file.write_text("")
    (made.folder / "alone.py").write_text("")
    return made


def test_a_connector_has_the_commit_of_its_checkout(checkout: Checkout) -> None:
    commit = checkout.commit()
    for file in ("my_package/inner/mod.py", "alone.py"):
        assert commits.of_connector(str(checkout.folder / file)) == commit
    (checkout.folder / "my_package" / "__init__.py").write_text("changed = True")
    assert commits.of_connector(str(checkout.folder / "my_package/inner/mod.py")) == f"{commit}-dirty"
    assert commits.of_connector(str(checkout.folder / "alone.py")) == commit
    assert not commits.is_commit(f"{commit}-dirty") and commits.is_commit(commit)


def test_what_only_lies_in_a_checkout_has_no_commit_of_it(checkout: Checkout) -> None:
    """As an environment in the folder of a checkout, with what is installed there."""
    checkout.commit()
    installed = checkout.folder / "site-packages"
    installed.mkdir()
    (installed / "other.py").write_text("")
    assert commits.of_connector(str(installed / "other.py")) == ""
    assert commits.of_connector("") == ""


def test_a_repository_without_a_commit_has_none(checkout: Checkout) -> None:
    checkout.git("add", "--all")
    assert commits.of_connector(str(checkout.folder / "alone.py")) == ""


def test_nothing_of_a_checkout_runs(checkout: Checkout, tmp_path: Path) -> None:
    """A hook and a monitor would run with the rights of who asks for the commit."""
    commit, ran = checkout.commit(), tmp_path / "ran"
    script = tmp_path / "script"
    script.write_text(f"#!/bin/sh\necho ran >>{ran}\n")
    script.chmod(0o755)
    hook = checkout.folder / ".git" / "hooks" / "post-index-change"
    hook.parent.mkdir(exist_ok=True)
    hook.symlink_to(script)
    checkout.git("config", "core.fsmonitor", str(script))
    (checkout.folder / "alone.py").touch()
    assert commits.of_connector(str(checkout.folder / "alone.py")) == commit
    assert not ran.exists()


def test_without_git_nothing_is_known(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout.commit()
    monkeypatch.setenv("PATH", "")
    assert commits.of_connector(str(checkout.folder / "alone.py")) == ""


@pytest.mark.parametrize(
    ("record", "commit"),
    [
        ({"url": "https://example.org/x.git", "vcs_info": {"vcs": "git", "commit_id": HASH}}, HASH),
        ({"url": "https://example.org/x.git", "vcs_info": {"vcs": "git", "commit_id": "main"}}, ""),
        ({"url": "file:///x", "dir_info": {}}, ""),
        ([], ""),
        (None, ""),
    ],
)
def test_pip_notes_the_commit_that_it_installs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: object, commit: str
) -> None:
    info = tmp_path / "my_dist-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-dist\nVersion: 1\n")
    (info / "top_level.txt").write_text("my_installed\n")
    if record is not None:
        (info / "direct_url.json").write_text(json.dumps(record))
    (tmp_path / "my_installed.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert commits.of_connector(str(tmp_path / "my_installed.py")) == commit
