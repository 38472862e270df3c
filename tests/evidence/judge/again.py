# SPDX-License-Identifier: Apache-2.0
"""Text that is said again, for MemShare: what of it uses blocks of the first time."""

from __future__ import annotations

import random
from collections.abc import Iterable

BLOCKS, STEPS, BEFORE, BEHIND = 5, 4, 2, 128    # blocks of a step, and before them; steps of a kind; scored tokens
CHANGED = 0.15
NEW, AGAIN, OTHER = "said for the first time", "said again", f"said again with {CHANGED:.0%} other words"


def steps(ids: list[int], end: int, block: int, number: str) -> tuple[list[int], list[tuple[str, list[int]]], list[int]]:
    """What comes before, steps of reasoning, each with its kind, and text behind them, from a text's tokens. A step ends
    with `end`, and has whole blocks, so that all of its blocks lie as those of the others."""
    text, dice, n = [it for it in ids if it != end], random.Random(number), BLOCKS * block - 1
    before, text = text[:BEFORE * block], text[BEFORE * block:]
    told = [text[i * n:(i + 1) * n] for i in range(STEPS)]
    changed = [[dice.choice(text) if dice.random() < CHANGED else it for it in step] for step in told]
    kinds = (NEW, told), (AGAIN, told), (OTHER, changed)
    return (before, [(kind, [*step, end]) for kind, each in kinds for step in each],
            text[STEPS * n:STEPS * n + BEHIND])


def counted(shared: Iterable[int], told: list[tuple[str, list[int]]], first: int, block: int) -> dict[str, list[int]]:
    """Return the number of shared blocks and of all blocks, by kind, from the positions of shared ones."""
    found = {kind: [0, 0] for kind, _ in told}
    for position in shared:
        found[told[(position - first) // (BLOCKS * block)][0]][0] += 1
    for kind, ids in told:
        found[kind][1] += len(ids) // block
    return found
