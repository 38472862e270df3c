# SPDX-License-Identifier: Apache-2.0
"""Results as lines of JSON, written as soon as they are there, so that a run which was cut goes on where it was."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

Key = tuple[str, str, int, str]     # row, task, length, question


class Store:
    """Results of one commit, one model and the same texts in a file that has those of others, too."""

    def __init__(self, path: Path, commit: str, model: str, texts: str) -> None:
        self.path, self.of = path, {"commit": commit, "model": model, "texts": texts}
        self.found: dict[Key, dict[str, Any]] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                it = json.loads(line)
            except ValueError:      # the line that was being written when the run was cut
                continue
            if all(it.get(name) == value for name, value in self.of.items()):
                self.found[it["row"], it["task"], it["length"], it["question"]] = it["result"]
        self.before = len(self.found)

    def has(self, row: str, task: str, length: int, question: str) -> bool:
        return (row, task, length, question) in self.found

    def get(self, row: str, task: str, length: int, question: str) -> dict[str, Any]:
        return self.found[row, task, length, question]

    def add(self, row: str, task: str, length: int, question: str, result: dict[str, Any]) -> None:
        """Write a result, on a line of its own even if the file ends in the middle of one."""
        line = json.dumps({**self.of, "row": row, "task": task, "length": length, "question": question,
                           "result": result})
        with self.path.open("a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else "\n" + line
            file.write(line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.found[row, task, length, question] = result
