"""The gate: answers of the subject against two baseline runs of the same questions, paired by question.

Pure functions. Both tests are exact, and compare a question with itself alone: hard and easy questions may
differ as they like.

- **Generations.** A right hand-over changes nothing but rounding, and two runs of the baseline show what
  rounding changes. If the subject is no worse than them, its answer to a question and the two of the baseline
  can be exchanged: an answer that differs from two equal ones is the subject's in one of three cases. So the
  number of questions whose odd answer is the subject's has a binomial distribution with probability 1/3.
- **Correctness.** McNemar's exact test: of the questions that one of subject and baseline answers right, the
  subject has lost at most half, except by chance.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pytest_kvconform.rigs.serving.messages import Answer

ALPHA = 0.01  # probability with which a test fails a right connector whose servers have much noise
UNSURE = 0.2  # above this p-value a difference is what chance gives
ODD = 1 / 3  # probability that of three exchangeable answers the odd one is the subject's
SHARE = 0.05  # of requests: a corruption of more of them is excluded by a pass
SURE = 0.95  # with this probability
LOOKS = 8  # times at which the gate is asked, with more questions each time


class Outcome(enum.Enum):
    """What a test tells."""

    PASS = "pass"
    FAIL = "fail"
    UNSURE = "too few questions to tell"


@dataclass(frozen=True)
class Result:
    """The result of one test."""

    outcome: Outcome
    p: float  # probability of at least such a difference, if the subject is no worse than the baseline
    worse: int  # questions that tell against the subject
    better: int  # questions that tell against the baseline
    questions: int
    needed: int = 0  # questions with which the test could tell; 0: it can


def alpha(looks: int = LOOKS) -> float:
    """The level of one look, if the gate is asked several times."""
    return ALPHA / looks


def least_differences(looks: int = LOOKS) -> int:
    """The fewest odd answers of the subject, with none of the baseline, that fail."""
    return math.ceil(math.log(alpha(looks)) / math.log(ODD))


def least_questions() -> int:
    """The fewest questions with which a pass excludes a corruption of SHARE of the requests."""
    return math.ceil(math.log(1 - SURE) / math.log(1 - SHARE))


def compare_generations(
    subject: Mapping[int, str], first: Mapping[int, str], second: Mapping[int, str], looks: int = LOOKS
) -> Result:
    """Compare texts by question. `first` and `second`: of the baseline. All have the same questions."""
    worse = better = 0
    for question, text in subject.items():
        one, other = first[question], second[question]
        worse += text != one and one == other
        better += (text == one) != (text == other)
    p, count = _binomial(worse, worse + better, ODD), len(subject)
    if p <= alpha(looks):
        return Result(Outcome.FAIL, p, worse, better, count)
    if worse and p <= UNSURE:
        needed = math.ceil(count * least_differences(looks) / worse)
        return Result(Outcome.UNSURE, p, worse, better, count, max(needed, count + 1))
    if count < least_questions():
        return Result(Outcome.UNSURE, p, worse, better, count, least_questions())
    return Result(Outcome.PASS, p, worse, better, count)


def compare_correctness(subject: Mapping[int, bool], baseline: Mapping[int, bool]) -> Result:
    """McNemar's exact test, one-sided. Both have the same questions: whether each was answered right."""
    lost = sum(baseline[question] and not right for question, right in subject.items())
    won = sum(right and not baseline[question] for question, right in subject.items())
    p, count, right = _binomial(lost, lost + won, 0.5), len(subject), sum(baseline.values())
    if p <= ALPHA:
        return Result(Outcome.FAIL, p, lost, won, count)
    # so many lost questions fail, if none is won
    least = math.ceil(math.log(ALPHA) / math.log(0.5))
    if right < least:
        # A subject that answers nothing right would pass: the baseline answers too little right.
        needed = math.ceil(least * count / right) if right else 0
        return Result(Outcome.UNSURE, p, lost, won, count, needed)
    return Result(Outcome.PASS, p, lost, won, count)


def compare_acceptance(subject: tuple[int, int], baseline: tuple[int, int]) -> Result:
    """Fisher's exact test, one-sided, of (accepted, drafted) tokens: whether fewer are accepted."""
    from scipy.stats import fisher_exact

    (accepted, drafted), (before, of) = subject, baseline
    table = [[accepted, drafted - accepted], [before, of - before]]
    p, lost = float(fisher_exact(table, alternative="less").pvalue), drafted - accepted
    best = float(fisher_exact([[0, drafted], table[1]], alternative="less").pvalue)
    if p <= ALPHA:
        return Result(Outcome.FAIL, p, lost, of - before, drafted)
    # a subject whose every draft is refused would pass
    return Result(Outcome.PASS if best <= ALPHA else Outcome.UNSURE, p, lost, of - before, drafted)


def wants_more(result: Result) -> bool:
    """Whether more questions should be asked before the answers are judged."""
    return result.outcome is not Outcome.FAIL and (result.worse > 0 or result.outcome is Outcome.UNSURE)


def same_rate(one: Mapping[int, str], other: Mapping[int, str]) -> float:
    """The part of the questions with equal texts."""
    return sum(text == other[question] for question, text in one.items()) / max(1, len(one))


def texts(answers: Sequence[Answer]) -> dict[int, str]:
    """Question -> text."""
    return {one.question: one.text for one in answers}


def right(answers: Sequence[Answer], strict: bool) -> dict[int, bool]:
    """Question -> whether the answer is right, by strict-match or by flexible-extract."""
    return {one.question: one.strict if strict else one.flexible for one in answers}


def _binomial(hits: int, trials: int, probability: float) -> float:
    """The probability of at least `hits` in `trials`."""
    if not trials:
        return 1.0
    from scipy.stats import binomtest

    return float(binomtest(hits, trials, probability, alternative="greater").pvalue)
