"""Record every call of a connector's scheduler half and its answer, and check what holds for every answer.

An exception of a hook becomes `HookRaised`. An answer that vLLM could not use becomes a `Violation`,
before vLLM's own assertion ends the engine.
"""

from __future__ import annotations

import functools
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pytest_kvconform.result import Violation, repr_of
from pytest_kvconform.rigs.engine.answers import CheckingRecorder
from pytest_kvconform.rigs.history import Call, request_of
from pytest_kvconform.rigs.processes.cores import Deadline
from pytest_kvconform.rigs.scheduler.violations import HookRaised
from pytest_kvconform.rigs.tap import around
from pytest_kvconform.rigs.vllm_setup.hooks import ANSWERS, FINISHED, RECORDED, RECVING


@dataclass(frozen=True)
class Unsure:
    """get_num_new_matched_tokens has answered None for a request, again and again."""

    since: Deadline  # without an end: how long it has done so
    times: int
    step: int  # of the last time


class Recorder(CheckingRecorder):
    """Records every call of one connector, and checks the answers.

    It calls `note(hook)` before each call and `note("")` after it, so that the finding about a process that
    died names the hook.
    """

    def __init__(self, note: Callable[[str], None], side: str, rank: int | None = None):
        """`side`: its name in the timeline of a finding. `rank`: of a worker half."""
        super().__init__(side, rank, timed=RECORDED)
        self.note = note
        self.unsure: dict[str, Unsure] = {}  # by request
        self.first_of_step = ""  # the side counts its steps

    def wrap_hooks(self, connector: Any) -> Any:
        """Wrap every hook that the object has. Returns the object."""
        for hook in RECORDED:
            around(connector, hook, functools.partial(self.record, hook))
        return connector

    def call(self, name: str, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call code of the connector. Raises HookRaised."""
        self.note(name)
        try:
            return super().call(name, hook, *args, **kwargs)
        except Violation:
            raise  # of a hook that it called
        except BaseException as error:  # SystemExit included
            raise HookRaised(name, error) from error
        finally:
            self.note("")

    def last_answer(self) -> str:
        """The connector's last answer about a request, as the end of a sentence; "" without one."""
        answers = (
            f"; the connector's last answer was {repr_of(call.result)} of {call.hook}"
            for call in reversed(self.calls)
            if call.request
        )
        return next(answers, "")

    def _keep(
        self, name: str, args: tuple[Any, ...], arguments: dict[str, Any], result: Any, took: float
    ) -> Any:
        result, request = self.checked(name, args, arguments, result), request_of(args)
        answer = ANSWERS[name](result, args) if name == "update_connector_output" else _kept(result)
        if name == "update_state_after_alloc" or name in FINISHED:
            self.unsure.pop(request, None)
        elif name == "update_connector_output" and answer[RECVING]:
            # The connector may have waited for the end of another load: the time begins anew.
            now = Deadline(math.inf)
            self.unsure = {id: Unsure(now, 0, before.step) for id, before in self.unsure.items()}
        self.calls.append(Call(name, request, self.step, arguments, answer, took))
        if name == "get_num_new_matched_tokens":
            self._note_match(request, result)
        return result

    def _note_match(self, request: str, answer: Any) -> None:
        """Note an answer of get_num_new_matched_tokens in `unsure`."""
        if isinstance(answer, tuple) and answer[:1] == (None,):
            before = self.unsure.get(request, Unsure(Deadline(math.inf), 0, 0))
            self.unsure[request] = Unsure(before.since, before.times + 1, self.step)
        else:
            self.unsure.pop(request, None)


def _kept(result: Any) -> Any:
    """An answer that later changes of the connector cannot reach."""
    try:
        return pickle.loads(pickle.dumps(result))
    except Exception:
        return result
