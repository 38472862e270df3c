# SPDX-License-Identifier: Apache-2.0
"""Questions through the pool: a daemon, a space whose settings turn methods on, and kvlm as the engine."""

from __future__ import annotations

from dataclasses import dataclass

import tasks
from certainty import Recall
from engine import Daemon, Programs, mean
from findings import Table

SPACE = "model"
BLOCK = 16
TOKEN_BYTES = 8 * 2 * 32 * 2 * 4        # layers, KV heads, width, keys and values, float32
OPTIONS = ("--own-prompt", "yes", "--max-tokens", "8")


@dataclass
class Run:
    """Answers to the questions, and kvlm's reports."""

    recall: Recall
    reports: list[dict]

    def of_table(self, name: str) -> float:
        """The mean of a figure of the requests' sequences."""
        return mean([r.get("sequence", {}).get(name, 0) for r in self.reports])

    def report(self, name: str) -> float:
        return mean([r[name] for r in self.reports])

    def memory(self) -> "Memory":
        full = mean([-(-r["prompt_tokens"] // BLOCK) * BLOCK * TOKEN_BYTES for r in self.reports])
        return Memory(full, *(self.of_table(f"{name}_bytes") for name in ("resident", "label", "copy", "sketch")))


@dataclass
class Memory:
    """Bytes that one request takes when its answer is ready, and those of a full cache."""

    full: float
    cache: float
    labels: float
    copies: float
    sketch: float

    @property
    def total(self) -> float:
        return self.cache + self.labels + self.copies + self.sketch

    def share(self, part: float) -> str:
        return f"{part / self.full:.0%}"


def recall_of(questions: list[tasks.Question], reports: list[dict]) -> Recall:
    return Recall(tuple(q.right(r["text"]) for q, r in zip(questions, reports)))


def memory_table(runs: dict[str, Run]) -> Table:
    """All memory of a request, for each run by its name."""
    table = Table("All memory of a request: labels, sketches and copies are counted",
                  ["what", "recall", "cache KiB", "labels KiB", "copies KiB", "sketch KiB", "total KiB",
                   "of the full cache"])
    for name, run in runs.items():
        it = run.memory()
        table.rows.append([name, str(run.recall), *(round(part / 1024) for part in (
            it.cache, it.labels, it.copies, it.sketch, it.total)), it.share(it.total)])
    return table


def space(daemon: Daemon, settings: list[str]) -> None:
    """Makes a space by a first request, and then sets its settings."""
    daemon.programs.generate([{"prompt": "The code of alder is 4 7."}], "--max-tokens", "1", socket=daemon.socket)
    if settings:
        daemon.stat("space", "set", SPACE, *settings)


def serve(programs: Programs, questions: list[tasks.Question], settings: list[str], *options: str) -> Run:
    """Sends the requests one after the other through their own daemon."""
    with Daemon(programs, "--pool", "128M") as daemon:
        space(daemon, settings)
        reports = programs.generate(tasks.prompts(questions), *OPTIONS, *options, socket=daemon.socket)
        return Run(recall_of(questions, reports), reports)


def plain(programs: Programs, questions: list[tasks.Question], *options: str) -> Recall:
    """kvlm without a daemon: the full cache."""
    return recall_of(questions, programs.generate(tasks.prompts(questions), "--max-tokens", "8", *options))
