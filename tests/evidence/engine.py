# SPDX-License-Identifier: Apache-2.0
"""kvlm and kvd, for the parts of the evidence."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
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


def threads() -> str:
    return str(min(2, os.cpu_count() or 1))
