# SPDX-License-Identifier: Apache-2.0
"""A request's own table of blocks, and the methods' calls on it."""

from __future__ import annotations

import errno
import sys

from common import TOKENS, chain, fill, geometry, kvd, main, raises, seal


def appended(space: kvd.Space, sequence: kvd.Sequence, number: int, n: int) -> None:
    blocks = space.alloc(n)
    for block in blocks:
        fill(block, number)
    sequence.append(blocks, chain(number, n))
    assert all(block.sealed for block in blocks)


def test_a_table_of_borrowed_and_own_blocks(space):
    ids = seal(space, 1, 2)
    pin = space.lookup(chain(1, 2))
    with space.sequence(8) as sequence:
        assert not sequence and sequence.entries() == []
        sequence.borrow(pin, chain(1, 2))
        appended(space, sequence, 2, 1)
        (half,) = space.alloc(1)
        sequence.append([half], [1, 2, 3])
        entries = sequence.entries()
        flags = kvd.EntryFlags
        assert [it.block for it in entries[:2]] == ids and len(sequence) == 4
        assert [it.flags for it in entries] == [flags.BORROWED, flags.BORROWED, flags.OWN, flags.OWN]
        assert [it.position for it in entries] == [0, TOKENS, 2 * TOKENS, 3 * TOKENS]
        assert [it.tokens for it in entries] == [TOKENS, TOKENS, TOKENS, 3] and all(it.data for it in entries)
        stats = sequence.stats()
        assert (stats.blocks, stats.borrowed, stats.own, stats.resident) == (4, 2, 2, 4)
        assert "4 blocks" in repr(sequence)
        assert space.match(chain(2, 1)) == 0        # its own blocks are in no index
    assert "closed" in repr(sequence)
    with raises(kvd.Closed):
        sequence.entries()
    sequence.close()


def test_blocks_leave_and_come_back(space):
    with space.sequence(8) as sequence:
        appended(space, sequence, 3, 2)
        sequence.cool([1], "drop")
        assert sequence.wait(60) == 1 and sequence.wait(0) == 0
        gone = sequence.entries()[1]
        assert gone.flags & kvd.EntryFlags.DROPPED and gone.data == 0 and sequence.stats().dropped == 1
        sequence.use(0, 1.0, 0.5)
        sequence.step(0, TOKENS)
        with raises(kvd.NoData):
            sequence.sharing()
        assert sequence.labels(0) is None       # hshare is off
        with raises(ValueError, "how must be one of spill, vague, drop"):
            sequence.cool([0], "melt")
        with raises(ValueError, "how must be one of exact, approx, both"):
            sequence.revive([0], "somehow")


def test_compaction_leaves_fewer_blocks(space):
    space.set("keydiff", 1)
    with space.sequence(8) as sequence:
        appended(space, sequence, 5, 4)
        assert sequence.compact(0, 4, 2 * TOKENS - 1) == 4
        assert sequence.wait(60) == 4
        entries, flags = sequence.entries(), kvd.EntryFlags
        assert [it.flags for it in entries] == [flags.OWN | flags.COMPACT] * 2 + [flags.OWN | flags.DROPPED] * 2
        assert [it.tokens for it in entries[:2]] == [TOKENS, TOKENS - 1]
        stats = sequence.stats()
        assert stats.compacted == 2 and stats.resident_bytes == 2 * space.geometry.block_bytes and stats.label_bytes
        assert stats.copy_bytes == stats.sketch_bytes == 0
        with raises(kvd.Invalid):
            sequence.compact(0, 9, 1)


def test_what_does_not_fit(space):
    with space.sequence(1) as sequence:
        blocks = space.alloc(2)
        with raises(kvd.Error, "1 blocks"):
            sequence.append(blocks, chain(4, 2))
        assert all(block.data for block in blocks) and len(sequence) == 0
        space.free(blocks)
    with space.daemon.space("bytes", kvd.Geometry.opaque(4096, "any")) as other:
        with raises(kvd.NotSupported):
            other.sequence(4)
    assert kvd.Error(errno.ENOTSUP, "").__class__ is kvd.NotSupported


def test_prefixes_of_two_depths(space):
    """Without a profile there is no table. Deep layers are recomputed every bicache.delta steps."""
    with space.daemon.space("depths", geometry(layer_groups=2), kind="bidirectional") as other:
        assert other.prefix_depth(64, 128, 16) == 0
        every = int(other.setting("bicache.delta"))
        assert every > 1 and [step for step in range(1, 3 * every) if other.prefix_refresh(step)] == [
            1, every + 1, 2 * every + 1]
        with raises(kvd.Invalid):
            other.prefix_sample(200, [], 16)


if __name__ == "__main__":
    sys.exit(main(globals()))
