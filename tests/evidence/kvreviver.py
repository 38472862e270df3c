# SPDX-License-Identifier: Apache-2.0
"""KVReviver: recall against the budget with exact copies, without them, and with the paper's profile; and all of its memory."""

from __future__ import annotations

import before
import pool
import tasks
from certainty import Recall, kept
from engine import Programs
from findings import HOLDS, NOT_REACHED, Aim, Claim, Findings, Plot, Table, aim_recall, compared, not_tried
from progress import Progress

BUDGETS = [0.1, 0.25, 0.5]
COPIES, ALONE, PAPER = "kvd, kvreviver=on", "kvd, without exact copies", "kvd, kvreviver.profile=paper"
VARIANTS = {COPIES: [], ALONE: ["kvreviver.spill=off", "kvreviver.drop=on"], PAPER: ["kvreviver.profile=paper"]}
TAIL = "24"                    # the question is decoded, so that blocks are evicted before it is known


def sizes(quick: bool) -> tuple[int, int]:
    return (20, 600) if quick else (80, 1000)


def steps(quick: bool) -> int:
    return 1 + len(VARIANTS) * len(BUDGETS)


def run(programs: Programs, progress: Progress, quick: bool) -> Findings:
    count, length = sizes(quick)
    questions = tasks.recall(count, length)
    progress.step("KVReviver: full cache")
    full = pool.plain(programs, questions)
    runs: dict[tuple[str, float], pool.Run] = {}
    for budget in BUDGETS:
        for name, more in VARIANTS.items():
            progress.step(f"KVReviver: {name}, {budget:.0%}")
            runs[name, budget] = pool.serve(programs, questions, ["kvreviver=on", *more, f"kvreviver.budget={budget}"],
                                            "--decode-tail", TAIL)
    return findings(count, length, full, runs)


def revivals(runs: dict[tuple[str, float], pool.Run]) -> Table:
    names = ["blocks", "resident", "spilled", "vague", "dropped", "revived_exact", "revived_approx",
             "misses", "wait_ms"]
    return Table("What a request's blocks do, means",
                 ["form", "budget", *(n.replace("_", " ") for n in names), "ms a request"],
                 [[name, f"{budget:.0%}", *(r.of_table(n) for n in names), r.report("total_ms")]
                  for (name, budget), r in runs.items()])


def cell(run: pool.Run) -> str:
    """The recall, and the share of the blocks that are resident, which may be above the budget."""
    return f"{run.recall}; {run.of_table('resident') / run.of_table('blocks'):.0%} resident"


def findings(count: int, length: int, full: Recall, runs: dict[tuple[str, float], pool.Run]) -> Findings:
    curves = {name: {b: runs[name, b].recall for b in BUDGETS} for name in VARIANTS}
    table = Table(f"Recall of {count} facts in documents of {length} tokens, with intervals of 95 %",
                  ["form", *(f"{b:.0%} of the tokens" for b in BUDGETS)],
                  [[name, *(cell(runs[name, b]) for b in BUDGETS)] for name in VARIANTS] + [["everything", str(full)]],
                  "The daemon adds a block to the sketch only while the sketch can still give good estimates "
                  "(kvreviver.max_load), so that without exact copies most blocks stay in the pool, and the budget is "
                  "not met; the paper's profile has no such limit. Where no block is revived from it (revived approx), a "
                  "row is eviction of blocks with a sketch beside it.")
    old = Table("The pool, and kvlm's private form that it replaced", ["form", *(f"{b:.0%}" for b in BUDGETS)],
                [[COPIES, *(curves[COPIES][b].value for b in BUDGETS)],
                 [f"private, at {before.COMMIT}, {before.KVREVIVER_N} questions",
                  *(before.KVREVIVER.get(b) for b in BUDGETS)]])
    found = Findings("kvreviver", "KVReviver: evicted blocks can come back",
                     "A share of a sequence's blocks stays in the pool; the others are kept as exact copies in host "
                     "memory, with a count sketch in front. Labels of all blocks show which missing blocks a query "
                     "needs; these are requested at the first miss, and the engine waits for them.",
                     "kvreviver=on, if the pool's memory is scarcer than the memory of the copies: on a GPU, whose "
                     "blocks move to the host's memory. In total, copies and labels take more than the full cache, so "
                     "it saves nothing if both are in the same memory. Without copies, use int4 or KeyDiff instead "
                     "(--model measures both): the sketch does not preserve the answers.")
    memory = pool.memory_table({f"{COPIES}, {b:.0%}": runs[COPIES, b] for b in BUDGETS})
    found.tables = [table, memory, revivals(runs), old]
    found.plots = [Plot("Recall against the budget", "tokens in the cache, % of the prompt", "recall",
                        {name: [*((100 * b, r.value, *r.interval()) for b, r in curve.items()), (100, full.value)]
                         for name, curve in curves.items()}, (0, 1.05))]
    found.claims = claims(runs, full)
    found.aims = [aim_recall("recall of 0.95 with a cache of 10 % and exact copies", curves[COPIES][0.1], 0.95),
                  whole_memory(runs[COPIES, 0.1].memory())]
    return found


def whole_memory(memory: pool.Memory) -> Aim:
    """The aim of counting all memory."""
    return Aim("all memory is counted", f"cache {memory.share(memory.cache)}, "
               f"labels {memory.share(memory.labels)}, copies "
               f"{memory.share(memory.copies)}, sketch {memory.share(memory.sketch)}: {memory.share(memory.total)} "
               "of the full cache", "stated")


def claims(runs: dict[tuple[str, float], pool.Run], full: Recall) -> list[Claim]:
    def keeps(text: str, budget: float) -> Claim:
        paper, copies = runs[PAPER, budget], runs[COPIES, budget].recall
        back = paper.of_table("revived_approx")
        lost = (f"{back:.1f} blocks of a request come back from the sketch" if back
                else "no block comes back from the sketch, so that this is eviction")
        return Claim(text, f"the paper's profile, at {budget:.0%}: {compared(paper.recall, full)} against the full cache; "
                     f"with exact copies {compared(copies, full)}", HOLDS if kept(paper.recall, full) else NOT_REACHED,
                     "" if kept(paper.recall, full) else lost)

    batch = not_tried("22.5 tokens a second at batch 16, where the full cache runs out of memory",
                      "it needs an engine that runs batches")
    return [keeps("End-to-end accuracy of the full cache at 10 % of the budget for 2 k contexts (abstract)", 0.1),
            keeps("About 2 % loss at 25 % of the budget for 32 k contexts (abstract)", 0.25), batch]
