"""The site of `make docs`: all pages, no broken link, nothing from another host."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from mkdocs.config import load_config

from .pages import PAGES, ROOT

LOADS = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src", "object": "data"}


def paths(nav: Any) -> Iterator[str]:
    """The pages of a `nav` of mkdocs.yml, in its order."""
    for entry in nav:
        [value] = entry.values()
        if isinstance(value, str):
            yield value
        else:
            yield from paths(value)


NAV = list(paths(load_config(str(ROOT / "mkdocs.yml")).nav))


class Page(HTMLParser):
    """What a page of the site loads and links to, and what can be linked to."""

    def __init__(self, file: Path):
        super().__init__()
        self.loads, self.links, self.anchors, self.tags = list[str](), list[str](), {""}, list[str]()
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        self.tags.append(f"{tag} {given.get('class')} {given.get('data-md-component')}")
        self.anchors.add(given.get("id", ""))
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if (name := LOADS.get(tag)) in given and given.get("rel") not in ("canonical", "prev", "next"):
            self.loads.append(given[name])


def build(folder: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """`make docs` of a checkout, in the environment of this test."""
    command = ["make", "docs", "SETUP=true", f"VENV={sys.prefix}", f"ARGS=--site-dir '{site}'"]
    environment = {name: value for name, value in os.environ.items() if name != "SITE_URL"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    """The pages of the built site, by file."""
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return {file: Page(file) for file in folder.rglob("*.html") if file.name != "404.html"}


def test_every_page_is_in_the_navigation_once() -> None:
    assert Counter(NAV) == Counter([*PAGES, "CHANGELOG.md"])


def test_the_site_has_every_page_and_drawing_and_no_program(site: dict[Path, Page]) -> None:
    [index] = [file for file in site if file.name == "index.html"]
    names = {"README.md": "index.html"}
    expected = {index.parent / names.get(name, name.replace(".md", ".html")) for name in NAV}
    assert set(site) == expected
    files = [file for file in index.parent.rglob("*") if file.is_file() and file.suffix != ".html"]
    others = {file.relative_to(index.parent).as_posix() for file in files}
    drawings = {file.relative_to(ROOT).as_posix() for file in (ROOT / "docs").rglob("*.svg")}
    assert {name for name in others if not name.startswith("assets/")} == drawings | {
        "LICENSE.txt",
        "search/search_index.json",
        "site.css",
        "sitemap.xml",
        "sitemap.xml.gz",
    }


def test_what_pages_load_and_link_to_is_there(site: dict[Path, Page]) -> None:
    missing = []
    for file, page in site.items():
        for link in page.loads + page.links:
            parts = urlsplit(link)
            if parts.netloc and link in page.links:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            if not target.is_file() or (
                target in site and unquote(parts.fragment) not in site[target].anchors
            ):
                missing.append((file.name, link))
    assert missing == []
    assert all({Path(link).suffix for link in page.loads} >= {".css", ".js"} for page in site.values())


def test_no_page_loads_anything_from_another_host(site: dict[Path, Page]) -> None:
    assert {link for page in site.values() for link in page.loads if urlsplit(link).netloc} == set()
    styles = {
        file.parent / link for file, page in site.items() for link in page.loads if link.endswith(".css")
    }
    assert styles
    for style in styles:
        assert not re.search(r"(?:url\(|@import\s+)[\"']?(?:https?:)?//", style.read_text(encoding="utf-8"))
    # The theme's script asks other hosts where a page has a diagram of Mermaid, or `repo_url` is set.
    assert not [tag for page in site.values() for tag in page.tags if re.search(r"mermaid| source$", tag)]


def test_a_pipe_in_code_of_a_table_has_no_backslash(site: dict[Path, Page]) -> None:
    [authors] = [file for file in site if file.name == "authors.html"]
    assert "<code>NAME|MODULE:CLASS</code>" in authors.read_text(encoding="utf-8")


def test_the_build_refuses_what_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "docs" / "findings").mkdir(parents=True)
    for name in ("Makefile", "mkdocs.yml", "LICENSE", "docs/site_pages.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    for name in NAV:
        (tmp_path / name).write_text("# A page\n")
    (tmp_path / "docs" / "start.md").write_text("# A page\n\n[a](../CONTRIBUTING.md#a-page), [b](rules.md)\n")
    assert build(tmp_path, tmp_path / "site").returncode == 0
    links = ("rules.md#none", "none.md", "../none.py", "/none")
    (tmp_path / "docs" / "start.md").write_text(" ".join(f"[a]({link})" for link in links))
    (tmp_path / "docs" / "beside.md").write_text("# No page of the navigation\n")
    (tmp_path / "docs" / "registry.md").unlink()
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    said = re.split(r"^(?=[A-Z]+ +- )", done.stderr, flags=re.MULTILINE)
    warnings = "".join(one for one in said if one.startswith("WARNING"))
    for word in (*links, "docs/beside.md", "docs/registry.md"):
        assert re.search(rf"(?:'|- ){re.escape(word)}(?:'|$)", warnings, re.MULTILINE), word
