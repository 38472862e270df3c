# SPDX-License-Identifier: Apache-2.0
"""The recall of other methods with the same total memory, labels, sketches and exact copies included."""

from __future__ import annotations

import pool
import tasks
from baselines import ask
from certainty import Recall
from findings import Table
from progress import Progress

RIVALS = ("int4", "SnapKV, per chunk", "StreamingLLM")


def table(baselines: ask.Baselines, progress: Progress, questions: list[tasks.Question], full: Recall,
          rows: list[tuple[str, Recall, pool.Memory]]) -> Table:
    """The rivals with the bytes of each row; with more than a full cache they keep everything."""
    made = Table("At equal total memory: labels, sketches and copies are counted, and the other methods may keep as many "
                 "bytes",
                 ["what", "recall", *pool.COLUMNS, *RIVALS])
    ids = [tasks.ids_of(q) for q in questions]
    for name, recall, memory in rows:
        share, beside = memory.total / memory.full, []
        for rival in RIVALS:
            progress.step(f"as much memory as {name}: {rival}")
            answers = None if share >= 1 else baselines.each(ask.evicted, ids, rival, share)
            beside.append(str(full if answers is None else pool.recall_of_tokens(questions, answers)))
        made.rows.append([name, str(recall), *memory.columns(), *beside])
    return made


def steps(rows: int) -> int:
    return rows * len(RIVALS)
