# SPDX-License-Identifier: Apache-2.0
"""Compares the file tier with fio in one run: the same blocks to a file in the same folder and back, in turns. Then the
times in which blocks of a sequence come back from exact copies in memory, from exact copies in the file, and from the
sketch alone; and times to the first token from each tier, with kvlm.

    python3 file.py --build BUILD [--dir DIR] [--mib N] [--block KIB] [--rounds N]

The time of reads is what a client waits: from the request until all blocks are resident. The time of writes is that for
which `kvctl evict --to file` kept the file busy (WRITTEN/S of `kvctl tiers`). fio writes and reads as many bytes in
order, in pieces of a record's size, at kvd's depth, bypassing the kernel's cache. For a sequence's blocks, the time is
that from the request for all of them to the end of kvd_sequence_wait, and the processor time is that of the daemon and
its processes.
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
from array import array
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEPTH = 64          # daemon/process/disk/disk_device.c
SECTOR = 4096       # bytes of a record before its payload
BLOCK_TOKENS = 16
CHAIN = 64          # blocks
MODEL = ROOT / "tools/kvlm/model"
MIB = 1 << 20
LENGTHS = {2000: 1, 16000: 1, 64000: 0.4}        # of prompts, and the share of the rounds: computing takes long
KVLM_BLOCK = 65536      # bytes of its model's blocks of 16 tokens
LAYER = 65536           # bytes of a block's layer with 8 heads of 128 numbers of two bytes
IN_MEMORY = 8           # with a file, memory has room for a share of 1/IN_MEMORY of the copies
VOCAB = 50000
REVIVED = "memory", "file", "sketch"


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
        fio(folder, "write", size, slot)        # creates fio's file
        for number in range(args.rounds + 1):
            kvd.fill()
            figures = kvd.write(), fio(folder, "write", size, slot), kvd.read(), fio(folder, "read", size, slot)
            if number:                          # the first one allocates its memory
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


# ---- copies of a sequence's blocks ---------------------------------------------------------------------------------


def spent(pid: int) -> float:
    """Seconds of processor time of a process and all its children."""
    ticks = sum(map(int, Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]))
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return ticks / os.sysconf("SC_CLK_TCK") + sum(spent(int(child)) for child in children)


class Copies:
    """A daemon, and one sequence at a time, whose blocks leave and come back."""

    def __init__(self, args: argparse.Namespace, where: str, folder: str) -> None:
        import instance
        import kvd
        self.where = where
        self.layers = max(1, (args.block << 10) // LAYER)
        self.block = self.layers * LAYER
        self.n = max(1, args.mib * MIB // 4 // self.block)
        size = self.n * self.block // MIB
        file = "--set", f"daemon.file={folder}/copies", "--set", f"daemon.file_size={4 * size + 64}M"
        spill = max(16, size // IN_MEMORY) if where == "file" else 4 * size
        self.instance = instance.Instance(
            "--pool", f"{2 * size + 64}M", "--backend", "host", "--set", f"daemon.spill={spill}M",
            *(file if where == "file" else ()), kvd=args.build / "daemon/kvd", kvctl=args.build / "tools/kvctl/kvctl")
        self.daemon = kvd.connect(self.instance.socket)
        if where == "file":
            until(lambda: self.tier()["state"] == "on")
        self.space = self.daemon.space("s", kvd.Geometry(layers=self.layers, kv_heads=8, head_dim=128, vocab=VOCAB))
        for name, value in ("kvreviver", 1), ("kvreviver.max_load", 1e9), ("pressure", 0):
            self.space.set(name, value)
        self.payload = array("H", [0x3000 + i % 1024 for i in range(self.block // 2)]).tobytes()

    def tier(self) -> dict:
        return self.instance.stat("tiers")["tiers"][0]

    def leave(self, sequence) -> None:
        import kvd
        tokens = [i % VOCAB for i in range(self.n * BLOCK_TOKENS)]
        while (there := len(sequence)) < self.n:
            blocks = self.space.alloc(min(CHAIN, self.n - there))
            for block in blocks:
                block.memoryview()[:] = self.payload
            first = there * BLOCK_TOKENS
            sequence.append(blocks, tokens[first:first + len(blocks) * BLOCK_TOKENS])
        while there := [i for i, entry in enumerate(sequence.entries()) if entry.data]:
            with contextlib.suppress(TimeoutError, kvd.QuotaExceeded, kvd.PoolFull):   # until copies are in the file
                sequence.cool(there, "vague" if self.where == "sketch" else "spill")
                sequence.wait(1)
        if self.where == "file":
            until(lambda: self.tier()["copies"] >= self.n * (IN_MEMORY - 1) // IN_MEMORY)

    def come_back(self) -> tuple[float, float]:
        """Seconds until all blocks are back, and seconds of processor time."""
        pid = self.instance.process.pid
        with self.space.sequence(self.n) as sequence:
            self.leave(sequence)
            busy, began = spent(pid), time.monotonic()
            sequence.revive(range(self.n), "approx" if self.where == "sketch" else "exact")
            sequence.wait(60)
            took, busy = time.monotonic() - began, spent(pid) - busy
            if (there := sum(entry.data != 0 for entry in sequence.entries())) < self.n:
                raise SystemExit(f"{there} of {self.n} blocks came back: {self.where}")
        return took, busy


def come_back(args: argparse.Namespace, folder: str) -> tuple[Copies, dict[str, list[tuple[float, float]]]]:
    with contextlib.ExitStack() as stack:
        all_of_them = [Copies(args, where, folder) for where in REVIVED]
        for copies in all_of_them:
            stack.enter_context(copies.instance)
        seen: dict[str, list[tuple[float, float]]] = {where: [] for where in REVIVED}
        for number in range(args.rounds + 1):
            for copies in all_of_them:
                figures = copies.come_back()
                if number:                      # the first one allocates its memory
                    seen[copies.where].append(figures)
        for copies in all_of_them:
            copies.space.close()
            copies.daemon.close()
        return all_of_them[0], seen


def show_come_back(copies: Copies, seen: dict[str, list[tuple[float, float]]]) -> None:
    print(f"{copies.n} blocks of a sequence, {copies.block >> 10} KiB and {BLOCK_TOKENS} tokens each, come back; of copies "
          f"in the file, a part of {IN_MEMORY} is in memory. Medians (least, most)\n")
    for where, values in seen.items():
        took = sorted(1e3 * t for t, _ in values)
        busy, all_tokens = statistics.median(1e3 * b for _, b in values), copies.n * BLOCK_TOKENS
        print(f"  {where:7} {statistics.median(took):7.1f} ms ({took[0]:.1f}, {took[-1]:.1f})  "
              f"{1e3 * statistics.median(took) / all_tokens:6.1f} us a token  "
              f"{copies.n * copies.block / MIB / statistics.median(took) * 1e3:6.0f} MiB/s  {busy:5.0f} ms of processors")
    print()


# ---- the first token ---------------------------------------------------------------------------------------------


def long_model(folder: str) -> Path:
    """The model of this repository, for longer prompts than it was trained on; its answers do not matter."""
    model = Path(shutil.copytree(MODEL, f"{folder}/model"))
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = 2 * max(LENGTHS)
    (model / "config.json").write_text(json.dumps(config))
    return model


class Engine:
    """kvlm on its own daemon with one tier."""

    def __init__(self, args: argparse.Namespace, folder: str, *settings: str) -> None:
        import instance
        self.folder, self.build, self.model = folder, args.build, f"{folder}/model"
        self.instance = instance.Instance("--pool", "768M", "--backend", "host", *settings, kvd=args.build / "daemon/kvd",
                                          kvctl=args.build / "tools/kvctl/kvctl")
        until(lambda: self.tier()["state"] == "on")

    def tier(self) -> dict:
        return self.instance.stat("tiers")["tiers"][0]

    def first_token(self, tokens: list[int], reused: int) -> float:
        """Milliseconds to the first token. reused: number of tokens that must have been found."""
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
    file = Engine(args, folder, "--set", f"daemon.file={folder}/first", "--set", "daemon.file_size=1G")
    remote = Engine(args, folder, "--set", f"daemon.remote=redis://127.0.0.1:{port}", "--set", "daemon.remote_depth=0")
    with file.instance, remote.instance:
        for n in [length for length, share in LENGTHS.items() for _ in range(max(round(share * args.rounds), 1))]:
            tokens = [chance.randrange(10, 750) for _ in range(n)]
            whole = (n - 1) // BLOCK_TOKENS * BLOCK_TOKENS
            seen.setdefault((n, "computed"), []).append(file.first_token(tokens, 0))
            seen.setdefault((n, "host"), []).append(file.first_token(tokens, whole))
            file.instance.kvctl("evict", "--all", "--to", "file")
            seen.setdefault((n, "file"), []).append(file.first_token(tokens, whole))
            there = remote.tier()["written_bytes"]
            remote.first_token(tokens, 0)
            until(lambda: remote.tier()["written_bytes"] - there >= whole // BLOCK_TOKENS * KVLM_BLOCK)
            remote.instance.kvctl("evict", "--all")
            seen.setdefault((n, "Redis"), []).append(remote.first_token(tokens, whole))
    return seen


def show_first_tokens(seen: dict[tuple[int, str], list[float]]) -> None:
    print("first token of a prompt, ms, medians (least, most), with the model of this repository\n")
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
        show_come_back(*come_back(args, folder))
        with redis(folder) as port:
            show_first_tokens(first_tokens(args, folder, port))
    return 0


if __name__ == "__main__":
    sys.exit(main())
