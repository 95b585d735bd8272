"""Runs of lm-eval, as pytest sees them: each in a child of the zygote, with a deadline and progress."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence

from pytest_kvconform.result import HarnessError
from pytest_kvconform.rigs.context import RunContext
from pytest_kvconform.rigs.processes.child import ChildProcess, ForkRefused, poll
from pytest_kvconform.rigs.processes.cores import Deadline
from pytest_kvconform.rigs.serving.messages import Answers, Job
from pytest_kvconform.rigs.serving.server import Endpoint, require_package

SHOW_S = 5.0  # between two lines about the progress
LOOK_S = 1.0  # between two looks at the servers
WIDTH = 20  # characters of the progress bar
TARGET = "pytest_kvconform.rigs.serving.evaluation:serve"


class Progress:
    """What the user sees while questions are asked: how many were answered, and when it will be over."""

    def __init__(self, context: RunContext, total: int, runs: int):
        """`total`: questions of one run; `runs`: of lm-eval, one after the other."""
        self._context, self._total, self._of_all = context, total, total * runs
        self._done = self._before = 0
        self._began = self._shown = time.monotonic()

    def answered(self, count: int, what: str) -> None:
        """Note how many questions of the current run were answered. `what`: what the run asks."""
        self._done, now = self._before + count, time.monotonic()
        if now - self._shown < SHOW_S or not self._of_all:
            return
        self._shown, part = now, self._done / self._of_all
        left = (now - self._began) * (1 / part - 1) if part else 0.0
        bar = "#" * int(WIDTH * part) + "-" * (WIDTH - int(WIDTH * part))
        self._context.progress(
            f"[{bar}] {count} of {self._total} questions answered by {what}, about {left:.0f} s left"
        )

    def end_of_run(self) -> None:
        """Note that the next run begins."""
        self._before = self._done


def evaluate(
    context: RunContext, job: Job, what: str, watched: Sequence[Endpoint], progress: Progress
) -> Answers:
    """Ask the questions of a job. `what` is asked, in words; `watched`: what has to stay alive meanwhile.

    Raises EngineFailed if a watched process ends or nothing is answered in time, Blocked if a package is not
    installed, and HarnessError if lm-eval fails.
    """
    require_package("lm_eval", "lm-eval[api]")
    try:
        process = ChildProcess(
            context.address, f"lm-eval-{context.next_name()}", TARGET, job, context.deadlines.call
        )
    except ForkRefused as refused:
        raise HarnessError(str(refused)) from None
    # lm-eval ends a request after `request_s`, and the run after some such requests
    quiet_s = 4 * job.request_s + context.deadlines.start
    deadline = Deadline(quiet_s, [process.pid])
    try:
        while True:
            for one in watched:
                one.require_alive()
            if not poll(process.connection, Deadline(LOOK_S)):
                if deadline.over():
                    raise HarnessError(f"lm-eval did nothing for {quiet_s:.0f} s: {_last(process)}")
                continue
            kind, *values = process.connection.recv()
            deadline = Deadline(quiet_s, [process.pid])
            if kind == "answered":
                progress.answered(values[0], what)
            elif kind == "done":
                progress.end_of_run()
                answers: Answers = values[0]
                return answers
            else:
                raise HarnessError(_sentence(process, *values))
    except (EOFError, OSError):
        raise HarnessError(f"lm-eval ended: {_last(process)}") from None
    finally:
        process.end()


def _sentence(process: ChildProcess, kind: str, message: str) -> str:
    text = " ".join(message.split())[:300]
    if os.strerror(errno.ENOSPC) in text:
        return f"lm-eval could not write its data: {text}; free space in {process.log.parent}"
    return f"lm-eval failed: {kind}: {text}"


def _last(process: ChildProcess) -> str:
    return next(reversed(process.exceptions(0)), "") or next(
        reversed(process.last_lines()), "no reason known"
    )
