# SPDX-License-Identifier: Apache-2.0
"""MemShare: memory saved and accuracy when similar reasoning steps share blocks, against random sharing."""

from __future__ import annotations

import tasks
from engine import Daemon, Programs, divergence, mean, threads
from findings import Claim, Findings, Plot, Table, above
from progress import Progress

REPEATS = [1, 2, 3, 4]
STEPS = 5
OWN = ["--own-prompt", "yes", "--threads", threads(), "--sync-wait", "6"]
COMPARED = 4        # prompts whose distributions are compared
VOCABULARY = 760
SETTINGS = {
    "serve": ["memshare.profile=serve"],
    "serve, keys not aligned": ["memshare.profile=serve", "memshare.align=none"],
    "serve, threshold 0.6": ["memshare.profile=serve", "memshare.tau_block=0.6"],
    "paper": ["memshare.profile=paper"],
}


def questions_of(quick: bool) -> int:
    return 12 if quick else 30


def steps(quick: bool) -> int:
    return 2 * len(REPEATS) + len(SETTINGS)


class Shares:
    """Means over the requests of one run."""

    def __init__(self, questions: list[tasks.Question], reports: list[dict], changes: list[float]) -> None:
        tables = [r["sequence"] for r in reports]
        self.accuracy = tasks.accuracy(questions, reports)
        blocks = sum(t["blocks"] or r["private_blocks"] for t, r in zip(tables, reports)) or 1
        self.affected = sum(t["shared_tokens"] for t in tables) / (sum(t["tokens"] for t in tables) or 1)
        self.blocks = sum(t["shared"] + t["random_shared"] for t in tables) / blocks
        self.saved_kib = mean([t["bytes_saved"] / 1024 for t in tables])
        self.empty = sum(t["empty_slots"] for t in tables) / (sum(r["prompt_tokens"] for r in reports) or 1)
        self.divergence = mean(changes)


def measure(programs: Programs, questions: list[tasks.Question], options: list[str], socket: str | None) -> Shares:
    """The answers of all requests, and how far a few prompts' next-token distributions move."""
    reports = programs.generate(tasks.prompts(questions), "--max-tokens", "8", *OWN, *options, socket=socket)
    changes = []
    for question in questions[:COMPARED]:
        exact, _ = programs.logits(question.prompt)
        other, _ = programs.logits(question.prompt, *OWN, *options, socket=socket)
        changes.append(divergence(exact, other, VOCABULARY))
    return Shares(questions, reports, changes)


def with_daemon(programs: Programs, questions: list[tasks.Question], settings: list[str]) -> Shares:
    """One request after the other through a daemon whose space has MemShare on."""
    with Daemon(programs, "--pool", "64M") as daemon:
        programs.generate(tasks.prompts(questions[:1]), "--max-tokens", "1", socket=daemon.socket)  # makes the space
        daemon.kvctl("space", "set", "model", "memshare=on", *settings)
        return measure(programs, questions, [], daemon.socket)


def at_random(programs: Programs, questions: list[tasks.Question], share: float) -> Shares:
    """As many blocks, any older ones in their places. First blocks are left alone, so that more must be asked for."""
    asked = max(1.3 * share, 1e-6)
    chance = measure(programs, questions, ["--share-random", f"{asked:.6f}"], None)
    if share and chance.blocks and not comparable(share, chance.blocks):
        asked = min(asked * share / chance.blocks, 1)
        chance = measure(programs, questions, ["--share-random", f"{asked:.6f}"], None)
    return chance


def comparable(share: float, other: float) -> bool:
    return 0.85 * share <= other <= 1.15 * share


def run(programs: Programs, progress: Progress, quick: bool) -> Findings:
    count = questions_of(quick)
    rows: list[tuple[int, float, Shares, Shares]] = []
    for repeats in REPEATS:
        questions = tasks.reasoning(count, STEPS, repeats)
        progress.step(f"MemShare: steps told {repeats} times")
        plain = tasks.accuracy(questions, programs.generate(tasks.prompts(questions), "--max-tokens", "8"))
        ours = with_daemon(programs, questions, SETTINGS["serve"])
        progress.step(f"MemShare: random sharing, steps told {repeats} times")
        rows.append((repeats, plain, ours, at_random(programs, questions, ours.blocks)))
    table = Table(f"{count} prompts of {STEPS} steps of {tasks.STEP_TOKENS} tokens, each told several times with "
                  f"{tasks.CHANGED:.0%} of the filler sentences changed (serve profile)",
                  ["told", "recall, unshared", "recall, MemShare", "recall, random", "affected tokens", "blocks shared",
                   "... at random", "change, MemShare", "change, random", "saved KiB", "empty slots"])
    for repeats, plain, ours, chance in rows:
        table.rows.append([f"{repeats} x", plain, ours.accuracy, chance.accuracy, f"{ours.affected:.1%}",
                           f"{ours.blocks:.1%}", f"{chance.blocks:.1%}", ours.divergence, chance.divergence,
                           ours.saved_kib, f"{ours.empty:.1%}"])
    findings = Findings("memshare", "MemShare: similar reasoning steps share blocks",
                        "Prompts whose steps repeat; each request's blocks are a sequence of the pool, the worker "
                        "compares steps by their words and blocks by their keys and values, and kvlm takes over what is "
                        "proposed, turning queries by the distance between the two places. The change is the mean KL "
                        "divergence of next-token distributions from those of the unshared cache, in nats.")
    settings = settings_table(programs, progress, count)
    findings.tables = [table, settings]
    findings.plots = [
        Plot("Change of the next token's distribution", "times a step is told", "KL, nats",
             {"MemShare": [(r, o.divergence) for r, _, o, _ in rows],
              "random sharing": [(r, c.divergence) for r, _, _, c in rows]}),
        Plot("Tokens that share another's block", "times a step is told", "% of all tokens",
             {"affected": [(r, 100 * o.affected) for r, _, o, _ in rows]})]
    findings.claims = claims(rows, settings, count)
    return findings


def settings_table(programs: Programs, progress: Progress, count: int) -> Table:
    table = Table(f"Settings, steps told {REPEATS[-1]} times",
                  ["settings", "recall", "affected tokens", "change", "saved KiB"])
    questions = tasks.reasoning(count, STEPS, REPEATS[-1])
    for name, values in SETTINGS.items():
        progress.step(f"MemShare: {name}")
        s = with_daemon(programs, questions, values)
        table.rows.append([name, s.accuracy, f"{s.affected:.1%}", s.divergence, s.saved_kib])
    return table


def claims(rows: list[tuple[int, float, Shares, Shares]], settings: Table, count: int) -> list[Claim]:
    plain, ours = mean([r[1] for r in rows]), mean([r[2].accuracy for r in rows])
    paper = next(row[2] for row in settings.rows if row[0] == "paper")
    form = f"in the serve form; the paper's form shares {paper} of the tokens"
    most = max(r[2].affected for r in rows)
    return [
        Claim("97.5 % of the dense model's accuracy is kept (0.872 of 0.894)",
              f"recall {ours:.2f} shared, {plain:.2f} unshared, {form}",
              None if paper == "0.0%" and ours >= 0.975 * plain else ours >= 0.975 * plain,
              "kept, but not by the paper's form, which finds nothing to share" if paper == "0.0%" else ""),
        Claim("8 to 39 % of the tokens are affected, in sequences whose steps repeat",
              f"up to {most:.0%} of the tokens where steps repeat, {rows[0][2].affected:.1%} where they do not, {form}",
              None if paper == "0.0%" and most >= 0.08 else most >= 0.08,
              "only in the serve form" if paper == "0.0%" else ""),
        claim_of_similarity([r for r in rows if r[2].blocks > 0], count),
    ]


def claim_of_similarity(shared: list[tuple[int, float, Shares, Shares]], count: int) -> Claim:
    ours, chance = [r[2] for r in shared], [r[3] for r in shared]
    recall, lost = mean([s.accuracy for s in ours]), mean([s.accuracy for s in chance])
    ratio, random = mean([s.blocks for s in ours]), mean([s.blocks for s in chance])
    better = above(recall, lost, count * len(shared)) if shared and comparable(ratio, random) else None
    why = {True: "", False: "random sharing answers better",
           None: "no recall is lost by either that so many questions could tell" if shared and comparable(ratio, random)
                 else "the ratios are not the same"}[better]
    return Claim("Similarity matters: random sharing at the same ratio loses accuracy (Table 5)",
                 f"recall {lost:.2f} at random ({random:.1%} of the blocks), {recall:.2f} with MemShare ({ratio:.1%}); "
                 f"distributions move by {mean([s.divergence for s in chance]):.4f} nats at random, "
                 f"{mean([s.divergence for s in ours]):.4f} with MemShare", better, why)
