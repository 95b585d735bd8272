"""The gate: answers of the subject against two baseline runs of the same questions, paired by question.

Pure functions. All tests are exact, and compare a question with itself alone: hard and easy questions may
differ as they like.

- **Generations.** A right hand-over changes nothing but rounding, and two runs of the baseline show what
  rounding changes. If the subject is no worse than them, its answer to a question and the two of the baseline
  can be exchanged: an answer that differs from two equal ones is the subject's in one of three cases. So the
  number of questions whose odd answer is the subject's has a binomial distribution with probability 1/3.
- **One question.** The subject's answer to a question may be odd each time it is asked, while the baseline's
  are equal. Fisher's exact test has the probability of that, if all answers to the question can be exchanged.
- **Correctness.** McNemar's exact test: of the questions that one of subject and baseline answers right, the
  subject has lost at most half, except by chance.

The same questions can be asked several times, in several looks. Rounding may tip the same answer each time,
since D computes the last token of a prompt alone after a hand-over, and with the whole prompt otherwise. So a
question counts once in the tests of all questions, whatever the number of looks. The more looks, the less
likely is it that a right subject has the odd answer: both baselines have to agree in all of them. In the test
of one question each of its answers counts, and whoever uses it has to exclude that rounding tips them: see
`again`.

A mapping has the answers of all looks. Its keys are those of `messages.Answer`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pytest_kvconform.rigs.serving.messages import AGAIN, Answer

ALPHA = 0.01  # probability with which a test fails a right connector whose servers have much noise
UNSURE = 0.05  # above this p-value a difference is what chance gives
ODD = 1 / 3  # probability that of three exchangeable answers the odd one is the subject's
HALF = 0.5  # probability that of two exchangeable answers the wrong one is the subject's
SHARE = 0.05  # of requests: a corruption of more of them is excluded by a pass
SURE = 0.95  # with this probability
LOOKS = 8  # times at which the gate is asked: the same questions once more each time
AGAIN_ALONE = 7  # times that an odd question of the first look is asked again

Told = TypeVar("Told", str, bool)  # what is compared of an answer


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
    """The level of one look, if the gate is asked several times, and of the two tests of one question: asked
    alone, and in all looks.
    """
    return ALPHA / (looks + 2)


def least_differences(looks: int = LOOKS) -> int:
    """The fewest odd answers of the subject, with none of the baseline, that fail."""
    return math.ceil(math.log(alpha(looks)) / math.log(ODD))


def least_lost(looks: int = LOOKS) -> int:
    """The fewest lost questions, with none won, that fail."""
    return math.ceil(math.log(alpha(looks)) / math.log(HALF))


def least_questions() -> int:
    """The fewest questions with which a pass excludes a corruption of SHARE of the requests."""
    return math.ceil(math.log(1 - SURE) / math.log(1 - SHARE))


def compare_generations(
    subject: Mapping[int, str], first: Mapping[int, str], second: Mapping[int, str], looks: int = LOOKS
) -> Result:
    """Compare texts by question. `first` and `second`: of the baseline. All have the same keys.

    Only a question to which the baseline gives one answer in each look can show that the subject's is odd.
    """
    noisy = {key % AGAIN for key, text in first.items() if text != second[key]}
    odd = odd_questions(subject, first, second)
    # of two different answers of the baseline, the subject has one: the other is the odd one
    odd_alone = {
        key % AGAIN for key, text in subject.items() if (text == first[key]) != (text == second[key])
    }
    asked = questions_of(subject)
    told, worse, better = len(asked) - len(noisy), len(odd), len(odd_alone)
    p, count = _binomial(worse, worse + better, ODD), len(asked)
    if p <= alpha(looks):
        return Result(Outcome.FAIL, p, worse, better, count)
    if worse and p <= UNSURE:
        needed = _needed(worse, worse + better, ODD, count, looks)
        return Result(Outcome.UNSURE, p, worse, better, count, needed)
    if told < least_questions():
        needed = math.ceil(least_questions() * count / told) if told else 0
        return Result(Outcome.UNSURE, p, worse, better, count, needed)
    return Result(Outcome.PASS, p, worse, better, count)


def odd_questions(
    subject: Mapping[int, str], first: Mapping[int, str], second: Mapping[int, str]
) -> tuple[int, ...]:
    """The questions to which an answer of the subject differs from those of the baseline, which are equal in
    each look.
    """
    noisy = {key % AGAIN for key, text in first.items() if text != second[key]}
    return tuple(sorted({key % AGAIN for key, text in subject.items() if text != first[key]} - noisy))


def compare_one_question(subject: Sequence[str], baseline: Sequence[str], questions: int) -> float:
    """Return the probability that the subject has so many odd answers to any of several questions, if its
    answers to a question and those of the baseline can be exchanged.

    Fisher's exact test, one-sided, times `questions`: each might have been the one. `subject` and `baseline`:
    all answers to one question, of which the most frequent one is not odd.
    """
    from scipy.stats import fisher_exact

    answers = sorted([*subject, *baseline])
    usual = max(answers, key=answers.count)
    odd, of_baseline = (sum(text != usual for text in of) for of in (subject, baseline))
    table = [[odd, len(subject) - odd], [of_baseline, len(baseline) - of_baseline]]
    return min(1.0, questions * float(fisher_exact(table, alternative="greater").pvalue))


def compare_correctness(
    subject: Mapping[int, bool], baseline: Mapping[int, bool], looks: int = LOOKS
) -> Result:
    """McNemar's exact test, one-sided. Both have the same keys: whether each answer is right.

    A question is lost if it is in one look, and won in none.
    """
    less = {key % AGAIN for key, right in subject.items() if baseline[key] and not right}
    more = {key % AGAIN for key, right in subject.items() if right and not baseline[key]}
    lost, won = len(less - more), len(more - less)
    known = questions_of(baseline) - {key % AGAIN for key, right in baseline.items() if not right}
    p, count, right = _binomial(lost, lost + won, HALF), len(questions_of(subject)), len(known)
    if p <= alpha(looks):
        return Result(Outcome.FAIL, p, lost, won, count)
    if lost > won and p <= UNSURE:
        needed = _needed(lost, lost + won, HALF, count, looks)
        return Result(Outcome.UNSURE, p, lost, won, count, needed)
    if right < least_lost(looks):
        # A subject that answers nothing right would pass: the baseline answers too little right.
        needed = math.ceil(least_lost(looks) * count / right) if right else 0
        return Result(Outcome.UNSURE, p, lost, won, count, needed)
    return Result(Outcome.PASS, p, lost, won, count)


def compare_acceptance(subject: tuple[int, int], baseline: tuple[int, int]) -> Result:
    """Fisher's exact test, one-sided, of (accepted drafts, generated tokens): whether fewer are accepted."""
    from scipy.stats import fisher_exact

    (accepted, generated), (before, of) = subject, baseline
    table = [[accepted, generated - accepted], [before, of - before]]
    p, lost = float(fisher_exact(table, alternative="less").pvalue), generated - accepted
    best = float(fisher_exact([[0, generated], table[1]], alternative="less").pvalue)
    if p <= alpha():
        return Result(Outcome.FAIL, p, lost, of - before, generated)
    # a subject whose every draft is refused would pass
    return Result(Outcome.PASS if best <= alpha() else Outcome.UNSURE, p, lost, of - before, generated)


def wants_more(result: Result) -> bool:
    """Whether the questions should be asked again before the answers are judged: another one may be odd.

    A question on which the baseline does not agree, or to which it does not know the answer, stays one.
    """
    return result.outcome is not Outcome.FAIL and result.worse > 0


def is_in_doubt(result: Result) -> bool:
    """Whether a difference was found that may be chance, and that more answers can tell from it."""
    return result.outcome is Outcome.UNSURE and result.p <= UNSURE


def questions_of(answers: Iterable[int]) -> set[int]:
    """The questions among the keys of all looks."""
    return {key % AGAIN for key in answers}


def without(answers: Mapping[int, Told], questions: Container[int]) -> dict[int, Told]:
    """The answers of all looks to other questions than these."""
    return {key: answer for key, answer in answers.items() if key % AGAIN not in questions}


def same_rate(one: Mapping[int, str], other: Mapping[int, str]) -> float:
    """The part of the questions with equal texts."""
    return sum(text == other[question] for question, text in one.items()) / max(1, len(one))


def texts(answers: Sequence[Answer]) -> dict[int, str]:
    """Key of the answer -> text."""
    return {one.question: one.text for one in answers}


def right(answers: Sequence[Answer], strict: bool) -> dict[int, bool]:
    """Key of the answer -> whether it is right, by strict-match or by flexible-extract."""
    return {one.question: one.strict if strict else one.flexible for one in answers}


def _binomial(hits: int, trials: int, probability: float) -> float:
    """The probability of at least `hits` in `trials`."""
    if not trials:
        return 1.0
    from scipy.stats import binomtest

    return float(binomtest(hits, trials, probability, alternative="greater").pvalue)


def _needed(hits: int, trials: int, probability: float, count: int, looks: int) -> int:
    """The questions with which such a part of hits fails. `hits` of `trials` were found with `count`."""
    asked = count + 1
    while _binomial(hits * asked // count, trials * asked // count, probability) > alpha(looks):
        asked += max(1, count // 8)
    return asked
