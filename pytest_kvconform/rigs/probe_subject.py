"""Probe the connector's class before any case runs: start the probe in a child process, and read its facts.

vllm_setup/probe.py runs in the child. If the import of a connector crashes or hangs, only the child ends.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

from pytest_kvconform.result import Blocked, HarnessError, ProcessKilled
from pytest_kvconform.rigs.context import SubjectFacts, transfer_config
from pytest_kvconform.rigs.launch import wait_for_zygote
from pytest_kvconform.rigs.processes import author_hook
from pytest_kvconform.rigs.processes.child import ChildProcess, ForkRefused
from pytest_kvconform.rigs.vllm_setup.compat import reason_not_supported

if TYPE_CHECKING:
    from pytest_kvconform.subject import Subject


class BadSubject(Exception):
    """There is nothing to test under the name that was given.

    The message is one sentence for the connector's author.
    """


def probe_subject(address: str, subject: Subject, deadline_s: float) -> SubjectFacts:
    """Wait for the zygote, then look at the connector's class in a child.

    Raises BadSubject, Blocked or HarnessError.
    """
    top = (subject.module or "").partition(".")[0]
    # A missing module is reported at once, not after vLLM is loaded.
    if top and not _can_be_found(top):
        raise BadSubject(
            f"there is no module {top!r} (looked in the current folder and in this Python's packages)"
        )
    facts = wait_for_zygote(address, deadline_s)
    if reason := reason_not_supported(facts["vllm"]):
        raise Blocked(reason)
    config = transfer_config(subject, "D", facts["device"])
    try:
        process = ChildProcess(
            address, "probe", "pytest_kvconform.rigs.vllm_setup.probe:probe", config, deadline_s
        )
    except ForkRefused as refused:
        raise HarnessError(str(refused)) from None
    try:
        kind, answer = process.receive(30.0)
    except TimeoutError:
        raise BadSubject(f"importing {subject.spec} did not end within 30 s") from None
    except (EOFError, OSError):
        status = process.end(gone=True)
        if status == signal.SIGKILL:
            raise ProcessKilled(f"the process that imports {subject.spec}", process.pid) from None
        how = (
            f" (signal {os.WTERMSIG(status)})"
            if status is not None and status >= 0 and os.WIFSIGNALED(status)
            else ""
        )
        raise BadSubject(f"importing {subject.spec} ended the process{how}") from None
    finally:
        process.end()
    if kind != "ok":
        raise BadSubject(answer)
    if subject.hook:
        _import_hook(address, subject.hook)
    of_vllm: dict[str, Any] = {name: facts[name] for name in ("vllm", "device", "mended", "kernels")}
    # inside another connector what the subject uses of it is not known
    what = subject.stand_in if subject.requires_device and subject.stand_in else "what this suite has"
    stood_in = f"{what} stood in for a GPU's (--kv-stand-in)"
    stands_in = subject.stands_in and facts["device"] == "cpu"
    return SubjectFacts(**answer, **of_vllm, stand_in=stood_in if stands_in else "")


def _can_be_found(package: str) -> bool:
    """Whether Python finds a package, which is not imported: in the current folder, or as it finds others.

    An editable install may have a finder of its own.
    """
    here = importlib.machinery.PathFinder.find_spec(package, [os.getcwd()])
    return here is not None or package in sys.modules or importlib.util.find_spec(package) is not None


def _import_hook(address: str, hook: str) -> None:
    """Import the author's hand-over in a child. Raises BadSubject."""
    try:
        author_hook.require(address, hook)
    except Blocked as blocked:
        raise BadSubject(str(blocked)) from None
