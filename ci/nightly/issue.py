"""Open or update one issue of this repository when a nightly run is red, or when outcomes changed.

    python ci/nightly/issue.py BEFORE AFTER [--kvconform COMMAND]      folders of reports

BEFORE is the report of the last night, and may be missing. AFTER takes its place. GitHub's own command `gh`
writes the issue, where GH_TOKEN is set; RUN_URL is the address of the run. Elsewhere the text is printed and
no issue is written. Exit 1: the run is red.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

TITLE = "vLLM's main: the suite's nightly run"
GREEN = ("CONFORMS", "CONFORMS-EXCEPT")
LINES = 100  # of the diff, in an issue; all of them are in the log of the run


class Night(NamedTuple):
    """What one night found."""

    red: bool
    changed: bool
    text: str  # in Markdown


def night(before: Path, after: Path, kvconform: str) -> Night:
    """Compare the report of this night with that of the last one."""
    try:
        report = json.loads((after / "report.json").read_bytes())
        verdict, vllm = report["verdict"], report["environment"]["vllm"]
    except (OSError, ValueError, KeyError) as error:
        return Night(
            True, False, f"There is no report of this night: the set-up or pytest failed ({error!r})."
        )
    red = verdict["word"] not in GREEN
    text = f"vLLM {vllm}: **{verdict['word']}**. {verdict['sentence']}"
    if not (before / "report.json").exists():
        return Night(red, False, f"{text}\n\nThere is no report of the last night to compare with.")
    command = [kvconform, "diff", str(before), str(after)]
    diff = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = (diff.stdout + diff.stderr).splitlines()
    if len(lines) > LINES:
        lines = [*lines[: LINES - 1], f"and {len(lines) - LINES} more lines", lines[-1]]
    shown = "\n".join(lines)
    return Night(red, diff.returncode != 0, f"{text}\n\n```text\n{shown}\n```")


def tell(text: str) -> None:
    """Comment on the open issue of this title, or open one."""
    listed = _gh("issue", "list", "--state", "open", "--limit", "500", "--json", "number,title")
    numbers = [str(issue["number"]) for issue in json.loads(listed) if issue["title"] == TITLE]
    if numbers:
        _gh("issue", "comment", numbers[0], "--body-file", "-", text=text)
    else:
        _gh("issue", "create", "--title", TITLE, "--body-file", "-", text=text)


def _gh(*arguments: str, text: str = "") -> str:
    return subprocess.run(
        ["gh", *arguments], input=text, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--kvconform", default="kvconform")
    options = parser.parse_args()
    found = night(options.before, options.after, options.kvconform)
    print(found.text)
    if (options.after / "report.json").exists():
        options.before.mkdir(parents=True, exist_ok=True)
        shutil.copy(options.after / "report.json", options.before)
    if (found.red or found.changed) and os.environ.get("GH_TOKEN"):
        tell("\n\n".join(filter(None, [found.text, os.environ.get("RUN_URL")])))
    return 1 if found.red else 0


if __name__ == "__main__":
    sys.exit(main())
