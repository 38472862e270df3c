#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""kvctl events: a router that reads the wire byte by byte knows what is cached, even if it or others are late, killed
or replaced.

Exit status 77 without libzmq.so.5. tests/engines decodes the same batches by vLLM's own classes.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time

from cached import BT, GEOMETRY, Instance, compute, daemon, kvd, prompts, until
from zmtp import Socket, unpack

TOPIC = b"kv@here"
LAST = (1 << 64) - 1
# as in vLLM 0.32, in its order: required members, and optional ones
EVENTS = {"BlockStored": (["block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
                           "lora_name"], ["extra_keys"]),
          "BlockRemoved": (["block_hashes", "medium"], []), "AllBlocksCleared": ([], [])}


def is_event(event: dict) -> bool:
    must, may = EVENTS[event["type"]]
    return list(event)[:1 + len(must)] == ["type", *must] and set(list(event)[1 + len(must):]) <= set(may)


class Publisher:
    """kvctl events, and its endpoints."""

    def __init__(self, on: Instance, space: str) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="kvctl-events-")
        self.live, self.replay = f"ipc://{self.folder.name}/live", "tcp://127.0.0.1:*"
        self.process = subprocess.Popen([os.environ["KVCTL"], "--socket", on.socket, "events", space, "--publish",
                                         self.live, "--replay", self.replay, "--topic", TOPIC.decode()],
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        atexit.register(self.process.kill)      # even if a test fails in the middle
        line = self.process.stdout.readline()
        assert line.startswith(f"Publishing {space} at {self.live}, replays at tcp://127.0.0.1:"), line
        self.replay = line.split()[-1]

    def end(self) -> None:
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(60) == 0, self.process.returncode


class Router:
    """A subscriber's view of the cache: each block's tokens and the block before it."""

    def __init__(self, publisher: Publisher, block_tokens: int = BT) -> None:
        self.block_tokens = block_tokens
        self.blocks: dict[int, tuple[int | None, tuple[int, ...], object]] = {}
        self.seq, self.batches, self.cleared = -1, 0, 0
        self.socket, self.asked = Socket(publisher.live, b"SUB", b"kv@"), Socket(publisher.replay, b"DEALER")

    def take(self, event: dict) -> None:
        assert is_event(event), event
        if event["type"] == "AllBlocksCleared":
            self.blocks.clear()
            self.cleared += 1
            return
        assert event["medium"] == "CPU"
        if event["type"] == "BlockRemoved":
            for block in event["block_hashes"]:
                assert self.blocks.pop(block, None), "removed, and never stored"
            return
        size = self.block_tokens
        assert event["block_size"] == size and len(event["token_ids"]) == size * len(event["block_hashes"])
        before = event["parent_block_hash"]
        assert before is None or before in self.blocks, "stored behind what is not there"
        keys = event.get("extra_keys") or [None] * len(event["block_hashes"])
        for i, block in enumerate(event["block_hashes"]):
            self.blocks[block] = (before, tuple(event["token_ids"][i * size:(i + 1) * size]), keys[i])
            before = block

    def take_batch(self, parts: list[bytes]) -> None:
        topic, number, payload = parts
        assert topic == TOPIC and len(number) == 8, parts[:2]
        when, events, rank = unpack(payload)
        assert rank is None and isinstance(when, float) and abs(when - time.time()) < 3600 and events
        for event in events:
            self.take(event)
        self.seq = int.from_bytes(number, "big")
        self.batches += 1

    def catch_up(self, start: int) -> int:
        """Asks for all batches from that number on. Returns how many came."""
        self.asked.send(b"", start.to_bytes(8, "big"))
        for n in range(1 << 20):
            empty, *parts = self.asked.receive()
            assert empty == b""
            if parts[1] == LAST.to_bytes(8, "big"):
                assert parts[2] == b""
                return n
            self.take_batch(parts)
        raise AssertionError("no end")

    def follow(self, condition, what: str) -> None:
        """Takes live batches until the condition holds; numbers follow each other."""
        while not condition():
            parts = self.socket.receive()
            number = int.from_bytes(parts[1], "big")
            if number <= self.seq:
                continue        # the replay contained it
            assert number == self.seq + 1, (number, self.seq, what)
            self.take_batch(parts)

    def chains(self) -> set[tuple[int, ...]]:
        """Every prefix of whole blocks that is cached."""
        def prefix(block: int | None) -> tuple[int, ...]:
            return () if block is None else prefix(self.blocks[block][0]) + self.blocks[block][1]
        return {prefix(block) for block in self.blocks}

    def close(self) -> None:
        self.socket.close()
        self.asked.close()


def prefixes(asked: list[list[int]]) -> set[tuple[int, ...]]:
    return {tuple(tokens[:n]) for tokens in asked for n in range(BT, len(tokens) + 1, BT)}


def test_a_router_knows_what_is_cached(on: Instance) -> None:
    first, then = prompts(60, seed=2), prompts(60, seed=3)
    with kvd.connect(on.socket) as client, client.space("known", GEOMETRY) as space:
        for tokens in first:
            compute(space, tokens)
        with space.lookup(first[0][:BT]) as pin:        # a part-filled block, which no router wants
            pin.seal(space.alloc(1), [5, 6, 7])
        publisher = Publisher(on, "known")
        router = Router(publisher)
        until(lambda: router.catch_up(router.seq + 1) or router.chains() == prefixes(first), "all that was there")
        assert router.cleared == 1
        for tokens in then:
            compute(space, tokens)
        router.follow(lambda: router.chains() == prefixes(first + then), "all that came")
        compute(space, list(range(3 * BT)), salt=77)
        router.follow(lambda: len(router.blocks) == len(prefixes(first + then)) + 3, "a salted chain")
        assert sorted(str(keys) for _, _, keys in list(router.blocks.values())[-3:]) == ["None", "None", "['77']"]

        another = Router(publisher)
        assert another.catch_up(0) > 1 and another.blocks == router.blocks, "a replay that comes to something else"
        assert another.catch_up(another.seq + 1) == 0
        assert another.catch_up(another.seq + 2) == 1, "of a publisher before"
        assert another.blocks == router.blocks and another.cleared == 2

        on.kvctl("evict", "known", "--all")
        router.follow(lambda: not router.blocks, "that all went")
        router.close()
        another.close()
        publisher.end()


def test_nobody_waits_for_a_subscriber(on: Instance) -> None:
    """One is killed, one never reads, one is a stranger; the fourth gets all."""
    with kvd.connect(on.socket) as client, client.space("patient", GEOMETRY) as space:
        publisher = Publisher(on, "patient")
        router, idle = Router(publisher), Router(publisher)
        until(lambda: router.catch_up(0), "the first batch")
        reader = subprocess.Popen([sys.executable, "-c", "import sys; sys.dont_write_bytecode = True; "
                                   f"sys.path.insert(0, {os.path.dirname(__file__)!r}); import zmtp; "
                                   f"s = zmtp.Socket({publisher.live!r}, b'SUB', b''); print('up', flush=True); "
                                   "s.receive(); print('got', flush=True); s.receive()"],
                                  stdout=subprocess.PIPE, text=True)
        assert reader.stdout.readline() == "up\n"
        idle.asked.send(b"", b"not a number")
        idle.asked.send(b"x" * 200)
        idle.asked.send(b"", b"", b"", b"")
        for n in range(5):
            compute(space, list(range(n * 1000, n * 1000 + 4 * BT)))
            router.follow(lambda: len(router.blocks) == 4 * (n + 1), "four more blocks")
        assert reader.stdout.readline() == "got\n"
        reader.kill()
        reader.wait()
        for n in range(5, 10):
            compute(space, list(range(n * 1000, n * 1000 + 4 * BT)))
        router.follow(lambda: len(router.blocks) == 4 * (n + 1), "all of them")
        router.close()
        idle.close()
        publisher.end()


def numbers_of(asked: Socket) -> list[int]:
    """The numbers of one replay's batches."""
    numbers = []
    while (parts := asked.receive())[2] != LAST.to_bytes(8, "big"):
        numbers.append(int.from_bytes(parts[2], "big"))
    return numbers


def test_a_replay_that_is_read_late_is_whole(on: Instance) -> None:
    """A late reader asks for more replays than ZeroMQ and the kernel keep; others get theirs meanwhile."""
    with kvd.connect(on.socket) as client, client.space("late", GEOMETRY) as space:
        publisher = Publisher(on, "late")
        router = Router(publisher)
        until(lambda: router.catch_up(0), "the first batch")
        for n in range(100):
            compute(space, list(range(n * 1000, n * 1000 + 10 * BT)))
            router.follow(lambda: len(router.blocks) == 10 * (n + 1), "ten more blocks")
        late = [Socket(publisher.replay, b"DEALER", room=4096) for _ in range(2)]
        ended, flood = Socket(publisher.replay, b"DEALER", room=4096), Socket(publisher.replay, b"DEALER", room=4096)
        for first in range(0, 400):
            for asked in (*late, ended):
                asked.send(b"", (first % 3).to_bytes(8, "big"))
        ended.close()
        another = Router(publisher)
        assert another.catch_up(0) == router.seq + 1 and another.blocks == router.blocks, "others wait"
        for asked in late:
            for first in range(0, 400):
                assert numbers_of(asked) == list(range(first % 3, router.seq + 1)), first
        for _ in range(4000):
            flood.send(b"", bytes(8))
        assert "left 1024 replays unread" in publisher.process.stderr.readline()
        assert another.catch_up(0) == router.seq + 1
        for asked in (router, another, *late, flood):
            asked.close()
        publisher.end()


def test_a_replay_outlives_its_batches(on: Instance) -> None:
    """The rest of a replay has been dropped by the time there is room for it: one batch replaces it."""
    size, kept = 256, 64 << 20      # tokens of a block; bytes of batches that a publisher keeps
    geometry = kvd.Geometry(layers=1, kv_heads=1, head_dim=8, vocab=1 << 31, dtype="f32", block_tokens=size)
    with kvd.connect(on.socket) as client, client.space("outlived", geometry) as space:
        publisher, n = Publisher(on, "outlived"), 0

        def fill(batch: int) -> int:
            """Stores a chain of new blocks. Returns the bytes that its tokens take in a batch."""
            nonlocal n
            n += 1
            with space.lookup([n << 16]) as pin:
                fresh = space.alloc(batch)
                pin.seal(fresh, list(range(n << 16, (n << 16) + len(fresh) * size)))
                return 5 * len(fresh) * size

        def publish(batch: int) -> int:
            """The same, and waits until it is published, so that numbers rise."""
            written = fill(batch)
            live.receive()
            return written

        live, late = Socket(publisher.live, b"SUB", b"kv@"), Router(publisher, size)
        until(lambda: late.catch_up(0), "the first batch")
        for _ in range(1000):
            publish(16)
        held, written = Socket(publisher.replay, b"DEALER", room=4096), 0
        held.send(b"", bytes(8))
        held.receive()          # the replay has begun, and ZeroMQ and the kernel have no room for the rest
        while written < kept:
            written += publish(128)
        numbers = numbers_of(held)
        assert numbers == sorted(set(numbers)) and any(b - a > 1 for a, b in zip(numbers, numbers[1:])), numbers
        another = Router(publisher, size)
        until(lambda: another.catch_up(0) == late.catch_up(0) == 1 and late.blocks == another.blocks, "the same")
        for socket in (live, late, another, held):
            socket.close()
        publisher.end()


def test_more_than_the_index_has_room_to_say(on: Instance) -> None:
    on.kvctl("space", "create", "small", *"--layers 1 --kv-heads 1 --head-dim 8 --dtype f32 --vocab 1048576".split(),
             "--max-blocks", "64")
    with kvd.connect(on.socket) as client, client.space("small", GEOMETRY) as space:
        publisher = Publisher(on, "small")
        router = Router(publisher)
        until(lambda: router.catch_up(0), "the first batch")
        compute(space, list(range(10 * BT)))
        router.follow(lambda: len(router.blocks) == 10, "ten blocks")
        publisher.process.send_signal(signal.SIGSTOP)
        for i in range(1, 80):
            compute(space, list(range(i * 1000, i * 1000 + 30 * BT)))
        publisher.process.send_signal(signal.SIGCONT)
        last = {tuple(range(79000, 79000 + n * BT)) for n in range(1, 31)}
        # the daemon evicts ahead of what is needed next, so blocks may leave behind the last prompt, too
        router.follow(lambda: last <= router.chains() and
                      all(space.match(list(it)) == len(it) for it in router.chains()), "the last prompt, and what has left")
        router.close()
        publisher.end()


def test_the_daemon_and_the_publisher_are_killed(on: Instance) -> None:
    with kvd.connect(on.socket) as client, client.space("killed", GEOMETRY) as space:
        publisher = Publisher(on, "killed")
        router = Router(publisher)
        until(lambda: router.catch_up(0), "the first batch")
        compute(space, list(range(10 * BT)))
        router.follow(lambda: len(router.blocks) == 10, "ten blocks")
        on.kill()
        on.start()
        router.follow(lambda: not router.blocks, "that they are gone")
        until(lambda: space.catch_up() and compute(space, list(range(10 * BT))) == 10 * BT, "that they are there again")
        router.follow(lambda: len(router.blocks) == 10, "that the next daemon's are told of")
        publisher.process.kill()
        publisher.process.wait()
        router.close()
        assert compute(space, list(range(10 * BT))) == 10 * BT
        publisher = Publisher(on, "killed")
        router = Router(publisher)
        until(lambda: router.catch_up(router.seq + 1) or len(router.blocks) == 10, "them, of the next publisher")
        on.kvctl("space", "delete", "killed", "--force")
        router.follow(lambda: not router.blocks, "that the space was deleted")
        router.close()
        publisher.end()


def test_what_is_refused(on: Instance) -> None:
    on.kvctl("space", "create", "whole", *"--layers 1 --kv-heads 1 --head-dim 8 --dtype f32 --vocab 9".split(),
             "--kind", "bidirectional")
    for arguments, status, words in ((["whole"], 1, "a bidirectional space"),
                                     (["known", "--publish", "tcp://0.0.0.0:5557"], 2, "other machines could reach"),
                                     (["known", "--publish", "tcp://127.0.0.1:x"], 1, "cannot listen at"),
                                     (["known", "--publish", "tcp://127.0.0.1:*", "--replay", "tcp://*:1"], 2,
                                      "--public")):
        done = subprocess.run([os.environ["KVCTL"], "--socket", on.socket, "events", *arguments], capture_output=True,
                              text=True, timeout=60)
        assert done.returncode == status and words in done.stderr, (arguments, done)
        assert done.stderr.startswith("kvctl: ") and done.stderr.count("\n") == 1, done


try:
    ctypes.CDLL("libzmq.so.5")
except OSError:
    print("libzmq.so.5 is not installed")
    sys.exit(77)
with daemon() as it:
    test_a_router_knows_what_is_cached(it)
    test_what_is_refused(it)
    test_nobody_waits_for_a_subscriber(it)
    test_a_replay_that_is_read_late_is_whole(it)
    test_a_replay_outlives_its_batches(it)
    test_more_than_the_index_has_room_to_say(it)
    test_the_daemon_and_the_publisher_are_killed(it)
