# SPDX-License-Identifier: Apache-2.0
"""The certainty of measured numbers: intervals of 95 %, paired tests, and times in rounds. Needs no library."""

from __future__ import annotations

from dataclasses import dataclass
from math import comb, inf, sqrt
from statistics import median

Z = 1.959964        # for intervals of 95 %
MARGIN = 0.05       # a recall counts as kept if its loss is at most this, with certainty


def wilson(right: int, n: int) -> tuple[float, float]:
    """Confidence interval of a share (Wilson's score interval)."""
    if n == 0:
        return 0.0, 1.0
    p, z2 = right / n, Z * Z
    centre, half = p + z2 / (2 * n), Z * sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    return max(0.0, (centre - half) / (1 + z2 / n)), min(1.0, (centre + half) / (1 + z2 / n))


@dataclass(frozen=True)
class Recall:
    """For each question, in order, whether it was answered."""

    answers: tuple[bool, ...]

    @property
    def n(self) -> int:
        return len(self.answers)

    @property
    def value(self) -> float:
        return sum(self.answers) / self.n if self.n else 0.0

    def interval(self) -> tuple[float, float]:
        return wilson(sum(self.answers), self.n)

    def __str__(self) -> str:
        low, high = self.interval()
        return f"{self.value:.2f} ({low:.2f} to {high:.2f})"


def together(recalls: list[Recall]) -> Recall:
    """The recall of several sets of questions together."""
    return Recall(tuple(answer for recall in recalls for answer in recall.answers))


def paired(a: Recall, b: Recall) -> tuple[int, int, int, int]:
    """Numbers of questions answered by both, by a only, by b only, by neither."""
    if a.n != b.n:
        raise ValueError(f"{a.n} questions cannot be compared with {b.n}")
    pairs = list(zip(a.answers, b.answers))
    return tuple(pairs.count(kind) for kind in ((True, True), (True, False), (False, True), (False, False)))


def chance(a: Recall, b: Recall) -> float:
    """McNemar's exact test: the probability that such a difference, in either direction, is luck."""
    _, only_a, only_b, _ = paired(a, b)
    n, few = only_a + only_b, min(only_a, only_b)
    return min(1.0, 2 * sum(comb(n, i) for i in range(few + 1)) / 2 ** n) if n else 1.0


def difference(a: Recall, b: Recall) -> tuple[float, float]:
    """Interval of a - b on the same questions (Newcombe's, from the scores of the paired shares)."""
    both, only_a, only_b, neither = paired(a, b)
    (low_a, high_a), (low_b, high_b) = a.interval(), b.interval()
    scale = sqrt((both + only_a) * (only_b + neither) * (both + only_b) * (only_a + neither))
    phi = (both * neither - only_a * only_b) / scale if scale else 0.0
    down, up = (a.value - low_a, high_b - b.value), (high_a - a.value, b.value - low_b)
    reach = [sqrt(max(0.0, x * x - 2 * phi * x * y + y * y)) for x, y in (down, up)]
    return a.value - b.value - reach[0], a.value - b.value + reach[1]


def better(a: Recall, b: Recall) -> bool | None:
    """Is a's recall above b's? None: the difference may be chance."""
    return None if chance(a, b) >= 0.05 else a.value > b.value


def kept(a: Recall, full: Recall, margin: float = MARGIN) -> bool:
    """Is a's loss certainly at most the margin?"""
    return difference(a, full)[0] >= -margin


def reaches(a: Recall, least: float) -> bool | None:
    """Is the recall certainly at least, or certainly below, that number? None: the number is inside the interval."""
    low, high = a.interval()
    return True if low >= least else False if high < least else None


@dataclass(frozen=True)
class Times:
    """One measurement per round, with contenders that take turns."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.rounds)

    def __str__(self) -> str:
        return f"{self.median:.3g} ({min(self.rounds):.3g} to {max(self.rounds):.3g})"

    def over(self, other: "Times") -> "Times":
        """Ratios, round by round."""
        return Times(tuple(a / b for a, b in zip(self.rounds, other.rounds)))

    def at_least(self, least: float) -> bool | None:
        """With seven rounds, the median lies between least and greatest in 98 % of cases."""
        return True if min(self.rounds) >= least else False if max(self.rounds) < least else None


def student(degrees: int) -> float:
    """Student's t for intervals of 95 % (Abramowitz and Stegun 26.7.5, good to a percent from 3 degrees on)."""
    if degrees < 3:
        return (12.706, 4.303)[degrees - 1]
    z, v = Z, degrees
    return (z + (z ** 3 + z) / (4 * v) + (5 * z ** 5 + 16 * z ** 3 + 3 * z) / (96 * v * v)
            + (3 * z ** 7 + 19 * z ** 5 + 17 * z ** 3 - 15 * z) / (384 * v ** 3))


def mean_difference(a: list[float], b: list[float]) -> tuple[float, float]:
    """The mean of a - b, which are paired, and half of its interval."""
    if len(a) != len(b) or not a:
        raise ValueError(f"{len(a)} numbers cannot be compared with {len(b)}")
    each = [x - y for x, y in zip(a, b)]
    n, mean = len(each), sum(each) / len(each)
    if n == 1:
        return mean, inf
    return mean, student(n - 1) * sqrt(sum((x - mean) ** 2 for x in each) / (n - 1) / n)
