# SPDX-License-Identifier: Apache-2.0
"""A request's own table of blocks, and the methods' calls on it."""

from __future__ import annotations

import ctypes
import errno
import sys
from array import array

from common import (DIM, HEADS, LAYERS, TOKENS, chain, fill, geometry, instance, kvd, main, np, options, raises, seal,
                    until)


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


def test_blocks_that_a_sequence_or_a_tensor_holds_are_counted(_space):
    """Also if no pin changes, which alone would start a round."""
    with instance.Instance(*options()) as it, kvd.connect(it.socket) as daemon, daemon.space("s", geometry()) as space:
        def pinned() -> int:
            return sum(client["pinned_blocks"] for client in it.stat("clients")["clients"])

        seal(space, 1, 1)
        with space.lookup(chain(1, 1)) as pin:
            tensor = np.from_dlpack(pin.view(pin.blocks[0]))
        until(lambda: pinned() == 1)
        del tensor
        until(lambda: pinned() == 0)
        with space.sequence(8) as sequence:
            appended(space, sequence, 2, 3)
            until(lambda: pinned() == 3)
            sequence.cool([1], "drop")
            assert sequence.wait(60) == 1
            until(lambda: pinned() == 2)
        until(lambda: pinned() == 0)
        it.check()


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


# ---- attention over a table ------------------------------------------------------------------------------------------

QUERIES, SCALE = 2 * HEADS, 0.4


class Attending:
    """A sequence whose blocks hold random keys and values, and a table of a block behind it, with their definition."""

    def __init__(self, space: kvd.Space, tokens: list[int], tail: int):
        self.space, self.random = space, np.random.default_rng(sum(tokens))
        self.sequence, self.table = space.sequence(16), kvd.Table(space)
        for i, n in enumerate(tokens):
            self.append(i, n)
        self.tail, self.new = space.alloc(1), self.random.standard_normal((2, LAYERS, tail, HEADS, DIM), dtype="f4")
        assert self.table.extend(self.tail[0], [self.tail[0].id])
        for layer in range(LAYERS):
            self.table.write(layer, 0, tail, *(it[layer].ctypes.data for it in self.new), HEADS * DIM)

    def append(self, number: int, n: int) -> None:
        (block,) = self.space.alloc(1)
        planes = np.ctypeslib.as_array((ctypes.c_float * (self.space.block_bytes // 4)).from_address(block.data))
        planes[:] = self.random.standard_normal(len(planes), dtype="f4")
        self.sequence.append([block], [1 + number] * n)

    def entry(self, it: kvd.Entry) -> np.ndarray:
        """[layers, K and V, heads, slots in use, dim]"""
        size = self.space.block_bytes // 4
        planes = np.ctypeslib.as_array((ctypes.c_float * size).from_address(it.data)).reshape(LAYERS, 2, HEADS, TOKENS, DIM)
        return planes[:, :, :, :it.tokens]

    def expected(self, q: np.ndarray, layer: int, first: int, chosen=None) -> tuple:
        """The results [n, queries, dim], and the mass of each entry."""
        out, entries = np.zeros(q.shape), self.sequence.entries()
        mass = np.zeros(len(entries))
        for i, rows in enumerate(q):
            for head, row in enumerate(rows):
                kv, scores, values, owner = head // 2, [], [], []
                for number, it in enumerate(entries):
                    for slot in range(it.tokens if it.data else 0):
                        if chosen is None or number * TOKENS + slot in chosen[kv]:
                            k, v = self.entry(it)[layer, :, kv, slot]
                            scores.append(SCALE * k @ row)
                            values.append(v)
                            owner.append(number)
                for k, v in self.new[:, layer, :first + i + 1, kv].swapaxes(0, 1):
                    scores.append(SCALE * k @ row)
                    values.append(v)
                weights = np.exp(np.array(scores, "f8"))
                weights /= weights.sum()
                out[i, head] = weights @ np.array(values, "f8")
                for number, weight in zip(owner, weights):
                    mass[number] += weight
        return out, mass

    def check(self, n: int, chosen=None) -> None:
        """The last n tokens of the tail attend, in each layer."""
        first = self.new.shape[2] - n
        lists = chosen and [array("I", sorted(it)) for it in chosen]
        for layer in range(LAYERS):
            q = self.random.standard_normal((n, QUERIES, DIM), dtype="f4")
            out, mass = np.full_like(q, np.nan), np.ones(len(self.sequence), "f4")
            self.table.attend(layer, first, n, QUERIES, SCALE, q.ctypes.data, QUERIES * DIM, out.ctypes.data, QUERIES * DIM,
                              after=self.sequence, chosen=lists, mass=mass.ctypes.data)
            right, masses = self.expected(q, layer, first, chosen)
            assert np.allclose(out, right, atol=1e-5) and np.allclose(mass - 1, masses, atol=1e-4), (out - right, masses)

    def close(self) -> None:
        self.space.free(self.tail)
        self.sequence.close()


def test_attention_sees_what_is_there(space):
    """Full entries, a partial one in the middle, one that is gone, and compacted ones, whose heads keep different tokens."""
    if not np:
        return
    it = Attending(space, [TOKENS, TOKENS], 5)
    it.check(5)
    it.check(1)
    it.append(2, TOKENS)
    it.check(3)
    it.sequence.cool([1], "drop")
    assert it.sequence.wait(60) == 1 and it.sequence.entries()[1].data == 0
    it.check(2)
    it.append(3, 7)
    it.append(4, TOKENS)
    it.check(5)
    space.set("keydiff", 1)
    assert it.sequence.compact(2, 3, TOKENS + 3) > 0 and it.sequence.wait(60) > 0
    assert any(entry.flags & kvd.EntryFlags.COMPACT for entry in it.sequence.entries())
    it.check(4)
    it.close()


def test_attention_sees_what_is_chosen(space):
    if not np:
        return
    it = Attending(space, [TOKENS, 9, TOKENS], 3)
    chosen = [{0, 3, TOKENS + 2, TOKENS + 8, 2 * TOKENS}, {2 * TOKENS + 15}, set()]
    it.check(2, chosen)
    it.sequence.cool([0], "drop")
    assert it.sequence.wait(60) == 1
    it.check(1, chosen)
    chosen[0] |= {TOKENS + 9, TOKENS + 15, 5 * TOKENS, 4294967295}      # slots without a token
    it.check(1, chosen)
    with raises(ValueError, "3 KV heads"):
        it.check(1, chosen[:2])
    it.close()


def test_attention_over_a_table_is_refused(space):
    if not np:
        return
    it, q = Attending(space, [TOKENS, 5], 2), np.zeros((2, QUERIES, DIM), "f4")

    def ask(**form):
        it.table.attend(0, 0, 2, QUERIES, SCALE, q.ctypes.data, QUERIES * DIM, q.ctypes.data, QUERIES * DIM,
                        after=it.sequence, **form)

    ask()
    with raises(kvd.Invalid, "sliding window over entry 1"):
        ask(window=8)
    it.sequence.close()
    with raises(kvd.Closed):
        ask()
    it.close()


def test_a_window_over_full_entries(space):
    if not np:
        return
    it = Attending(space, [TOKENS, TOKENS], 4)
    q = it.random.standard_normal((1, QUERIES, DIM), dtype="f4")
    for window in (1, 3, 4, 5, TOKENS, 2 * TOKENS + 3, 1000):
        out = np.empty_like(q)
        it.table.attend(1, 3, 1, QUERIES, SCALE, q.ctypes.data, QUERIES * DIM, out.ctypes.data, QUERIES * DIM,
                        after=it.sequence, window=window)
        seen = set(range(max(2 * TOKENS + 4 - window, 0), 2 * TOKENS))
        new, it.new = it.new, it.new[:, :, max(4 - window, 0):]
        right, _ = it.expected(q, 1, len(it.new[0, 0]) - 1, [seen] * HEADS)
        it.new = new
        assert np.allclose(out, right, atol=1e-5), window
    it.close()


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
