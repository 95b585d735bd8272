"""What the serving rig has seen in one cell."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from dataclasses import dataclass

from pytest_kvconform.rigs.canary.oracle import Compared
from pytest_kvconform.rigs.serving.gate import alpha
from pytest_kvconform.rigs.serving.messages import Answer, Answers, Prompt
from pytest_kvconform.rigs.serving.metrics import Counters, added


@dataclass(frozen=True)
class Look:
    """The same questions, asked three times."""

    subject: Answers  # through the router: P prefills, the connector hands over, D decodes
    baselines: tuple[Answers, Answers]  # D alone, or a server without the connector
    counted: Counters  # what D counted during the subject's run
    counted_alone: tuple[Counters, Counters]  # and the baseline during its runs
    prompts: tuple[Prompt, ...] = ()  # of D's requests in the subject's run; empty for a foreign server
    moved_by_p: dict[str, int] | None = None  # P's own metrics of bytes in that run; None: P is not known
    in_turn: bool = False  # one question was asked after the other

    @property
    def has_skipped(self) -> bool:
        """Whether D has loaded nothing of a prompt, and something of one that is no longer."""
        loaded = [one.prompt for one in self.prompts if one.external]
        return any(not one.external and one.prompt >= min(loaded) for one in self.prompts if loaded)


@dataclass(frozen=True)
class Repeated:
    """One question whose answer was odd, and which was asked again: alone, or of the control."""

    question: int
    tokens: int  # of its prompt
    subject: tuple[str, ...]  # answers, that of the first look among them
    baseline: tuple[str, ...]  # twice as many
    p: float  # see `gate.compare_one_question`
    # of an answer that stays odd: those of D alone and after a right hand-over, without the connector
    control: Compared | None = None

    @property
    def odd(self) -> str:
        """The first answer of the subject that differs from those of the baseline."""
        return next((text for text in self.subject if text not in self.baseline), self.subject[0])

    @property
    def is_odd(self) -> bool:
        """Whether chance does not give so many odd answers of the subject."""
        return self.p <= alpha()

    @property
    def is_wrong(self) -> bool:
        """Whether the odd answers are the connector's: after a right hand-over D answers as the baseline."""
        if self.control is None:
            return False
        return len({*self.baseline, *self.control.alone, *self.control.handed_over}) == 1


@dataclass(frozen=True)
class Runs:
    """All looks at the same questions, one or more."""

    looks: tuple[Look, ...]
    block: int  # tokens of a block of D
    probed: tuple[Prompt, ...] = ()  # D's requests of a store that were made right after those of P
    repeated: tuple[Repeated, ...] = ()  # questions that were odd, and were asked again

    @property
    def wrong(self) -> tuple[Repeated, ...]:
        """The questions whose answers the connector changes each time."""
        return tuple(one for one in self.repeated if one.is_wrong)

    @property
    def rounded(self) -> set[int]:
        """The questions whose answers change without the connector, too: they show nothing."""
        return {one.question for one in self.repeated if one.control is not None and not one.is_wrong}

    @property
    def loaded(self) -> bool:
        """Whether D loaded something of what P had. A D that saves to a store may find its own KV there."""
        if self.probed:
            return any(one.external for one in self.probed)
        return self.counted.external > 0

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
    def moved(self) -> dict[str, int]:
        """The connector's own metrics of bytes, of D and P together: a push is counted by P."""
        sides = (side for look in self.looks for side in (look.counted.moved, look.moved_by_p or {}))
        return functools.reduce(added, sides)

    @property
    def speculates(self) -> bool:
        """Whether D drafts tokens. vLLM counts them of each engine that speculates, see `Counters`."""
        return bool(self.counted.drafted or self.counted_alone.drafted)

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """D's requests in the subject's runs; empty for a foreign server."""
        return tuple(prompt for look in self.looks for prompt in look.prompts)

    @property
    def prompts_in_turn(self) -> tuple[Prompt, ...]:
        """D's requests of the looks that asked one question after the other, or of all if there are none: a
        connector may let D compute prompts while it loads others.
        """
        looks = [look for look in self.looks if look.in_turn] or self.looks
        return tuple(prompt for look in looks for prompt in look.prompts)


@dataclass(frozen=True)
class ServingObservation:
    """Everything that the cases of a cell judge."""

    data: str  # where the questions come from
    model: str = ""  # what answered, where it is a real checkpoint that is served here
    runs: Runs | None = None  # None: the connector kept a run from its end
    failed: str = ""  # in one sentence: how the connector kept it, if it did
    refusal: str = ""  # why a server refused to start, if it ended cleanly because of the connector
    log: tuple[str, ...] = ()  # last lines of the process that failed
    file: str = ""  # of the report, with all answers


def some_of(questions: Iterable[int]) -> str:
    """The first ten questions, in words."""
    numbers = sorted(questions)
    more = f" and {len(numbers) - 10} more" if len(numbers) > 10 else ""
    return ", ".join(map(str, numbers[:10])) + more
