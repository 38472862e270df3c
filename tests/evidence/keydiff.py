# SPDX-License-Identifier: Apache-2.0
"""KeyDiff: recall against the budget, beside what else one could keep."""

from __future__ import annotations

import tasks
from engine import Programs, mean, threads
from findings import Claim, Findings, Plot, Table
from progress import Progress

POLICIES = {"KeyDiff": "keydiff", "recent window": "window", "random": "random", "attention mass (H2O)": "attention"}
BUDGETS = [12.5, 25, 50, 75]
PROFILES = ["serve", "paper"]


def sizes(quick: bool) -> tuple[int, int]:
    """Questions, and tokens of their documents."""
    return (16, 600) if quick else (40, 1000)


def steps(quick: bool) -> int:
    return 1 + len(POLICIES) * len(BUDGETS) + 2 * len(BUDGETS)


def ask(programs: Programs, questions: list[tasks.Question], policy: str, budget: float, *more: str) -> tuple[float, list]:
    reports = programs.generate(tasks.prompts(questions), "--evict", policy, "--budget", f"{budget}%", "--max-tokens",
                                "8", "--threads", threads(), *more)
    return tasks.accuracy(questions, reports), reports


def claim_of_small_budgets(full: float, curve: dict[float, float]) -> Claim:
    """The abstract's claim, at the share of the context that 8 K is of the papers' long inputs."""
    kept = curve[50] / full if full else 0.0
    return Claim("Within 0.04 % of the full cache at an 8 K budget, about 23 % less memory (abstract); Table 1 itself "
                 "gives 0.2 to 0.35 %",
                 f"{kept:.1%} of the full cache's recall with half of the tokens, {curve[25] / full:.1%} with a "
                 "quarter", kept >= 0.95,
                 "" if kept >= 0.95 else "2 KV heads of 32 dimensions have little that repeats, and the task needs "
                                         "exactly one fact that nothing announces")


def claim_of_comparison(curves: dict[str, dict[float, float]]) -> Claim:
    ours, window = mean(list(curves["KeyDiff"].values())), mean(list(curves["recent window"].values()))
    h2o, chance = mean(list(curves["attention mass (H2O)"].values())), mean(list(curves["random"].values()))
    return Claim("Better than the attention-based and window policies at equal budgets (Table 1, Fig. 6)",
                 f"mean recall over all budgets: KeyDiff {ours:.2f}, attention mass {h2o:.2f}, recent window "
                 f"{window:.2f}, random {chance:.2f}", ours > max(window, h2o, chance),
                 "" if ours > max(window, h2o, chance) else "in this model the facts' keys are not the distinctive ones")


def run(programs: Programs, progress: Progress, quick: bool) -> Findings:
    count, length = sizes(quick)
    questions = tasks.recall(count, length)
    progress.step("KeyDiff: full cache")
    full_reports = programs.generate(tasks.prompts(questions), "--max-tokens", "8", "--threads", threads())
    full = tasks.accuracy(questions, full_reports)
    curves: dict[str, dict[float, float]] = {}
    table = Table(f"Recall of {count} facts in documents of {length} tokens, serve profile, blocks of 128 prompt tokens",
                  ["policy", *(f"{b:g} %" for b in BUDGETS), "full"])
    for name, policy in POLICIES.items():
        curves[name] = {}
        for budget in BUDGETS:
            progress.step(f"KeyDiff: {name}, {budget:g} %")
            curves[name][budget], _ = ask(programs, questions, policy, budget)
        table.rows.append([name, *curves[name].values(), full])
    findings = Findings("keydiff", "KeyDiff: eviction by the similarity of keys",
                        "Each layer and KV head keeps its own tokens; the prompt is processed in blocks of 128, and "
                        "what is over the budget is evicted after each, before the question is known.")
    findings.tables = [table, profiles(programs, progress, questions, full)]
    findings.plots = [Plot("Recall against the budget", "tokens kept, % of the prompt", "recall",
                           {name: [(b, a) for b, a in curve.items()] + [(100, full)] for name, curve in curves.items()},
                           (0, 1.05))]
    findings.claims = [claim_of_small_budgets(full, curves["KeyDiff"]), claim_of_comparison(curves)]
    return findings


def profiles(programs: Programs, progress: Progress, questions: list[tasks.Question], full: float) -> Table:
    table = Table("The two profiles, and whole blocks instead of single tokens (KeyDiff)",
                  ["variant", *(f"{b:g} %" for b in BUDGETS), "full"])
    for name, options in (("paper", ["--profile", "paper"]), ("serve, whole blocks", ["--evict-unit", "block"])):
        row = []
        for budget in BUDGETS:
            progress.step(f"KeyDiff: {name}, {budget:g} %")
            row.append(ask(programs, questions, "keydiff", budget, *options)[0])
        table.rows.append([name, *row, full])
    return table
