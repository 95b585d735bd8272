"""Completion of `kvconform` in bash: the commands of the page write the script, and bash loads it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from pytest_kvconform import cli, rules

from .pages import PAGES, blocks

[COMMANDS] = blocks(PAGES["docs/start.md"], "sh")
SCRIPT = ".local/share/bash-completion/completions/kvconform"

# What bash does when somebody presses Tab behind the last of its arguments.
ASK = rf"""
source ~/{SCRIPT}
[[ $(complete -p kvconform) =~ -F\ ([^ ]+)\ kvconform$ ]] || exit 3
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
"${{BASH_REMATCH[1]}}" || exit 4
printf '%s\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[str]]:
    """complete(word, ...): what bash offers for the last word, in the home of somebody who did as told."""
    home = tmp_path_factory.mktemp("home")
    (home / "bin").mkdir()
    command = home / "bin" / "kvconform"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m pytest_kvconform.cli "$@"\n')
    command.chmod(0o755)
    (home / "kv-report").mkdir()
    (home / "kv-notes.txt").touch()
    path = f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"HOME": str(home), "PATH": path, "PYTHONPATH": os.pathsep.join(sys.path)}

    def bash(code: str, *words: str) -> str:
        done = subprocess.run(
            ["bash", "--norc", "-e", "-c", code, "bash", *words],
            cwd=home,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    assert bash(COMMANDS) == ""
    return lambda *words: bash(ASK, "kvconform", *words).split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("ma",), {"matrix"}),
        (("matrix", "--sh"), {"--shards"}),
        (("list", "cl"), {"clauses"}),
        (("list", "--matrix", "f"), {"full"}),
        (("explain", "KV-MATCH-00"), {name for name in rules.load() if name.startswith("KV-MATCH-00")}),
        (("html", "kv-"), {"kv-report", "kv-notes.txt"}),
        (("merge", "--report", "kv-"), {"kv-report"}),
    ],
    ids=["command", "option", "choice", "value of an option", "rule", "path", "folder"],
)
def test_bash_offers(complete: Callable[..., list[str]], words: tuple[str, ...], offered: set[str]) -> None:
    found = complete(*words)
    assert set(found) == offered and len(found) == len(offered)


def test_every_command_is_offered(complete: Callable[..., list[str]], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    helped = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("    ")]
    assert {"doctor", "matrix", "completion"} < set(complete("")) <= set(helped)


def test_zsh_gets_a_script_of_its_own(capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["completion", "zsh"]) == 0
    assert capsys.readouterr().out.startswith("#compdef kvconform\n")


def test_another_shell_is_a_wrong_question(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["completion", "csh"])
    assert "csh" in capsys.readouterr().err
