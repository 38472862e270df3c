# SPDX-License-Identifier: Apache-2.0
"""KVReviver: recall against the budget with a sketch, with exact copies behind it, and with 4-bit blocks instead."""

from __future__ import annotations

import tasks
from engine import Programs, mean, threads
from findings import Claim, Findings, Plot, Table
from progress import Progress

BUDGETS = [10, 25, 50]
VARIANTS = {
    "serve: sketch, exact copies behind it": ["--evict", "reviver"],
    "serve, without exact copies": ["--evict", "reviver", "--spill", "none"],
    "paper: unsigned keys, uniform hashing": ["--evict", "reviver", "--profile", "paper"],
    "int4, exact copies behind it": ["--evict", "int4"],
    "int4 alone": ["--evict", "int4", "--spill", "none"],
    "KeyDiff (evict for good)": ["--evict", "keydiff"],
    "recent window": ["--evict", "window"],
}
LARGE_SKETCH = ["--evict", "reviver", "--spill", "none", "--split", "0.8:0.1:0.1", "--sketch-load", "100"]


def sizes(quick: bool) -> tuple[int, int]:
    return (16, 600) if quick else (40, 1000)


def steps(quick: bool) -> int:
    return 1 + len(VARIANTS) * len(BUDGETS) + 2


def ask(programs: Programs, questions: list[tasks.Question], options: list[str], budget: float) -> tuple[float, list]:
    reports = programs.generate(tasks.prompts(questions), *options, "--budget", f"{budget}%", "--max-tokens", "8",
                                "--threads", threads())
    return tasks.accuracy(questions, reports), reports


def kib(reports: list[dict], name: str) -> float:
    return mean([r[name] / 1024 for r in reports])


def run(programs: Programs, progress: Progress, quick: bool) -> Findings:
    count, length = sizes(quick)
    questions = tasks.recall(count, length)
    progress.step("KVReviver: full cache")
    full = tasks.accuracy(questions, programs.generate(tasks.prompts(questions), "--max-tokens", "8"))
    recall = Table(f"Recall of {count} facts in documents of {length} tokens",
                   ["variant", *(f"{b} %" for b in BUDGETS), "full"])
    cost = Table(f"What it costs at {BUDGETS[1]} %", ["variant", "cache KiB", "exact copies KiB", "sketch load",
                                                     "revived exactly", "revived approximately", "refused", "ms a request"])
    curves: dict[str, dict[float, float]] = {}
    for name, options in VARIANTS.items():
        curves[name] = {}
        for budget in BUDGETS:
            progress.step(f"KVReviver: {name}, {budget} %")
            curves[name][budget], reports = ask(programs, questions, options, budget)
            if budget == BUDGETS[1]:
                cost.rows.append([name, kib(reports, "kv_bytes"), kib(reports, "spill_bytes"),
                                  max(r["sketch_load"] for r in reports),
                                  *(mean([r[k] for r in reports]) for k in ("revived_exact", "revived_approximate",
                                                                            "revive_refused", "total_ms"))])
        recall.rows.append([name, *curves[name].values(), full])
    large = []
    for keys in ("unsigned", "centred"):
        progress.step(f"KVReviver: a sketch of 40 % of the tokens, {keys} keys")
        accuracy, reports = ask(programs, questions, [*LARGE_SKETCH, "--sketch-keys", keys], 50)
        large.append([f"{keys} keys, {max(r['sketch_load'] for r in reports):.1f} tokens per cell", accuracy])
    findings = Findings("kvreviver", "KVReviver: what was evicted can come back",
                        "Recent, candidate and vague tokens share the budget 45:45:10. In the paper the vague part is "
                        "a count sketch that every query reads; here the sketch answers only while it is not "
                        "overloaded, and exact copies in host memory stand behind it.")
    findings.tables = [recall, cost, Table("A sketch five times as large, budget 50 %", ["sketch", "recall"], large)]
    findings.plots = [Plot("Recall against the budget", "tokens in the cache, % of the prompt", "recall",
                           {n: [*c.items(), (100, full)] for n, c in curves.items()}, (0, 1.05))]
    findings.claims = claims(curves, full, large, cost)
    return findings


def claims(curves: dict[str, dict[float, float]], full: float, large: list, cost: Table) -> list[Claim]:
    serve, paper = curves["serve: sketch, exact copies behind it"], curves["paper: unsigned keys, uniform hashing"]
    alone, int4 = curves["serve, without exact copies"], curves["int4 alone"]
    return [
        Claim("End-to-end accuracy of the full cache at 10 % of the budget for 2 k contexts (abstract)",
              f"recall at 10 %: {serve[10]:.2f} with exact copies behind the sketch, {alone[10]:.2f} without, "
              f"{paper[10]:.2f} in the paper's form, {full:.2f} in full", paper[10] >= 0.95 * full,
              "the copies carry the answer, not the sketch" if serve[10] > paper[10] + 0.1 else ""),
        Claim("About 2 % loss at 25 % of the budget for 32 k contexts (abstract)",
              f"recall at 25 %: {serve[25]:.2f} with exact copies, {paper[25]:.2f} in the paper's form, {full:.2f} in full",
              paper[25] >= 0.98 * full,
              f"the sketch holds {cost.rows[2][3]:.0f} tokens per cell; its error is many times the keys themselves"),
        Claim("The sketch restores vectors accurately enough to attend to (Section 4)",
              f"with a sketch of 40 % of the tokens: {large[0][0]}: {large[0][1]:.2f}, {large[1][0]}: {large[1][1]:.2f}; "
              f"4 bits a number alone at 25 %: {int4[25]:.2f}", max(r[1] for r in large) >= 0.9 * full,
              "" if max(r[1] for r in large) >= 0.9 * full else "4-bit groups need less memory and lose less"),
    ]
