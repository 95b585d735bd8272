"""The pages that people read, cut into what tests can check."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {
    page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8")
    for page in (
        *(ROOT / "README.md", ROOT / "CONTRIBUTING.md"),
        *sorted(DOCS.glob("*.md")),
        *sorted((DOCS / "findings").glob("*.md")),
    )
}
FINDINGS = "\n".join(text for page, text in PAGES.items() if page.startswith("docs/findings/"))


def blocks(text: str, language: str) -> list[str]:
    """Contents of the fenced blocks of one language; "" is a block without one."""
    return [
        body
        for word, body in re.findall(r"^```([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        if word == language
    ]


def prose(text: str) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[list[str]]:
    """Each command of the console blocks, as the shell would split it, with continued lines joined."""
    return [
        shlex.split(line, comments=True)
        for block in blocks(text, "console")
        for line in block.replace("\\\n", "").splitlines()
        if line.strip()
    ]


def words(text: str) -> list[str]:
    """Everything between single backticks outside of fenced blocks."""
    return re.findall(r"`([^`\n]+)`", prose(text))


def tables(text: str) -> list[list[list[str]]]:
    """Rows of cells of each table, the head first, without the line of dashes."""
    found = re.findall(r"(?:^\|.*\|$\n?)+", prose(text), re.MULTILINE)
    split = [
        [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in one.splitlines()]
        for one in found
    ]
    return [[rows[0], *rows[2:]] for rows in split]


def terms(text: str, heading: str) -> dict[str, str]:
    """The items of the lists below a heading, `- term: what the term means`, up to the next heading."""
    below = re.split(rf"^#+ {re.escape(heading)}$", text, maxsplit=1, flags=re.MULTILINE)[1]
    section = re.split(r"^#+ ", prose(below), maxsplit=1, flags=re.MULTILINE)[0]
    items = re.findall(r"^- (.*(?:\n  \S.*)*)", section, re.MULTILINE)
    pairs = [re.sub(r"\s+", " ", item).partition(": ") for item in items]
    return {term: meaning for term, _, meaning in pairs}


def anchors(text: str) -> set[str]:
    """Names of the headings, as GitHub makes them, and of anchors."""
    heads = re.findall(r"^#+ +(.+)$", prose(text), re.MULTILINE)
    names = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
    return names.union(re.findall(r'<a id="([\w-]+)"></a>', text))


def regenerate() -> ModuleType:
    """docs/regenerate.py, which is a script and in no package."""
    if str(DOCS) not in sys.path:
        sys.path.append(str(DOCS))  # where Python finds the modules of a script
    spec = importlib.util.spec_from_file_location("regenerate", DOCS / "regenerate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
