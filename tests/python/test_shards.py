# SPDX-License-Identifier: Apache-2.0
"""A pool on two GPUs, of the stand-in driver: a space has a shard of each block on each of them."""

from __future__ import annotations

import ctypes
import sys
from contextlib import ExitStack

from common import chain, instance, kvd, options, raises

BYTES = 4096        # of a shard
GEOMETRY = kvd.Geometry.opaque(2 * BYTES, "test", block_tokens=16)


def shard_of(space: kvd.Space, block: int) -> ctypes.Array:
    """The stand-in's device addresses are addresses of this process."""
    memory = space.memory()
    assert memory.block_bytes == BYTES and block < memory.mapped
    return (ctypes.c_uint8 * BYTES).from_address(memory.base + block * BYTES)


def main() -> None:
    with instance.Instance(*options("cuda"), "--device", "1,0") as it, ExitStack() as ends:
        ranks = [ends.enter_context(kvd.connect(it.socket)) for _ in range(2)]
        first, second = spaces = [ends.enter_context(rank.space("s", GEOMETRY, shard=i)) for i, rank in enumerate(ranks)]
        assert [(space.shard, space.shards, space.device) for space in spaces] == [(0, 2, (2, 1)), (1, 2, (2, 0))]
        blocks = first.alloc(2)
        for i, space in enumerate(spaces):
            for k, block in enumerate(blocks):
                ctypes.memset(shard_of(space, block.id), 10 * (i + 1) + k, BYTES)
        with kvd.Pin(first) as pin:
            ids = pin.seal(blocks, chain(1, 2))
        for i, space in enumerate(spaces):
            space.catch_up()
            with space.lookup(chain(1, 2)) as pin:
                assert pin.blocks == ids
                assert [set(shard_of(space, block)) for block in ids] == [{10 * (i + 1)}, {10 * (i + 1) + 1}]
        with ranks[0].space("s", GEOMETRY, index_only=True) as scheduler:
            assert (scheduler.shards, scheduler.device) == (2, (2, -1)) and scheduler.memory().block_bytes == BYTES
            with kvd.Pin(scheduler) as pin, scheduler.lookup(chain(1, 2)) as found:
                assert found.blocks == ids
                more = pin.seal(scheduler.alloc(1), chain(2, 1), keep=True, written=[space.write_on() for space in spaces])
                with raises(ValueError, "keep=True"):
                    pin.seal(scheduler.alloc(1), chain(2, 1), written=[])
                for call in found.wait, found.check, scheduler.memory().__dlpack__:
                    with raises(kvd.NotSupported, "maps only the index"):
                        call()
        for space in spaces:
            with space.lookup(chain(2, 1)) as pin:
                assert pin.blocks == more
                pin.wait()
        for shard, words in (None, "say which one"), (2, "the pool has 2 GPUs, and options.shard is 3"):
            with raises(kvd.Invalid, words):
                ranks[0].space("s", GEOMETRY, shard=shard)
        it.check()


if __name__ == "__main__":
    sys.exit(main())
