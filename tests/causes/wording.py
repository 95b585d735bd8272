"""Other words for every sentence with which the suite tells what happened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from pytest_kvconform import result
from pytest_kvconform.rigs.engine.handle import EngineFailed

WORDS = ("happened", "differs", "diagnosis", "declined")  # of a finding


def other_words(text: str) -> str:
    """The same letters in another order; "" is no sentence, and stays."""
    return text[::-1]


def _given_other_words(init: Callable[..., None]) -> Callable[..., None]:
    def reworded(self: Any, message: str = "", *more: Any, **named: Any) -> None:
        init(self, other_words(message), *more, **named)

    return reworded


def _violation(self: result.Violation, finding: result.Finding) -> None:
    finding = replace(finding, **{name: other_words(getattr(finding, name)) for name in WORDS})
    Exception.__init__(self, finding.happened)
    self.finding = finding


def _engine_failed(init: Callable[..., None]) -> Callable[..., None]:
    def reworded(self: Any, role: str, how: str, sentence: str, *more: Any, **named: Any) -> None:
        init(self, role, how, other_words(sentence), *more, **named)

    return reworded


def patches() -> list[tuple[type, Callable[..., None]]]:
    """Classes of exceptions whose `__init__` takes sentences, and another `__init__` of each."""
    plain = (result.Blocked, result.NotApplicable, result.HarnessError)
    return [
        *((one, _given_other_words(one.__init__)) for one in plain),
        (result.Violation, _violation),
        (EngineFailed, _engine_failed(EngineFailed.__init__)),
    ]
