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


@dataclass(frozen=True)
class ServingObservation:
    """Everything that the cases of a cell judge."""

    data: str  # where the questions come from
    runs: Runs | None = None  # None: the connector kept a run from its end
    failed: str = ""  # in one sentence: how the connector kept it, if it did
    log: tuple[str, ...] = ()  # last lines of the process that failed
    foreign: bool = False  # the servers are a deployment of the user
