"""Violations that no case looks for: a hook of the connector raises, or vLLM's scheduler stops."""

from __future__ import annotations

import os
import signal
import traceback
from pathlib import Path

from pytest_kvconform.case_outcome import CaseEnd
from pytest_kvconform.result import Finding, Violation, first_line, message_of
from pytest_kvconform.rigs.cluster.control import shows_connector
from pytest_kvconform.rigs.cluster.scripts.failures import RAISES, RULES_OF_HOOKS
from pytest_kvconform.rigs.context import SubjectFacts
from pytest_kvconform.rigs.processes.hangs import RunningHook
from pytest_kvconform.rigs.processes.logs import text_since
from pytest_kvconform.rigs.processes.stacks import is_hook, last_stacks, place_of_del
from pytest_kvconform.rigs.vllm_setup.hooks import IN_STACKS

# Hooks of an engine's start. One that raises with a message keeps the engine from
# starting: so a connector declines.
START_HOOKS = ("register_kv_caches", "set_xfer_handshake_metadata")
SEVERAL = ("a step ", "the hooks ")  # so begins what is noted where vLLM calls several hooks
NO_ANSWER = "KV-MATCH-006"  # the rule that get_num_new_matched_tokens answers at some time
DECLINING = (NotImplementedError, ValueError)
FRAMES = 6  # of the connector's stack, in a finding
_OURS = str(Path(__file__).parents[2]) + os.sep
_VLLM = f"{os.sep}vllm{os.sep}"


class HookRaised(Violation):
    """A hook of the connector raised `error`. `where` is the innermost line outside this project:
    "connector.py:12".
    """

    def __init__(self, hook: str, error: BaseException):
        self.hook, self.error, self.where = hook, error, location_of(error)
        text, kind = first_line(error, 200), type(error).__name__
        finding = Finding(
            rule=RULES_OF_HOOKS.get(hook, RAISES),
            happened=f"{hook} raised {kind}{f': {text}' if text else ''} ({self.where})",
            diagnosis=f"{hook} raises {kind} ({self.where})",
            log=_stack(error),
            declined=_declined(hook, error),
        )
        super().__init__(finding)


def is_of_suite(error: BaseException) -> bool:
    """Whether code of this project raised an exception, or called what did; vLLM has, if it is in between."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    ours = (file.startswith(_OURS) for file in reversed(files) if file.startswith(_OURS) or _VLLM in file)
    return next(ours, True)


def waited_in_vain(end: CaseEnd, own_reports: bool) -> bool:
    """Whether a case has waited in vain for seconds. `own_reports`: its workers were real."""
    return bool(end.waited_for) or (own_reports and end.finding is not None and end.finding.rule == NO_ANSWER)


def is_in_connector(text: str, hook: str, facts: SubjectFacts) -> bool:
    """Whether a process that hangs is in code of the connector, or in an object's `__del__`.

    `text`: its log, with its stack. `hook`: the hook that it has noted, "": none.
    """
    return bool(hook or place_of_del(text)) or shows_connector(last_stacks(text), facts)


def write_stacks(hook: RunningHook, pid: int, log_from: int, facts: SubjectFacts) -> int:
    """Let the process that is judged write its stack. If this shows no code of the connector, look at the
    case (`pid`), which may step an engine meanwhile, and judge it where its stack does.

    Returns where the log about the judged process begins. `log_from`: where that about the case begins.
    """
    hook.write_stack(pid)
    if not hook.judged() or is_in_connector(text_since(log_from), hook.name(), facts):
        return log_from
    own = os.lseek(2, 0, os.SEEK_END)
    with hook.judging():
        hook.write_stack(pid)
    if not shows_connector(last_stacks(text_since(own)), facts):
        return log_from
    hook.judge()
    return own


def hook_in(text: str, noted: str) -> str:
    """The hook in which a process hangs or has died; "": none. `text`: its log. `noted`: what it has noted.

    Its stack tells which one, if it has noted several at once, or none.
    """
    if noted and not noted.startswith(SEVERAL):
        return noted
    return next((frame[2] for frame in last_stacks(text) if is_hook(frame, IN_STACKS)), noted)


def death_of(status: int) -> str:
    """How a process has ended, by its wait status."""
    if os.WIFSIGNALED(status):
        return f"died of {signal.Signals(os.WTERMSIG(status)).name}"
    return f"ended with exit code {os.WEXITSTATUS(status)}"


def location_of(error: BaseException) -> str:
    """ "connector.py:12": the innermost frame of an exception outside the recorder, which calls the hooks."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.endswith("rigs/scheduler/recorder.py")
    ]
    return f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else "no frame"


def _declined(hook: str, error: BaseException) -> str:
    """The message with which a connector declines to start, or "".

    It does not decline if it raised elsewhere, raised without a message, or failed an assertion.
    """
    message = " ".join(message_of(error).split())
    in_constructor = hook.startswith("__init__") and not isinstance(error, AssertionError)
    if message and (in_constructor or (hook.startswith(START_HOOKS) and isinstance(error, DECLINING))):
        return f"{type(error).__name__}: {message}"
    return ""


def _stack(error: BaseException) -> tuple[str, ...]:
    """The connector's own frames, innermost last."""
    return tuple(
        f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
        for frame in traceback.extract_tb(error.__traceback__)
        if "pytest_kvconform" not in frame.filename
    )[-FRAMES:]
