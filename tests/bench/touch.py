#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What memory costs a process that has not used it before: the process's own time to write and to read a block, and to look
one up, in its first pass through the pool and in its second one; and both for another process, which finds the pool filled.

    tests/bench/touch.py BUILD [--pages small,auto] [--pool MIB] [--kib 128]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PIECE, BT = 16, 16      # blocks of a call, tokens of a block
sys.path[:0] = [str(ROOT / "client/python"), str(ROOT / "tests/lib")]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=Path)
    parser.add_argument("--pages", default="small,auto")
    parser.add_argument("--pool", type=int, default=1024)
    parser.add_argument("--kib", type=int, default=128)
    return parser.parse_args()


def timed(call: Callable[[int], None], n: int) -> float:
    """Microseconds of this thread's own time for each block, of n calls for a piece each."""
    began = time.thread_time_ns()
    for i in range(n):
        call(i)
    return (time.thread_time_ns() - began) / 1e3 / (n * PIECE)


def child(kvd, socket: str, options: argparse.Namespace, who: int) -> None:
    geometry = kvd.Geometry(layers=1, kv_heads=1, head_dim=options.kib * 8, vocab=1 << 30, dtype="f32", block_tokens=BT)
    pieces = options.pool * 1024 // options.kib // PIECE * 7 // 8
    data = bytes(PIECE * options.kib * 1024)
    out = bytearray(len(data))

    def tokens(i: int) -> range:
        return range(i * PIECE * BT, (i + 1) * PIECE * BT)

    def write(space, first: int) -> Callable[[int], None]:
        def call(i: int) -> None:
            blocks = []
            while len(blocks) < PIECE:
                blocks += space.alloc(PIECE - len(blocks))
            space.write(blocks, data)
            with kvd.Pin(space) as pin:
                pin.seal(blocks, tokens(first + i))
        return call

    def read(space, first: int, copies: bool) -> Callable[[int], None]:
        def call(i: int) -> None:
            with space.lookup(tokens(first + i)) as pin:
                if copies and pin.blocks:
                    space.read(pin, memoryview(out)[:len(pin.blocks) * options.kib * 1024])
        return call

    with kvd.connect(socket) as client, client.space("touch", geometry) as space:
        last = 2 * pieces
        if who == 0:
            put = [timed(write(space, at), pieces) for at in (0, pieces)]
            seen = last - pieces
            look, copy = ([timed(read(space, seen, copies), pieces) for _ in range(2)] for copies in (False, True))
        else:
            seen = last - pieces
            look, copy = ([timed(read(space, seen, copies), pieces) for _ in range(2)] for copies in (False, True))
            put = [timed(write(space, last + at), pieces) for at in (0, pieces)]
        for what, (one, two) in (("write", put), ("look up", look), ("read", copy)):
            print(f"  process {who + 1}: {what:8} {one:7.2f} us a block, then {two:6.2f}: {one / two:5.2f}", flush=True)


def main() -> None:
    options = parse()
    build = options.build.resolve()
    os.environ["KVD_LIBRARY"] = str(build / "client/libkvd.so.0")
    import kvd
    from instance import Instance
    for pages in options.pages.split(","):
        with Instance("--backend", "host", "--pool", f"{options.pool}M", "--set", f"daemon.pages={pages}",
                      kvd=build / "daemon/kvd", kvctl=build / "tools/kvctl/kvctl") as server:
            print(f"pages = {pages}:")
            for who in range(2):
                time.sleep(3 * who)
                pid = os.fork()
                if not pid:
                    child(kvd, server.socket, options, who)
                    os._exit(0)
                assert os.waitpid(pid, 0)[1] == 0
            with open(f"/proc/{server.process.pid}/status") as status:
                print("  daemon:", " ".join(it.split(":")[1].strip() for it in status if it.startswith("VmRSS")))


if __name__ == "__main__":
    main()
