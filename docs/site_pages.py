"""The hook of mkdocs.yml: pages keep the paths and the links that they have in the repository.

README.md is the first page, and the pages of docs/ are below docs/ on the site, too. So no link is rewritten.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
BESIDE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE")  # what pages link to beside docs/


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Link to the repository that builds the site. With `repo_url` each reader's browser would ask GitHub."""
    if repository := os.environ.get("GITHUB_REPOSITORY"):
        link = f"{os.environ['GITHUB_SERVER_URL']}/{repository}"
        config.extra["social"] = [{"icon": "fontawesome/brands/github", "link": link, "name": "Repository"}]
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Put the pages and drawings of docs/ below docs/, and add the pages beside it."""
    drawings = [file for file in files.media_files() if file.src_uri.endswith(".svg")]
    for file in [*files.documentation_pages(), *drawings]:
        files.remove(file)
        files.append(_file(config, f"docs/{file.src_uri}"))
    for name in BESIDE:
        files.append(_file(config, name))
    return files


def on_page_content(html: str, **_: Any) -> str:
    r"""Write | for \| in tables. GitHub needs the backslash, and Python-Markdown leaves it in code."""
    return re.sub(r"<td>.*?</td>", lambda cell: cell[0].replace(r"\|", "|"), html)


def _file(config: MkDocsConfig, name: str) -> File:
    file = File.generated(config, name, abs_src_path=str(ROOT / name))
    if not Path(name).suffix:
        file.dest_uri += ".txt"  # a browser shows it, and would save a file without an ending
    return file
