# SPDX-License-Identifier: Apache-2.0
"""kvlm and kvd, for the parts of the evidence."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
import tempfile
from array import array
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests/lib"))

from instance import Failed, Instance   # noqa: E402  (needs the path above)

MODEL = ROOT / "tools/kvlm/model"
DIFFUSION = ROOT / "tools/kvlm/diffusion"


class Programs:
    """The binaries of one build."""

    def __init__(self, build: Path) -> None:
        self.kvd, self.kvctl = build / "daemon/kvd", build / "tools/kvctl/kvctl"
        self.kvlm = build / "tools/kvlm/kvlm"
        for program in (self.kvd, self.kvctl, self.kvlm):
            if not program.exists():
                raise Failed(f"{program} is missing; sh tools/evidence builds it")

    def generate(self, prompts: list[dict], *options: str, model: Path = MODEL, socket: str | None = None,
                 timeout: float = 900) -> list[dict]:
        """One report of kvlm per prompt."""
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
            for prompt in prompts:
                file.write(json.dumps(prompt) + "\n")
            file.flush()
            where = ["--socket", socket] if socket else ["--no-share"]
            command = [str(self.kvlm), "--model", str(model), "--prompts", file.name, "--json", *where, *options]
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=timeout)
        reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b"{")]
        if done.returncode or len(reports) != len(prompts):
            raise Failed(f"{' '.join(command)}: {done.stderr.decode().strip() or 'no answer'}")
        return reports


    def logits(self, prompt: str, *options: str, socket: str | None = None) -> tuple[array, dict]:
        """The logits of every token of one prompt, row by row, and the report."""
        with tempfile.TemporaryDirectory() as directory:
            text, ids, out = (Path(directory) / name for name in ("prompt", "ids", "logits"))
            text.write_text(prompt)
            tokens = subprocess.run([str(self.kvlm), "--model", str(MODEL), "--tokenize", str(text)],
                                    stdout=subprocess.PIPE, check=True)
            ids.write_text("1 " + tokens.stdout.decode())
            where = ["--socket", socket] if socket else ["--no-share"]
            done = subprocess.run([str(self.kvlm), "--model", str(MODEL), "--tokens", str(ids), "--logits", str(out),
                                   "--json", *where, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            if done.returncode:
                raise Failed(f"kvlm --logits: {done.stderr.decode().strip()}")
            values = array("f")
            values.frombytes(out.read_bytes())
        return values, json.loads(done.stdout.splitlines()[0])


class Daemon(Instance):
    """A private kvd for as long as a `with` lasts."""

    def __init__(self, programs: Programs, *options: str) -> None:
        self.programs = programs
        super().__init__("--backend", "host", *options, kvd=programs.kvd, kvctl=programs.kvctl)

    def counters(self, space: str) -> dict[str, int]:
        answer = self.stat("stat", space)
        return {row["name"]: row["value"] for row in answer["counters"]}


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def commit() -> str:
    done = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty"], stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL)
    return done.stdout.decode().strip() or "unknown"


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def median(values: list[float]) -> float:
    ordered = sorted(values)
    n = len(ordered)
    return (ordered[n // 2] + ordered[(n - 1) // 2]) / 2 if n else 0.0


def threads() -> str:
    return str(min(2, os.cpu_count() or 1))


def divergence(exact: array, other: array, vocabulary: int, every: int = 5) -> float:
    """Mean KL divergence of the next-token distributions, in nats, over every fifth token of the second half."""
    rows = len(exact) // vocabulary
    total, n = 0.0, 0
    for row in range(rows // 2, rows, every):
        p = exact[row * vocabulary:(row + 1) * vocabulary]
        q = other[row * vocabulary:(row + 1) * vocabulary]
        p_top, q_top = max(p), max(q)
        p_exp = [math.exp(x - p_top) for x in p]
        p_sum, q_sum = sum(p_exp), sum(math.exp(x - q_top) for x in q)
        shift = q_top - p_top + math.log(q_sum / p_sum)
        total += sum(e * (x - y + shift) for e, x, y in zip(p_exp, p, q)) / p_sum
        n += 1
    return total / max(n, 1)
