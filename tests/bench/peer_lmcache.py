#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""kvd beside LMCache's multiprocess server, on processors, in one run: one process stores prefixes, another finds and gets them.

    PYTHON tests/bench/peer_lmcache.py BUILD [--prefixes 16] [--chunks 128] [--kib 1] [--rounds 7]

PYTHON is build-engines/lmcache/bin/python, after sh tests/engines/run --install lmcache.

Chunks, and kvd's blocks, have 256 tokens of --kib KiB each. In a round each contender stores fresh prefixes of --chunks chunks,
and the other process gets them; the order of the contenders alternates, and caches are emptied between, untimed. Both processes
are clients of both. All copies of the first two are the same memmove.

    kvd      lookup, alloc, memmove, seal; lookup, memmove (or nothing, in place), release
    shm      LMCache, engine_driven in POSIX shared memory: LOOKUP, PREPARE_STORE, memmove, COMMIT_STORE; LOOKUP,
             PREPARE_RETRIEVE, memmove (or nothing), COMMIT_RETRIEVE
    server   LMCache, lmcache_driven, the default: the server copies from and to the client's memory

LMCache is built for GPUs: on processors, the copies of `server` are torch's. Its server works in Python for each chunk, so large
chunks suit it better. In its favour, work that it does after replying is not counted."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOKENS, PATIENCE_S = 256, 240
sys.path[:0] = [str(ROOT / "client/python"), str(ROOT / "tests/lib")]


# ---- a client of both -------------------------------------------------------------------------------------------------

class Kvd:
    """kvd's public API. source: address of the engine's own memory."""

    def __init__(self, options: argparse.Namespace, kv, shared: dict):
        import kvd
        self.kvd, self.chunks, self.size, self.source = kvd, options.chunks, options.size, kv.data_ptr() + options.size
        self.space = kvd.connect(options.socket).space("peer", kvd.Geometry.opaque(options.size, "peer", block_tokens=TOKENS))

    def store(self, tokens: tuple[int, ...], name: str) -> None:
        with self.space.lookup(tokens) as pin:
            assert not pin
        with self.kvd.Pin(self.space) as pin:
            blocks = self.space.alloc(self.chunks)
            for i, block in enumerate(blocks):
                ctypes.memmove(block.data, self.source + i * self.size, self.size)
            pin.seal(blocks, tokens)

    def get(self, tokens: tuple[int, ...], name: str, use: Callable[[list[int]], None]) -> None:
        self.space.catch_up()           # the pool may have grown since
        with self.space.lookup(tokens) as pin:
            assert len(pin) == self.chunks
            use([pin.address(block) for block in pin])

    def settle(self, tokens: tuple[int, ...], name: str) -> None:
        pass

    def end(self, name: str) -> None:
        pass


class Lmcache:
    """LMCache's own client classes."""

    def __init__(self, options: argparse.Namespace, kv, shared: dict):
        from lmcache.utils import EngineType
        from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
        from lmcache.v1.multiprocess.group_view import EngineGroupInfo
        from lmcache.v1.multiprocess.transfer_context import create_transfer_context
        self.key_type, self.way, self.chunks, self.size = IPCCacheServerKey, options.way, options.chunks, options.size
        self.client = shared["client"] = shared.get("client") or client_of(options.url)
        assert self.client.get_chunk_size().result(timeout=PATIENCE_S) == TOKENS
        self.kv, self.id, self.source = {"layer.0": kv}, os.getpid() * 10 + list(WAYS).index(self.way), kv.data_ptr() + self.size
        mode = "lmcache_driven" if self.way == "server" else "engine_driven"
        self.context = create_transfer_context(self.kv, mode=mode, instance_id=self.id, req_client=self.client)
        group = EngineGroupInfo(engine_group_id=0, layer_indices=(0,), tokens_per_block=TOKENS)
        self.context.register(self.kv, f"model-{self.way}", 1, 1, float(PATIENCE_S), layout_hints={"kv_layout": "NHD"},
                              engine_group_infos=[group], engine_type=EngineType.VLLM)
        self.blocks = [list(range(1, 1 + self.chunks))]         # block 0 is "none" to the server

    def _key(self, tokens: tuple[int, ...], name: str, worker: int | None):
        return self.key_type(model_name=f"model-{self.way}", world_size=1, worker_id=worker, token_ids=tokens, start=0,
                             end=len(tokens), request_id=name, num_kv_readers=1)

    def _lookup(self, tokens: tuple[int, ...], name: str) -> int:
        self.client.lookup(self._key(tokens, name, None), 1).result(timeout=PATIENCE_S)
        until = time.monotonic() + PATIENCE_S
        while (found := self.client.query_prefetch_status(name).result(timeout=PATIENCE_S)) is None:
            assert time.monotonic() < until, "LMCache's server does not find anything"
        return found

    def _submit(self, call, tokens: tuple[int, ...], name: str) -> None:
        event = self.context.create_recorded_event()
        assert call(name, self._key(tokens, name, 0), self.kv, self.blocks, event, 1).result(timeout=PATIENCE_S)

    def store(self, tokens: tuple[int, ...], name: str) -> None:
        assert self._lookup(tokens, name) == 0
        if self.way == "server":
            return self._submit(self.context.submit_store, tokens, name)
        raw, key = self.context.engine_driven_context, self._key(tokens, name, 0)
        views, indices = raw.prepare_store(key, self.id)
        assert len(indices) == self.chunks
        for view, i in zip(views, indices, strict=True):
            ctypes.memmove(view.data_ptr(), self.source + i * self.size, self.size)
        assert raw.commit_store(key, self.id, views)

    def get(self, tokens: tuple[int, ...], name: str, use: Callable[[list[int]], None]) -> None:
        found = self._lookup(tokens, name)
        assert found == self.chunks, f"{self.way} found {found} of {self.chunks} chunks"
        if self.way == "server":
            return self._submit(self.context.submit_retrieve, tokens, name)
        raw, key = self.context.engine_driven_context, self._key(tokens, name, 0)
        use([view.data_ptr() for view in raw.prepare_retrieve(key, self.id)])
        assert raw.commit_retrieve(key, self.id)

    def settle(self, tokens: tuple[int, ...], name: str) -> None:
        """Wait until what was stored is found: its server may finish after its reply."""
        until, i = time.monotonic() + PATIENCE_S, 0
        while self._lookup(tokens, f"{name}-{i}") < self.chunks:
            assert time.monotonic() < until, f"{self.way} does not find what it has stored"
            self.end(f"{name}-{i}")
            time.sleep(0.02)
            i += 1
        self.end(f"{name}-{i}")

    def end(self, name: str) -> None:
        self.client.end_session(name).result(timeout=PATIENCE_S)


WAYS = {"kvd": Kvd, "shm": Lmcache, "server": Lmcache}


def client_of(url: str):
    from lmcache.v1.multiprocess.transport.factory import RequestClientFactory
    return RequestClientFactory.create(url)


class Serving:
    """The client's end of a pipe: answers each line of JSON with its seconds of wall clock and of its processor."""

    def __init__(self, options: argparse.Namespace):
        import torch
        torch.set_num_threads(1)
        self.torch, self.chunks, self.size, self.memory, shared = torch, options.chunks, options.size, {}, {}
        for way in WAYS:                # LMCache moves the tensor of `server` to shared memory
            self.memory[way] = torch.zeros((self.chunks + 1, TOKENS, self.size // TOKENS // 2), dtype=torch.float16)
            self.memory[way].view(torch.int64).random_()
        self.ways = {way: kind(argparse.Namespace(**vars(options), way=way), self.memory[way], shared)
                     for way, kind in WAYS.items()}

    def answer(self, what: str, way: str, number: int) -> list[float]:
        """what: store, settle, copy or in place. Compares the first and last words of each chunk."""
        it, body = self.ways[way], self.memory[way].view(self.chunks + 1, -1).view(self.torch.int64)[1:]
        stamps = self.torch.arange(self.chunks, dtype=self.torch.int64) + (number << 32)
        tokens = tuple(range(1 + number * self.chunks * TOKENS, 1 + (number + 1) * self.chunks * TOKENS))
        name, seen = f"{way}-{what}-{number}-{os.getpid()}", []
        if what == "settle":
            it.settle(tokens, name)
            return []
        body[:, 0] = body[:, -1] = stamps if what == "store" else 0

        def use(addresses: list[int]) -> None:
            if what == "in place":
                seen.extend(ctypes.c_uint64.from_address(at + self.size - 8).value for at in addresses)
            else:
                for i, at in enumerate(addresses):
                    ctypes.memmove(it.source + i * self.size, at, self.size)

        start = time.perf_counter(), time.process_time()
        if what == "store":
            it.store(tokens, name)
        else:
            it.get(tokens, name, use)
        spent = [time.perf_counter() - start[0], time.process_time() - start[1]]
        it.end(name)
        if what == "in place":
            assert seen == stamps.tolist(), "other bytes"
        assert what == "in place" or self.torch.equal(body[:, 0], stamps) and self.torch.equal(body[:, -1], stamps), "other bytes"
        return spent


def serve(options: argparse.Namespace) -> None:
    serving = Serving(options)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(serving.answer(*json.loads(line))), flush=True)
    os._exit(0)                         # LMCache's client waits when it says goodbye


# ---- the run ----------------------------------------------------------------------------------------------------------

class Client:
    def __init__(self, options: argparse.Namespace, log):
        given = json.dumps({it: getattr(options, it) for it in ("chunks", "size", "socket", "url")})
        self.process = subprocess.Popen([sys.executable, __file__, "--serve", given], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=log, text=True)

    def hear(self):
        watchdog = threading.Timer(PATIENCE_S, self.process.kill)
        watchdog.start()
        try:
            return self._answer()
        finally:
            watchdog.cancel()

    def _answer(self):
        while line := self.process.stdout.readline():
            if line[0] in '["':         # LMCache prints, too
                return json.loads(line)
        raise SystemExit("a client ended")

    def ask(self, *request) -> list[float]:
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self.hear()


def own_s(pid: int) -> float:
    """Seconds of processor time of all threads that a process has now."""
    total = 0
    for it in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(OSError):         # the thread has just ended
            total += int(it.read_text().split()[0])
    return total / 1e9


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)      # PR_SET_PDEATHSIG


@contextmanager
def server_of(options: argparse.Namespace, log) -> Iterator[subprocess.Popen]:
    with socket.socket() as it:
        it.bind(("127.0.0.1", 0))
        port = it.getsockname()[1]
    options.url, pool = f"tcp://127.0.0.1:{port}", f"kvd-peer-{os.getpid()}"
    server = subprocess.Popen(
        [sys.executable, "-m", "lmcache.v1.multiprocess.server", "--host", "127.0.0.1", "--port", str(port), "--chunk-size",
         str(TOKENS), "--supported-transfer-mode", "auto", "--shm-name", pool, "--l1-size-gb", str(options.pool),
         "--eviction-policy", "LRU", "--disable-observability", "--max-workers", "2"], stdout=log, stderr=log, cwd="/",
        preexec_fn=die_with_parent)
    try:
        until = time.monotonic() + PATIENCE_S
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert server.poll() is None and time.monotonic() < until, "LMCache's server does not start"
            time.sleep(0.1)
        yield server
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
        for left in Path("/dev/shm").glob(f"*{pool}*"):
            left.unlink()


def measure(options: argparse.Namespace, daemon, server: subprocess.Popen, writer: Client, reader: Client) -> dict:
    """Returns the milliseconds of each round by what is measured and contender."""
    control, number, figures = client_of(options.url), 0, {}
    for turn in range(-2, options.rounds):                      # two warm up
        for way in list(WAYS)[::1 if turn % 2 else -1]:
            pid = daemon.process.pid if way == "kvd" else server.pid
            for what in ("store", "copy", "in place")[:2 if way == "server" else 3]:
                before, client = own_s(pid), writer if what == "store" else reader
                spent = [client.ask(what, way, number + i) for i in range(options.prefixes)]
                wall, own = (1e3 * sum(it[i] for it in spent) for i in range(2))
                own += 1e3 * (own_s(pid) - before)
                for i in range(options.prefixes if what == "store" else 0):
                    client.ask("settle", way, number + i)
                if turn < 0:
                    continue
                figures.setdefault(what, {}).setdefault(way, []).append(wall)
                figures.setdefault(f"{what}, processors", {}).setdefault(way, []).append(own)
            number += options.prefixes
            time.sleep(0.3)             # LMCache ends some reads after its reply
            daemon.kvctl("evict", "--all", "peer") if way == "kvd" else control.clear(True).result(timeout=PATIENCE_S)
    control.close()
    return figures


def report(figures: dict) -> None:
    for what, ways in figures.items():
        for way, times in ways.items():
            ratio, least = (f(times) / f(ways["kvd"]) for f in (statistics.median, min))
            print(f"{what:22} {way:8} {statistics.median(times):9.2f} ms ({min(times):.2f} to {max(times):.2f})"
                  f" {ratio:6.1f}x, of the least {least:.1f}x", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=Path)
    for name, default in ("prefixes", 16), ("chunks", 128), ("kib", 1), ("rounds", 7):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    options.size = options.kib * 1024 * TOKENS
    options.pool = max(1, options.prefixes * options.chunks * options.size >> 28)       # GiB: four times what a round stores
    return options


def main() -> None:
    if sys.argv[1] == "--serve":
        serve(argparse.Namespace(**json.loads(sys.argv[2])))
    options = parse()
    build = options.build.resolve()
    os.environ.update(KVD_LIBRARY=str(build / "client/libkvd.so.0"), LMCACHE_TRACK_USAGE="false", DO_NOT_TRACK="1",
                      LMCACHE_DISABLE_BANNER="1", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", LMCACHE_LOG_LEVEL="WARNING")
    from instance import Instance
    with tempfile.TemporaryFile("w+") as log, server_of(options, log) as server, \
            Instance("--backend", "host", "--pool", f"{options.pool}G", kvd=build / "daemon/kvd",
                     kvctl=build / "tools/kvctl/kvctl") as daemon:
        options.socket = str(daemon.socket)
        writer, reader = clients = Client(options, log), Client(options, log)
        try:
            assert writer.hear() == reader.hear() == "ready"
            report(measure(options, daemon, server, writer, reader))
            daemon.check()
        except (SystemExit, Exception):
            log.seek(0)
            sys.stderr.write(log.read()[-4000:])
            raise
        finally:
            for it in clients:
                it.process.kill()
                it.process.wait()
                for left in Path("/dev/shm").glob(f"*lmcache_kv_{it.process.pid}_*"):
                    left.unlink()


if __name__ == "__main__":
    main()
