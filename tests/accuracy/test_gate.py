"""The exact tests: what they find, what they let pass, and when they cannot tell."""

from __future__ import annotations

import random

import pytest

from pytest_kvconform.rigs.serving import gate
from pytest_kvconform.rigs.serving.gate import Outcome, compare_correctness, compare_generations


def answers(count: int, odd: int = 0, text: str = "wrong") -> dict[int, str]:
    """Texts, of which the first `odd` differ from those of everybody else."""
    return {number: text if number < odd else f"answer {number}" for number in range(count)}


def test_equal_answers_pass() -> None:
    result = compare_generations(answers(96), answers(96), answers(96))
    assert (result.outcome, result.worse, result.better, result.p) == (Outcome.PASS, 0, 0, 1.0)
    assert not gate.wants_more(result)


def test_odd_answers_of_the_subject_fail_from_the_number_on_that_chance_does_not_give() -> None:
    least = gate.least_differences()
    assert compare_generations(answers(96, least), answers(96), answers(96)).outcome is Outcome.FAIL
    result = compare_generations(answers(96, least - 1), answers(96), answers(96))
    assert result.outcome is not Outcome.FAIL
    assert gate.wants_more(result)


def test_odd_answers_of_the_baseline_excuse_as_many_of_the_subject() -> None:
    noisy = {n: f"noise {n}" if 40 <= n < 60 else text for n, text in answers(96).items()}
    result = compare_generations(answers(96, 8), answers(96), noisy)
    assert (result.outcome, result.worse, result.better) == (Outcome.PASS, 8, 20)


def test_too_few_questions_cannot_tell_and_the_number_needed_can() -> None:
    few = compare_generations(answers(16), answers(16), answers(16))
    assert few.outcome is Outcome.UNSURE
    enough = compare_generations(*(answers(few.needed) for _ in range(3)))
    assert enough.outcome is Outcome.PASS


def test_some_odd_answers_name_the_number_of_questions_that_can_tell() -> None:
    two = compare_generations(answers(96, 2), answers(96), answers(96))
    assert two.outcome is Outcome.UNSURE
    more = round(2 * two.needed / 96)  # as many in a hundred
    assert compare_generations(*(answers(two.needed, n) for n in (more, 0, 0))).outcome is Outcome.FAIL


def test_noise_that_is_the_same_for_all_three_alarms_less_often_than_the_level() -> None:
    rng = random.Random(3)

    def noisy() -> dict[int, str]:
        return {n: rng.choice("aaaab") for n in range(96)}

    alarms = sum(
        compare_generations(noisy(), noisy(), noisy(), 1).outcome is Outcome.FAIL for _ in range(400)
    )
    assert alarms / 400 <= 2.5 * gate.ALPHA


def test_lost_answers_fail_and_won_ones_do_not() -> None:
    right = dict.fromkeys(range(96), True)
    lost = {n: n >= 8 for n in right}
    assert compare_correctness(lost, right).outcome is Outcome.FAIL
    assert compare_correctness(right, lost).outcome is Outcome.PASS
    assert compare_correctness(right, right).outcome is Outcome.PASS


def test_as_many_won_as_lost_pass() -> None:
    one = {n: n % 2 == 0 for n in range(96)}
    assert compare_correctness(one, {n: not right for n, right in one.items()}).outcome is Outcome.PASS


@pytest.mark.parametrize(("right", "needed"), [(0, 0), (3, 224)])
def test_a_baseline_that_knows_too_little_cannot_tell(right: int, needed: int) -> None:
    baseline = {n: n < right for n in range(96)}
    result = compare_correctness(baseline, baseline)
    assert (result.outcome, result.needed) == (Outcome.UNSURE, needed)


def test_a_gate_of_five_points_would_let_four_in_a_hundred_pass() -> None:
    """What this gate is for: 4 % of the requests are wrong, and the score falls by 0.04."""
    baseline = dict.fromkeys(range(480), True)
    wrong = set(range(0, 480, 25))
    subject = {n: n not in wrong for n in baseline}
    assert sum(baseline.values()) / 480 - sum(subject.values()) / 480 < 0.05
    assert compare_correctness(subject, baseline).outcome is Outcome.FAIL
    texts = {n: "wrong" if n in wrong else str(n) for n in baseline}
    alone = {n: str(n) for n in baseline}
    assert compare_generations(texts, alone, alone).outcome is Outcome.FAIL


def test_the_rate_of_equal_answers() -> None:
    assert gate.same_rate(answers(100, 5), answers(100)) == 0.95
