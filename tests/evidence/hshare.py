# SPDX-License-Identifier: Apache-2.0
"""HShare: recall against the share of layers, heads and steps that select tokens themselves, and its speed."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import before
import pool
import tasks
from certainty import Recall, Times, kept
from engine import MODEL, Daemon, Programs, mean
from findings import (HOLDS, NOT_REACHED, NOT_SHOWN, Aim, Claim, Findings, Plot, Table, aim_recall, compared,
                      not_tried)
from progress import Progress

# Shares of layers, heads and steps that select tokens themselves.
RATIOS = {"1": (1, 1, 1), "9/16": (0.75, 0.75, 1), "9/32": (0.75, 0.75, 0.5), "1/8": (0.5, 0.5, 0.5)}
DEFAULT = "as shipped"
SPEED = "8.6 x faster attention than dense, at batch 16 and 2 k tokens, an eighth of which is read (Table 5)"
TAIL = 24           # the question is computed token by token, so that sparse attention must find the fact
SHARE = 0.25        # of the tokens is attended to
ROUNDS = 7
DECODED = 33        # tokens whose attention is timed


def sizes(quick: bool) -> tuple[int, int]:
    return (20, 800) if quick else (80, 1600)


def lengths(quick: bool) -> list[int]:
    return [1024, 4096] if quick else [1024, 2048, 4096, 8192, 16384]


def steps(quick: bool) -> int:
    return 4 + len(RATIOS) + len(lengths(quick)) + 1


def ratio_settings(ratio: tuple[float, float, float]) -> list[str]:
    return [f"hshare.{name}_ratio={value}" for name, value in zip(("layer", "head", "query"), ratio)]


def share_of(length: int) -> list[str]:
    """Settings for a quarter of the tokens: sinks, recent and selected ones."""
    return ["hshare.sinks=16", "hshare.recent=32", f"hshare.top={int(length * SHARE) - 48}"]


def serve(programs: Programs, questions: list[tasks.Question], settings: list[str]) -> pool.Run:
    return pool.serve(programs, questions, ["hshare=on", *settings], "--decode-tail", str(TAIL))


def run(programs: Programs, progress: Progress, quick: bool) -> Findings:
    count, length = sizes(quick)
    questions = tasks.recall(count, length)
    runs: dict[str, pool.Run] = {}
    progress.step("HShare: as shipped")
    runs[DEFAULT] = serve(programs, questions, share_of(length))
    for name, ratio in RATIOS.items():
        progress.step(f"HShare: {name}")
        runs[name] = serve(programs, questions, [*share_of(length), *ratio_settings(ratio)])
    progress.step("HShare: paper's profile")
    runs["paper's profile"] = serve(programs, questions, ["hshare.profile=paper", *share_of(length)])
    progress.step("HShare: full cache")
    dense = pool.plain(programs, questions, "--decode-tail", str(TAIL))
    progress.step("HShare: times by ratio")
    ratios = {DEFAULT: share_of(length)} | {name: share_of(length) + ratio_settings(r) for name, r in RATIOS.items()}
    times = timed(programs, length, ratios)
    by_length = {}
    for tokens in lengths(quick):
        progress.step(f"HShare: times at {tokens} tokens")
        by_length[tokens] = timed(programs, tokens, {DEFAULT: [], "1/8": ratio_settings(RATIOS["1/8"])})
    progress.step("HShare: recall of the shipped 512 tokens in a long document")
    long = tasks.recall(max(count // 4, 5), 3600, seed="evidence-long")
    kept_long = (serve(programs, long, []).recall, pool.plain(programs, long))
    return findings(count, length, runs, dense, times, by_length, kept_long)


def long_model(folder: Path, tokens: int) -> Path:
    """The same model, for longer prompts than it was trained on, since times do not need right answers."""
    for file in MODEL.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((MODEL / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": tokens + 512}))
    return folder


def timed(programs: Programs, tokens: int, contenders: dict[str, list[str]]) -> dict[str, Times]:
    """Milliseconds in attention and selection per decoded token after one document; contenders take turns."""
    prompt = tasks.prompts(tasks.recall(1, tokens - 16, seed="evidence-times"))
    rounds: dict[str, list[float]] = {name: [] for name in ("dense", *contenders)}
    with tempfile.TemporaryDirectory() as directory, Daemon(programs, "--pool", f"{64 + tokens // 64}M") as daemon:
        model = long_model(Path(directory), tokens)

        def once(options: tuple[str, ...] = ()) -> float:
            [r] = programs.generate(prompt, "--max-tokens", str(DECODED), "--stop", "", "--sequence", "on", *options,
                                    model=model, socket=daemon.socket)
            return (r["attention_ms"] + r["selection_ms"]) / max(r["decoded_tokens"], 1)

        once()
        space = daemon.stat("spaces")["spaces"][0]["name"]
        for _ in range(ROUNDS):
            for name in rounds:
                switch = contenders.get(name)
                daemon.stat("space", "set", space, "hshare=off" if switch is None else "hshare=on", *(
                    [] if switch is None else ["hshare.profile=serve", *switch]))
                rounds[name].append(once())
    return {name: Times(tuple(values)) for name, values in rounds.items()}


def crossover(by_length: dict[int, dict[str, Times]]) -> str:
    """The shortest measured length from which on the shipped settings are faster than dense in every round."""
    faster = [n for n, t in by_length.items() if t["dense"].over(t[DEFAULT]).at_least(1.0)]
    longest = max(by_length)
    since = [n for n in faster if all(m in faster for m in by_length if n <= m <= longest)]
    return f"faster in every round from {min(since):,} tokens on" if since else "at no measured length in every round"


def findings(count: int, length: int, runs: dict[str, pool.Run], dense: Recall, times: dict[str, Times],
             by_length: dict[int, dict[str, Times]], long: tuple[Recall, Recall]) -> Findings:
    table = Table(f"{count} facts in documents of {length} tokens, "
                  "a quarter of which is attended to while the question and "
                  f"the answer are decoded; ms in attention and selection per token, {ROUNDS} rounds taking turns",
                  ["form", "recall", "ms a token", "dense takes", "selections a token", "labels, % of the full cache"])
    for name, r in runs.items():
        t, memory = times.get(name), r.memory()
        table.rows.append([f"kvd, {name}", str(r.recall), str(t) if t else None,
                           f"{times['dense'].over(t)} x" if t else None,
                           mean([x["selections"] / x["decoded_tokens"] for x in r.reports]),
                           memory.share(memory.labels)])
    table.rows.append(["kvlm, full cache", str(dense), str(times["dense"]), None, None, None])
    reach = Table("By length, with the shipped 16 + 64 + 432 tokens attended to",
                  ["tokens", "dense, ms a token", DEFAULT, "dense takes", "1/8", "dense takes"],
                  [[n, str(t["dense"]), str(t[DEFAULT]), f"{t['dense'].over(t[DEFAULT])} x", str(t["1/8"]),
                    f"{t['dense'].over(t['1/8'])} x"] for n, t in by_length.items()],
                  f"Recall of the shipped settings in documents of 3,600 tokens: {long[0]}, dense {long[1]}, n = "
                  f"{long[0].n}; the model cannot answer longer ones.")
    old = Table("The pool, and kvlm's private form that it replaced (recall)", ["ratio", "kvd", "private"],
                [[name, r.recall.value, before.HSHARE.get(name)] for name, r in runs.items()])
    found = Findings("hshare", "HShare: critical tokens shared by layers, heads and queries",
                     "The question and the answer are decoded with sparse attention over a quarter of the tokens; "
                     "the daemon's 4-bit labels of the keys select them, and only a share of layers, heads and steps "
                     "selects.",
                     "hshare=on as shipped, for long outputs from documents of several thousand tokens; every step "
                     "selects its own tokens. Sharing among steps (hshare.query_ratio below 1) is faster but loses "
                     "facts: use it only if neighbouring tokens attend to the same places.")
    found.tables = [table, reach, old]
    found.plots = [Plot("Dense attention's time over HShare's", "tokens", "x",
                        {name: [(n, *spread(t["dense"].over(t[name]))) for n, t in by_length.items()]
                         for name in (DEFAULT, "1/8")})]
    found.claims = claims(runs, dense, times, length)
    found.aims = aims(runs[DEFAULT].recall, by_length)
    return found


def spread(times: Times) -> tuple[float, float, float]:
    return times.median, min(times.rounds), max(times.rounds)


def aims(shipped: Recall, by_length: dict[int, dict[str, Times]]) -> list[Aim]:
    longest = max(by_length)
    ratio = by_length[longest]["dense"].over(by_length[longest][DEFAULT])
    reached = ratio.median >= 3 and longest >= 16384
    certain = ratio.at_least(3.0) and longest >= 16384
    return [aim_recall("recall of 0.95 with a quarter of the tokens, as shipped", shipped, 0.95),
            Aim("decode attention at 16 k tokens three times as fast as dense", f"{ratio} x at {longest:,} tokens; "
                + crossover(by_length), "reached" if certain else "reached, within chance" if reached else "missed",
                "" if reached else "selection reads the labels of all tokens and sorts their scores")]


def claims(runs: dict[str, pool.Run], dense: Recall, times: dict[str, Times], length: int) -> list[Claim]:
    at = runs["9/32"].recall
    selecting, eighth = times["1"], times["1/8"]
    return [
        Claim("Accuracy close to the full cache at a ratio of 9/32 (Table 3: 45.5 to 44.74)",
              f"at 9/32 {compared(at, dense)} against dense", HOLDS if kept(at, dense) else NOT_REACHED,
              "" if kept(at, dense) else "steps that share: adjacent tokens of a look-up attend to different places "
              f"(if every step selects its own tokens: {runs['9/16'].recall})"),
        Claim("The more is shared, the less selection costs, at the loss of accuracy shown here",
              f"1/8 takes {eighth.over(selecting)} of the time of 1, at recall {runs['1/8'].recall} against "
              f"{runs['1'].recall}", HOLDS if selecting.over(eighth).at_least(1.0) else NOT_SHOWN),
        claim_of_speed({n: r.recall for n, r in runs.items()}, times, dense, length),
        not_tried("2.7 x more throughput from end to end (abstract)", "it needs a GPU and batches"),
    ]


def claim_of_speed(recall: dict[str, Recall], times: dict[str, Times], dense: Recall, length: int) -> Claim:
    """The claim at the fastest setting that still answers, since fast wrong answers have no merit."""
    named = [name for name in times if name != "dense"]
    speed = {name: times["dense"].over(times[name]) for name in named}
    keeping = [name for name in named if kept(recall[name], dense)]
    best, fastest = (max(names, key=lambda n: speed[n].median, default=None) for names in (keeping, named))
    words = f"fastest: {fastest}, {speed[fastest]} x dense's speed at recall {recall[fastest]}"
    if best is None:
        return Claim(SPEED, words, NOT_REACHED,
                     f"with so many questions, no setting is shown to keep the recall of dense ({dense})")
    words = f"{best}: {speed[best]} x dense's speed at recall {recall[best]} (dense {dense}); {words}"
    reached = speed[best].at_least(8.6)
    return Claim(SPEED, words, {True: HOLDS, False: NOT_REACHED, None: NOT_SHOWN}[reached],
                 "" if reached else f"it cannot be reached here, with batch 1 and {SHARE:.0%} of {length} tokens: "
                 f"reading takes {SHARE:.0%} of dense's time at least, and selecting comes on top")
