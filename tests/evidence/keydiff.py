# SPDX-License-Identifier: Apache-2.0
"""KeyDiff: recall against the budget, beside what else one could keep."""

from __future__ import annotations

import tasks
from engine import Programs, mean, threads
from findings import Claim, Findings, Plot, Table, above
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


def claim_of_small_budgets(full: float, curve: dict[float, float], count: int, length: int) -> Claim:
    """A loss can be seen here; that there is none of 0.04 % cannot."""
    kept = curve[75]
    lost = above(full, kept, count)
    return Claim("Within 0.04 % of the full cache at an 8 K budget, about 23 % less memory (abstract); Table 1 itself "
                 "gives 0.2 to 0.35 %",
                 f"recall {kept:.2f} with three quarters of the tokens, {curve[50]:.2f} with half, {curve[25]:.2f} with "
                 f"a quarter, {full:.2f} with all", False if lost else None,
                 "2 KV heads of 32 dimensions have little that repeats, and the task needs exactly one fact that "
                 "nothing announces" if lost else
                 f"{count} questions tell differences of {1 / count:.1%}, not of 0.04 %; {length} tokens are no 8 K")


def claim_of_comparison(curves: dict[str, dict[float, float]], count: int) -> Claim:
    ours, window = mean(list(curves["KeyDiff"].values())), mean(list(curves["recent window"].values()))
    h2o, chance = mean(list(curves["attention mass (H2O)"].values())), mean(list(curves["random"].values()))
    better = above(ours, max(window, h2o, chance), count * len(BUDGETS))
    return Claim("Better than the attention-based and window policies at equal budgets (Table 1, Fig. 6)",
                 f"mean recall over all budgets: KeyDiff {ours:.2f}, attention mass {h2o:.2f}, recent window "
                 f"{window:.2f}, random {chance:.2f}", better,
                 {True: "", False: "in this model the facts' keys are not the distinctive ones",
                  None: f"too close to tell with {count} questions"}[better])


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
    findings.claims = [claim_of_small_budgets(full, curves["KeyDiff"], count, length),
                       claim_of_comparison(curves, count)]
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
