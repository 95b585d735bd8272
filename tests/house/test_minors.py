"""One room changes with a minor of vLLM: no other module of the rigs and cases knows one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from .checkout import ROOT

PLACES = ("pytest_kvconform/rigs", "pytest_kvconform/suite")
ROOM = "pytest_kvconform/rigs/vllm_setup"
# a number of a minor, or a comparison of versions
KNOWS = re.compile(r"\b0\.3\d\b|vllm\.__version__|(?:older|earlier|newer) minor|(?:before|since) vLLM \d")


def lines_that_know(root: Path) -> Iterator[str]:
    """FILE:LINE of each line outside the room that knows a minor."""
    for place in PLACES:
        for file in sorted((root / place).rglob("*.py")):
            if not file.is_relative_to(root / ROOM):
                for number, line in enumerate(file.read_text("utf-8").splitlines(), 1):
                    if KNOWS.search(line):
                        yield f"{file.relative_to(root)}:{number}"


def test_no_other_room_knows_a_minor() -> None:
    assert list(lines_that_know(ROOT)) == []


@pytest.mark.parametrize(
    "line",
    [
        'if vllm.__version__ < "1":',
        "x = 1  # since vLLM 1.0",
        '    """Before 0.32 none."""',
        "return None  # older minors have none",
    ],
)
def test_a_planted_branch_is_found(tmp_path: Path, line: str) -> None:
    for place in (*PLACES, ROOM):
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        (tmp_path / place / "a.py").write_text(f"import vllm\n{line}\n")
    assert list(lines_that_know(tmp_path)) == [f"{place}/a.py:2" for place in PLACES]
