"""What the serving rig has seen in one cell."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass

from pytest_kvconform.rigs.serving.messages import Answer, Answers, Prompt
from pytest_kvconform.rigs.serving.metrics import Counters


@dataclass(frozen=True)
class Look:
    """The same questions, asked three times."""

    subject: Answers  # through the router: P prefills, the connector hands over, D decodes
    baselines: tuple[Answers, Answers]  # D alone, or a server without the connector
    counted: Counters  # what D counted during the subject's run
    counted_alone: tuple[Counters, Counters]  # and the baseline during its runs
    prompts: tuple[Prompt, ...] = ()  # of D's requests in the subject's run; empty for a foreign server


@dataclass(frozen=True)
class Runs:
    """All looks at the same questions, one or more."""

    looks: tuple[Look, ...]
    block: int = 0  # tokens of a block of D; 0: D does not tell

    @property
    def questions(self) -> int:
        """How many questions there are, each asked in every look."""
        return len(self.looks[0].subject.answers)

    @property
    def subject(self) -> tuple[Answer, ...]:
        """The subject's answers in all looks."""
        return tuple(answer for look in self.looks for answer in look.subject.answers)

    @property
    def baselines(self) -> tuple[tuple[Answer, ...], tuple[Answer, ...]]:
        """The baseline's answers in all looks, of the first and the second runs."""
        first = (answer for look in self.looks for answer in look.baselines[0].answers)
        second = (answer for look in self.looks for answer in look.baselines[1].answers)
        return tuple(first), tuple(second)

    @property
    def counted(self) -> Counters:
        """What D counted while the subject was asked."""
        return functools.reduce(operator.add, (look.counted for look in self.looks))

    @property
    def counted_alone(self) -> Counters:
        """What the baseline counted while it was asked."""
        return functools.reduce(operator.add, (one for look in self.looks for one in look.counted_alone))

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """D's requests in the subject's runs; empty for a foreign server."""
        return tuple(prompt for look in self.looks for prompt in look.prompts)


@dataclass(frozen=True)
class ServingObservation:
    """Everything that the cases of a cell judge."""

    data: str  # where the questions come from
    runs: Runs | None = None  # None: the connector kept a run from its end
    failed: str = ""  # in one sentence: how the connector kept it, if it did
    refusal: str = ""  # why a server refused to start, if it ended cleanly because of the connector
    log: tuple[str, ...] = ()  # last lines of the process that failed
    file: str = ""  # of the report, with all answers
