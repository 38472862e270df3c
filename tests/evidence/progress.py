# SPDX-License-Identifier: Apache-2.0
"""The progress of the evidence, on standard error: a bar on a terminal, a line per step elsewhere."""

from __future__ import annotations

import sys
import time


class Progress:
    """Counts a known number of steps."""

    def __init__(self, steps: int) -> None:
        self.steps, self.done, self.started = steps, 0, time.monotonic()
        self.terminal = sys.stderr.isatty()

    def step(self, what: str) -> None:
        """Call before each step."""
        spent = time.monotonic() - self.started
        left = spent / self.done * (self.steps - self.done) if self.done else None
        guess = f", about {left / 60:.0f} min left" if left is not None and self.terminal else ""
        if self.terminal:
            width = 30
            filled = width * self.done // max(self.steps, 1)
            sys.stderr.write(f"\r\033[K[{'#' * filled}{'.' * (width - filled)}] {self.done}/{self.steps} {what}{guess}")
        else:
            sys.stderr.write(f"[{self.done + 1}/{self.steps}] {what}\n")
        sys.stderr.flush()
        self.done += 1

    def end(self) -> None:
        spent = time.monotonic() - self.started
        sys.stderr.write(("\r\033[K" if self.terminal else "") + f"{self.done} steps in {spent / 60:.1f} minutes\n")
