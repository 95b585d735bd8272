"""The exact tests: what they find, what they let pass, and when they cannot tell."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from pytest_kvconform.rigs.serving import gate
from pytest_kvconform.rigs.serving.gate import Outcome, compare_correctness, compare_generations
from pytest_kvconform.rigs.serving.messages import AGAIN


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
    four = compare_generations(answers(96, 4), answers(96), answers(96))
    assert four.outcome is Outcome.UNSURE
    more = 4 * four.needed // 96  # as many in a hundred
    assert compare_generations(*(answers(four.needed, n) for n in (more, 0, 0))).outcome is Outcome.FAIL


def test_texts_that_all_differ_tell_nothing() -> None:
    subject, first, second = ({n: f"{who} {n}" for n in range(96)} for who in ("subject", "D", "D again"))
    result = compare_generations(subject, first, second)
    assert (result.outcome, result.worse, result.better, result.needed) == (Outcome.UNSURE, 0, 0, 0)


def test_questions_on_which_the_baseline_does_not_agree_tell_nothing() -> None:
    noisy = {n: text if n < 40 else f"noise {n}" for n, text in answers(96).items()}
    result = compare_generations(answers(96), answers(96), noisy)
    assert (result.outcome, result.better) == (Outcome.UNSURE, 56)
    assert result.needed == pytest.approx(gate.least_questions() * 96 / 40, abs=1)


def test_a_question_that_is_odd_each_time_is_no_chance() -> None:
    times = 1 + gate.AGAIN_ALONE
    p = gate.compare_one_question(["odd"] * times, ["usual"] * 2 * times, 64)
    assert p == pytest.approx(64 / math.comb(3 * times, times))
    assert p <= gate.alpha()
    assert gate.compare_one_question(["odd"] * times, ["usual"] * 2 * times, 96) <= gate.alpha()


@pytest.mark.parametrize(
    ("subject", "baseline"),
    [
        (["odd"] + ["usual"] * 7, ["usual"] * 16),  # it does not come again
        (["odd"] * 5 + ["usual"] * 3, ["usual"] * 16),
        (["odd"] * 8, ["usual"] * 10 + ["odd"] * 6),  # the baseline does not agree
        (["usual"] * 8, [f"noise {n}" for n in range(16)]),  # the baseline is odd
    ],
)
def test_a_question_that_is_odd_now_and_then_is_chance(subject: list[str], baseline: list[str]) -> None:
    assert gate.compare_one_question(subject, baseline, 64) > gate.alpha()


def test_a_question_is_odd_if_the_subject_differs_from_two_equal_answers() -> None:
    first = {AGAIN + n: "a" for n in range(3)}
    second, subject = first | {AGAIN: "b"}, first | {AGAIN: "c", AGAIN + 2: "c"}
    assert gate.odd_questions(subject, first, second) == (2,)


def asked_again(looks: list[dict[int, Any]]) -> dict[int, Any]:
    """The answers of all looks, as a run has them."""
    return {
        question + AGAIN * look: one for look, asked in enumerate(looks) for question, one in asked.items()
    }


def test_a_question_counts_once_however_often_it_is_asked() -> None:
    """Rounding may tip the same answer in each look."""
    subject, alone = asked_again([answers(64, 1)] * gate.LOOKS), asked_again([answers(64)] * gate.LOOKS)
    result = compare_generations(subject, alone, alone)
    assert (result.outcome, result.worse, result.questions) == (Outcome.PASS, 1, 64)
    right = asked_again([dict.fromkeys(range(64), True)] * gate.LOOKS)
    lost = {key: key % AGAIN != 5 for key in right}
    found = compare_correctness(lost, right)
    assert (found.outcome, found.worse, found.questions) == (Outcome.PASS, 1, 64)


def test_other_questions_in_each_look_are_added() -> None:
    looks = [
        {n: "odd" if n == look else text for n, text in answers(64).items()} for look in range(gate.LOOKS)
    ]
    alone = asked_again([answers(64)] * gate.LOOKS)
    result = compare_generations(asked_again(looks), alone, alone)
    assert (result.outcome, result.worse) == (Outcome.FAIL, gate.LOOKS)


def test_a_question_on_which_the_baseline_changes_its_mind_is_not_the_subjects() -> None:
    first = asked_again([answers(64)] * 2)
    second = first | {AGAIN + 5: "noise"}
    subject = first | {5: "odd"}
    result = compare_generations(subject, first, second)
    assert (result.worse, result.better) == (0, 1)


def stays_odd(rng: random.Random, noise: float) -> bool:
    """Whether a question whose answer was odd stays so, if the answers of all three have the same noise."""
    more = ["b" if rng.random() < noise else "a" for _ in range(3 * gate.AGAIN_ALONE)]
    for one, other in ("ab", "ba"):
        got, want = [one, *more[: gate.AGAIN_ALONE]], [other, other, *more[gate.AGAIN_ALONE :]]
        if gate.compare_one_question(got, want, 64) <= gate.alpha():
            return True
    return False


@pytest.mark.parametrize("noise", [0.02, 0.2, 0.5])
def test_noise_that_is_the_same_for_all_three_alarms_less_often_than_the_level(noise: float) -> None:
    """All looks of a run, and after each of them the gate decides whether to ask again. Odd questions of the
    first look are asked again alone.
    """
    rng, runs, alarms = random.Random(3), 300, {"texts": 0, "right": 0, "one question": 0}

    def asked(look: int) -> dict[int, str]:
        return {n + AGAIN * look: "b" if rng.random() < noise else "a" for n in range(64)}

    for _ in range(runs):
        three: list[dict[int, str]] = [{}, {}, {}]
        for look in range(gate.LOOKS):
            for one in three:
                one |= asked(look)
            result = compare_generations(*three)
            if look == 0:
                odd = gate.odd_questions(*three)
                alarms["one question"] += any(stays_odd(rng, noise) for _ in odd)
            if not gate.wants_more(result):
                break
        subject, baseline = ({key: text == "a" for key, text in one.items()} for one in three[:2])
        alarms["texts"] += result.outcome is Outcome.FAIL
        alarms["right"] += compare_correctness(subject, baseline).outcome is Outcome.FAIL
    # three standard deviations above the level
    most = runs * gate.ALPHA + 3 * (runs * gate.ALPHA) ** 0.5
    assert max(alarms.values()) <= most, alarms


def test_lost_answers_fail_and_won_ones_do_not() -> None:
    right = dict.fromkeys(range(96), True)
    lost = {n: n >= gate.least_lost() for n in right}
    assert compare_correctness(lost, right).outcome is Outcome.FAIL
    assert compare_correctness(right, lost).outcome is Outcome.PASS
    assert compare_correctness(right, right).outcome is Outcome.PASS


def test_lost_answers_that_chance_seldom_gives_name_the_number_of_questions_that_can_tell() -> None:
    baseline = {n: n != 0 for n in range(64)}
    subject = {n: not 1 <= n <= 7 for n in range(64)}
    result = compare_correctness(subject, baseline)
    assert (result.outcome, result.worse, result.better) == (Outcome.UNSURE, 7, 1)
    assert result.needed > 64
    lost, won = (count * result.needed // 64 for count in (7, 1))
    more = range(result.needed)
    found = compare_correctness({n: n >= lost for n in more}, {n: not lost <= n < lost + won for n in more})
    assert found.outcome is Outcome.FAIL


def test_as_many_won_as_lost_pass() -> None:
    one = {n: n % 2 == 0 for n in range(96)}
    assert compare_correctness(one, {n: not right for n, right in one.items()}).outcome is Outcome.PASS


@pytest.mark.parametrize(("right", "needed"), [(0, 0), (3, 320)])
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


@pytest.mark.parametrize(
    ("accepted", "outcome"), [(128, Outcome.PASS), (120, Outcome.PASS), (64, Outcome.FAIL), (0, Outcome.FAIL)]
)
def test_fewer_accepted_drafts_fail(accepted: int, outcome: Outcome) -> None:
    assert gate.compare_acceptance((accepted, 192), (256, 384)).outcome is outcome


def test_a_draft_model_that_drafts_nothing_right_cannot_tell() -> None:
    assert gate.compare_acceptance((0, 192), (0, 384)).outcome is Outcome.UNSURE
