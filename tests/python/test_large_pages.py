# SPDX-License-Identifier: Apache-2.0
"""pages = auto: the kernel makes 2 MiB pages of the pool's memory while clients write it, other processes map them whole, and
they outlive a daemon that is killed.

Exit status 77 where the kernel makes none.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "client/python"), str(ROOT / "tests/lib")]

import kvd  # noqa: E402
from instance import Instance  # noqa: E402

LARGE, MADV_COLLAPSE, PATIENCE = 2 << 20, 25, 600
BT, BLOCKS, CHAIN = 16, 256, 16         # of 256 KiB: 64 MiB
GEOMETRY = kvd.Geometry(layers=1, kv_heads=1, head_dim=2048, vocab=1 << 20, dtype="f32", block_tokens=BT)


def kernel_makes_them() -> bool:
    """Tries it without kvd's code."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    fd = os.memfd_create("probe")
    os.ftruncate(fd, LARGE)
    os.write(fd, b"x")
    room = libc.mmap(None, 2 * LARGE, 0, 0x22, -1, 0)           # PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS
    at = -(-room // LARGE) * LARGE
    libc.mmap(at, LARGE, 0, 0x11, fd, 0)                        # MAP_SHARED | MAP_FIXED
    return libc.madvise(at, LARGE, MADV_COLLAPSE) == 0


def until(condition, what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"this did not come: {what}"
        time.sleep(0.02)


def tokens(chain: int) -> list[int]:
    return [chain * 1000 + i for i in range(CHAIN * BT)]


def content(chain: int, block: int) -> bytes:
    return (chain * CHAIN + block).to_bytes(4, "little") * (GEOMETRY.block_bytes // 4)


def fill(space: kvd.Space, first: int, last: int) -> None:
    for chain in range(first, last):
        with space.lookup(tokens(chain)) as pin:
            while len(pin.blocks) < CHAIN:
                at = len(pin.blocks)
                blocks = space.alloc(CHAIN - at)
                for i, block in enumerate(blocks):
                    block.memoryview()[:] = content(chain, at + i)
                pin.seal(blocks, tokens(chain)[at * BT:(at + len(blocks)) * BT])


def check(socket: str, chains: int) -> int:
    """Another process compares every byte. Returns how many MiB it has mapped in large pages."""
    done = subprocess.run([sys.executable, __file__, socket, str(chains)], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def read(socket: str, chains: int) -> None:
    with kvd.connect(socket) as client, client.space("s", GEOMETRY) as space:
        for chain in range(chains):
            with space.lookup(tokens(chain)) as pin:
                assert len(pin.blocks) == CHAIN, (chain, len(pin.blocks))
                for i, block in enumerate(pin.blocks):
                    assert bytes(pin.memoryview(block)) == content(chain, i), (chain, i)
        smaps = Path("/proc/self/smaps").read_text()
        print(sum(map(int, re.findall(r"^ShmemPmdMapped: +(\d+) kB", smaps, re.M))) >> 10)


def made(server: Instance, tried: int) -> int:
    """Waits until the kernel was asked for so many large pages; how many did it make? It may lack memory for some."""
    def asked() -> bool:
        nonlocal status
        status = json.loads(server.kvctl("status", "--json"))["daemon"]
        return status["large_pages"] + status["large_pages_failed"] >= tried

    status: dict = {}
    until(asked, f"{tried} tries to make a large page")
    return status["large_pages"]


def replace_daemon(server: Instance) -> None:
    """Kills it; its keeper starts the next one."""
    pid = json.loads(server.kvctl("status", "--json"))["daemon"]["pid"]
    assert pid != server.process.pid
    os.kill(pid, signal.SIGKILL)
    until(lambda: not Path(f"/proc/{pid}").exists(), "the daemon's end")


def serves(space: kvd.Space) -> bool:
    try:
        space.free(space.alloc(1))
    except (kvd.ConnectionLost, kvd.ConnectionRefused):
        return False
    return True


def run(pages: str) -> None:
    options = ["--keep", "--backend", "host", "--pool", "256M", "--set", "daemon.segment=16M"]
    with Instance(*options, "--set", f"daemon.pages={pages}") as server:
        with kvd.connect(server.socket) as client, client.space("s", GEOMETRY) as space:
            fill(space, 0, BLOCKS // CHAIN)
            if pages == "small":
                assert check(server.socket, BLOCKS // CHAIN) == 0 and made(server, 0) == 0
                return
            assert made(server, 32) > 0 and check(server.socket, BLOCKS // CHAIN) > 0
            replace_daemon(server)
            until(lambda: serves(space), "the next daemon")
            assert check(server.socket, BLOCKS // CHAIN) > 0
            fill(space, BLOCKS // CHAIN, BLOCKS // CHAIN * 2)
            assert made(server, 24) > 0 and check(server.socket, BLOCKS // CHAIN * 2) > 0
        server.check()


def refused(folder: str) -> None:
    """A daemon that is to have reserved pages, of which there are none, leaves the cache to the next one."""
    free, config = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages"), Path(folder, "kvd.conf")
    if free.exists() and int(free.read_text()) >= 128:
        return
    config.write_text("[daemon]\nsegment = 16M\n")
    with Instance("--keep", "--backend", "host", "--pool", "256M", "--config", str(config)) as server:
        with kvd.connect(server.socket) as client, client.space("s", GEOMETRY) as space:
            fill(space, 0, BLOCKS // CHAIN)
            pid = json.loads(server.kvctl("status", "--json"))["daemon"]["pid"]
            config.write_text("[daemon]\nsegment = 16M\npages = huge\n")
            os.kill(pid, signal.SIGKILL)
            until(lambda: "pages = huge needs" in Path(server.folder, "log").read_text(), "the refusal")
            config.write_text("[daemon]\nsegment = 16M\n")
            until(lambda: serves(space), "the next daemon")
            check(server.socket, BLOCKS // CHAIN)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        read(sys.argv[1], int(sys.argv[2]))
    elif not kernel_makes_them():
        print("SKIP: this kernel makes no large pages of shared memory")
        sys.exit(77)
    else:
        run("small")
        run("auto")
        with tempfile.TemporaryDirectory() as scratch:
            refused(scratch)
