#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""kvctl trace: it reports what happened; whatif can replay it; it survives being late, and its daemon's death."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from cached import BT, GEOMETRY, Instance, compute, daemon, kvd, prompts, until


class Trace:
    """kvctl trace, and its output so far."""

    def __init__(self, on: Instance, space: str) -> None:
        self.file = tempfile.NamedTemporaryFile(prefix="kvctl-trace-")
        self.process = subprocess.Popen([os.environ["KVCTL"], "--socket", on.socket, "trace", space],
                                        stdout=self.file)
        atexit.register(self.process.kill)      # even if a test fails in the middle
        self.wait("begin")

    def lines(self, event: str | None = None) -> list[dict]:
        written = Path(self.file.name).read_text().split("\n")[:-1]
        return [line for line in map(json.loads, written) if event in (None, line["event"])]

    def wait(self, event: str, n: int = 1) -> list[dict]:
        return until(lambda: len(found := self.lines(event)) >= n and found, f"{n} lines that say {event}")

    def there(self) -> set[int]:
        """The blocks that are there according to the trace."""
        there: set[int] = set()
        for line in self.lines():
            if line["event"] == "stored":
                assert line["block"] not in there, f"twice: {line}"
                assert line["depth"] == 0 or line["parent"] in there, f"before its parent: {line}"
                there.add(line["block"])
            elif line["event"] == "removed":
                there.remove(line["block"])
            elif line["event"] == "cleared":
                there.clear()
        return there

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        self.signal(signal.SIGINT)
        assert self.process.wait(60) == 0, self.process.returncode


class Live:
    """kvctl whatif --live, which already has the clients' pages."""

    def __init__(self, on: Instance, space: str) -> None:
        self.process = subprocess.Popen([os.environ["KVCTL"], "--socket", on.socket, "whatif", "--live", space, "--json"],
                                        stdout=subprocess.PIPE, text=True)
        atexit.register(self.process.kill)
        until(lambda: "kvd-pins" in Path(f"/proc/{self.process.pid}/maps").read_text(), "a client's page in it")

    def end(self) -> dict:
        self.process.send_signal(signal.SIGINT)
        out, _ = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, self.process.returncode
        return json.loads(out)


def sealed(on: Instance, space: str) -> int:
    return next(row["blocks"]["sealed"] for row in on.stat("spaces")["spaces"] if row["name"] == space)


def test_what_is_told_is_what_happened_and_can_be_replayed(on: Instance) -> None:
    asked = prompts(120, seed=1)
    with kvd.connect(on.socket) as client, client.space("told", GEOMETRY) as space:
        trace, live = Trace(on, "told"), Live(on, "told")
        found = [compute(space, tokens) for tokens in asked]
        lines = trace.wait("asked", len(asked))
        assert [(line["input_length"], line["found"]) for line in lines] == \
               [(len(tokens), n) for tokens, n in zip(asked, found)]
        number: dict[tuple[int, ...], int] = {}
        for tokens, line in zip(asked, lines):
            assert len(line["hash_ids"]) == -(-len(tokens) // BT), line
            for i, block in enumerate(line["hash_ids"]):
                assert number.setdefault(tuple(tokens[:(i + 1) * BT]), block) == block, "one prefix, two numbers"
        assert len(set(number.values())) == len(number), "two prefixes, one number"

        whole = {block for prefix, block in number.items() if len(prefix) % BT == 0}
        until(lambda: trace.there() == whole, "the blocks that are there")
        told = on.stat("whatif", trace.file.name)
        assert told["trace"]["requests"] == len(asked)
        assert told["pools"][-1]["found"] * BT == sum(found), (told, sum(found))
        assert live.end() == told

        on.kvctl("evict", "told", "--all")
        until(lambda: not trace.there(), "that all are removed")
        trace.end()


def test_who_comes_late_loses_lookups_but_not_his_way(on: Instance) -> None:
    """While it is stopped, there are more changes than the index can list, and more lookups than a page can hold."""
    on.kvctl("space", "create", "late", *"--layers 1 --kv-heads 1 --head-dim 8 --dtype f32 --vocab 1048576".split(),
             "--max-blocks", "64")
    with kvd.connect(on.socket) as client, client.space("late", GEOMETRY) as space:
        trace = Trace(on, "late")
        compute(space, list(range(40 * BT)))
        until(lambda: len(trace.there()) == 40, "the first blocks")
        trace.signal(signal.SIGSTOP)
        for i in range(60):
            compute(space, list(range(i * 1000, i * 1000 + 40 * BT)))
        for _ in range(300):
            compute(space, list(range(40 * BT)))
        trace.signal(signal.SIGCONT)
        trace.wait("missed")
        until(lambda: len(trace.there()) == sealed(on, "late"), "as many blocks as there are")
        assert 0 < len(trace.there()) <= 64
        trace.end()


def test_the_daemon_is_killed(on: Instance) -> None:
    with kvd.connect(on.socket) as client, client.space("killed", GEOMETRY) as space:
        trace = Trace(on, "killed")
        compute(space, list(range(10 * BT)))
        until(lambda: len(trace.there()) == 10, "ten blocks")
        on.kill()
        trace.wait("away")
        on.start()
        trace.wait("back")
        until(lambda: not trace.there(), "that the blocks are gone")
        compute(space, list(range(10 * BT)))
        until(space.catch_up, "the client's next daemon")
        until(lambda: compute(space, list(range(10 * BT))) == 10 * BT, "that they are there again")
        until(lambda: len(trace.there()) == 10, "that the next daemon's are told of")
        before = len(trace.lines("asked"))
        until(lambda: compute(space, list(range(BT))) and len(trace.lines("asked")) > before, "the first lookups")
        trace.end()


def test_ends_after_a_time_and_refuses_what_is_not_there(on: Instance) -> None:
    done = subprocess.run([os.environ["KVCTL"], "--socket", on.socket, "trace", "told", "--for", "0.05", "--json"],
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 1, done
    done = subprocess.run([os.environ["KVCTL"], "--socket", on.socket, "trace", "nowhere"], capture_output=True,
                          text=True, timeout=60)
    assert done.returncode == 1 and 'no space "nowhere"' in done.stderr, done
    done = subprocess.run([os.environ["KVCTL"], "--socket", on.socket, "whatif", "--live", "told", "--for", "0.05"],
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "nobody looked anything up" in done.stderr, done


with daemon() as it:
    test_what_is_told_is_what_happened_and_can_be_replayed(it)
    test_ends_after_a_time_and_refuses_what_is_not_there(it)
    test_who_comes_late_loses_lookups_but_not_his_way(it)
    test_the_daemon_is_killed(it)
