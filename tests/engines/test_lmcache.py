# SPDX-License-Identifier: Apache-2.0
"""LMCache's second level on kvd: its own conformance test, and adapters in several processes with checked bytes."""

from __future__ import annotations

import json
import os
import random
import re
import select
import subprocess
import sys
import tempfile
from pathlib import Path

import common

HERE = Path(__file__).resolve()
EXAMPLE = common.ROOT / "client/python/examples/lmcache_shared.sh"
SIZE = 300_000      # bytes of an object: not a multiple of anything


# ---- the other process -----------------------------------------------------------------------------------------------


def content(key: int) -> bytes:
    return random.Random(key).randbytes(SIZE)


class Object:
    """The part of LMCache's MemoryObj that an adapter may use."""

    def __init__(self, data: bytes):
        import ctypes
        self.buffer = ctypes.create_string_buffer(data, SIZE)
        self.data_ptr = ctypes.addressof(self.buffer)

    def get_size(self) -> int:
        return SIZE


def serve(params: str) -> None:
    """Answers lines of JSON, {"store" | "lookup" | "unlock" | "load": keys}, by the calls of LMCache's controllers."""
    import torch
    from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
    from lmcache.v1.distributed.l2_adapters import create_l2_adapter
    from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig

    adapter = create_l2_adapter(PluginL2AdapterConfig("kvd.engines.lmcache", "Adapter", json.loads(params)))
    desc = {0: MemoryLayoutDesc([torch.Size([SIZE])], [torch.uint8])}

    def wait(fd: int, take):
        while (result := take()) is None or result == {}:
            assert select.select([fd], [], [], 600)[0], "no answer"
            os.read(fd, 8)
        return result

    def bits(result, n: int) -> list[bool]:
        return [result.test(i) for i in range(n)]

    def run(verb: str, numbers: list[int]):
        keys = [ObjectKey(it.to_bytes(16, "big"), "model", 0) for it in numbers]
        if verb == "store":
            task = adapter.submit_store_task(keys, [Object(content(it)) for it in numbers])
            return int(wait(adapter.get_store_event_fd(), adapter.pop_completed_store_tasks)[task])
        if verb == "lookup":
            task = adapter.submit_lookup_and_lock_task(keys, desc)
            found = wait(adapter.get_lookup_and_lock_event_fd(), lambda: adapter.query_lookup_and_lock_result(task))
            return bits(found, len(keys))
        if verb == "load":
            objects = [Object(b"") for _ in numbers]
            task = adapter.submit_load_task(keys, objects)
            there = bits(wait(adapter.get_load_event_fd(), lambda: adapter.query_load_result(task)), len(keys))
            assert all(it.buffer.raw == content(number) for it, number, is_there in zip(objects, numbers, there)
                       if is_there), "other bytes"
            return there
        return adapter.submit_unlock(keys)

    print("{}", flush=True)
    for line in sys.stdin:
        ((verb, numbers),) = json.loads(line).items()
        print(json.dumps({"answer": run(verb, numbers), "status": adapter.report_status()}), flush=True)
    adapter.close()


class Process:
    def __init__(self, socket: str, **params):
        self.log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen([sys.executable, HERE, "serve", json.dumps({"socket": socket} | params)],
                                        text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log)

    def line(self) -> dict:
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        self.log.seek(0)
        raise AssertionError(self.log.read()[-3000:])

    def send(self, **ask) -> None:
        print(json.dumps(ask), file=self.process.stdin, flush=True)

    def ask(self, **ask):
        self.send(**ask)
        return self.line()["answer"]

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


# ---- tests -----------------------------------------------------------------------------------------------------------


def test_its_own_test_passes_and_finds_what_another_run_stored(*_) -> None:
    """LMCache itself compares the data."""
    assert len(EXAMPLE.read_text().splitlines()) <= 30
    with common.daemon() as d:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = os.environ | {"KVD_SOCKET": d.socket, "PATH": path}
        for more in (("--lookup-max-hit-rate", "1.0"), ("--only", "load")):
            done = subprocess.run(["sh", EXAMPLE, *more], env=environment, text=True, capture_output=True, timeout=600)
            assert done.returncode == 0, done.stdout + done.stderr
            totals = [int(it) for it in re.findall(r"Total success: +(\d+)", done.stdout)]
            assert totals == ([32] if "load" in more else [32, 32, 32]), done.stdout
        d.check()


def test_second_process_finds_the_objects_and_their_bytes(d, a, b, other) -> None:
    assert a.ask(store=[1, 2, 3]) == 3 * SIZE
    assert a.ask(store=[2, 3, 4]) == SIZE, "objects in the pool are not copied again"
    assert b.ask(lookup=[1, 2, 5, 4]) == [True, True, False, True]
    assert b.ask(load=[1, 2, 5, 4]) == [True, True, False, True]


def test_locks_are_pins_and_bounded(d, a, b, other) -> None:
    """b may hold four locks. Locked objects stay, even when other clients fill the pool."""
    b.send(lookup=[1, 2, 3, 4, 1])
    assert b.line()["status"]["locks"] == 4
    b.ask(unlock=[1, 2, 3, 4])
    b.ask(unlock=[1, 2, 3, 4])
    assert b.ask(lookup=[1, 2]) == [True, True]
    for first in range(1000, 1400, 50):
        a.ask(store=list(range(first, first + 50)))
    assert b.ask(load=[1, 2]) == [True, True] and a.ask(lookup=[3, 1000]) == [False, False]
    b.ask(unlock=[1, 2])
    d.check()


def test_another_model_of_the_same_name_finds_nothing(d, a, b, other) -> None:
    a.ask(store=[20])
    assert other.ask(lookup=[20]) == [False] and other.ask(load=[20]) == [False]
    assert other.ask(store=[20]) == SIZE


def test_killed_processes_and_daemons_cost_a_miss(d, a, b, other) -> None:
    b.ask(lookup=[1, 2])
    b.send(store=list(range(2000, 2100)))
    b.kill()
    assert a.ask(store=[30]) == SIZE and a.ask(load=[30]) == [True]
    d.check()
    d.kill()
    assert a.ask(store=[31]) == -1
    d.start()
    assert a.ask(lookup=[31]) == [False]
    answers = [a.ask(store=[number]) for number in (32, 33, 34)]
    assert answers[-1] == SIZE, answers
    assert other.ask(lookup=[34]) == [False] and a.ask(lookup=[34]) == [True] and a.ask(load=[34]) == [True]
    d.check()


def test_the_benchmark_beside_its_server(*_) -> None:
    build = Path(os.environ["KVD"]).resolve().parents[1]
    done = subprocess.run([sys.executable, common.ROOT / "tests/bench/peer_lmcache.py", build, "--prefixes", "1", "--chunks", "4",
                           "--rounds", "1"], timeout=600, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("in place") == 4, done.stdout + done.stderr[-4000:]


def main() -> int:
    tests = [it for name, it in globals().items() if name.startswith("test_")]
    with common.daemon("--pool", "64M") as d:
        processes = [Process(d.socket), Process(d.socket, max_locks=4), Process(d.socket, fingerprint="other")]
        try:
            for it in processes:
                it.line()
            return common.run(tests, d, *processes)
        finally:
            for it in processes:
                it.kill()


if __name__ == "__main__":
    sys.exit(serve(sys.argv[2]) if sys.argv[1:2] == ["serve"] else main())
