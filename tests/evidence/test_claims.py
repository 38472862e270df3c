# SPDX-License-Identifier: Apache-2.0
"""The evidence's verdicts, on made-up numbers, one test for each rule."""

from __future__ import annotations

import sys

from certainty import Recall, Times, better, chance, difference, kept, mean_difference, reaches, student, wilson
from findings import FAILS, HOLDS, NOT_REACHED, NOT_SHOWN, aim_recall, claim_better
from hshare import claim_of_speed
from keydiff import claim_of_no_loss


def recall(right: int, n: int) -> Recall:
    """A recall with the first `right` questions answered."""
    return Recall(tuple(i < right for i in range(n)))


def near(a: float, b: float) -> bool:
    return abs(a - b) < 5e-4


def test_intervals_are_those_of_the_literature() -> None:
    """Newcombe 1998: 81 of 263, 15 of 148, 0 of 20; McNemar exact: 1 against 9."""
    for right, n, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611)):
        assert all(map(near, wilson(right, n), (low, high)))
    a, b = Recall((True,) * 9 + (False,) * 11), Recall((False,) * 9 + (True,) + (False,) * 10)
    assert near(chance(a, b), 2 * 11 / 2 ** 10)


def test_a_paired_difference_has_its_value_inside() -> None:
    """Newcombe's own example (1998, method 10): 36, 12, 2, 0 pairs give 0.2 (0.0569 to 0.3404)."""
    a = Recall((True,) * 48 + (False,) * 2)
    b = Recall((True,) * 36 + (False,) * 12 + (True,) * 2)
    low, high = difference(a, b)
    assert near(a.value - b.value, 0.2) and abs(low - 0.0569) < 0.003 and abs(high - 0.3404) < 0.003


def test_a_few_answers_tell_nothing() -> None:
    assert better(recall(20, 20), recall(18, 20)) is None
    assert better(recall(20, 20), recall(12, 20)) is True and better(recall(12, 20), recall(20, 20)) is False
    assert reaches(recall(40, 40), 0.98) is None and reaches(recall(400, 400), 0.98) is True
    assert not kept(recall(20, 20), recall(20, 20)) and kept(recall(80, 80), recall(80, 80))


def test_an_aim_within_chance_says_so() -> None:
    assert aim_recall("", recall(28, 40), 0.65).verdict == "reached, within chance"
    assert aim_recall("", recall(40, 40), 0.65).verdict == "reached"
    assert aim_recall("", recall(20, 40), 0.65, "since").why == "since"


def test_equal_recalls_are_no_loss() -> None:
    """1.00 against 1.00 was once called a loss."""
    def verdict(a: int, b: int) -> str:
        return claim_better("", "", recall(a, 30), recall(b, 30), {}).verdict

    assert (verdict(30, 30), verdict(30, 20), verdict(20, 30)) == (NOT_SHOWN, HOLDS, FAILS)


def speed_claim(kept_at_eighth: int, eighth: float, all_selecting: float) -> str:
    recalls = {"1": recall(80, 80), "1/8": recall(kept_at_eighth, 80)}
    times = {"dense": Times((1.0,) * 7), "1": Times((all_selecting,) * 7), "1/8": Times((eighth,) * 7)}
    return claim_of_speed(recalls, times, recall(80, 80), 1600).verdict


def test_wrong_answers_are_not_fast() -> None:
    assert speed_claim(30, 0.05, 0.5) == NOT_REACHED
    assert speed_claim(80, 0.05, 0.5) == HOLDS
    assert speed_claim(30, 0.05, 0.1) == HOLDS


def test_speed_must_be_there_in_every_round() -> None:
    assert Times((9.0, 9.0, 8.0)).at_least(8.6) is None and Times((2.0, 3.0)).at_least(8.6) is False
    assert Times((2.0, 3.0)).over(Times((1.0, 2.0))).rounds == (2.0, 1.5)


def test_a_loss_can_be_seen_and_none_cannot() -> None:
    assert claim_of_no_loss(recall(16, 16), {0.5: recall(16, 16)}, 600).verdict == NOT_SHOWN
    assert claim_of_no_loss(recall(16, 16), {0.5: recall(8, 16)}, 600).verdict == FAILS


def test_the_mean_of_paired_numbers() -> None:
    """Student's own example (1908), ten patients: 1.58 more hours of sleep, with a standard error of 0.389."""
    a, b = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4], [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    mean, half = mean_difference(a, b)
    assert near(mean, 1.58) and abs(half - 2.262 * 0.3890) < 0.003
    for degrees, t in ((1, 12.706), (2, 4.303), (3, 3.182), (7, 2.365), (30, 2.042)):
        assert abs(student(degrees) / t - 1) < 0.01


def main() -> int:
    tests = [value for name, value in globals().items() if name.startswith("test_")]
    for test in tests:
        test()
        print(f"ok {test.__name__}")
    return 0 if tests else 1


if __name__ == "__main__":
    sys.exit(main())
