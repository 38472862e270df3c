# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests of kvctl trace and kvctl events: a daemon, a space, and prompts that are computed into it."""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.dont_write_bytecode = True
sys.path[:0] = [str(ROOT / "client/python"), str(ROOT / "tests/lib")]

import kvd  # noqa: E402
from instance import PATIENCE, Instance  # noqa: E402, F401

BT = 16
GEOMETRY = kvd.Geometry(layers=1, kv_heads=1, head_dim=8, vocab=1 << 20, dtype="f32", block_tokens=BT)


def daemon() -> Instance:
    return Instance("--pool", "32M", "--set", "daemon.segment=1M", kvd=os.environ["KVD"], kvctl=os.environ["KVCTL"])


def until(condition, what: str):
    """Waits until the condition is true, and returns its value. The test fails if that takes too long."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError(f"this did not come: {what}")


def prompts(n: int, seed: int) -> list[list[int]]:
    """n prompts of 1 to 12 blocks and a tail, many of which begin alike."""
    draw = random.Random(seed)
    shared = [[draw.randrange(1 << 20) for _ in range(BT * draw.randrange(1, 8))] for _ in range(4)]
    return [draw.choice(shared) + [draw.randrange(1 << 20) for _ in range(draw.randrange(BT * 5))] for _ in range(n)]


def compute(space: kvd.Space, tokens: list[int], salt: int = 0) -> int:
    """Looks the prompt up, computes the whole blocks that are missing, and returns the tokens that were found."""
    whole = len(tokens) // BT * BT
    with space.lookup(tokens, salt=salt) as pin:
        found = pin.tokens
        while pin.tokens < whole:
            fresh = space.alloc(min((whole - pin.tokens) // BT, 16))
            for block in fresh:
                block.memoryview()[:] = bytes(GEOMETRY.block_bytes)
            pin.seal(fresh, tokens[pin.tokens:pin.tokens + BT * len(fresh)])
        return found
