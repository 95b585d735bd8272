"""No case can leave by pytest's skip or xfail: it passes, fails, or is blocked with a reason."""

from __future__ import annotations

import ast

import pytest

from .checkout import ROOT

SUITE = ROOT / "pytest_kvconform" / "suite"
WAYS_OUT = {"skip", "skipif", "xfail", "importorskip", "SkipTest", "skipTest", "expectedFailure"}


def ways_out(source: str) -> list[str]:
    """Every name, attribute, import and string that is a way out of pytest or unittest, as line:word."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(id=word) | ast.Attribute(attr=word) | ast.alias(name=word):
                words = [word.rpartition(".")[2]]
            case ast.Constant(value=str(word)):
                words = [word]  # getattr(pytest, "skip")
            case _:
                continue
        found += [f"{node.lineno}:{word}" for word in words if word in WAYS_OUT]
    return sorted(found)


def test_no_case_of_the_suite_has_a_way_out() -> None:
    files = sorted(SUITE.rglob("*.py"))
    assert files, "the scan looks at the wrong place"
    found = {str(file.relative_to(ROOT)): ways_out(file.read_text(encoding="utf-8")) for file in files}
    assert {file: words for file, words in found.items() if words} == {}


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("import pytest\npytest.skip('no')", "2:skip"),
        ("import pytest as p\np.xfail('no')", "2:xfail"),
        ("from pytest import skip as leave\nleave('no')", "1:skip"),
        ("import pytest\ntorch = pytest.importorskip('torch')", "2:importorskip"),
        ("import pytest\n@pytest.mark.skipif(True, reason='no')\ndef arrive(): ...", "2:skipif"),
        ("import pytest\ngetattr(pytest, 'skip')('no')", "2:skip"),
        ("import unittest\nraise unittest.SkipTest", "2:SkipTest"),
    ],
)
def test_the_scan_sees_a_planted_way_out(source: str, word: str) -> None:
    assert ways_out(source) == [word]


def test_the_scan_reads_words_and_not_parts_of_words() -> None:
    assert ways_out("'skip the first block'\nskipped = 1\nx.skip_tail = 2") == []
