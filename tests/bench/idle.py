#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What clients cost that are merely attached: the daemon's own time for each block that one client puts into a full pool,
which evicts another, and the daemon's memory.

    tests/bench/idle.py BUILD [--clients 1,16,100,250] [--rounds 5]
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PIECE, TURNS, POOL = 16, 1500, 256     # blocks of a call; calls of a round; MiB, of blocks of 1 KiB
sys.path[:0] = [str(ROOT / "client/python"), str(ROOT / "tests/lib")]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=Path)
    parser.add_argument("--clients", default="1,16,100,250")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


def own_ns(pid: int) -> int:
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0])


def memory_mib(pid: int) -> int:
    (line,) = [it for it in Path(f"/proc/{pid}/status").read_text().splitlines() if it.startswith("VmRSS")]
    return int(line.split()[1]) // 1024


def put(kvd, space, calls: int, first: int) -> int:
    for _ in range(calls):
        with kvd.Pin(space) as pin:
            blocks = space.alloc(PIECE)
            pin.seal(blocks, range(first, first + 16 * len(blocks)))
            first += 16 * len(blocks)
    return first


def measure(kvd, server, clients: int, rounds: int) -> None:
    geometry = kvd.Geometry(layers=1, kv_heads=1, head_dim=16, vocab=1 << 30)
    opened = [(it := kvd.connect(server.socket), it.space("idle", geometry)) for _ in range(clients)]
    space, pid, costs = opened[0][1], server.process.pid, []
    first = put(kvd, space, POOL * 1024 // PIECE + 100, 0)
    for _ in range(rounds):
        before = own_ns(pid)
        first = put(kvd, space, TURNS, first)
        costs.append((own_ns(pid) - before) / (TURNS * PIECE))
    print(f"{clients:3} clients: {min(costs):5.0f} ns a block ({max(costs):.0f} at most), {memory_mib(pid)} MiB", flush=True)


def main() -> None:
    options = parse()
    build = options.build.resolve()
    os.environ["KVD_LIBRARY"] = str(build / "client/libkvd.so.0")
    import kvd
    from instance import Instance
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    for clients in map(int, options.clients.split(",")):
        with Instance("--backend", "host", "--pool", f"{POOL}M", "--set", "daemon.max_clients=400", "--set",
                      "daemon.user_clients=399", kvd=build / "daemon/kvd", kvctl=build / "tools/kvctl/kvctl") as server:
            measure(kvd, server, clients, options.rounds)


if __name__ == "__main__":
    main()
