"""Connectors of all rigs are handed what vLLM builds, but for the differences that are listed with a reason.

One run of a small selection of cases writes down what the connector is handed wherever a rig builds one. Then
vLLM's own code builds the same engines, without a rig (expected.py).
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_kvconform.rigs.vllm_setup import engine_config
from tests.configurations import FOLDER
from tests.configurations.comparison import (
    RIGS,
    ROOT,
    Difference,
    build,
    differing,
    engine_of,
    load_differences,
    read,
)

RUN_S = 400.0
VLLM = Path(importlib.util.find_spec("vllm").origin).parent
NEEDS_KERNELS = set() if any(VLLM.glob("_*C*.so")) else {"engine"}  # as vllm_setup/compat.py tells
QUICK = {
    "family": "llama qwen3_5 kimi_linear kimi_k2_5_eagle3 "
    "llama3_1_8b gemma3_1b gpt_oss_20b qwen3_5_35b_a3b kimi_linear_48b deepseek_v3 kimi_k2_5_eagle3",
    "tier": "interface protocol bytes engine",
    "topology": "P1D2 P1D1 P2D2",
    # at least one case of each rig, and of each way in which one changes a configuration: steps in flight,
    # groups that are not transferred, layouts, both roles, drafts
    "rule": "KV-START-001 KV-LIFE-001 KV-LAYOUT-002 KV-GROUPS-001 KV-ASYNC-001 KV-HOOK-004 KV-BOTH-001 "
    "KV-SPEC-001 KV-PEER-009",
}
FULL = {"matrix": "full", "family": "llama3_1_8b", "rule": "KV-DP-001"}  # data-parallel ranks


@pytest.fixture(scope="module")
def differences(tmp_path_factory: pytest.TempPathFactory) -> list[Difference]:
    """Every field in which what a half of a connector is handed is not what vLLM hands over."""
    place = tmp_path_factory.mktemp("handed")
    (run := place / "run").mkdir()
    for selection in (QUICK, FULL):
        command = [
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "2"),
            "--kv-connector=tests.configurations.recorder:Records",
            "--kv-declare=reference_connector/declaration.toml",
            *(f"--kv-{name}={','.join(words.split())}" for name, words in selection.items()),
            f"--kv-report={place / 'report'}",
        ]
        subprocess.run(command, cwd=ROOT, env=os.environ | {FOLDER: str(run)}, timeout=RUN_S, check=False)
    handed = [one for one in read(run) if one.first_rank and not one.differs_on_purpose]
    assert {one.rig for one in handed} >= set(RIGS.values()) - {"serving"} - NEEDS_KERNELS
    engines = [json.dumps(engine_of(one, place), sort_keys=True) for one in handed]
    of = list(dict.fromkeys(engines))
    built = build([json.loads(engine) for engine in of], place)
    return [
        found
        for one, engine in zip(handed, engines, strict=True)
        for found in differing(one, built[of.index(engine)][one.half])
    ]


def test_only_listed_fields_differ(differences):
    listed = load_differences().fields
    wrong = [one for one in differences if not any(field.excuses(one) for field in listed)]
    assert not wrong, "\n".join(map(str, dict.fromkeys(wrong)))


def test_each_listed_field_differs(differences):
    """A reason that excuses nothing on any minor is not true any more."""
    unused = [field.paths for field in load_differences().fields if not any(map(field.excuses, differences))]
    assert not unused


def test_the_engine_core_asks_its_workers_nothing_else():
    """vLLM's engine core asks for some facts only if a connector of a certain name is configured."""
    source = (VLLM / "v1" / "engine" / "core.py").read_text("utf-8")
    _, source = source.split("def _initialize_kv_caches(", 1)
    source = source.split("\n    def ", 1)[0]
    asked = set(re.findall(r"self\.model_executor\.(\w+)", source))
    assert len(asked) > 2
    assert {name for name in asked if not hasattr(engine_config._Ranks, name)} == set()
