# SPDX-License-Identifier: Apache-2.0
"""What the evidence may say of numbers: verdicts on numbers that are made up here, each as wrong as the rule it is for."""

from __future__ import annotations

import sys
from types import SimpleNamespace

from findings import above
from hshare import claim_of_speed
from keydiff import claim_of_comparison, claim_of_small_budgets
from memshare import claim_of_similarity


def shares(recall: float, blocks: float, moved: float) -> SimpleNamespace:
    return SimpleNamespace(accuracy=recall, blocks=blocks, divergence=moved)


def similarity(ours: SimpleNamespace, chance: SimpleNamespace, count: int = 30) -> bool | None:
    return claim_of_similarity([(4, 1.0, ours, chance)], count).holds


def test_a_few_answers_tell_nothing() -> None:
    assert above(1.0, 0.9, 20) is None and above(1.0, 0.8, 20) is True and above(0.8, 1.0, 20) is False


def test_ratios_must_be_equal() -> None:
    """Half of the blocks at random, and the same recall: moved distributions are no lost accuracy."""
    assert similarity(shares(1.0, 0.181, 0.0002), shares(1.0, 0.098, 0.0053)) is None
    assert similarity(shares(1.0, 0.2, 0.0002), shares(1.0, 0.2, 0.0053)) is None
    assert similarity(shares(1.0, 0.2, 0.0002), shares(0.5, 0.2, 0.0053)) is True
    assert similarity(shares(1.0, 0.2, 0.0002), shares(0.5, 0.4, 0.0053)) is None


def test_wrong_answers_are_not_fast() -> None:
    recall, ms = {1.0: 1.0, 1 / 8: 0.38}, {1.0: 0.46, 1 / 8: 0.05}
    assert claim_of_speed(recall, ms, 1.0, 0.46, 1600).holds is False
    assert claim_of_speed(recall, {1.0: 0.27, 1 / 8: 0.05}, 1.0, 0.46, 1600).holds is None
    assert claim_of_speed(recall, {1.0: 0.05, 1 / 8: 0.01}, 1.0, 0.46, 1600).holds is True
    assert claim_of_speed({1.0: 0.1, 1 / 8: 0.1}, ms, 1.0, 0.46, 1600).holds is None


def test_a_loss_can_be_seen_and_none_cannot() -> None:
    assert claim_of_small_budgets(1.0, {75: 1.0, 50: 1.0, 25: 0.8}, 16, 600).holds is None
    assert claim_of_small_budgets(1.0, {75: 0.5, 50: 0.4, 25: 0.3}, 16, 600).holds is False


def test_better_means_by_more_than_chance() -> None:
    def compare(ours: float, others: float) -> bool | None:
        curves = {name: dict.fromkeys((12.5, 25, 50, 75), value) for name, value in (
            ("KeyDiff", ours), ("recent window", others), ("random", others), ("attention mass (H2O)", others))}
        return claim_of_comparison(curves, 16).holds

    assert compare(0.8, 0.4) is True and compare(0.4, 0.8) is False and compare(0.80, 0.79) is None


def main() -> int:
    tests = [value for name, value in globals().items() if name.startswith("test_")]
    for test in tests:
        test()
        print(f"ok {test.__name__}")
    return 0 if tests else 1


if __name__ == "__main__":
    sys.exit(main())
