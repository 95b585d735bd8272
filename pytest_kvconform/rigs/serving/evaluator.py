"""Runs of lm-eval, as pytest sees them: each in a child of the zygote, with a deadline and progress."""

from __future__ import annotations

import errno
import math
import os
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from pytest_kvconform.result import Blocked, HarnessError
from pytest_kvconform.rigs.context import RunContext
from pytest_kvconform.rigs.processes.child import ChildProcess, ForkRefused, poll
from pytest_kvconform.rigs.processes.cores import Deadline
from pytest_kvconform.rigs.serving.chain import Chain
from pytest_kvconform.rigs.serving.data import Exam
from pytest_kvconform.rigs.serving.messages import Answers, Job
from pytest_kvconform.rigs.serving.metrics import Unreachable
from pytest_kvconform.rigs.serving.server import Endpoint, answer_seconds, require_packages

AT_ONCE = 4  # questions
REQUEST_TIMES = 2  # times the deadline of a hand-over: a request through a router, beside three others
END_S = 3.0  # for a server to end whose engine core has ended
SHOW_S = 5.0  # between two lines about the progress
LOOK_S = 1.0  # between two looks at the servers
WIDTH = 20  # characters of the progress bar
TARGET = "pytest_kvconform.rigs.serving.evaluation:serve"


class Unanswered(Exception):
    """Questions were not answered. The message is one sentence."""


class Progress:
    """What the user sees while questions are asked: how many were answered, and when it will be over."""

    def __init__(self, context: RunContext, runs: int, looks: int = 1):
        """`runs`: of lm-eval in one look, 0: nothing is shown; `looks`: at most."""
        self._context, self._runs = context, runs
        self._looks, self._look = looks, 1
        self.total = 0  # questions of the current run, as lm-eval asks them
        self.done = self._before = 0  # questions answered, in all runs
        self._began, self._shown = time.monotonic(), -math.inf  # the first answer is shown at once

    def answered(self, count: int, total: int, what: str) -> None:
        """Note how many of the questions of the current run were answered. `what`: what the run asks."""
        self.done, self.total, now = self._before + count, total, time.monotonic()
        if not count or now - self._shown < SHOW_S or not self._runs:
            return
        # Most runs end after the first look. A run that goes on may need all of them.
        of_all = total * self._runs * (1 if self._look == 1 else self._looks)
        self._shown, part = now, self.done / of_all
        left = (now - self._began) * (1 / part - 1) if part else 0.0
        bar = "#" * int(WIDTH * part) + "-" * (WIDTH - int(WIDTH * part))
        about = "about" if self._look == 1 else f"look {self._look} of at most {self._looks}, at most"
        self._context.progress(
            f"[{bar}] {count} of {total} questions answered by {what}, {about} {left:.0f} s left"
        )

    @property
    def done_in_run(self) -> int:
        """Questions answered in the current run."""
        return self.done - self._before

    def end_of_run(self) -> None:
        """Note that the next run begins."""
        self._before = self.done

    def end_of_look(self) -> None:
        """Note that the same questions are asked again."""
        self._look += 1


def new_salt() -> str:
    """A cache_salt that no other run has, on whatever machine."""
    return f"kvconform-{uuid.uuid4()}"


def ask(
    context: RunContext,
    chain: Chain,
    url: str,
    exam: Exam,
    progress: Progress,
    what: str,
    salt: str = "",
    at_once: int = AT_ONCE,
) -> Answers:
    """One run of lm-eval. `what` is asked, in words, `at_once` questions at a time. `salt`: cache_salt of the
    requests; a deployment, and a D with a cache of its own (`chain.own_cache`), get another one for each run.

    Raises EngineFailed if a server ends, and Unanswered if a question was not answered.
    """
    settings = context.settings
    job = Job(
        url=url,
        model=_model(context, chain, url),
        questions=exam.questions,
        at_once=at_once,
        # lm-eval counts all seconds, also those in which a server waits for a core
        request_s=REQUEST_TIMES * context.deadlines.request * context.slow,
        salt=salt or (new_salt() if settings.deployed or chain.own_cache else ""),
        online=settings.asks_hub,
        headers=settings.headers if settings.deployed else {},
    )
    answers = evaluate(context, job, what, chain.processes, progress)
    _require_alive(chain, END_S if answers.unanswered else 0.0)
    if answers.unanswered:
        causes = [cause for one in chain.processes for cause in one.causes()]
        lost, left_out = len(answers.unanswered), progress.total - progress.done_in_run
        raise Unanswered(
            f"{lost} questions to {what} were not answered, the first with {answers.unanswered[0]}"
            + (f"; logged: {causes[0]}" if causes else "")
            + (f"; the other {left_out - lost} were not asked" if left_out > lost else "")
        )
    progress.end_of_run()
    return answers


def evaluate(
    context: RunContext, job: Job, what: str, watched: Sequence[Endpoint], progress: Progress
) -> Answers:
    """Ask the questions of a job. `what` is asked, in words; `watched`: what has to stay alive meanwhile.

    Raises EngineFailed if a watched process ends or nothing is answered in time, Blocked if a package is not
    installed or questions of the hub cannot be asked, and HarnessError if lm-eval fails.
    """
    require_packages("lm_eval")
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
                progress.answered(values[0], values[1], what)
            elif kind == "done":
                answers: Answers = values[0]
                return answers
            else:
                if job.online:
                    raise Blocked(
                        f"{_sentence(process, *values)}; where the hub cannot be reached, give gsm8k's "
                        "files: --kv-gsm8k=PATH"
                    )
                raise HarnessError(_sentence(process, *values))
    except (EOFError, OSError):
        raise HarnessError(f"lm-eval ended: {_last(process)}") from None
    finally:
        process.end()


def _model(context: RunContext, chain: Chain, url: str) -> str:
    """The name of the model at an address. A router need not tell it: D does. Raises Unreachable."""
    if not context.settings.deployed:
        return chain.decode.model()
    try:
        return Endpoint("", url, answer_seconds(context), context.settings.headers).model()
    except Unreachable:
        return chain.decode.model()


def _require_alive(chain: Chain, seconds: float) -> None:
    """Raise EngineFailed if a process of the chain has ended, or ends within `seconds`."""
    deadline = Deadline(seconds)
    while True:
        for one in chain.processes:
            one.require_alive()
        if deadline.over():
            return
        time.sleep(LOOK_S / 10)


def _sentence(process: ChildProcess, kind: str, message: str) -> str:
    text = " ".join(message.split())[:300]
    if os.strerror(errno.ENOSPC) in text:
        return f"lm-eval could not write its data: {text}; free space in {Path(process.address).parent}"
    return f"lm-eval failed: {kind}: {text}"


def _last(process: ChildProcess) -> str:
    return next(reversed(process.exceptions(0)), "") or next(
        reversed(process.last_lines()), "no reason known"
    )
