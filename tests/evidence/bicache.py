# SPDX-License-Identifier: Apache-2.0
"""BiCache: similarity by layer and prefix ratio, and what reuse of shared prefixes costs and saves."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from pathlib import Path

from engine import DIFFUSION, ROOT, Daemon, Failed, Programs, mean, threads
from findings import Claim, Findings, Plot, Table
from progress import Progress

SPACE = "diffusion"
RATIOS = (10, 30, 50, 70, 90)
MODES = {
    "no reuse": ["--bicache", "off"],
    "naive: all layers, for ever": ["--bicache", "naive"],
    "BiCache, never refreshed": ["--bicache", "on", "--refresh", "100000"],
    "BiCache": ["--bicache", "on"],
}


def requests(quick: bool) -> list[dict]:
    """A few of every prefix ratio; one token a step, so that refreshes matter."""
    by_set: dict[str, list[dict]] = defaultdict(list)
    for line in (ROOT / "tools/kvlm/demo/diffusion.jsonl").read_text().splitlines():
        item = json.loads(line)
        by_set[item["set"]].append({**item, "steps": item["gen_length"]})
    each = 2 if quick else 5
    return [item for items in by_set.values() for item in items[:each]]


def steps(quick: bool) -> int:
    return 3 + 2 * len(MODES)


def right(item: dict, text: str) -> float:
    """Share of the answer's statements that were given."""
    wanted = [s.strip() for s in item["answer"].split(".") if s.strip()]
    got = {s.strip() for s in text.split(".")}
    return sum(s in got for s in wanted) / len(wanted) if wanted else 0.0


def ask(programs: Programs, items: list[dict], socket: str, options: list[str]) -> dict:
    reports = programs.generate(items, *options, "--threads", threads(), model=DIFFUSION, socket=socket)
    return {"accuracy": mean([right(i, r["text"]) for i, r in zip(items, reports)]),
            "speed": sum(r["generated_tokens"] for r in reports) / sum(r["total_ms"] for r in reports) * 1e3,
            "depth": mean([r["b"] for r in reports]), "layers": reports[0]["layers"],
            "refreshes": mean([r["refreshes"] for r in reports]),
            "shared": mean([r["shared_bytes"] / 1024 for r in reports])}


def profile(programs: Programs, daemon: Daemon, items: list[dict], variant: str) -> tuple[list[dict], dict[int, int]]:
    """Samples through kvctl profile run, and the table that the worker's sums gave: percent to depth."""
    with tempfile.TemporaryDirectory() as directory:
        prompts, samples = Path(directory) / "prompts.jsonl", Path(directory) / "samples.jsonl"
        prompts.write_text("".join(json.dumps(item) + "\n" for item in items))
        daemon.kvctl("space", "set", SPACE, "bicache=on", f"bicache.profile={variant}")
        daemon.kvctl("profile", "forget", SPACE)
        answer = daemon.kvctl("profile", "run", SPACE, "--", str(programs.kvlm), "--model", str(DIFFUSION), "--prompts",
                              str(prompts), "--socket", daemon.socket, "--profile-out", str(samples),
                              "--profile-step", "10", timeout=600)
        rows = [json.loads(line) for line in samples.read_text().splitlines()]
    return rows, {row["ratio_percent"]: row["depth"] for row in answer["profile"]}


def similarity(rows: list[dict]) -> dict[int, list[float]]:
    """Mean similarity of each layer at each tenth of a prefix ratio."""
    by_ratio: dict[int, list[list[float]]] = defaultdict(list)
    for row in rows:
        by_ratio[min(RATIOS, key=lambda r: abs(r - row["r"]))].append(row["sim"])
    return {r: [mean(list(layer)) for layer in zip(*samples)] for r, samples in sorted(by_ratio.items())}


def run(programs: Programs, progress: Progress, quick: bool) -> Findings:
    items = requests(quick)
    results: dict[str, dict] = {}
    tables: dict[str, dict[int, int]] = {}
    with Daemon(programs, "--pool", "512M") as daemon:
        progress.step("BiCache: the space is made")
        programs.generate(items[:1], "--bicache", "naive", model=DIFFUSION, socket=daemon.socket)
        if not daemon.kvctl("spaces")["spaces"]:
            raise Failed("kvlm made no space for the diffusion model")
        for variant in ("paper", "serve"):
            progress.step(f"BiCache: profile, {variant}")
            rows, tables[variant] = profile(programs, daemon, items, variant)
            for name, options in MODES.items():
                progress.step(f"BiCache: {name}, {variant}")
                if variant == "serve" or name == "BiCache":
                    results[f"{name} ({variant})"] = ask(programs, items, daemon.socket, options)
    return findings(len(items), rows, tables, results)


def findings(count: int, rows: list[dict], tables: dict, results: dict[str, dict]) -> Findings:
    sims = similarity(rows)
    table = Table(f"{count} requests, one token a step, refresh every 16 steps",
                  ["mode", "statements right", "tokens/s", "layers reused", "refreshes", "shared KiB a request"])
    for name, r in results.items():
        table.rows.append([name, r["accuracy"], r["speed"], f"{r['depth']:.1f} of {r['layers']}", r["refreshes"],
                           r["shared"]])
    depth = Table("Layers reused by prefix ratio", ["profile", *(f"{r} %" for r in RATIOS)],
                  [[name, *(t.get(r, 0) for r in RATIOS)] for name, t in tables.items()])
    found = Findings("bicache", "BiCache: shared prefixes of bidirectional models",
                     "A masked-diffusion model of 12 layers. A prefix's keys and values computed alone are compared with "
                     "those computed with the whole request; shallow layers, where they are alike, are shared in the "
                     "pool, deep ones are recomputed every 16 steps from the boundary state that is stored with them.")
    found.tables = [table, depth]
    found.plots = [Plot("Similarity of the prefix alone to the whole input (per token, keys and values)", "layer",
                        "cosine", {f"r = {r} %": [(i + 1, s) for i, s in enumerate(layers)]
                                   for r, layers in sims.items()},
                        (min(min(layers) for layers in sims.values()) - 0.01, 1.0))]
    found.claims = claims(sims, results)
    return found


def claims(sims: dict[int, list[float]], results: dict[str, dict]) -> list[Claim]:
    off, naive = results["no reuse (serve)"], results["naive: all layers, for ever (serve)"]
    ours, paper = results["BiCache (serve)"], results["BiCache (paper)"]
    low, high = sims[min(sims)], sims[max(sims)]
    half = len(high) // 2
    return [
        Claim("Shallow layers hardly change (O1), and the more of the input is prefix, the less any layer does (O2)",
              f"mean cosine of layers 1 to {half}: {mean(high[:half]):.3f}, of {half + 1} to {len(high)}: "
              f"{mean(high[half:]):.3f} at r = {max(sims)} %; at r = {min(sims)} %: {mean(low[:half]):.3f} and "
              f"{mean(low[half:]):.3f}", mean(high[:half]) > mean(high[half:]) and mean(high) > mean(low)),
        Claim("Reusing everything without recomputation collapses accuracy (Section 3)",
              f"statements right: {naive['accuracy']:.2f} naive, {off['accuracy']:.2f} without reuse",
              naive["accuracy"] < 0.8 * off["accuracy"],
              "" if naive["accuracy"] < 0.8 * off["accuracy"] else "the facts are written in the prefix and do not "
                                                                   "depend on what is asked"),
        Claim("36 to 98 % more throughput at equal accuracy (Table 1)",
              f"{(ours['speed'] / off['speed'] - 1):+.0%} tokens/s, {ours['accuracy']:.2f} against {off['accuracy']:.2f} "
              f"right (paper's estimator: {(paper['speed'] / off['speed'] - 1):+.0%}, {paper['accuracy']:.2f})",
              ours["speed"] > 1.1 * off["speed"] and ours["accuracy"] >= off["accuracy"] - 0.03),
    ]
