# SPDX-License-Identifier: Apache-2.0
"""The file tier beside fio, in one run: the same blocks to a file in the same folder and back, in turns. Then how long a
first token takes from each tier, with kvlm.

    python3 file.py --build BUILD [--dir DIR] [--mib N] [--block KIB] [--rounds N]

Reads are what a client waits: from asking for all to all being resident. Writes are those of `kvctl evict --to file`, by
the time that the file was busy with them (WRITTEN/S of `kvctl tiers`). fio writes and reads as many bytes in order, as
large as a record of kvd's, at kvd's depth, past the cache of the kernel.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEPTH = 64          # daemon/disk/device.c
SECTOR = 4096       # a record's, before its payload
BLOCK_TOKENS = 16
CHAIN = 64          # blocks
MODEL = ROOT / "tools/kvlm/model"
MIB = 1 << 20
LENGTHS = 2000, 16000
KVLM_BLOCK = 65536      # bytes of its model's blocks of 16 tokens
FETCHED = 15360         # kvd_fetch: of the first so many tokens


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, required=True)
    parser.add_argument("--dir", default="/var/tmp", help="where the files are: on the disk that is measured")
    parser.add_argument("--mib", type=int, default=512, help="moved in a round")
    parser.add_argument("--block", type=int, default=1024, help="KiB of a block")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    args.build = args.build.resolve()
    return args


# ---- fio ---------------------------------------------------------------------------------------------------------


def fio(folder: str, what: str, size: int, block: int) -> float:
    """Bytes a second."""
    done = subprocess.run(["fio", "--name=file", f"--filename={folder}/fio", f"--rw={what}", f"--bs={block}",
                           f"--size={size // block * block}", f"--iodepth={DEPTH}", "--ioengine=io_uring", "--direct=1",
                           "--output-format=json"], check=True, text=True, stdout=subprocess.PIPE)
    return float(json.loads(done.stdout)["jobs"][0][what]["bw_bytes"])


# ---- kvd ---------------------------------------------------------------------------------------------------------


def until(condition) -> None:
    while not condition():
        time.sleep(0.002)


def busy(before: dict, after: dict) -> float:
    """Seconds for which the tier was busy with writes between two answers of kvctl."""
    def seconds(t: dict) -> float:
        return t["written_bytes"] / t["written_per_second"] if t["written_bytes"] else 0.0
    return seconds(after) - seconds(before)


class Kvd:
    """A daemon with a file, and a space of opaque blocks."""

    def __init__(self, args: argparse.Namespace, folder: str) -> None:
        import instance
        import kvd
        size = args.mib * 3 + 128
        self.instance = instance.Instance(
            "--pool", f"{args.mib + 256}M", "--backend", "host", "--set", f"daemon.file={folder}/kvd", "--set",
            f"daemon.file_size={size}M", "--set", "daemon.file_depth=1000000000", kvd=args.build / "daemon/kvd", kvctl=args.build / "tools/kvctl/kvctl")
        until(lambda: self.tier()["state"] == "on")
        self.daemon = kvd.connect(self.instance.socket)
        self.block = args.block << 10
        self.n = args.mib * MIB // self.block
        self.space = self.daemon.space("s", kvd.Geometry.opaque(self.block, "bench", block_tokens=BLOCK_TOKENS))
        self.payload = os.urandom(self.block)
        self.round = 0

    def tier(self) -> dict:
        return self.instance.stat("tiers")["tiers"][0]

    def chains(self) -> list[list[int]]:
        first = self.round * self.n
        return [[(first + i) * BLOCK_TOKENS + k for k in range(min(CHAIN, self.n - i) * BLOCK_TOKENS)]
                for i in range(0, self.n, CHAIN)]

    def fill(self) -> None:
        self.round += 1
        for tokens in self.chains():
            with self.space.lookup(tokens) as pin:
                blocks = self.space.alloc(len(tokens) // BLOCK_TOKENS)
                for block in blocks:
                    block.memoryview()[:] = self.payload
                pin.seal(blocks, tokens)

    def write(self) -> float:
        before = self.tier()
        self.instance.kvctl("evict", "s", "--all", "--to", "file")
        after = self.tier()
        written = after["written_bytes"] - before["written_bytes"]
        if written < self.n * self.block:
            raise SystemExit(f"only {written} bytes were written")
        return written / busy(before, after)

    def read(self) -> float:
        before = self.tier()
        began = time.monotonic()
        for fetch in [self.space.fetch(tokens) for tokens in self.chains()]:
            fetch.wait()
        took = time.monotonic() - began
        read = self.tier()["read_bytes"] - before["read_bytes"]
        if read < self.n * self.block:
            raise SystemExit(f"only {read} bytes were read")
        self.instance.kvctl("evict", "s", "--all")
        return read / took


def speed(args: argparse.Namespace, folder: str) -> dict[str, list[float]]:
    seen: dict[str, list[float]] = {"kvd write": [], "fio write": [], "kvd read": [], "fio read": []}
    kvd, slot = Kvd(args, folder), (args.block << 10) + SECTOR
    size = args.mib * MIB
    with kvd.instance:
        fio(folder, "write", size, slot)        # makes its file
        for number in range(args.rounds + 1):
            kvd.fill()
            figures = kvd.write(), fio(folder, "write", size, slot), kvd.read(), fio(folder, "read", size, slot)
            if number:                          # the first one makes its memory
                for values, figure in zip(seen.values(), figures, strict=True):
                    values.append(figure)
        kvd.space.close()
        kvd.daemon.close()
    return seen


def show_speed(args: argparse.Namespace, seen: dict[str, list[float]]) -> None:
    print(f"{args.mib} MiB in blocks of {args.block} KiB, {args.rounds} rounds in turns, medians (least, most), MiB/s\n")
    for what in "write", "read":
        line = []
        for who in "kvd", "fio":
            values = sorted(v / MIB for v in seen[f"{who} {what}"])
            line.append(f"{who} {statistics.median(values):7.0f} ({values[0]:.0f}, {values[-1]:.0f})")
        ratio = statistics.median(a / b for a, b in zip(seen[f"kvd {what}"], seen[f"fio {what}"], strict=True))
        print(f"  {what:6} {line[0]:28} {line[1]:28} {100 * ratio:5.0f} % of fio's")
    print()


# ---- the first token ---------------------------------------------------------------------------------------------


def long_model(folder: str) -> Path:
    """The model of this repository, for longer prompts than it was trained on: what it says is not asked."""
    model = Path(shutil.copytree(MODEL, f"{folder}/model"))
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = 2 * max(LENGTHS)
    (model / "config.json").write_text(json.dumps(config))
    return model


class Engine:
    """kvlm over a daemon of its own with one tier."""

    def __init__(self, args: argparse.Namespace, folder: str, *settings: str) -> None:
        import instance
        self.folder, self.build, self.model = folder, args.build, f"{folder}/model"
        self.instance = instance.Instance("--pool", "256M", "--backend", "host", *settings, kvd=args.build / "daemon/kvd",
                                          kvctl=args.build / "tools/kvctl/kvctl")
        until(lambda: self.tier()["state"] == "on")

    def tier(self) -> dict:
        return self.instance.stat("tiers")["tiers"][0]

    def first_token(self, tokens: list[int], reused: int) -> float:
        """Milliseconds. So many tokens must have been there."""
        path = Path(self.folder, "tokens")
        path.write_text(" ".join(map(str, tokens)))
        done = subprocess.run([self.build / "tools/kvlm/kvlm", "--model", self.model, "--socket", self.instance.socket, "--json",
                               "--max-tokens", "1", "--tokens", path], check=True, text=True, stdout=subprocess.PIPE)
        said = json.loads(done.stdout)
        if said["reused_tokens"] < reused:
            raise SystemExit(f"{said['reused_tokens']} tokens were there, not {reused}")
        return float(said["ttft_ms"])


@contextlib.contextmanager
def redis(folder: str):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    server = subprocess.Popen(["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder],
                              stdout=subprocess.DEVNULL)
    try:
        yield port
    finally:
        server.terminate()
        server.wait()


def first_tokens(args: argparse.Namespace, folder: str, port: int) -> dict[tuple[int, str], list[float]]:
    seen: dict[tuple[int, str], list[float]] = {}
    chance = random.Random(1)
    long_model(folder)
    file = Engine(args, folder, "--set", f"daemon.file={folder}/first", "--set", "daemon.file_size=512M")
    remote = Engine(args, folder, "--set", f"daemon.remote=redis://127.0.0.1:{port}", "--set", "daemon.remote_depth=0")
    with file.instance, remote.instance:
        for n in [length for length in LENGTHS for _ in range(args.rounds)]:
            tokens = [chance.randrange(10, 750) for _ in range(n)]
            whole = (n - 1) // BLOCK_TOKENS * BLOCK_TOKENS
            below = min(whole, FETCHED)
            seen.setdefault((n, "computed"), []).append(file.first_token(tokens, 0))
            seen.setdefault((n, "host"), []).append(file.first_token(tokens, whole))
            file.instance.kvctl("evict", "--all", "--to", "file")
            seen.setdefault((n, "file"), []).append(file.first_token(tokens, below))
            there = remote.tier()["written_bytes"]
            remote.first_token(tokens, 0)
            until(lambda: remote.tier()["written_bytes"] - there >= whole // BLOCK_TOKENS * KVLM_BLOCK)
            remote.instance.kvctl("evict", "--all")
            seen.setdefault((n, "Redis"), []).append(remote.first_token(tokens, below))
    return seen


def show_first_tokens(seen: dict[tuple[int, str], list[float]]) -> None:
    print("first token of a prompt, ms, medians (least, most), with the model of this repository; of more than "
          f"{FETCHED} tokens, the rest is computed\n")
    for (n, tier), values in seen.items():
        print(f"  {n:6} tokens  {tier:9} {statistics.median(values):9.1f} ({min(values):.1f}, {max(values):.1f})")
    print()


def main() -> int:
    args = options()
    for program in "fio", "redis-server":
        if not shutil.which(program):
            print(f"file.py: {program} is not there: sh tools/packages bench", file=sys.stderr)
            return 2
    sys.path += [str(ROOT / "client/python"), str(ROOT / "tests/lib")]
    os.environ["KVD_LIBRARY"] = str(args.build / "client/libkvd.so.0")
    with tempfile.TemporaryDirectory(prefix="kvd-bench-", dir=args.dir) as folder:
        show_speed(args, speed(args, folder))
        with redis(folder) as port:
            show_first_tokens(first_tokens(args, folder, port))
    return 0


if __name__ == "__main__":
    sys.exit(main())
