"""Answers of `kvconform`: their exit codes where nobody reads on, and texts that a terminal would obey."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_kvconform import cli
from tests.report.test_verify import seal
from tests.shards.test_refused_shards import write

OBEYED = "\x1b]0;title\x07\r\x9b2J\u202e"
SHOWN = r"\x1b]0;title\x07\r\x9b2J\u202e"


@pytest.fixture
def reports(tmp_path: Path) -> tuple[Path, Path]:
    """Two reports. The second one has another vLLM, and another case, with a hostile name."""
    paths = [write(str(tmp_path / name)) / "report.json" for name in ("before", "after")]
    raw = json.loads(paths[1].read_bytes())
    raw["environment"] |= {"vllm": OBEYED, OBEYED: "1"}
    raw["results"][0]["id"] = OBEYED
    seal(paths[1], raw)
    return paths[0], paths[1]


def test_diff_shows_what_a_terminal_would_obey(reports, capsys) -> None:
    assert cli.main(["diff", *map(str, reports)]) == 1
    out = capsys.readouterr().out
    assert all(line.isprintable() for line in out.splitlines())
    assert f"{SHOWN}: not installed -> 1\n" in out
    assert f" -> {SHOWN}\n" in out
    [case] = [line for line in out.splitlines() if line.endswith("- -> PASS")]
    assert case.startswith(f"{SHOWN} ")


def test_verify_shows_what_a_terminal_would_obey(reports, capsys) -> None:
    assert cli.main(["verify", str(reports[1])]) == 1
    out = capsys.readouterr().out
    assert SHOWN in out
    assert all(line.isprintable() for line in out.splitlines())


@pytest.mark.parametrize("command", ["diff", "verify"])
def test_the_answer_is_the_same_where_nobody_reads_it(reports, command) -> None:
    """As in `kvconform diff A B | head`, where head is done at once."""
    read, unread = os.pipe()
    os.close(read)
    paths = [str(path) for path in reports] if command == "diff" else [str(reports[1])]
    code = "import sys; from pytest_kvconform import cli; sys.exit(cli.main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, command, *paths],
        stdout=unread,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    os.close(unread)
    assert (done.returncode, done.stderr) == (1, "")
