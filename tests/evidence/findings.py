# SPDX-License-Identifier: Apache-2.0
"""What a part of the evidence hands to the page: claims, tables and plots, all made from measured numbers.

A claim holds only if the numbers that stand beside it carry the very thing it says: as much as it says, at a setting
that still answers, and by more than the number of questions can tell. Whatever is less is open, with the reason.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field


@dataclass
class Claim:
    """A statement of a paper, and the same statement measured here."""

    paper: str          # what the paper says, with its number and place
    measured: str       # the same quantity here, in words with the measured numbers
    holds: bool | None  # None: cannot be told at this scale, and `why` says why
    why: str = ""
    invariant: bool = False     # not a finding: if it does not hold, kvd is broken

    def verdict(self) -> str:
        return {True: "holds", False: "does not hold", None: "open"}[self.holds]


def above(a: float, b: float, questions: int) -> bool | None:
    """Is recall a above recall b? None: they differ by no more than two answers of so many questions."""
    return None if abs(a - b) * questions < 2.5 else a > b


@dataclass
class Table:
    """Rows of numbers and words under column titles."""

    title: str
    columns: list[str]
    rows: list[list] = field(default_factory=list)


@dataclass
class Plot:
    """Lines over one x axis; a point is (x, y)."""

    title: str
    x: str
    y: str
    series: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    y_range: tuple[float, float] | None = None


@dataclass
class Findings:
    """All of one method."""

    method: str
    title: str
    summary: str = ""
    claims: list[Claim] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)

    def as_json(self) -> dict:
        return asdict(self)
