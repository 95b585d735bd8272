"""vLLM's scheduler has stopped at what the connector answered or reported: the finding."""

from __future__ import annotations

import os
import traceback
from types import FrameType

from pytest_kvconform.result import Finding, Violation, first_line
from pytest_kvconform.rigs.processes.stacks import is_hook, stack_of
from pytest_kvconform.rigs.vllm_setup.answers import hook_of
from pytest_kvconform.rigs.vllm_setup.hooks import IN_STACKS

STOPS = "KV-HOOK-003"
# A line of vLLM's scheduler that asserts something -> what the connector did most likely.
ASSERTED = {
    "assert req_id in self.requests": "the workers report a request that vLLM has freed: each request is "
    "reported once, and an aborted load as received or as sent, not as both"
}
_VLLM = f"{os.sep}vllm{os.sep}"


class SchedulerStopped(Violation):
    """vLLM's scheduler raised `error`, by itself or since an object of the connector did that it called.

    `side`: name of the side; `last`: the connector's last answer, as text.
    """

    def __init__(self, side: str, error: BaseException, last: str = ""):
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = first_line(error, 160) or frame.line
        where = f"{frame.filename.rpartition('/')[2]}:{frame.lineno} in {frame.name}"
        kind, called = type(error).__name__, _called_object(error)
        likely = ASSERTED.get(frame.line or "", "") if isinstance(error, AssertionError) else ""
        if called:
            last, likely = f", when it called {called}", f"{called} raises {kind}"
        happened = f"vLLM's scheduler of {side} stopped with {kind}: {text} ({where}){last}"
        super().__init__(Finding(rule=STOPS, happened=happened, diagnosis=likely))


def is_of_an_object(error: Exception) -> bool:
    """Whether an object that a hook has returned raised an exception when vLLM called it."""
    called = _called(error)
    in_a_hook = any(is_hook(frame, IN_STACKS) for frame in stack_of(error))
    return called is not None and bool(hook_of(called.f_locals["self"])) and not in_a_hook


def _called(error: BaseException) -> FrameType | None:
    """The call of a method by vLLM that raised; None: vLLM raised itself, or in a function."""
    step, called = error.__traceback__, None
    while step is not None:
        called = None if _VLLM in step.tb_frame.f_code.co_filename else called or step.tb_frame
        step = step.tb_next
    return called if called is not None and called.f_locals.get("self") is not None else None


def _called_object(error: BaseException) -> str:
    """The method of an object of the connector that vLLM called, and that raised, in words; "": none."""
    if (called := _called(error)) is None:
        return ""
    owner = called.f_locals["self"]
    hook = hook_of(owner)
    of = f" that {hook} has returned" if hook else ""
    return f"{called.f_code.co_name} of the {type(owner).__name__}{of}"
