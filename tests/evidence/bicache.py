# SPDX-License-Identifier: Apache-2.0
"""BiCache: similarity by layer and prefix ratio, and the costs and savings of reusing shared prefixes."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path

import before
import gathering
import tasks  # noqa: F401  (finds language.py)
from certainty import Recall, Times, better, kept
from engine import DIFFUSION, ROOT, Daemon, Failed, Programs, mean, threads
from findings import HOLDS, NOT_REACHED, NOT_SHOWN, Aim, Claim, Findings, Plot, Table, claim_better, compared, verdict
from progress import Progress

from language import TOKENS, Writer

RATIOS = (10, 30, 50, 70, 90)
OFF, NAIVE, EVER, OURS = "no reuse", "naive: all layers, for ever", "BiCache, never refreshed", "BiCache"
MODES = {OFF: ["--bicache", "off"], NAIVE: ["--bicache", "naive"], EVER: ["--bicache", "on", "--refresh", "100000"],
         OURS: ["--bicache", "on"]}
ROUNDS = 7


def requests(quick: bool) -> list[dict]:
    """A few requests of every prefix ratio; one token per step, so that refreshes matter."""
    by_set: dict[str, list[dict]] = defaultdict(list)
    for line in (ROOT / "tools/kvlm/demo/diffusion.jsonl").read_text().splitlines():
        item = json.loads(line)
        by_set[item["set"]].append({**item, "steps": item["gen_length"]})
    return [item for items in by_set.values() for item in items[:2 if quick else 5]]


def others(quick: bool) -> list[dict]:
    """Requests of the same lengths to fit the table on: other prefixes, other questions."""
    writer, made = Writer("evidence-profile", held_out=True), []
    for like in requests(quick):
        facts = writer.facts(len(like["prefix_ids"]) // 16, 0.0)
        prefix = writer.paragraphs(writer.body(facts, len(like["prefix_ids"]), repeats=0.0))
        own = writer.paragraphs(writer.body([], len(like["prompt_ids"]) - 20))
        names = ",".join(TOKENS.decode([fact.name]) for fact in writer.rng.sample(facts, 6))
        made.append({"document": TOKENS.decode(prefix), "gen_length": like["gen_length"], "steps": like["gen_length"],
                     "prompt": f"{TOKENS.decode(own)}\nQuestion: What is known of{names}?\nAnswer:"})
    return made


def steps(quick: bool) -> int:
    return 6 + len(MODES) + ROUNDS


def right(item: dict, text: str) -> list[bool]:
    """For each statement of the answer, whether it was given."""
    wanted = [s.strip() for s in item["answer"].split(".") if s.strip()]
    got = {s.strip() for s in text.split(".")}
    return [s in got for s in wanted]


def ask_kvlm(programs: Programs, items: list[dict], daemon: Daemon, mode: str, model: Path = DIFFUSION) -> dict:
    reports = programs.generate(items, *MODES[mode], "--threads", threads(), model=model, socket=daemon.socket)
    return {"recall": Recall(tuple(ok for i, r in zip(items, reports) for ok in right(i, r["text"]))),
            "ms": sum(r["total_ms"] for r in reports) / sum(r["generated_tokens"] for r in reports),
            "depth": mean([r["b"] for r in reports]), "layers": reports[0]["layers"],
            "refreshes": mean([r["refreshes"] for r in reports]),
            "shared": mean([r["shared_bytes"] / 1024 for r in reports])}


def space_of(programs: Programs, daemon: Daemon, items: list[dict], model: Path) -> str:
    programs.generate(items[:1], "--bicache", "naive", model=model, socket=daemon.socket)
    spaces = daemon.stat("spaces")["spaces"]
    if not spaces:
        raise Failed("kvlm made no space for the diffusion model")
    return spaces[0]["name"]


def profile(programs: Programs, daemon: Daemon, items: list[dict], space: str, variant: str,
            model: Path = DIFFUSION) -> tuple[list[dict], dict[int, int]]:
    """Samples that kvlm takes, and the table made from the worker's sums: {percent: depth}."""
    with tempfile.TemporaryDirectory() as directory:
        prompts, samples = Path(directory) / "prompts.jsonl", Path(directory) / "samples.jsonl"
        prompts.write_text("".join(json.dumps(item) + "\n" for item in items))
        daemon.stat("space", "set", space, "bicache=on", f"bicache.profile={variant}")
        daemon.stat("profile", "forget", space)
        subprocess.run([str(programs.kvlm), "--model", str(model), "--prompts", str(prompts), "--socket",
                        daemon.socket, "--profile-out", str(samples), "--profile-step", "10"],
                       stdout=subprocess.DEVNULL, check=True, timeout=900)
        rows = [json.loads(line) for line in samples.read_text().splitlines()]
    return rows, {row["ratio_percent"]: row["depth"] for row in daemon.stat("profile", "build", space)["profile"]}


def similarity(rows: list[dict]) -> dict[int, list[float]]:
    """Mean similarity of each layer at each tenth of a prefix ratio."""
    by_ratio: dict[int, list[list[float]]] = defaultdict(list)
    for row in rows:
        by_ratio[min(RATIOS, key=lambda r: abs(r - row["r"]))].append(row["sim"])
    return {r: [mean(list(layer)) for layer in zip(*samples)] for r, samples in sorted(by_ratio.items())}


def run(programs: Programs, progress: Progress, quick: bool) -> Findings:
    items, fitted = requests(quick), others(quick)
    results: dict[str, dict] = {}
    tables: dict[str, dict[int, int]] = {}
    with Daemon(programs, "--pool", "512M") as daemon:
        progress.step("BiCache: the space is made")
        space = space_of(programs, daemon, items, DIFFUSION)
        for variant in ("paper", "serve"):
            progress.step(f"BiCache: profile of other requests, {variant}")
            rows, tables[variant] = profile(programs, daemon, fitted, space, variant)
            if variant == "paper":
                progress.step("BiCache: paper's profile")
                results[f"{OURS}, paper's profile"] = ask_kvlm(programs, items, daemon, OURS)
        for name in MODES:
            progress.step(f"BiCache: {name}")
            results[name] = ask_kvlm(programs, items, daemon, name)
        times = timed(programs, daemon, items, progress, quick)
    made = []
    for early in (False, True):
        progress.step("BiCache: a task that needs what follows the prefix" + (", early" if early else ""))
        made.append(gather(programs, progress, early, quick))
    return findings(len(items), rows, tables, results, times, *made)


def timed(programs: Programs, daemon: Daemon, items: list[dict], progress: Progress, quick: bool) -> dict[str, Times]:
    """Milliseconds per token over one request of every prefix ratio, all modes in turns."""
    chosen = list({item["set"]: item for item in reversed(items)}.values())
    rounds: dict[str, list[float]] = {name: [] for name in MODES}
    for i in range(ROUNDS):
        progress.step(f"BiCache: times, round {i + 1}")
        for name in MODES:
            rounds[name].append(ask_kvlm(programs, chosen, daemon, name)["ms"])
    return {name: Times(tuple(values)) for name, values in rounds.items()}


def gather(programs: Programs, progress: Progress, early: bool, quick: bool) -> dict[str, dict]:
    """The task of gathering.py, with a table fitted on other requests."""
    count = 20 if quick else 60
    with tempfile.TemporaryDirectory() as directory, Daemon(programs, "--pool", "64M") as daemon:
        model = gathering.write(Path(directory), early)
        items, fitted = gathering.requests(count, "asked"), gathering.requests(12, "profile")
        space = space_of(programs, daemon, items, model)
        profile(programs, daemon, fitted, space, "serve", model)
        return {name: ask_kvlm(programs, items, daemon, name, model) for name in MODES}


def findings(count: int, rows: list[dict], tables: dict, results: dict[str, dict], times: dict[str, Times],
             gathered: dict[str, dict], early: dict[str, dict]) -> Findings:
    sims = similarity(rows)
    table = Table(f"{count} requests, one token a step, refresh every 16 steps; "
                  "the table of depths is fitted on others. "
                  f"Times: one request of each prefix ratio, {ROUNDS} rounds taking turns",
                  ["mode", "statements right", "ms a token", "times no reuse's speed", "layers reused", "refreshes",
                   "shared KiB a request"])
    for name, r in results.items():
        t = times.get(name)
        table.rows.append([name, str(r["recall"]), str(t) if t else None, str(times[OFF].over(t)) if t else None,
                           f"{r['depth']:.1f} of {r['layers']}", r["refreshes"], r["shared"]])
    second = Table("A task whose answers need the prefix to attend to the text after it (a handmade model)",
                   ["mode", "answers right", "layers reused", "... if the first layer marks", "layers reused"],
                   [[name, str(r["recall"]), f"{r['depth']:.1f} of {r['layers']}", str(early[name]["recall"]),
                     f"{early[name]['depth']:.1f} of {early[name]['layers']}"] for name, r in gathered.items()],
                   "For the trained model, the prefix alone contains all answers, so that nothing is lost. The handmade "
                   "model marks in the prefix what the request repeats, and copies what is marked. If the first layer "
                   "marks, BiCache loses as much: its deep layers start from the last shared layer's output for the "
                   "prefix alone, and similar keys and values say nothing about that layer's own output.")
    depth = Table("Layers reused by prefix ratio", ["profile", *(f"{r} %" for r in RATIOS)],
                  [[name, *(t.get(r, 0) for r in RATIOS)] for name, t in tables.items()])
    found = Findings("bicache", "BiCache: shared prefixes of bidirectional models",
                     "A masked-diffusion model of 12 layers. A prefix's keys and values computed alone are compared "
                     "with those computed with the whole request. Shallow layers, where they are similar, are shared in "
                     "the pool; deep ones are recomputed every 16 steps from the boundary state stored with them.",
                     "bicache=on and a table made of requests like yours, for bidirectional models only. The larger "
                     "the prefix's share of a request and the more steps a request has, the more it gains.")
    found.tables = [table, second, depth]
    found.plots = [Plot("Similarity of the prefix alone to the whole input (per token, keys and values)", "layer",
                        "cosine", {f"r = {r} %": [(i + 1, s) for i, s in enumerate(layers)]
                                   for r, layers in sims.items()},
                        (min(min(layers) for layers in sims.values()) - 0.01, 1.0))]
    found.claims = claims(sims, results, times, gathered, early)
    found.aims = [aim(results, times)]
    return found


def aim(results: dict[str, dict], times: dict[str, Times]) -> Aim:
    speed, equal = times[OFF].over(times[OURS]), kept(results[OURS]["recall"], results[OFF]["recall"])
    reached = speed.median >= 3 and equal
    return Aim("three times the speed at equal accuracy", f"{speed} x; statements right "
               f"{compared(results[OURS]['recall'], results[OFF]['recall'])}; README had {before.BICACHE} x",
               "reached" if reached and speed.at_least(3.0) else "reached, within chance" if reached else "missed",
               "" if reached else f"{100 - 100 * results[OURS]['depth'] / results[OURS]['layers']:.0f} % of the layers "
               f"are refreshed, and all tokens after the prefix are computed in every step; naive reuse, which does "
               f"neither, is {times[OFF].over(times[NAIVE])} x as fast as no reuse")


def claims(sims: dict[int, list[float]], results: dict[str, dict], times: dict[str, Times],
           gathered: dict[str, dict], early: dict[str, dict]) -> list[Claim]:
    low, high = sims[min(sims)], sims[max(sims)]
    half = len(high) // 2
    falls = mean(high[:half]) > mean(high[half:]) and mean(low[:half]) > mean(low[half:]) and mean(high) > mean(low)
    speed, recall = times[OFF].over(times[OURS]), {name: r["recall"] for name, r in results.items()}
    made = {name: r["recall"] for name, r in gathered.items()}
    fast = speed.at_least(1.36)
    equal = kept(recall[OURS], recall[OFF])
    return [
        Claim("Shallow layers hardly change (O1), and the more of the input is prefix, the less any layer does (O2)",
              f"mean cosine of layers 1 to {half}: {mean(high[:half]):.3f}, of {half + 1} to {len(high)}: "
              f"{mean(high[half:]):.3f} at r = {max(sims)} %; at r = {min(sims)} %: {mean(low[:half]):.3f} and "
              f"{mean(low[half:]):.3f}", verdict(falls)),
        Claim("Reusing everything without recomputation collapses accuracy (Section 3): the trained model",
              f"naive {compared(recall[NAIVE], recall[OFF])} against no reuse",
              verdict(better(recall[OFF], recall[NAIVE])),
              "the answers are in the prefix and do not depend on the text after it"
              if better(recall[OFF], recall[NAIVE]) is None else ""),
        claim_better("Reusing everything without recomputation collapses accuracy (Section 3): if answers need the "
                     "prefix to attend to later text", "no reuse against naive", made[OFF], made[NAIVE], {}),
        claim_better("BiCache avoids the collapse, on the same task", "BiCache against naive", made[OURS],
                     made[NAIVE], {}),
        claim_better("(ours) BiCache avoids it wherever the change begins", "the same, if the first layer marks",
                     early[OURS]["recall"], early[NAIVE]["recall"],
                     {NOT_SHOWN: "the last shared layer's output comes from the prefix alone"}),
        Claim("36 to 98 % more throughput at equal accuracy (Table 1)",
              f"{speed} x the speed; statements right {compared(recall[OURS], recall[OFF])}",
              HOLDS if fast and equal else NOT_REACHED if fast is False else NOT_SHOWN,
              "" if equal else "so many statements cannot exclude a loss of 0.05"),
    ]
