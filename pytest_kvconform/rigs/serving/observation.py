"""What the serving rig has seen in one cell."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_kvconform.rigs.serving.messages import Answers, Prompt
from pytest_kvconform.rigs.serving.metrics import Counters


@dataclass(frozen=True)
class Runs:
    """The same questions, asked three times."""

    subject: Answers  # through the router: P prefills, the connector hands over, D decodes
    baselines: tuple[Answers, Answers]  # D alone
    counted: Counters  # what D counted during the subject's run
    counted_alone: tuple[Counters, Counters]  # and during the baseline's runs
    prompts: tuple[Prompt, ...] = ()  # of D's requests in the subject's run; empty for a foreign server
    looks: int = 1  # at which the gate was asked

    def __add__(self, more: Runs) -> Runs:
        """The same with further questions."""
        return Runs(
            joined(self.subject, more.subject),
            (joined(self.baselines[0], more.baselines[0]), joined(self.baselines[1], more.baselines[1])),
            self.counted + more.counted,
            (
                self.counted_alone[0] + more.counted_alone[0],
                self.counted_alone[1] + more.counted_alone[1],
            ),
            self.prompts + more.prompts,
            self.looks + more.looks,
        )


def joined(one: Answers, more: Answers) -> Answers:
    """Answers to other questions of the same data as one."""
    return Answers(
        answers=one.answers + more.answers,
        unanswered=one.unanswered + more.unanswered,
        seconds=one.seconds + more.seconds,
        prompts=one.prompts + more.prompts,
    )


@dataclass(frozen=True)
class ServingObservation:
    """Everything that the cases of a cell judge."""

    data: str  # where the questions come from
    runs: Runs | None = None  # None: the connector kept a run from its end
    failed: str = ""  # in one sentence: how the connector kept it, if it did
    log: tuple[str, ...] = ()  # last lines of the process that failed
    file: str = ""  # of the report, with all answers
