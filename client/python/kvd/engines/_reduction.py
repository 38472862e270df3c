# SPDX-License-Identifier: Apache-2.0
"""What requests of vLLM and rows of transformers that follow methods have in common: their budget, which tokens of a
kvd.Sequence to compact, so that it holds, and blocks of it that have left the pool."""

from __future__ import annotations

import errno
from contextlib import suppress
from typing import NamedTuple

import kvd

METHODS = ("keydiff", "kvreviver", "hshare", "memshare")
OWN = {"keydiff", "kvreviver"}      # a request that follows one of these shares no blocks with others
LOOKS = {"kvreviver", "hshare"}     # these must see the queries
STEPS = {"memshare"}                # these compare steps of reasoning
LONG_STEP = 3       # blocks: the step of reasoning after one this long begins in a block of its own (MemShare)
NOTED = 32          # last queries of a prompt, from which the methods estimate what is needed
PATIENCE_S = 10     # that a request waits for the daemon
MOST = 1024         # entries that are compacted at a time, at most
_OTHERS = kvd.EntryFlags.SHARED | kvd.EntryFlags.BORROWED


class Part(NamedTuple):
    """n entries from first on, of which keep tokens stay; of the sequence's tokens, they have `tokens` from column on."""

    first: int
    n: int
    keep: int
    column: int
    tokens: int


def methods_of(space: kvd.Space) -> set[str]:
    """Return the methods that requests of this space follow now."""
    on = {it for it in METHODS if space.setting(it)}
    return on if space.setting("keydiff.budget") else on - {"keydiff"}


def budget_of(space: kvd.Space) -> int:
    """Return the number of tokens that KeyDiff leaves of a request; 0: all."""
    return int(space.setting("keydiff.budget")) if drops_tokens(space) else 0


def drops_tokens(space: kvd.Space) -> bool:
    """Return whether KeyDiff is on, with a budget or without."""
    return bool(space.setting("keydiff"))


def slack_of(space: kvd.Space, budget: int, decodes: bool, moves: bool) -> int:
    """Return how many tokens more than its budget a request may have. moves: for a reduction, all that has left must come
    back."""
    slack = int(space.setting("keydiff.slack")) if decodes else 0
    return max(slack, budget // 8) if slack and moves else slack


def tokens_of(entries: list[kvd.Entry]) -> list[int]:
    """Return the number of tokens of each entry."""
    return [0 if it.flags & kvd.EntryFlags.DROPPED else it.tokens for it in entries]


def reduction(space: kvd.Space, entries: list[kvd.Entry], behind: int, budget: int, *, own: bool = False) -> list[Part]:
    """Return what to compact so that `budget` tokens stay of these entries and of those behind them.

    The first entries stay whole (keydiff.sink_blocks), as do the newest ones (keydiff.recent_frac of the budget) and, since
    they are not the sequence's own, shared and borrowed ones. The rest keeps a share of each part.
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
    cut = [Part(at, n, max(round(share * sum(mine[at:at + n])), 1), sum(tokens[:at]), sum(mine[at:at + n]))
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


def compares_steps(space: kvd.Space) -> bool:
    """Return whether MemShare is on, which may change while a request runs."""
    return bool(space.setting("memshare"))


def room_for_steps(space: kvd.Space, entries: list[kvd.Entry], answer: int) -> bool:
    """Return whether KeyDiff could keep its budget if MemShare replaced every block that it may: such a block stays whole.
    answer: position of the answer's first token, before which none is replaced."""
    budget = budget_of(space)
    kept = int(space.setting("keydiff.sink_blocks")) * (space.geometry.block_tokens or 0)
    whole = sum(it.tokens for it in entries
                if it.position >= answer and not it.flags & (kvd.EntryFlags.COMPACT | kvd.EntryFlags.DROPPED))
    return not budget or whole <= budget - kept - round(space.setting("keydiff.recent_frac") * budget)


# ---- blocks that have left -------------------------------------------------------------------------------------------

def missing(sequence: kvd.Sequence) -> list[int]:
    return [i for i, it in enumerate(sequence.entries()) if not it.data and not it.flags & kvd.EntryFlags.DROPPED]


def fetch_all(sequence: kvd.Sequence) -> None:
    """Have all blocks in the pool, for a reduction."""
    gone = missing(sequence)
    if gone:
        sequence.revive(gone)
        sequence.wait(PATIENCE_S)
    if missing(sequence):
        raise kvd.Error(errno.EAGAIN, "blocks that have left do not come back now")


def bring_back(sequence: kvd.Sequence) -> None:
    """Have blocks come back that the daemon has taken without being asked, since KVReviver was switched on meanwhile. Nothing
    else would notice that they are missing."""
    for _ in range(2):
        gone = missing(sequence)
        if not gone:
            return
        with suppress(kvd.Error):
            sequence.revive(gone)
            sequence.wait(PATIENCE_S)
    raise RuntimeError(f"{len(gone)} blocks of this request have left the pool, and did not come back")
