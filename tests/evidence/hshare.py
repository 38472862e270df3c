# SPDX-License-Identifier: Apache-2.0
"""HShare: accuracy and attention time against the share of layers, heads and queries that select for themselves."""

from __future__ import annotations

import tasks
from engine import Programs, mean, median
from findings import Claim, Findings, Plot, Table
from progress import Progress

RATIOS = {"1": "1,1,1", "9/16": "0.75,0.75,1", "9/32": "0.75,0.75,0.5", "1/8": "0.5,0.5,0.5",
          "1/16": "0.5,0.5,0.25", "1/32": "0.25,0.5,0.25"} # 9/16: what a space does unless told otherwise
VALUES = {"1": 1.0, "9/16": 9 / 16, "9/32": 9 / 32, "1/8": 1 / 8, "1/16": 1 / 16, "1/32": 1 / 32}
ONE_KIND = {"layers only, 1/2": "0.5,1,1", "KV heads only, 1/2": "1,0.5,1", "queries only, 1/2": "1,1,0.5",
            "queries only, 1/4": "1,1,0.25"}
SPEED = "8.6 x faster attention than dense at long contexts (Table 5)"
TAIL = "24"     # the question is computed token by token, so that sparse attention must find the fact


def sizes(quick: bool) -> tuple[int, int]:
    return (16, 800) if quick else (40, 1600)


def steps(quick: bool) -> int:
    return 3 + 3 * len(RATIOS) + len(ONE_KIND) + 3


def critical(length: int, share: float) -> str:
    """Sinks, recent and selected tokens: `share` of the document in all."""
    total = int(length * share)
    return f"16,32,{max(total - 48, 8)}"


def ask(programs: Programs, questions: list[tasks.Question], *options: str) -> tuple[float, list[dict]]:
    reports = programs.generate(tasks.prompts(questions), "--max-tokens", "12", "--stop", "", "--decode-tail", TAIL,
                                *options)
    return tasks.accuracy(questions, reports), reports


def attention_ms(programs: Programs, questions: list[tasks.Question], *options: str) -> float:
    """Milliseconds in attention and selection for each token that is decoded behind a long prompt."""
    reports = programs.generate(tasks.prompts(questions[:6]), "--max-tokens", "48", "--stop", "", *options)
    return median([(r["attention_ms"] + r["selection_ms"]) / max(r["generated_tokens"] - 1, 1) for r in reports])


def why(kinds: Table, dense: float) -> str:
    """Which kind of sharing loses, as the run measured it."""
    losing = [f"{row[0]} ({row[1]:.2f})" for row in kinds.rows if row[1] < 0.9 * dense]
    keeping = [f"{row[0]} ({row[1]:.2f})" for row in kinds.rows if row[1] >= 0.9 * dense]
    return (f"recall is lost by sharing over {', '.join(losing) or 'several kinds at once'}"
            f"{' and kept by sharing over ' + ', '.join(keeping) if keeping else ''}; adjacent tokens of a look-up "
            "attend to different places")


def run(programs: Programs, progress: Progress, quick: bool) -> Findings:
    count, length = sizes(quick)
    questions = tasks.recall(count, length)
    set_of = critical(length, 0.25)
    progress.step("HShare: dense")
    dense, _ = ask(programs, questions)
    progress.step("HShare: recent window only")
    window, _ = ask(programs, questions, "--hshare", "1,1,1", "--critical", f"16,{int(length * 0.25) - 16},0")
    table = Table(f"{count} facts in documents of {length} tokens; {set_of} sinks, recent and selected tokens",
                  ["sharing ratio", "recall, serve", "recall, paper", "ms a token, serve", "selections a token, serve"])
    curves: dict[str, list[tuple[float, float]]] = {"serve": [], "paper": []}
    times = []
    for name, ratio in RATIOS.items():
        row = []
        for profile in ("serve", "paper"):
            progress.step(f"HShare: {name}, {profile}")
            accuracy, reports = ask(programs, questions, "--profile", profile, "--hshare", ratio, "--critical", set_of)
            curves[profile].append((VALUES[name], accuracy))
            row.append((accuracy, reports))
        serve = row[0][1]
        progress.step(f"HShare: {name}, time")
        times.append((VALUES[name], attention_ms(programs, questions, "--hshare", ratio, "--critical", set_of)))
        table.rows.append([name, row[0][0], row[1][0], times[-1][1],
                           mean([r["selections"] / max(r["generated_tokens"] + int(TAIL), 1) for r in serve])])
    budgets = Table("How many tokens are attended to (sharing ratio 9/32, serve)", ["share of the tokens", "recall"])
    for share in (0.125, 0.25, 0.5):
        progress.step(f"HShare: {share:.0%} of the tokens")
        budgets.rows.append([f"{share:.1%}", ask(programs, questions, "--hshare", RATIOS["9/32"], "--critical",
                                                 critical(length, share))[0]])
    kinds = Table("One kind of sharing at a time (serve)", ["what is shared", "recall"])
    for name, ratio in ONE_KIND.items():
        progress.step(f"HShare: {name}")
        kinds.rows.append([name, ask(programs, questions, "--hshare", ratio, "--critical", set_of)[0]])
    progress.step("HShare: dense, time")
    dense_ms = attention_ms(programs, questions)
    table.rows.append(["dense", dense, dense, dense_ms, 0])
    table.rows.append(["recent window", window, None, None, None])
    findings = Findings("hshare", "HShare: critical tokens shared by layers, heads and queries",
                        "The question and the answer are decoded with sparse attention over a quarter of the tokens; "
                        "4-bit labels of the keys select them, and only a share of layers, heads and steps selects.")
    findings.tables = [table, kinds, budgets]
    findings.plots = [Plot("Recall against the sharing ratio", "sharing ratio", "recall",
                           {**curves, "dense": [(x, dense) for x in (0, 1)], "window": [(x, window) for x in (0, 1)]},
                           (0, 1.05)),
                      Plot("Attention and selection per token", "sharing ratio", "ms",
                           {"serve": times, "dense": [(x, dense_ms) for x in (0, 1)]})]
    at = {x: y for x, y in curves["serve"]}
    by_time = dict(times)
    findings.claims = [
        Claim("Accuracy close to the full cache at a ratio of 9/32 (Table 3: 45.5 to 43.8)",
              f"recall {at[9 / 32]:.2f} at 9/32, {at[1 / 8]:.2f} at 1/8, {dense:.2f} dense, {window:.2f} with a recent "
              "window of the same size", at[9 / 32] >= 0.9 * dense,
              "" if at[9 / 32] >= 0.9 * dense else why(kinds, dense)),
        Claim("Selection costs less the more is shared",
              f"{by_time[1.0]:.3f} ms a token in attention and selection without sharing, {by_time[9 / 32]:.3f} at "
              f"9/32, {by_time[1 / 8]:.3f} at 1/8", by_time[1.0] > by_time[9 / 32] > by_time[1 / 8]),
        claim_of_speed(at, by_time, dense, dense_ms, length),
    ]
    return findings


def claim_of_speed(recall: dict[float, float], ms: dict[float, float], dense: float, dense_ms: float,
                   length: int) -> Claim:
    """At the fastest setting that still answers; how fast wrong answers come is no merit."""
    kept = [ratio for ratio in ms if recall[ratio] >= 0.9 * dense]
    best = min(kept, key=lambda ratio: ms[ratio], default=None)
    eighth = f"{dense_ms / ms[1 / 8]:.1f} x dense's speed at 1/8, where recall is {recall[1 / 8]:.2f}"
    if best is None:
        return Claim(SPEED, eighth, None, f"no setting keeps 0.9 of dense recall ({dense:.2f})")
    times = dense_ms / ms[best]
    return Claim(SPEED, f"{times:.1f} x dense's speed at a ratio of {best:.3g}, where recall is {recall[best]:.2f} of "
                 f"{dense:.2f}; {eighth}", True if times >= 8.6 else None if times > 1 else False,
                 "" if times >= 8.6 else f"{length} tokens of 2 heads of 32 dimensions are no long context: reading "
                                         "them all costs little more than selecting among them")
