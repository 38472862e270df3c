# SPDX-License-Identifier: Apache-2.0
"""The results of a part of the evidence, for the page: claims, aims, tables and plots, all made from measured numbers.

A claim holds only if its numbers support exactly that claim: the same amount, in the same direction, at a setting that
still answers, and beyond chance for that many questions or rounds. Otherwise it is not shown, not reached, or does not
hold, with the reason. Claims that were not tried are listed, too.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from certainty import Recall, better, chance, difference, reaches

HOLDS, NOT_SHOWN, NOT_REACHED, FAILS = "holds", "not shown", "not reached", "does not hold"
NOT_TRIED = "not tried"


@dataclass
class Claim:
    """A statement of a paper, and the same statement measured here."""

    paper: str          # what the paper says, with its number and place
    measured: str       # the same quantity here, in words with the measured numbers
    verdict: str
    why: str = ""
    invariant: bool = False     # not a finding: kvd is broken if it does not hold


@dataclass
class Aim:
    """A goal of kvd, in the pool."""

    text: str
    measured: str
    verdict: str
    why: str = ""


def verdict(truth: bool | None, false: str = FAILS) -> str:
    return {True: HOLDS, False: false, None: NOT_SHOWN}[truth]


def compared(a: Recall, b: Recall) -> str:
    """The difference in words."""
    low, high = difference(a, b)
    return f"{a.value - b.value:+.2f} ({low:+.2f} to {high:+.2f}, p = {chance(a, b):.2g}, n = {a.n})"


def claim_better(paper: str, what: str, a: Recall, b: Recall, why: dict[str, str]) -> Claim:
    """The claim that a's recall is above b's; `why`: {verdict: reason}."""
    result = verdict(better(a, b))
    return Claim(paper, f"{what}: {compared(a, b)}", result, why.get(result, ""))


def not_tried(paper: str, why: str) -> Claim:
    """A claim of a paper that this program does not measure."""
    return Claim(paper, "not measured", NOT_TRIED, why)


def aim_recall(text: str, recall: Recall, least: float, why: str = "") -> Aim:
    """The aim of a recall of at least `least`."""
    beyond = reaches(recall, least)
    reached = recall.value >= least
    result = ("reached" if reached else "missed") + (", within chance" if beyond is None else "")
    return Aim(text, f"{recall}, n = {recall.n}", result, "" if reached else why)


@dataclass
class Table:
    """Rows of numbers and words under column titles."""

    title: str
    columns: list[str]
    rows: list[list] = field(default_factory=list)
    note: str = ""


@dataclass
class Plot:
    """Lines over one x axis; a point is (x, y), or (x, y, low, high)."""

    title: str
    x: str
    y: str
    series: dict[str, list[tuple[float, ...]]] = field(default_factory=dict)
    y_range: tuple[float, float] | None = None
    x_range: tuple[float, float] | None = None


@dataclass
class Findings:
    """All results of one method."""

    method: str
    title: str
    summary: str = ""
    use: str = ""       # recommended settings, and when to use them
    claims: list[Claim] = field(default_factory=list)
    aims: list[Aim] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)

    def as_json(self) -> dict:
        return asdict(self)
