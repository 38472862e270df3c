#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Selects tests of a build folder, and the Ninja targets that these tests need.

    choose.py BUILD --out PREFIX [--suites NAME,...] [--not-suites NAME,...] [--not FILE] [--changed REV]

    --out PREFIX      writes PREFIX.tests, one name per line, and PREFIX.targets
    --suites          only tests of these suites
    --not-suites      no test of these suites
    --not FILE        no test that FILE lists
    --changed REV     only tests that depend on a file that differs from REV, by Ninja's graph and the headers that
                      compilers have reported; all tests before the first build of the folder. A script also depends on
                      the files in its folder, on tests/lib and on client/python. Suite "tree" reads all files: it always
                      runs.
"""
from __future__ import annotations

import argparse
import collections
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Iterable

ROOT = Path(__file__).resolve().parents[2]
SHARED = ("tests/lib/", "client/python/")       # scripts may import these
GRAPH_NODE = re.compile(r'^"(0x[0-9a-f]+)" \[label="(.*?)"')
GRAPH_EDGE = re.compile(r'^"(0x[0-9a-f]+)" -> "(0x[0-9a-f]+)"(.*)')


def output(*command: str | Path) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def suites(test: dict) -> set[str]:
    return {suite.split(":")[-1] for suite in test["suite"]}


class Graph:
    """Which file is made from which, as paths relative to the build folder."""

    def __init__(self, build: Path, targets: set[str]):
        self.used_by: dict[str, set[str]] = collections.defaultdict(set)
        self.read_graph(output("ninja", "-C", build, "--quiet", "-t", "graph", *sorted(targets)))
        self.read_headers(output("ninja", "-C", build, "--quiet", "-t", "deps"))

    def read_graph(self, dot: str) -> None:
        names, edges = {}, []
        for line in dot.splitlines():
            if edge := GRAPH_EDGE.match(line):
                if "style=dotted" not in edge[3]:       # an order-only dependency
                    edges.append((edge[1], edge[2]))
            elif node := GRAPH_NODE.match(line):        # a file, or a rule between files
                names[node[1]] = node[2] if "shape=ellipse" not in line else node[1]
        for one, other in edges:
            self.used_by[names[one]].add(names[other])

    def read_headers(self, deps: str) -> None:
        made = ""
        for line in deps.splitlines():
            if line.startswith("    "):
                self.used_by[line.strip()].add(made)
            elif ": #deps" in line:
                made = line.split(": #deps")[0]

    def reached(self, files: set[str]) -> set[str]:
        found, new = set(), files
        while new:
            found |= new
            new = set().union(*(self.used_by.get(file, set()) for file in new)) - found
        return found


def changed_files(rev: str) -> set[str]:
    git = ("git", "-C", ROOT)
    return set(output(*git, "diff", "--name-only", rev, "--").splitlines()) | \
        set(output(*git, "ls-files", "--others", "--exclude-standard").splitlines())


def in_tree(words: Iterable[str]) -> set[str]:
    """The words that are paths of files or folders in the source tree."""
    paths = {os.path.normpath(word) for word in words if word.startswith(f"{ROOT}/")}
    return {os.path.relpath(path, ROOT) for path in paths if os.path.exists(path) and path != str(ROOT)}


def reads(test: dict, file: str) -> bool:
    """Whether the test's command or environment names the file, its folder, or a script that may import it."""
    for path in in_tree([*test["cmd"], *test["env"].values()]):
        folder = path if (ROOT / path).is_dir() else os.path.dirname(path)
        if file == path or folder and file.startswith(f"{folder}/") or path.endswith((".py", ".sh")) and file.startswith(SHARED):
            return True
    return False


class Choice:
    def __init__(self, build: Path):
        self.build = build
        known = json.loads(output("meson", "introspect", "--tests", "--targets", "-f", build))
        self.tests = known["tests"]
        folder = os.path.realpath(build)
        self.files = {t["id"]: [os.path.relpath(f, folder) for f in t["filename"]] for t in known["targets"]}
        names = [test["name"] for test in self.tests]
        if twice := [name for name, n in collections.Counter(names).items() if n > 1]:
            sys.exit(f"two tests have the same name: {', '.join(twice)}")

    def needs(self, test: dict) -> set[str]:
        return {file for target in test["depends"] for file in self.files[target]}

    def reached(self, changed: set[str]) -> list[dict]:
        """The tests that depend on one of these files (paths from the root of the tree)."""
        if not (self.build / ".ninja_deps").exists() or any(f.endswith(("meson.build", "meson_options.txt")) for f in changed):
            return self.tests
        graph = Graph(self.build, {"all"}.union(*map(self.needs, self.tests)))
        reached = graph.reached({os.path.relpath(ROOT / file, self.build) for file in changed})
        others = {file for file in changed if not file.endswith((".c", ".h", ".cu", ".cuh", ".def"))}
        return [test for test in self.tests if "tree" in suites(test) or self.needs(test) & reached
                or any(reads(test, file) for file in others)]


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("build", type=Path)
    parser.add_argument("--out", required=True)
    for name in ("--suites", "--not-suites", "--not", "--changed"):
        parser.add_argument(name)
    o = parser.parse_args()
    choice = Choice(o.build.resolve())
    tests = choice.reached(changed_files(o.changed)) if o.changed else choice.tests
    wanted, unwanted = (set(filter(None, (names or "").split(","))) for names in (o.suites, o.not_suites))
    named = set(Path(getattr(o, "not")).read_text().splitlines()) if getattr(o, "not") else set()
    tests = [t for t in tests if (not wanted or wanted & suites(t)) and not unwanted & suites(t) and t["name"] not in named]
    Path(f"{o.out}.tests").write_text("".join(f"{test['name']}\n" for test in tests))
    Path(f"{o.out}.targets").write_text("".join(f"{file}\n" for file in sorted(set().union(*map(choice.needs, tests)))))


if __name__ == "__main__":
    main()
