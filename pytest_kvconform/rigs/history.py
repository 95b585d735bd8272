"""The history of one half of a connector: what vLLM asked of it, and what it answered.

A `Recorder` wraps every hook of a half once. `vllm_setup/hooks.py` says, hook by hook, what is kept of the
arguments and of the answer. The last calls are kept as texts as well, for the timeline of a finding.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from pytest_kvconform.case_outcome import MOST_CALLS
from pytest_kvconform.result import Violation
from pytest_kvconform.rigs.hook_calls import LastCalls, raised, short
from pytest_kvconform.rigs.processes.cores import core_waits, lost, own_core_wait
from pytest_kvconform.rigs.tap import around, unwrap
from pytest_kvconform.rigs.vllm_setup.hooks import ANSWERS, ARGUMENTS, BOTH, HOOKS, SCHEDULER, WORKER
from pytest_kvconform.rigs.vllm_setup.worker import worker_half

# the first hook of a step in each half
FIRST = {SCHEDULER: "build_connector_meta", WORKER: "bind_connector_metadata"}


@dataclass(frozen=True)
class Call:
    """One call of a hook that returned."""

    hook: str
    request: str  # id of the request it is about; "": none
    step: int  # number of the engine's step, from 1; 0: before the first
    arguments: dict[str, Any]  # before the call, see hooks.ARGUMENTS
    result: Any  # the answer, see hooks.ANSWERS
    seconds: float = 0.0  # without those in which the thread waited for a core; of timed hooks


@dataclass(frozen=True)
class History:
    """What one half of a connector has done since its engine was built."""

    calls: tuple[Call, ...] = ()  # those whose arguments or answer say something
    counts: Mapping[str, int] = field(default_factory=dict)  # hook -> all its calls
    steps: Mapping[str, int] = field(default_factory=dict)  # hook -> steps in which vLLM has called it
    # timed hook -> float64 [call, (start, seconds, others)]; start: of the monotonic clock; seconds: without
    # those in which the thread waited for a core; others: in which another thread of the process waited for
    # one, perhaps while it held a lock that the call needed
    times: Mapping[str, np.ndarray] = field(default_factory=dict)
    rank: int = 0  # of a worker half

    def of(self, hook: str) -> tuple[Call, ...]:
        """The calls of a hook, those that say something, in order."""
        return tuple(call for call in self.calls if call.hook == hook)

    def naming(self, hook: str, where: str, request: str) -> tuple[Call, ...]:
        """The calls of a hook whose answer names a request in a field, such as "finished_sending"."""
        return tuple(call for call in self.of(hook) if request in call.result[where])

    @property
    def idle_steps(self) -> int:
        """Steps of a worker half without a token to compute: in others each layer waits for its load
        (model_executor/layers/attention/kv_transfer_utils.py).
        """
        return self.steps.get(FIRST[WORKER], 0) - self.steps.get("wait_for_layer_load", 0)

    def since(self, before: History) -> History:
        """What it has done since an earlier look at it."""
        return replace(
            self,
            calls=self.calls[len(before.calls) :],
            counts=_more(self.counts, before.counts),
            steps=_more(self.steps, before.steps),
            times={hook: every[len(before.times.get(hook, ())) :] for hook, every in self.times.items()},
        )

    def longest(self, hook: str, first: float, end: float) -> tuple[float, float] | None:
        """Of the calls of a timed hook that began in [first, end): the seconds of the longest, and the most
        that is left of one without the waits of others. None if there was none.
        """
        every = self.times.get(hook, np.empty((0, 3)))
        _, seconds, others = every[(every[:, 0] >= first) & (every[:, 0] < end)].T
        return (max(seconds.tolist()), max((seconds - others).tolist())) if len(seconds) else None


def _more(counts: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    return {hook: count - before.get(hook, 0) for hook, count in counts.items()}


class Recorder:
    """Records the calls of one half of a connector. Arguments and answers are passed on unchanged."""

    def __init__(
        self, side: str, rank: int | None = None, most: int = MOST_CALLS, timed: Collection[str] = ()
    ):
        """`side`: name of the engine. `rank` None: scheduler half. `most`: texts of calls that are kept.

        `timed`: hooks whose durations are kept.
        """
        self.last, self.rank, self.timed = LastCalls(side, rank, most), rank, timed
        self.first_of_step = FIRST[SCHEDULER if rank is None else WORKER]
        self.step, self.calls = 0, list[Call]()
        # request -> tokens of its prompt that the engine's own prefix cache had when vLLM last asked
        # get_num_new_matched_tokens. vLLM's prefill_stats have the number of the first schedule alone, and a
        # request that was preempted may load again.
        self.local_hits: dict[str, int] = {}
        self.listeners: dict[str, Callable[[Call], None]] = {}  # hook -> is told of each call that is kept
        self.counts, self.steps = Counter[str](), Counter[str]()
        self._called_in: dict[str, int] = {}  # hook -> the last step in which vLLM has called it
        self.times: defaultdict[str, list[tuple[float, float, float]]] = defaultdict(list)
        self._inside = threading.local()

    def watch(self, connector: Any) -> None:
        """Record the calls of the hooks of this half from now on. Its shutdown unwraps all hooks."""
        half = SCHEDULER if self.rank is None else WORKER
        for hook in HOOKS:
            if hook.in_stacks and hook.half in (half, BOTH):
                around(connector, hook.name, partial(self.record, hook.name))
        around(connector, "shutdown", partial(_shut_down, connector))

    def history(self) -> History:
        """What was recorded so far."""
        times = {hook: np.array(every, dtype=np.float64) for hook, every in self.times.items()}
        return History(tuple(self.calls), dict(self.counts), dict(self.steps), times, self.rank or 0)

    def forget(self) -> None:
        """Forget what was recorded."""
        for records in (self.calls, self.counts, self.steps, self.times, self.local_hits):
            records.clear()

    def call(self, name: str, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call code of the connector, and keep its name and answer as texts."""
        began, answer = time.time(), ""
        try:
            result = hook(*args, **kwargs)
            # what a connector keeps is its own, and may be secret
            answer = "" if name.startswith("__init__") else short(result)
            return result
        except Violation:
            raise  # of a hook that it called
        except BaseException as error:
            answer = raised(error)
            raise
        finally:
            self.last.note(began, name, args, answer)

    def record(self, name: str, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a hook of the connector as vLLM does, and record the call."""
        # a hook of the base class may call another one: the outermost is vLLM's call
        if getattr(self._inside, "hook", ""):
            return hook(*args, **kwargs)
        self.counts[name] += 1
        self.step += name == self.first_of_step
        self.steps[name] += self._called_in.get(name) != self.step
        self._called_in[name] = self.step
        arguments, took = self._arguments(name, [*args, *kwargs.values()]), 0.0
        timer = Timer(others=self.rank is not None) if name in self.timed else None
        self._inside.hook = name
        try:
            result = self.call(name, hook, *args, **kwargs)
        finally:
            self._inside.hook = ""
            if timer:
                self.times[name].append(timer.took())
                took = self.times[name][-1][1]
        return self._keep(name, args, arguments, result, took)

    def _arguments(self, name: str, values: list[Any]) -> dict[str, Any]:
        if name == "get_num_new_matched_tokens":
            self.local_hits[values[0].request_id] = values[1]
        return ARGUMENTS[name](*values) if name in ARGUMENTS else {}

    def _keep(
        self, name: str, args: tuple[Any, ...], arguments: dict[str, Any], result: Any, took: float
    ) -> Any:
        """Keep a call that says something. Returns the answer that vLLM gets."""
        try:
            answer = ANSWERS[name](result, args) if name in ANSWERS else None
        except Exception:  # vLLM itself raises at an answer that it cannot use
            return result
        if says_something(arguments) or says_something(answer):
            self.calls.append(call := Call(name, request_of(args), self.step, arguments, answer, took))
            if listener := self.listeners.get(name):
                listener(call)
        return result


def request_of(args: tuple[Any, ...]) -> str:
    """The id of the request that a call is about; "": none."""
    return getattr(args[0], "request_id", "") if args else ""


def says_something(kept: Any) -> bool:
    """Whether what is kept of arguments or of an answer is not empty."""
    return any(kept.values()) if isinstance(kept, dict) else bool(kept)


class Timer:
    """How long a call takes, from now on. `others`: the waits of other threads count, too."""

    def __init__(self, others: bool):
        self._others = _waits_of_others() if others else None
        self._began, self._waited = time.monotonic(), own_core_wait()

    def took(self) -> tuple[float, float, float]:
        """Its start, its seconds, and those of others, see `History.times`."""
        seconds = time.monotonic() - self._began - (own_core_wait() - self._waited)
        others = lost(self._others, _waits_of_others()) if self._others is not None else 0.0
        return self._began, seconds, others


def _waits_of_others() -> dict[int, dict[str, float]]:
    """Seconds that each thread of this process but the caller's has waited for a core."""
    waits = core_waits([os.getpid()])
    waits[os.getpid()].pop(str(threading.get_native_id()), None)
    return waits


def _shut_down(connector: Any, hook: Callable[[], None]) -> None:
    try:
        hook()
    finally:
        unwrap(connector)


# ---- in the ranks: vLLM passes the worker ------------------------------------------------------------------


def watch_rank(worker: Any, side: str, most: int, timed: Collection[str]) -> None:
    """Record the calls of the worker half of this rank."""
    worker.recorder = Recorder(side, worker.rank, most, timed)
    worker.recorder.watch(worker_half())


def history_of_rank(worker: Any) -> History:
    """What the worker half of this rank has done."""
    history: History = worker.recorder.history()
    return history
