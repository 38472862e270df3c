# SPDX-License-Identifier: Apache-2.0
"""Runs one test with one mutant on, within the test's and the run's time limits."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "lib"))

from sessions import end_session, session_of  # noqa: E402

SEEN = 65536            # KVD_MUTANTS
NONE = -1               # number that turns no mutant on
LOOK = 2                # seconds
PATIENCE = 60           # seconds, in addition to ten times the test's usual time


class Stopped(Exception):
    """The time is over."""


class Time:
    """The deadline of the run."""

    deadline = float("inf")

    @classmethod
    def end(cls, *_) -> None:
        cls.deadline = 0

    @classmethod
    def look(cls) -> None:
        if time.monotonic() >= cls.deadline:
            raise Stopped


class Clock:
    """The time that a session has had, without the time for which the thread that waits most waited for a processor."""

    def __init__(self, process: subprocess.Popen):
        self.process, self.own, self.waited, self.last = process, 0.0, {}, time.monotonic()

    def waits(self) -> dict[str, float]:
        found = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            if session_of(stat) == self.process.pid:
                with contextlib.suppress(OSError):      # the process has ended
                    found |= self.waits_of(stat.parent)
        return found

    @staticmethod
    def waits_of(process: Path) -> dict[str, float]:
        found = {}
        for thread in os.listdir(process / "task"):
            with contextlib.suppress(OSError, IndexError):
                found[f"{process}/{thread}"] = int((process / "task" / thread / "schedstat").read_text().split()[1]) / 1e9
        return found

    def look(self) -> None:
        now, waited = time.monotonic(), self.waits()
        most = max((seconds - self.waited.get(thread, 0) for thread, seconds in waited.items()), default=0.0)
        self.own += max(0.0, now - self.last - most)
        self.last, self.waited = now, waited

    def wait(self, limit: float) -> int | None:
        """The process's status, or None after `limit` seconds of its time."""
        while self.own < limit:
            Time.look()
            try:
                status = self.process.wait(LOOK)
                self.own += max(0.0, time.monotonic() - self.last)
                return status
            except subprocess.TimeoutExpired:
                self.look()
        return None


class Test:
    def __init__(self, known: dict, build: Path):
        self.name, self.command, self.needs = known["name"], known["cmd"], known["depends"]
        self.environment, self.folder = known["env"], known["workdir"] or build
        self.seconds, self.seen, self.passes, self.result = 0.0, bytes(SEEN), False, None
        self.made_of = ""       # a digest of its programs and scripts

    def run(self, number: int, scratch: Path, limit: float, notes: bool = False) -> str:
        """Returns "" if the test passed, otherwise how it failed. notes: record the places that it reaches."""
        folder = Path(tempfile.mkdtemp(dir=scratch))
        seen = folder / "seen"
        seen.write_bytes(bytes(SEEN))
        environment = {**os.environ, **self.environment, "KVD_MUTANT": str(number), "TMPDIR": str(folder)}
        if notes:
            environment["KVD_MUTANTS_SEEN"] = str(seen)
        process = subprocess.Popen(self.command, env=environment, cwd=self.folder, start_new_session=True,
                                   stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with contextlib.suppress(OSError): # a session has a full share of the processors, despite our niceness
            Path(f"/proc/{process.pid}/autogroup").write_text(str(os.nice(0)))
        clock = Clock(process)
        try:
            status = clock.wait(limit)
        finally:
            end_session(process)
        if notes:
            self.seen, self.seconds = seen.read_bytes(), clock.own
        shutil.rmtree(folder, ignore_errors=True)
        return "hangs" if status is None else "" if status == 0 else f"status {status}"

    def remember(self, known: list | None) -> None:
        if known:
            self.seconds, self.result, numbers = known
            seen = bytearray(SEEN)
            for n in numbers:
                seen[n] = 1
            self.seen = bytes(seen)

    def passes_as_it_is(self, scratch: Path, limit: float) -> str:
        if self.result is not None:
            return self.result
        return self.run(NONE, scratch, limit, True) and self.run(NONE, scratch, limit, True)

    def notices(self, number: int, scratch: Path) -> str:
        """How the test fails with this mutant, if it does so twice, and not without the mutant; else ""."""
        limit = PATIENCE + 10 * self.seconds
        result = self.run(number, scratch, limit)
        if not result or self.run(NONE, scratch, limit):
            return ""
        return result if result == "hangs" else self.run(number, scratch, limit)
