# SPDX-License-Identifier: Apache-2.0
"""MemShare: memory saved and answers kept when similar reasoning steps share blocks."""

from __future__ import annotations

from dataclasses import dataclass

import before
import pool
import tasks
from certainty import Recall, kept, reaches, together
from engine import Programs
from findings import HOLDS, NOT_REACHED, NOT_SHOWN, Aim, Claim, Findings, Plot, Table, compared, not_tried
from progress import Progress

REPEATS = [1, 2, 4]
STEPS, TOKENS = 3, 128
PAPER = "paper's profile"
SETTINGS = {"memshare.tau_block=0.35": ["memshare.tau_block=0.35"], "keys not aligned": ["memshare.align=none"],
            PAPER: ["memshare.profile=paper"],
            f"{PAPER}, memshare.calibrate=0.01": ["memshare.profile=paper", "memshare.calibrate=0.01"]}


@dataclass
class Row:
    """One task: unshared, and shared by the pool."""

    name: str
    plain: Recall
    shared: pool.Run

    @property
    def affected(self) -> float:
        return share_of(self.shared)


def share_of(run: pool.Run) -> float:
    """The share of all tokens that are in a shared block."""
    tables = [r["sequence"] for r in run.reports]
    return sum(t["shared_tokens"] for t in tables) / (sum(t["tokens"] for t in tables) or 1)


def net_kib(run: pool.Run) -> float:
    """KiB that sharing saves, less the slots that stay empty because steps begin in new blocks."""
    return (run.of_table("bytes_saved") - run.of_table("empty_slots") * pool.TOKEN_BYTES) / 1024


def questions_of(quick: bool) -> int:
    return 16 if quick else 60


def steps(quick: bool) -> int:
    return 2 * (len(REPEATS) + len(tasks.LENGTHS) - 1) + len(SETTINGS)


def serve(programs: Programs, questions: list[tasks.Question], *settings: str) -> pool.Run:
    return pool.serve(programs, questions, ["memshare=on", *settings])


def measure(programs: Programs, progress: Progress, name: str, questions: list[tasks.Question]) -> Row:
    progress.step(f"MemShare: {name}, unshared")
    plain = pool.plain(programs, questions)
    progress.step(f"MemShare: {name}")
    return Row(name, plain, serve(programs, questions))


def run(programs: Programs, progress: Progress, quick: bool) -> Findings:
    count = questions_of(quick)
    rows = [measure(programs, progress, f"told {n} x, {tasks.LENGTHS[0]}",
                    tasks.reasoning(count, STEPS, n, TOKENS)) for n in REPEATS]
    other = [measure(programs, progress, f"told {REPEATS[-1]} x, {lengths}",
                     tasks.reasoning(count, STEPS, REPEATS[-1], TOKENS, lengths=lengths))
             for lengths in tasks.LENGTHS[1:]]
    questions = tasks.reasoning(count, STEPS, REPEATS[-1], TOKENS)
    return findings(count, rows, other, forms(programs, progress, questions))


def forms(programs: Programs, progress: Progress, questions: list[tasks.Question]) -> Table:
    """Other settings: those of the paper, too, with its own threshold and with one that fits this model's keys."""
    table = Table(f"Other forms, steps told {REPEATS[-1]} x, {tasks.LENGTHS[0]}", ["form", "recall", "tokens shared"])
    for name, settings in SETTINGS.items():
        progress.step(f"MemShare: {name}")
        served = serve(programs, questions, *settings)
        table.rows.append([f"kvd, {name}", str(served.recall), f"{share_of(served):.1%}"])
    return table


def findings(count: int, rows: list[Row], other: list[Row], settings: Table) -> Findings:
    table = Table(f"{count} prompts of {STEPS} steps of about {TOKENS} tokens, "
                  f"each time with two other facts and {tasks.CHANGED:.0%} of the other sentences changed",
                  ["steps", "recall, unshared", "recall, MemShare", "tokens shared",
                   "saved KiB", "empty slots", "saved, net KiB", "labels KiB"],
                  [[r.name, str(r.plain), str(r.shared.recall), f"{r.affected:.1%}",
                    r.shared.of_table("bytes_saved") / 1024, r.shared.of_table("empty_slots"), net_kib(r.shared),
                    r.shared.of_table("label_bytes") / 1024] for r in rows + other])
    found = Findings("memshare", "MemShare: similar reasoning steps share blocks",
                     "Each request's blocks are a sequence of the pool; the worker compares steps by their words and "
                     "blocks by their keys and values, and kvlm applies its proposals, rotating queries by the distance "
                     "between the two places. Every fact is told once, and the question asks for any of them, so that "
                     "sharing the wrong block gives a wrong answer.",
                     "memshare=on, for long texts that repeat themselves in the same words: drafts that are revised, "
                     "plans that are repeated. A repetition with a word more or less is divided differently into "
                     "blocks and not found; then steps that begin in new blocks only cost their empty slots.")
    found.tables = [table, settings]
    found.plots = [Plot("Tokens that share another's block", "times a step is told", "% of all tokens",
                        {"MemShare": [(n, 100 * r.affected) for n, r in zip(REPEATS, rows)]})]
    found.claims, found.aims = claims(rows, settings), aims(rows)
    return found


def claims(rows: list[Row], settings: Table) -> list[Claim]:
    repeated = rows[1:]
    plain, ours = together([r.plain for r in repeated]), together([r.shared.recall for r in repeated])
    most = max(r.affected for r in repeated)
    paper = next(row for row in settings.rows if row[0] == f"kvd, {PAPER}")
    return [
        Claim("97.5 % of the dense model's accuracy is kept (0.872 of 0.894)",
              f"{compared(ours, plain)} against unshared", HOLDS if kept(ours, plain) else NOT_SHOWN,
              "" if kept(ours, plain) else "so many questions cannot exclude a loss of 0.05"),
        Claim("8 to 39 % of the tokens are affected, in sequences whose steps repeat",
              f"{most:.0%} in the serve form; the paper's profile: {paper[2]}, recall {paper[1]}",
              HOLDS if most >= 0.08 else NOT_REACHED),
        not_tried("Similarity matters: random sharing at the same ratio loses accuracy (Table 5)",
                  "kvd shares no blocks at random"),
        not_tried("84.8 % more throughput (abstract)", "it needs an engine that runs batches"),
    ]


def aims(rows: list[Row]) -> list[Aim]:
    last = rows[-1]
    ratio = last.shared.recall.value / (last.plain.value or 1)
    reached = last.affected >= 0.25 and ratio >= 0.98
    certain = reaches(last.shared.recall, 0.98 * last.plain.value) is not None
    return [Aim("a quarter of the tokens shared at 0.98 of the recall", f"{last.affected:.0%} shared at recall "
                f"{last.shared.recall} of {last.plain}, n = {last.plain.n}; net of empty slots "
                f"{net_kib(last.shared):.0f} KiB of {last.shared.memory().full / 1024:.0f} are saved. Before "
                f"({before.COMMIT}, another task): "
                f"{before.MEMSHARE[0]:.0%} at {before.MEMSHARE[1]:.2f}",
                ("reached" if reached else "missed") + ("" if certain else ", within chance"),
                "" if reached else "shared blocks differ by more than the answers tolerate")]
