"""Runs whose output the pages show: vLLM's NixlConnector, and the connector of `kvconform new`."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from pytest_kvconform import starter

DOCS = Path(__file__).parent
FIRST = "--kv-family=llama --kv-topology=P1D1 kv::engine/bytes"
BROKEN = "'kv::engine/bytes::attention_kv_arrives[llama-P1D1-partial_hit]'"
RUN_SECONDS = 300  # 20 on two idle cores


def failure(arguments: str) -> str:
    """The failure that a run of vLLM's NixlConnector prints, with the command before it."""
    with tempfile.TemporaryDirectory() as folder:  # this project's pyproject.toml must not apply
        return _run(folder, f"--kv-connector=NixlConnector {arguments}", section)


PARAMS = "kv::protocol/kv_transfer_params::corrupted_params_fail_only_their_request"
FAILURES = {  # name of the part of a page -> the function that makes it
    name: partial(failure, arguments)
    for name, arguments in {
        "failure": "'kv::engine/bytes::sliding_window_is_complete[gemma3-P1D1-n63]'",
        "failure-blocks": "--kv-matrix=full "
        "'kv::bytes/pool::attention_kv_arrives[llama3_1_8b-P1D1.b16x64-hit1]'",
        "failure-params": f"'{PARAMS}[llama3_1_8b-P1D1.b16-missing]'",
    }.items()
}


def first_run(connector_is_right: bool) -> str:
    """What a run on the connector of `kvconform new` prints, as it is written or with the page's mistake."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, starter.write("my_connector", Path(folder))[0])
        if not connector_is_right:
            old, new = re.findall(r"^[-+]( {9}.*\n)", (DOCS / "start.md").read_text("utf-8"), re.MULTILINE)
            file.write_text(new.join(file.read_text("utf-8").split(old)), "utf-8")
        cases, shown = (FIRST, summary) if connector_is_right else (BROKEN, section)
        return _run(folder, f"--kv-connector=my_connector:MyConnector {cases}", shown)


def _run(folder: str, arguments: str, shown: Callable[[str], str]) -> str:
    command = [sys.executable, "-m", "pytest", *shlex.split(arguments), "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=RUN_SECONDS)
    text = shown(done.stdout) or sys.exit(f"{arguments}: {done.returncode}\n{done.stdout}{done.stderr}")
    return f"```console\npytest {arguments}\n```\n\n```text\n{text}\n```"


def summary(output: str) -> str:
    """The lines of a pytest run from the table to the verdict. `...` stands for lines that are left out.

    Whether the line about the accuracy tier is printed depends on what is installed: it is left out.
    """
    match = re.search(r"^=+ KV conformance .*?^CONFORMS[^\n]*", output, re.MULTILINE | re.DOTALL)
    text = re.sub(r"\naccuracy: left out.*", "", match[0]) if match else ""
    return re.sub(r"\nselection: .*", "\n...", f"...\n{text}\n...") if match else ""


def section(output: str) -> str:
    """The lines of a pytest run from `rule` to `report`. `...` stands for the others."""
    match = re.search(r"^rule {7}.*?^report {5}\S+$", output, re.MULTILINE | re.DOTALL)
    return f"...\n{match[0]}\n..." if match else ""
