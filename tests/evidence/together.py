# SPDX-License-Identifier: Apache-2.0
"""All methods on at once: several processes on a pool that holds a fraction of what they need."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import tasks
from engine import Daemon, Programs, mean
from findings import Claim, Findings, Plot, Table
from progress import Progress

PROCESSES = 4
STEPS, REPEATS, TOKENS = 8, 2, 64
POOLS = [16, 8, 6, 4]      # MiB; four requests at once need about 15
SPACE = "model"
OPTIONS = ["--own-prompt", "yes", "--decode-tail", "24", "--max-tokens", "8", "--sync-wait", "3"]
ON = ["memshare=on", "keydiff=on", "kvreviver=on", "kvreviver.budget=0.15", "hshare=on",
      "hshare.recent=32", "hshare.top=208", "policy=priority"]
VARIANTS = {"all methods": ON, "none": []}


def questions_of(quick: bool) -> int:
    return 8 if quick else 20


def steps(quick: bool) -> int:
    return len(POOLS) * len(VARIANTS)


def one(programs: Programs, questions: list[tasks.Question], pool: int, settings: list[str]) -> dict:
    """Four kvlm processes at the same time."""
    with Daemon(programs, "--pool", f"{pool}M", "--set", "daemon.segment=256K", "--set", "daemon.spill=64M") as daemon:
        programs.generate([{"prompt": "The code of alder is 4 7."}], "--max-tokens", "1", socket=daemon.socket)
        if settings:
            daemon.kvctl("space", "set", SPACE, *settings)
        parts = [questions[i::PROCESSES] for i in range(PROCESSES)]
        options = OPTIONS if settings else [*OPTIONS, "--sequence", "on"]
        with ThreadPoolExecutor(PROCESSES) as executor:
            reports = list(executor.map(lambda part: programs.generate(tasks.prompts(part), *options,
                                                                       socket=daemon.socket), parts))
        right = sum(q.right(r["text"]) for part, answers in zip(parts, reports) for q, r in zip(part, answers))
        counters = daemon.counters(SPACE)
        broken = sum(row["broken"] for row in daemon.kvctl("check")["checks"])
    flat = [r for answers in reports for r in answers]
    return {"recall": right / len(questions), "private": mean([r["refused"] > 0 for r in flat]), "broken": broken,
            "ms": mean([r["total_ms"] for r in flat]), **counters}


def run(programs: Programs, progress: Progress, quick: bool) -> Findings:
    questions = tasks.long_reasoning(questions_of(quick), STEPS, REPEATS, TOKENS)
    table = Table(f"{len(questions)} requests of about {STEPS * REPEATS * TOKENS} tokens, {PROCESSES} processes at a time",
                  ["pool MiB", "methods", "recall", "requests that left the pool", "blocks shared", "spilled", "vague",
                   "revived exactly", "revived approximately", "revival refused", "ms a request", "invariants broken"])
    curves: dict[str, list[tuple[float, float]]] = {name: [] for name in VARIANTS}
    left: dict[str, list[tuple[float, float]]] = {name: [] for name in VARIANTS}
    results: dict[tuple[str, int], dict] = {}
    for pool in POOLS:
        for name, settings in VARIANTS.items():
            progress.step(f"together: {pool} MiB, {name}")
            r = results[name, pool] = one(programs, questions, pool, settings)
            table.rows.append([pool, name, r["recall"], f"{r['private']:.0%}", r["shared"], r["spilled"], r["vague"],
                               r["revived_exact"], r["revived_approx"], r["revive_refused"], r["ms"], r["broken"]])
            curves[name].append((pool, r["recall"]))
            left[name].append((pool, 100 * r["private"]))
    findings = Findings("together", "All methods at once",
                        "Four processes answer at the same time, from sequences in a pool that shrinks from all they "
                        "need to a quarter of it: MemShare shares, KeyDiff and attention mass order the blocks, KVReviver "
                        "lets the lowest leave and brings back what HShare's labels select.")
    findings.tables = [table]
    findings.plots = [Plot("Recall", "pool, MiB", "recall", curves, (0, 1.05)),
                      Plot("Requests that had to leave the pool for private memory", "pool, MiB", "%", left, (0, 105))]
    small, large = results["all methods", POOLS[-1]], results["none", POOLS[0]]
    without = results["none", POOLS[-1]]
    findings.claims = [
        Claim("(ours) The methods together serve from a quarter of the memory what otherwise needs all of it",
              f"recall {small['recall']:.2f} in {POOLS[-1]} MiB with all methods ({small['private']:.0%} of the requests "
              f"went on in private memory), {large['recall']:.2f} in {POOLS[0]} MiB without; without them, in "
              f"{POOLS[-1]} MiB {without['private']:.0%} had to leave the pool",
              small["recall"] >= 0.9 * large["recall"] and small["private"] < 0.5,
              "" if small["recall"] >= 0.9 * large["recall"] else
              f"with half of the memory recall is {results['all methods', POOLS[1]]['recall']:.2f}; in a quarter, blocks "
              "that are selected find no room to come back"),
        Claim("(ours) Every invariant holds with every method on",
              f"{sum(r['broken'] for r in results.values())} broken in {len(results)} runs",
              all(r["broken"] == 0 for r in results.values()), invariant=True),
    ]
    return findings
