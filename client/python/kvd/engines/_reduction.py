# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a kvd.Sequence to compact, so that a budget holds."""

from __future__ import annotations

from typing import NamedTuple

import kvd

MOST = 1024         # entries that are compacted at a time, at most
_OTHERS = kvd.EntryFlags.SHARED | kvd.EntryFlags.BORROWED


class Part(NamedTuple):
    """n entries from first on, of which keep tokens stay; of the sequence's tokens, they have `tokens` from column on."""

    first: int
    n: int
    keep: int
    column: int
    tokens: int


def tokens_of(entries: list[kvd.Entry]) -> list[int]:
    """Return the number of tokens of each entry."""
    return [0 if it.flags & kvd.EntryFlags.DROPPED else it.tokens for it in entries]


def reduction(space: kvd.Space, entries: list[kvd.Entry], behind: int, budget: int, *, own: bool = False,
              unit: int = 1) -> list[Part]:
    """Return what to compact so that `budget` tokens stay of these entries and of those behind them.

    The first entries stay whole (keydiff.sink_blocks), as do the newest ones (keydiff.recent_frac of the budget) and, since
    they are not the sequence's own, shared and borrowed ones. The rest keeps a share of each part, in multiples of unit.
    own: parts have no entries of others.
    """
    tokens = tokens_of(entries)
    mine = [0 if it.flags & _OTHERS else n for it, n in zip(entries, tokens)]
    first = min(int(space.setting("keydiff.sink_blocks")), len(tokens))
    end, newest = len(tokens), behind
    while end > first and newest < round(space.setting("keydiff.recent_frac") * budget):
        end -= 1
        newest += tokens[end]
    keep = max(budget - newest - sum(tokens[:first]), 1)
    most = sum(mine[first:end])
    share = max(keep - sum(tokens[first:end]) + most, 1) / max(most, 1)
    parts = [] if share >= 1 else _parts(entries, first, end, own)
    cut = [Part(at, n, max(round(share * sum(mine[at:at + n])) // unit, 1) * unit, sum(tokens[:at]), sum(mine[at:at + n]))
           for at, n in parts]
    return [it for it in cut if it.keep < it.tokens]


def _parts(entries: list[kvd.Entry], first: int, end: int, own: bool) -> list[tuple[int, int]]:
    """Cut a range into (first, n)."""
    parts, at = [], first
    while at < end:
        n, others = 1, bool(entries[at].flags & _OTHERS)
        while at + n < end and n < MOST and not (own and bool(entries[at + n].flags & _OTHERS) != others):
            n += 1
        if not (own and others):
            parts.append((at, n))
        at += n
    return parts
