"""What a worker half reports must stay as it is until the scheduler has read it.

With a step in flight and the worker in the scheduler's process, as vLLM has it on one GPU, the worker makes
step n + 1 before update_from_output of step n (v1/executor/uniproc_executor.py, v1/engine/core.py:
step_with_batch_queue). vLLM copies nothing meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pytest_kvconform.result import Finding, Violation, repr_of

RULE = "KV-ASYNC-001"
USES_ON = (
    "the worker half goes on using a set that it has returned. With a step in flight vLLM reads it after the "
    "next step"
)
FIELDS = ("finished_sending", "finished_recving", "failed_recving", "invalid_block_ids")  # KVConnectorOutput


class Reports:
    """The reports of one worker half, step by step."""

    def __init__(self) -> None:
        self._last: list[tuple[str, Any, frozenset[Any]]] = []  # field, what was returned, what was in it

    def note(self, output: Any) -> None:
        """Note what a step reports, and put copies in the place of its sets: the scheduler half may change
        them in update_connector_output. Raises Violation if the worker half has changed the report before.
        """
        for field, found, before in self._last:
            if set(found) != before:
                happened = (
                    f"a step reported {_words(before)} in {field}, and in the next step this set became "
                    f"{_words(found)}"
                )
                raise Violation(Finding(rule=RULE, happened=happened, diagnosis=USES_ON))
        self._last = []
        for field in FIELDS:
            found = getattr(output, field, None)
            if found and isinstance(found, set | frozenset):  # vLLM's scheduler judges what is none
                self._last.append((field, found, frozenset(found)))
                setattr(output, field, set(found))


def _words(names: Iterable[Any]) -> str:
    return f"[{', '.join(sorted(map(repr_of, names)))}]"
