"""An engine of a script that fails: the stack tells whose fault that is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pytest_kvconform.result import Blocked, Cell, Violation
from pytest_kvconform.rigs.cluster.scripts.failures import NOT_SHOWN, ended_by
from pytest_kvconform.rigs.engine.handle import EngineFailed

CELL = Cell("llama3_1_8b", "P1D1", "b16")
FACTS = SimpleNamespace(
    file="/src/mine/connector.py", module="mine.connector", name="Mine", supports_hma=True
)
MINE = ("/src/mine/connector.py", 12, "start_load_kv")
VLLM = ("/lib/vllm/v1/core/sched/scheduler.py", 7, "_update_from_kv_xfer_finished")


def ended(how: str, frames: tuple[Any, ...], kind: str = "", message: str = "") -> Exception:
    subject = SimpleNamespace(connector="Mine", module="mine.connector", packages=())
    context: Any = SimpleNamespace(facts=FACTS, subject=subject, missing=[])
    reason = f"{kind}: {message}" if kind else ""
    failed = EngineFailed(
        "P", how, f"P {how} {reason}", frames=frames, reason=reason, kind=kind, message=message
    )
    return ended_by(failed, context, CELL, starting=how == "refused")


@pytest.mark.parametrize(
    ("how", "frames", "kind", "rule", "happened"),
    [
        (
            "raised",
            (MINE, VLLM),
            "KeyError",
            "KV-HOOK-001",
            "start_load_kv raised KeyError: a",
        ),
        ("raised", (VLLM,), "KeyError", "KV-HOOK-003", "vLLM's scheduler of P stopped with KeyError: a"),
        ("died", (MINE,), "", "KV-HOOK-002", "P died "),
        ("hung", (MINE,), "", "KV-HOOK-002", "P hung "),
    ],
)
def test_code_of_the_connector_in_the_stack_is_named(
    how: str, frames: tuple[Any, ...], kind: str, rule: str, happened: str
) -> None:
    error = ended(how, frames, kind, "a")
    assert isinstance(error, Violation) and error.finding.rule == rule
    assert error.finding.happened.startswith(happened) and not error.finding.declined


def test_a_connector_declines_to_start_with_a_reason_and_not_with_an_assertion() -> None:
    frames = (("/src/mine/connector.py", 3, "__init__"),)
    for kind, declined in (("ValueError", "ValueError: no"), ("AssertionError", "")):
        error = ended("refused", frames, kind, "no")
        assert isinstance(error, Violation) and error.finding.rule == "KV-HOOK-001"
        assert error.finding.happened == f"__init__ raised {kind}: no (connector.py:3)"
        assert error.finding.declined == declined


@pytest.mark.parametrize("how", ["died", "hung", "refused"])
def test_nobody_knows_whose_fault_the_rest_is(how: str) -> None:
    error = ended(how, (VLLM,), "OSError", "no memory")
    assert isinstance(error, Blocked) and str(error).endswith(NOT_SHOWN)
