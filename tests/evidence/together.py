# SPDX-License-Identifier: Apache-2.0
"""All methods on at once: several processes on a pool that holds a fraction of what they need."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import before
import pool
import tasks
from certainty import Recall, kept
from engine import Daemon, Programs, mean
from findings import HOLDS, NOT_SHOWN, Aim, Claim, Findings, Plot, Table, aim_recall, compared, verdict
from progress import Progress

PROCESSES = 4
STEPS, REPEATS, TOKENS = 8, 2, 64
POOLS = [20, 8, 6, 4]      # MiB; four requests at once need 17
ALL, NONE = "all methods", "none"
OPTIONS = [*pool.OPTIONS, "--decode-tail", "24"]
ON = ["memshare=on", "kvreviver=on", "kvreviver.budget=0.15", "hshare=on", "hshare.recent=32", "hshare.top=208",
      "policy=priority"]
VARIANTS = {ALL: ON, NONE: []}


def questions_of(quick: bool) -> int:
    return 16 if quick else 60


def steps(quick: bool) -> int:
    return len(POOLS) * len(VARIANTS)


def one(programs: Programs, questions: list[tasks.Question], size: int, settings: list[str]) -> dict:
    """Four kvlm processes at the same time."""
    with Daemon(programs, "--pool", f"{size}M", "--set", "daemon.segment=256K", "--set", "daemon.spill=64M") as daemon:
        pool.space(daemon, settings)
        parts = [questions[i::PROCESSES] for i in range(PROCESSES)]
        options = OPTIONS if settings else [*OPTIONS, "--sequence", "on"]
        with ThreadPoolExecutor(PROCESSES) as executor:
            reports = list(executor.map(lambda part: programs.generate(tasks.prompts(part), *options,
                                                                       socket=daemon.socket), parts))
        counters = daemon.counters(pool.SPACE)
        broken = sum(row["broken"] for row in daemon.stat("check")["checks"])
    ordered = [reports[i % PROCESSES][i // PROCESSES] for i in range(len(questions))]
    return {"recall": pool.recall_of(questions, ordered), "private": mean([r["refused"] > 0 for r in ordered]),
            "broken": broken, "ms": mean([r["total_ms"] for r in ordered]), **counters,
            **{name: mean([r.get("sequence", {}).get(f"{name}_bytes", 0) / 1024 for r in ordered])
               for name in ("label", "copy", "sketch")}}


def run(programs: Programs, progress: Progress, quick: bool) -> Findings:
    questions = tasks.reasoning(questions_of(quick), STEPS, REPEATS, TOKENS, seed="evidence-together")
    table = Table(f"{len(questions)} requests of about {STEPS * REPEATS * TOKENS} tokens, "
                  f"{PROCESSES} processes at a time",
                  ["pool MiB", "methods", "recall", "requests that left the pool", "blocks shared", "spilled", "vague",
                   "revived exactly", "revived approximately", "revival refused", "labels KiB", "copies KiB",
                   "sketch KiB", "ms a request", "invariants broken", "before, recall"])
    results: dict[tuple[str, int], dict] = {}
    for size in POOLS:
        for name, settings in VARIANTS.items():
            progress.step(f"together: {size} MiB, {name}")
            r = results[name, size] = one(programs, questions, size, settings)
            table.rows.append([size, name, str(r["recall"]), f"{r['private']:.0%}", r["shared"], r["spilled"],
                               r["vague"], r["revived_exact"], r["revived_approx"], r["revive_refused"], r["label"],
                               r["copy"], r["sketch"], r["ms"], r["broken"],
                               before.TOGETHER.get(size) if name == ALL else None])
    table.note = ("Copies and labels are outside the pool, with a size that does not depend on it. \"Before\": at "
                  f"{before.COMMIT}, 20 questions of a task whose facts were told again in every step.")
    findings = Findings("together", "All methods at once",
                        "Four processes answer at the same time, from sequences in a pool that shrinks from all the "
                        "memory they need to a quarter of it: MemShare shares blocks; attention mass, HShare's "
                        "selections and KeyDiff rank them; KVReviver moves out the lowest and brings back those that "
                        "HShare's labels select.",
                        "Use all of them if the pool is too small for its sequences and must not refuse; without them, "
                        "requests leave the pool for private memory, exact and in full size.")
    findings.tables = [table]
    findings.plots = plots(results)
    findings.claims, findings.aims = judged(results)
    return findings


def plots(results: dict[tuple[str, int], dict]) -> list[Plot]:
    curves = {name: [(size, results[name, size]["recall"].value, *results[name, size]["recall"].interval())
                     for size in POOLS] for name in VARIANTS}
    left = {name: [(size, 100 * results[name, size]["private"]) for size in POOLS] for name in VARIANTS}
    return [Plot("Recall", "pool, MiB", "recall", curves, (0, 1.05)),
            Plot("Requests that had to leave the pool for private memory", "pool, MiB", "%", left, (0, 105))]


def judged(results: dict[tuple[str, int], dict]) -> tuple[list[Claim], list[Aim]]:
    def recall(name: str, size: int) -> Recall:
        return results[name, size]["recall"]

    half, quarter = POOLS[1], POOLS[-1]
    why = "selected blocks find no room to come back while four requests are answered at once: " + "; ".join(
        f"{size} MiB: {results[ALL, size]['revive_refused']} revivals refused, {results[ALL, size]['revived_exact']} made"
        for size in POOLS[1:])
    broken = sum(r["broken"] for r in results.values())
    claims = [
        Claim("(ours) A quarter of the memory is enough for the same answers",
              f"{quarter} MiB with all methods against {POOLS[0]} MiB without: "
              f"{compared(recall(ALL, quarter), recall(NONE, POOLS[0]))}",
              HOLDS if kept(recall(ALL, quarter), recall(NONE, POOLS[0])) else NOT_SHOWN,
              "" if kept(recall(ALL, quarter), recall(NONE, POOLS[0])) else "a loss of 0.05 cannot be excluded"),
        Claim("(ours) Every invariant holds with every method on", f"{broken} broken in {len(results)} runs",
              verdict(broken == 0), invariant=True)]
    aims = [aim_recall("recall of 0.9 with half of the memory", recall(ALL, half), 0.9, why),
            aim_recall("recall of 0.6 with a quarter of the memory", recall(ALL, quarter), 0.6, why)]
    return claims, aims
