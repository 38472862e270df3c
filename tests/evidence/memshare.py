# SPDX-License-Identifier: Apache-2.0
"""MemShare: memory saved and accuracy when similar reasoning steps share blocks, against random sharing."""

from __future__ import annotations

import tasks
from engine import Daemon, Programs, mean, threads
from findings import Claim, Findings, Plot, Table
from progress import Progress

REPEATS = [1, 2, 3, 4]
STEPS = 5
OWN = ["--own-prompt", "yes", "--max-tokens", "8", "--threads", threads()]
SETTINGS = {
    "serve": ["memshare.profile=serve"],
    "serve, keys not aligned": ["memshare.profile=serve", "memshare.align=none"],
    "serve, threshold 0.6": ["memshare.profile=serve", "memshare.tau_block=0.6"],
    "paper": ["memshare.profile=paper"],
}


def questions_of(quick: bool) -> int:
    return 12 if quick else 30


def steps(quick: bool) -> int:
    return 1 + len(REPEATS) * 2 + len(SETTINGS)


class Shares:
    """Sums over the requests of one run."""

    def __init__(self, questions: list[tasks.Question], reports: list[dict]) -> None:
        tables = [r["sequence"] for r in reports]
        self.accuracy = tasks.accuracy(questions, reports)
        blocks = sum(t["blocks"] for t in tables) or 1
        self.affected = sum(t["shared_tokens"] for t in tables) / (sum(t["tokens"] for t in tables) or 1)
        self.blocks_shared = sum(t["shared"] for t in tables) / blocks
        self.saved_kib = mean([t["bytes_saved"] / 1024 for t in tables])
        self.random = sum(t["random_shared"] for t in tables) / blocks
        self.empty = sum(t["empty_slots"] for t in tables) / (sum(r["prompt_tokens"] for r in reports) or 1)


def with_daemon(programs: Programs, questions: list[tasks.Question], settings: list[str]) -> Shares:
    """One request after the other through a daemon whose space has MemShare on."""
    with Daemon(programs, "--pool", "64M") as daemon:
        programs.generate(tasks.prompts(questions[:1]), "--max-tokens", "1", socket=daemon.socket) # makes the space
        daemon.kvctl("space", "set", "model", "memshare=on", *settings)
        return Shares(questions, programs.generate(tasks.prompts(questions), *OWN, socket=daemon.socket))


def at_random(programs: Programs, questions: list[tasks.Question], share: float) -> Shares:
    return Shares(questions, programs.generate(tasks.prompts(questions), *OWN, "--share-random", f"{share:.4f}"))


def run(programs: Programs, progress: Progress, quick: bool) -> Findings:
    count = questions_of(quick)
    curve, random_curve, saved = [], [], []
    table = Table(f"{count} prompts of {STEPS} steps of {tasks.STEP_TOKENS} tokens, each told several times with "
                  f"{tasks.CHANGED:.0%} of the filler sentences changed (serve profile)",
                  ["told", "recall, unshared", "recall, MemShare", "recall, random", "affected tokens",
                   "saved KiB", "empty slots"])
    for repeats in REPEATS:
        questions = tasks.reasoning(count, STEPS, repeats)
        progress.step(f"MemShare: steps told {repeats} times")
        plain = tasks.accuracy(questions, programs.generate(tasks.prompts(questions), "--max-tokens", "8"))
        ours = with_daemon(programs, questions, SETTINGS["serve"])
        progress.step(f"MemShare: random sharing, steps told {repeats} times")
        chance = at_random(programs, questions, ours.blocks_shared)
        table.rows.append([f"{repeats} x", plain, ours.accuracy, chance.accuracy, f"{ours.affected:.1%}",
                           ours.saved_kib, f"{ours.empty:.1%}"])
        curve.append((repeats, ours.accuracy))
        random_curve.append((repeats, chance.accuracy))
        saved.append((repeats, 100 * ours.affected))
    settings = Table(f"Settings, steps told {REPEATS[-1]} times", ["settings", "recall", "affected tokens", "saved KiB"])
    questions = tasks.reasoning(count, STEPS, REPEATS[-1])
    for name, values in SETTINGS.items():
        progress.step(f"MemShare: {name}")
        s = with_daemon(programs, questions, values)
        settings.rows.append([name, s.accuracy, f"{s.affected:.1%}", s.saved_kib])
    progress.step("MemShare: done")
    findings = Findings("memshare", "MemShare: similar reasoning steps share blocks",
                        "Prompts whose steps repeat; each request's blocks are a sequence of the pool, the worker "
                        "compares steps by their words and blocks by their keys and values, and kvlm takes over what is "
                        "proposed, turning queries by the distance between the two places.")
    findings.tables = [table, settings]
    findings.plots = [
        Plot("Recall", "times a step is told", "recall", {"MemShare": curve, "random sharing": random_curve}, (0, 1.05)),
        Plot("Tokens that share another's block", "times a step is told", "% of all tokens", {"affected": saved})]
    findings.claims = claims(table, curve, random_curve, saved)
    return findings


def claims(table: Table, curve: list, random_curve: list, saved: list) -> list[Claim]:
    plain, ours, chance = (mean([row[i] for row in table.rows]) for i in (1, 2, 3))
    return [
        Claim("97.5 % of the dense model's accuracy is kept (0.872 of 0.894)",
              f"recall {ours:.2f} shared, {plain:.2f} unshared", ours >= 0.95 * plain),
        Claim("8 to 39 % of the tokens are affected, in sequences whose steps repeat",
              f"{saved[1][1]:.0f} to {saved[-1][1]:.0f} % of the tokens where steps repeat, {saved[0][1]:.1f} % where "
              "they do not", saved[-1][1] >= 8),
        Claim("Similarity matters: random sharing at the same ratio loses accuracy (Table 5)",
              f"recall {chance:.2f} at the same shares, {ours:.2f} with MemShare", chance < ours - 0.02),
    ]
