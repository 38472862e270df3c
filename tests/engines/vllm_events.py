# SPDX-License-Identifier: Apache-2.0
"""For test_vllm.py: checks with vLLM's own classes that kvctl events publishes the same bytes as vLLM's own publisher.

    vllm_events.py SOCKET       the socket of a daemon; $KVCTL names the program
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time

import msgspec
import zmq
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch, ZmqEventPublisher

import kvd

SOCKET = sys.argv[1]
BT = 16
GEOMETRY = kvd.Geometry(layers=1, kv_heads=1, head_dim=8, vocab=1 << 20, dtype="f32", block_tokens=BT)
PROMPTS = [list(range(seed, seed + 20 * BT)) for seed in range(0, 5000, 1000)]
decoder, encoder = msgspec.msgpack.Decoder(type=KVEventBatch), msgspec.msgpack.Encoder()


def compute(space: kvd.Space, tokens: list[int], salt: int = 0) -> None:
    with space.lookup(tokens, salt=salt) as pin:
        while pin.tokens < len(tokens):
            fresh = space.alloc(min((len(tokens) - pin.tokens) // BT, 8))
            pin.seal(fresh, tokens[pin.tokens:pin.tokens + len(fresh) * BT])


def decode(payload: bytes) -> list:
    batch = decoder.decode(payload)
    assert encoder.encode(batch) == payload, "vLLM would have written other bytes"
    assert abs(batch.ts - time.time()) < 3600 and batch.data_parallel_rank is None
    return batch.events


def replay(socket: zmq.Socket, start: int) -> list:
    socket.send_multipart((b"", start.to_bytes(8, "big")))
    events = []
    while True:
        _, _, number, payload = socket.recv_multipart()
        if number == ZmqEventPublisher.END_SEQ:
            return events
        events += decode(payload)


with tempfile.TemporaryDirectory() as folder, kvd.connect(SOCKET) as client, client.space("events", GEOMETRY) as space:
    context = zmq.Context()
    live, asked = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    for socket in (live, asked):
        socket.RCVTIMEO, socket.LINGER = 60000, 0
    publisher = subprocess.Popen([os.environ["KVCTL"], "--socket", SOCKET, "events", "events", "--publish",
                                  f"ipc://{folder}/live", "--replay", f"ipc://{folder}/replay", "--topic", "kv@vllm"],
                                 stdout=subprocess.PIPE)
    try:
        assert publisher.stdout.readline().startswith(b"Publishing events at ")
        live.connect(f"ipc://{folder}/live")
        asked.connect(f"ipc://{folder}/replay")
        live.subscribe("kv@vllm")
        events = []
        while not events:
            events = replay(asked, 0)
        assert events[0] == AllBlocksCleared(), events[0]
        for tokens in PROMPTS:
            compute(space, tokens)
        compute(space, PROMPTS[0], salt=7)
        while sum(len(event.block_hashes) for event in events[1:]) < 20 * (len(PROMPTS) + 1):
            events = replay(asked, 0)
        stored = events[1:]
        assert all(isinstance(event, BlockStored) and event.block_size == BT for event in stored)
        told = {event.block_hashes[0]: event for event in stored if event.parent_block_hash is None}
        roots = [(event.token_ids[0], str(event.extra_keys and event.extra_keys[0])) for event in told.values()]
        assert sorted(roots) == sorted([*((tokens[0], "None") for tokens in PROMPTS), (0, "('7',)")]), roots
        hashes = {block for event in stored for block in event.block_hashes}
        assert len(hashes) == 20 * (len(PROMPTS) + 1)

        subprocess.run([os.environ["KVCTL"], "--socket", SOCKET, "evict", "events", "--all"], check=True,
                       capture_output=True)
        while hashes:
            topic, _, payload = live.recv_multipart()
            assert topic == b"kv@vllm"
            for event in decode(payload):
                if isinstance(event, BlockRemoved):
                    hashes -= set(event.block_hashes)
    finally:
        publisher.terminate()
        publisher.wait(60)
