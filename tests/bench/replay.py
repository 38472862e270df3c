# SPDX-License-Identifier: Apache-2.0
"""Plays requests of a real service to kvd and to an independent simulator, for pools of several sizes, and compares how
much each request found. A difference is an error; so is a block with wrong contents.

    python3 replay.py --build BUILD [--trace FILE] [--blocks N[,N...]]

FILE has the form of Mooncake's traces (trace/README.md); without it, it is the sample there.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
from collections import OrderedDict
from itertools import islice
from pathlib import Path

HERE = Path(__file__).resolve().parent
SHARES = 0.02, 0.05, 0.1, 0.2, 0.4
CACHES = 10
PAGE_BLOCKS = 32  # of 128 bytes (kvd_side.c)
BATCH = 128  # fetched at once (client/cache/magazine.c)
FRESH_LEAST, FRESH_MOST = 32, 512  # least stock that replies fill, most blocks in a reply (client/cache/magazine.c)


def read(path: Path) -> list[list[int]]:
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as lines:
        return [json.loads(line)["hash_ids"] for line in lines]


class Lru:
    """A cache of a number of blocks, which evicts the least recently used one, of a request its last block first, so
    that a block stays as long as those after it. Blocks found by the current request stay. The engine's library takes
    blocks to fill in batches, which the cache then cannot use. An engine that finds all of a prompt computes the last
    block again, to continue from it, and needs one block to fill. If less than half of the stock is left, the reply to
    a seal fills it up. With a batch of 0, the library has no stock."""

    def __init__(self, blocks: int, batch: int) -> None:
        self.blocks, self.batch, self.hand = blocks, batch, 0
        self.cached: OrderedDict[int, None] = OrderedDict()

    def make_room(self, keep: set[int]) -> None:
        excess = max(0, len(self.cached) + self.hand - self.blocks)
        for block in list(islice((block for block in self.cached if block not in keep), excess)):
            del self.cached[block]

    def request(self, chain: list[int]) -> int:
        found = next((i for i, block in enumerate(chain) if block not in self.cached), len(chain))
        missing = len(chain) - found
        filled = max(missing, min(self.batch, 1))
        if filled > self.hand:
            self.hand += max(filled - self.hand, self.batch)
            self.make_room(set(chain[:found]))
        self.hand -= missing
        for block in reversed(chain):
            self.cached[block] = None
            self.cached.move_to_end(block)
        self.top_up(chain, filled, filled - missing)
        return found

    def top_up(self, chain: list[int], sealed: int, spare: int) -> None:
        stock = max(self.batch, share(self.blocks, min(sealed, FRESH_MOST)))
        if self.batch >= FRESH_LEAST and self.hand - spare < stock // 2:
            self.hand = stock + spare  # the spare one is still being filled, and is returned to the daemon
            self.make_room(set(chain))
            self.hand = stock
        elif spare and self.hand > self.batch:
            self.hand -= spare


def simulate(requests: list[list[int]], blocks: int, batch: int) -> list[int]:
    cache = Lru(blocks, batch)
    return [cache.request(chain) for chain in requests]


def share(blocks: int, n: int) -> int:
    """Maximum stock of libkvd (client/cache/magazine.c): a 64th of the ids, which are rounded up to whole pages."""
    return max(1, min(n, -(-blocks // PAGE_BLOCKS) * PAGE_BLOCKS // 64))


def replay(build: Path, requests: list[list[int]], blocks: int) -> tuple[list[int], dict]:
    text = "".join(" ".join(map(str, chain)) + "\n" for chain in requests)
    program, kvd, kvctl = (build / path for path in ("tests/bench/kvd-replay", "daemon/kvd", "tools/kvctl/kvctl"))
    out = subprocess.run([program, kvd, kvctl, str(blocks)], input=text, text=True, stdout=subprocess.PIPE,
                         check=True).stdout.splitlines()
    lines, told = out[:len(requests)], json.loads(out[len(requests)])
    counters = json.loads("".join(out[len(requests) + 1:]))["counters"]
    told["unindexed"] = next(row["value"] for row in counters if row["name"].lower() == "unindexed")
    return [int(line) for line in lines], told


def compare(want: list[int], got: list[int]) -> str:
    """The first difference, or an empty string."""
    if len(want) != len(got):
        return f"{len(got)} requests of {len(want)} were answered"
    wrong = [i for i, pair in enumerate(zip(want, got)) if pair[0] != pair[1]]
    if not wrong:
        return ""
    return f"{len(wrong)} differ, first request {wrong[0]}: {got[wrong[0]]} found, {want[wrong[0]]} by the simulator"


def same(build: Path, requests: list[list[int]], blocks: int) -> tuple[list[int], dict, str]:
    """Keys are secret and random for each cache, and a few blocks in a million find no place in its index (layout.h). A
    cache with such a block cannot be compared, so another one is tried."""
    want = simulate(requests, blocks, share(blocks, BATCH))
    for _ in range(CACHES):
        found, told = replay(build, requests, blocks)
        trouble = compare(want, found)
        if told["wrong"]:
            trouble = f"{told['wrong']} blocks held something else"
        if not trouble or told["wrong"] or not told["unindexed"]:
            break
    return found, told, trouble


def one_pool(build: Path, requests: list[list[int]], blocks: int) -> bool:
    asked = sum(map(len, requests))
    found, told, trouble = same(build, requests, blocks)
    plain = sum(simulate(requests, blocks, 0)) / asked
    print(f"{blocks:9,} {sum(found) / asked:9.4f} {plain:9.4f} {asked / told['seconds']:12,.0f} "
          f"{told['owner_seconds'] / asked * 1e6:10.2f}   {trouble or 'equal'}", flush=True)
    return not trouble


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=Path, required=True)
    parser.add_argument("--trace", type=Path, default=HERE / "trace/conversation.jsonl.gz")
    parser.add_argument("--blocks", type=lambda s: [int(n) for n in s.split(",")])
    args = parser.parse_args()
    requests = read(args.trace)
    different = len({block for chain in requests for block in chain})
    print(f"{len(requests):,} requests, {sum(map(len, requests)):,} blocks, {different:,} different ones")
    print("     pool  hit rate plain LRU     blocks/s   owner us   beside the simulator")
    good = [one_pool(args.build, requests, n) for n in args.blocks or [int(different * s) for s in SHARES]]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
