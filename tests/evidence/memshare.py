# SPDX-License-Identifier: Apache-2.0
"""MemShare: memory saved and answers kept when similar reasoning steps share blocks, against random sharing."""

from __future__ import annotations

from dataclasses import dataclass

import before
import pool
import tasks
from baselines import ask
from certainty import Recall, kept, reaches, together
from engine import Programs, mean
from findings import (HOLDS, NOT_REACHED, NOT_SHOWN, Aim, Claim, Findings, Plot, Table, claim_better, compared,
                      not_tried)
from progress import Progress

REPEATS = [1, 2, 4]
STEPS, TOKENS = 3, 128
PUBLISHED, SERVE_FORM = "MemShare, as published", "MemShare, serve form"
TAU_PAPER, TAU_SERVE = 0.8, 0.27
SETTINGS = {"memshare.tau_block=0.35": ["memshare.tau_block=0.35"], "keys not aligned": ["memshare.align=none"],
            "paper's profile": ["memshare.profile=paper"],
            "paper's profile, memshare.calibrate=0.01": ["memshare.profile=paper", "memshare.calibrate=0.01"]}


@dataclass
class Row:
    """One task: unshared, shared by the pool, and other methods with the same number of blocks."""

    name: str
    plain: Recall
    shared: pool.Run
    chance: Recall

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
    return 3 * (len(REPEATS) + len(tasks.LENGTHS) - 1) + len(SETTINGS) + 4


def serve(programs: Programs, questions: list[tasks.Question], *settings: str) -> pool.Run:
    return pool.serve(programs, questions, ["memshare=on", *settings])


def told(baselines: ask.Baselines, questions: list[tasks.Question], rule: str,
         values: list[float]) -> tuple[Recall, float]:
    """A baseline's recall, and its share of the tokens."""
    ids = [tasks.ids_of(q) for q in questions]
    answers = baselines.pairs(ask.told, ids, values, tasks.BLANK, rule)
    share = mean([pool.BLOCK * blocks / len(i) for (_, blocks, _), i in zip(answers, ids)])
    return pool.recall_of_tokens(questions, [a for a, _, _ in answers]), share


def measure(programs: Programs, baselines: ask.Baselines, progress: Progress, name: str,
            questions: list[tasks.Question]) -> Row:
    progress.step(f"MemShare: {name}, unshared")
    plain = pool.plain(programs, questions)
    progress.step(f"MemShare: {name}")
    ours = serve(programs, questions)
    progress.step(f"MemShare: {name}, as many blocks at random")
    chance, _ = told(baselines, questions, "at random", [r["sequence"]["shared"] for r in ours.reports])
    return Row(name, plain, ours, chance)


def run(programs: Programs, baselines: ask.Baselines, progress: Progress, quick: bool) -> Findings:
    count = questions_of(quick)
    rows = [measure(programs, baselines, progress, f"told {n} x, {tasks.LENGTHS[0]}",
                    tasks.reasoning(count, STEPS, n, TOKENS)) for n in REPEATS]
    other = [measure(programs, baselines, progress, f"told {REPEATS[-1]} x, {lengths}",
                     tasks.reasoning(count, STEPS, REPEATS[-1], TOKENS, lengths=lengths))
             for lengths in tasks.LENGTHS[1:]]
    questions = tasks.reasoning(count, STEPS, REPEATS[-1], TOKENS)
    return findings(count, rows, other, forms(programs, baselines, progress, questions))


def forms(programs: Programs, baselines: ask.Baselines, progress: Progress, questions: list[tasks.Question]) -> Table:
    """Other settings, and the paper's form with its own threshold and with one that fits this model's keys."""
    table = Table(f"Other forms, steps told {REPEATS[-1]} x, {tasks.LENGTHS[0]}", ["form", "recall", "tokens shared"])
    for name, settings in SETTINGS.items():
        progress.step(f"MemShare: {name}")
        served = serve(programs, questions, *settings)
        table.rows.append([f"kvd, {name}", str(served.recall), f"{share_of(served):.1%}"])
    progress.step("MemShare: the paper's threshold, calibrated")
    distances = sorted(d for part in baselines.each(ask.pairs_apart, [tasks.ids_of(q) for q in questions[:8]], 100)
                       for d in part)
    least = round(0.75 * distances[len(distances) // 100], 2)
    for rule, tau in ((PUBLISHED, TAU_PAPER), (PUBLISHED, least), (SERVE_FORM, TAU_SERVE)):
        progress.step(f"MemShare: {rule}, threshold {tau}")
        recall, share = told(baselines, questions, rule, [tau] * len(questions))
        table.rows.append([f"{rule}, threshold {tau} (numpy)", str(recall), f"{share:.1%}"])
    table.note = (f"{least} is three quarters of the distance below which one random pair of blocks in a hundred lies "
                  f"({distances[len(distances) // 100]:.2f}).")
    return table


def findings(count: int, rows: list[Row], other: list[Row], settings: Table) -> Findings:
    table = Table(f"{count} prompts of {STEPS} steps of about {TOKENS} tokens, "
                  f"each time with two other facts and {tasks.CHANGED:.0%} of the other sentences changed",
                  ["steps", "recall, unshared", "recall, MemShare", "recall, as many blocks at random", "tokens shared",
                   "saved KiB", "empty slots", "saved, net KiB", "labels KiB"],
                  [[r.name, str(r.plain), str(r.shared.recall), str(r.chance), f"{r.affected:.1%}",
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
    plain, ours, chance = (together([getattr(r, n) if n != "shared" else r.shared.recall for r in repeated])
                           for n in ("plain", "shared", "chance"))
    most = max(r.affected for r in repeated)
    published = next(row for row in settings.rows if row[0].startswith(PUBLISHED))
    return [
        Claim("97.5 % of the dense model's accuracy is kept (0.872 of 0.894)",
              f"{compared(ours, plain)} against unshared", HOLDS if kept(ours, plain) else NOT_SHOWN,
              "" if kept(ours, plain) else "so many questions cannot exclude a loss of 0.05"),
        Claim("8 to 39 % of the tokens are affected, in sequences whose steps repeat",
              f"{most:.0%} in the serve form; the paper's form and threshold: {published[2]}, recall {published[1]}",
              HOLDS if most >= 0.08 else NOT_REACHED),
        claim_of_similarity(ours, chance, repeated),
        not_tried("84.8 % more throughput (abstract)", "it needs an engine that runs batches"),
    ]


def claim_of_similarity(ours: Recall, chance: Recall, repeated: list[Row]) -> Claim:
    shares = mean([r.affected for r in repeated])
    return claim_better("Similarity matters: random sharing at the same ratio loses accuracy (Table 5)",
                        f"MemShare against as many blocks at random ({shares:.0%} of the tokens)", ours, chance,
                        {NOT_SHOWN: "neither loses enough answers to show with so many questions"})


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
