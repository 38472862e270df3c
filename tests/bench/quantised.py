#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Milliseconds of attention for one decoded token and layer, in spaces of f16, q8, q4, e4m3 and e5m2.

    tests/bench/quantised.py BUILD [--tokens 16384] [--heads 8] [--groups 1,4] [--dims 64,128] [--rounds 15] [--wall]

One thread, over blocks of a pool in shuffled order, in rounds in which the dtypes take turns; several layers, so that
none stays in a cache. Time is the thread's own, unless --wall. Needs numpy.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
DTYPES, LAYERS, PIECE = ("f16", "q8", "q4", "e4m3", "e5m2"), 4, 1024


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=Path)
    for name, default in ("tokens", 16384), ("heads", 8), ("rounds", 15):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in ("groups", "1,4"), ("dims", "64,128"):
        parser.add_argument(f"--{name}", default=default)
    parser.add_argument("--wall", action="store_true")
    return parser.parse_args()


def start(build: Path, folder: str, pool: str) -> subprocess.Popen:
    ready, told = os.pipe()
    process = subprocess.Popen([build / "daemon/kvd", "--private", folder, "--backend", "host", "--pool", pool,
                                "--ready-fd", str(told)], pass_fds=[told], stderr=subprocess.DEVNULL)
    os.close(told)
    os.read(ready, 1)
    return process


def filled(kvd, space, options: argparse.Namespace, dim: int):
    """A table of so many tokens, in blocks in shuffled order."""
    rng, row = np.random.default_rng(1), options.heads * dim
    blocks, table = [], kvd.Table(space)
    while len(blocks) < options.tokens // 16:
        blocks += space.alloc(options.tokens // 16 - len(blocks))
    assert table.extend(blocks[0], [blocks[i].id for i in rng.permutation(len(blocks))])
    for layer in range(LAYERS):
        for first in range(0, options.tokens, PIECE):
            k, v = rng.standard_normal((2, PIECE, row), dtype=np.float32)
            table.write(layer, first, PIECE, k.ctypes.data, v.ctypes.data, row)
    return table, blocks


def measure(tables: dict, options: argparse.Namespace, group: int, dim: int) -> dict[str, list[float]]:
    clock = time.perf_counter if options.wall else time.thread_time
    heads = options.heads * group
    q = np.random.default_rng(2).standard_normal((LAYERS, heads * dim), dtype=np.float32)
    out, times = np.empty(heads * dim, np.float32), {dtype: [] for dtype in tables}
    for _ in range(options.rounds):
        for dtype, (table, _blocks) in tables.items():
            before = clock()
            for layer in range(LAYERS):
                table.attend(layer, options.tokens - 1, 1, heads, dim ** -0.5, q[layer].ctypes.data, heads * dim,
                             out.ctypes.data, heads * dim)
            times[dtype].append((clock() - before) / LAYERS * 1e3)
    return times


def run(kvd, socket: str, options: argparse.Namespace, dim: int) -> None:
    with kvd.connect(socket) as there:
        spaces = {dtype: there.space(f"{dtype}-{dim}", kvd.Geometry(
            layers=LAYERS, kv_heads=options.heads, head_dim=dim, vocab=9, dtype=dtype)) for dtype in DTYPES}
        tables = {dtype: filled(kvd, space, options, dim) for dtype, space in spaces.items()}
        for group in map(int, options.groups.split(",")):
            times = measure(tables, options, group, dim)
            plain = np.median(times["f16"])
            for dtype, all_ in times.items():
                print(f"{options.heads} KV heads of {dim}, {group} query heads each, {dtype:3}: {np.median(all_):7.3f} ms "
                      f"({min(all_):.3f} to {max(all_):.3f}), {plain / np.median(all_):.2f} x f16", flush=True)
        for dtype, space in spaces.items():
            space.free(tables[dtype][1])
            space.close()


def main() -> None:
    options = parse()
    build = options.build.resolve()
    os.environ |= {"KVD_LIBRARY": str(build / "client/libkvd.so.0")}
    sys.path.insert(0, str(ROOT / "client/python"))
    import kvd
    with tempfile.TemporaryDirectory(prefix="kvd-quantised-") as folder:
        daemon = start(build, folder, "1G")
        try:
            for dim in map(int, options.dims.split(",")):
                run(kvd, f"{folder}/kvd.sock", options, dim)
        finally:
            daemon.terminate()
            daemon.wait()


if __name__ == "__main__":
    main()
