# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests of the Python package: a daemon that ends with the test, chains, and a runner.

    KVD=build/daemon/kvd KVD_LIBRARY=build/client/libkvd.so.0 python tests/python/test_tensors.py [--backend cuda]

--backend cuda runs the tests that need no GPU in torch. It needs a driver or its stand-in in LD_LIBRARY_PATH.
Exit status 77 means skipped: no KVD or KVD_LIBRARY.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import subprocess
import sys
import time
import traceback
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "client" / "python"
sys.path[:0] = [str(PACKAGE), str(ROOT / "tests/lib")]
SKIPPED = 77

if not os.environ.get("KVD") or not os.environ.get("KVD_LIBRARY"):
    print("skipped: KVD and KVD_LIBRARY are not set")
    sys.exit(SKIPPED)

import instance     # noqa: E402  (needs the path above)
import kvd          # noqa: E402

try:
    import numpy as np
except ImportError:
    np = None
try:
    import torch
except ImportError:
    torch = None

LAYERS, HEADS, TOKENS, DIM, VOCAB = 2, 3, 16, 8, 50000


@contextmanager
def daemon(backend: str = "host", pool: str = "8M"):
    """Yields the socket's path of a daemon that ends with the context."""
    with instance.Instance(*options(backend, pool)) as it:
        yield it.socket


def options(backend: str = "host", pool: str = "8M") -> list[str]:
    return ["--pool", pool, "--set", "daemon.segment=2M", "--backend", backend]


def start(folder: str) -> subprocess.Popen:
    return instance.start(folder, *options())


# ---- chains --------------------------------------------------------------------------------------------------------


def geometry(dtype="f32", order: str = "hnd", **more) -> kvd.Geometry:
    return kvd.Geometry(layers=LAYERS, kv_heads=HEADS, head_dim=DIM, vocab=VOCAB, dtype=dtype, order=order, **more)


def chain(number: int, blocks: int) -> list[int]:
    return [number] + [1 + i % 7 for i in range(blocks * TOKENS - 1)]


def fill(block: kvd.Block, value: float) -> None:
    address = (ctypes.c_float * (geometry().block_bytes // 4)).from_address(block.data)
    address[:] = [value] * len(address)


def seal(space: kvd.Space, number: int, n: int, value: float = 0, salt: int = 0) -> list[int]:
    """Seals a chain of n blocks full of value, value + 1, ... Returns its ids."""
    blocks = space.alloc(n)
    for i, block in enumerate(blocks):
        if space.device[0] == 1:
            fill(block, value + i)
    with kvd.Pin(space, salt=salt) as pin:
        return pin.seal(blocks, chain(number, n))


def fill_pool(space: kvd.Space) -> None:
    """Fills the pool with more chains than it has room for, which evicts every block that no client holds."""
    fill_pool.number += 1000
    for i in range(400):
        seal(space, fill_pool.number + i, 4)


fill_pool.number = 1000


def gone(space: kvd.Space, tokens: list[int]) -> bool:
    """Whether no client holds the chain: filling the pool then evicts it, which may take more than one try."""
    while space.settle():
        pass
    for _ in range(3):
        fill_pool(space)
    return space.match(tokens) == 0


# ---- running -------------------------------------------------------------------------------------------------------


@contextmanager
def raises(kind: type[BaseException], words: str = ""):
    try:
        yield
    except kind as error:
        assert words in str(error), error
        return
    raise AssertionError(f"no {kind.__name__}")


def until(what) -> None:
    end = time.monotonic() + instance.PATIENCE
    while not what():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.01)


def child(text: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs a Python program that imports the package under test."""
    path = os.pathsep.join(filter(None, [str(PACKAGE), os.environ.get("PYTHONPATH")]))
    return subprocess.run([sys.executable, "-c", text, *arguments], capture_output=True, text=True, timeout=600,
                          env={**os.environ, "PYTHONPATH": path, **environment})


def _run(name: str, test, socket: str) -> bool:
    try:
        with kvd.connect(socket) as connection, connection.space("tensors", geometry()) as space:
            test(space)
        gc.collect()
    except Exception:
        traceback.print_exc()
        print(f"FAIL  {name}")
        return False
    print(f"ok    {name}")
    return True


def main(tests: dict, on_a_gpu: set = frozenset()) -> int:
    """Runs the functions called test_... with a space of a daemon; on a GPU, only those in the set."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--backend", choices=("host", "cuda"), default="host")
    backend = arguments.parse_args().backend
    tests = {name: it for name, it in tests.items() if name.startswith("test_")}
    if backend == "cuda":
        tests = {name: it for name, it in tests.items() if it in on_a_gpu}
    with daemon(backend) as socket:
        return 0 if all([_run(name, test, socket) for name, test in tests.items()]) else 1
