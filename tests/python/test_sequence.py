# SPDX-License-Identifier: Apache-2.0
"""A request's own table of blocks, and the methods' calls on it."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import signal
import sys
from array import array
from contextlib import contextmanager
from pathlib import Path

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


def test_cooling_without_memory_for_copies_fails_aloud(space):
    size = space.geometry.block_bytes
    with instance.Instance(*options(), "--set", f"daemon.spill={2 * size}") as it, kvd.connect(it.socket) as daemon:
        with daemon.space("s", geometry()) as own, own.sequence(8) as sequence:
            own.set("kvreviver", 1)
            own.set("pressure", 0)
            appended(own, sequence, 2, 4)
            assert sequence.cool(range(4), "spill") == 2
            with raises(kvd.QuotaExceeded, "exact copies in memory"):
                sequence.cool(range(4), "spill")
            assert sequence.wait(600) == 2 and sequence.stats().spilled == 2
            with raises(kvd.QuotaExceeded, "exact copies in memory"):
                sequence.cool([2], "vague")
            assert sequence.cool([0], "spill") == 0     # it has left
            assert sequence.cool([2], "drop") == 1
        it.check()


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


def kept(rows: list[list[float]], keep: int) -> list[list[int]]:
    """The tokens of highest score in each row, in order of position; of equal scores, later ones."""
    return [sorted(sorted(range(len(row)), key=lambda t: (row[t], t))[-keep:]) for row in rows]


def scored(space: kvd.Space, sequence: kvd.Sequence) -> tuple[array, list[list[float]]]:
    """Append 3 * TOKENS - 5 tokens, whose bytes are their number; return their scores, with ties."""
    n = 3 * TOKENS - 5
    blocks = space.alloc(3)
    for number, block in enumerate(blocks):
        bytes_ = block.memoryview()
        bytes_[:] = b"".join(bytes([number * TOKENS + t]) * (DIM * 4) for t in range(TOKENS)) * (2 * LAYERS * HEADS)
    sequence.append(blocks, list(range(1, n + 1)))
    rows = [[float((head * 31 + t * 17) % 13) for t in range(n)] for head in range(LAYERS * HEADS)]
    return array("f", [score for row in rows for score in row]), rows


def expect_kept(space: kvd.Space, sequence: kvd.Sequence, chosen: list[list[int]]) -> None:
    entries = [it for it in sequence.entries() if it.data]
    planes = [ctypes.string_at(it.data, space.block_bytes) for it in entries]
    for row, tokens in enumerate(chosen):
        for plane in range(2):
            for i, token in enumerate(tokens):
                layer, head = divmod(row, HEADS)
                at = (((2 * layer + plane) * HEADS + head) * TOKENS + i % TOKENS) * DIM * 4
                assert planes[i // TOKENS][at:at + DIM * 4] == bytes([token]) * (DIM * 4)


def filling() -> int:
    """Number of blocks to fill that are held in this process."""
    return sum(isinstance(it, kvd.Block) and it.data != 0 for it in gc.get_objects())


def test_given_scores_decide_what_stays(space):
    """As a buffer, which is copied to blocks; keydiff is off. The blocks are freed by the sync that brings the result."""
    with space.sequence(8) as sequence:
        scores, rows = scored(space, sequence)
        with raises(ValueError, "scores must be float32 of shape (2, 3, 43)"):
            sequence.compact(0, 3, TOKENS + 3, scores[1:])
        assert sequence.compact(0, 3, TOKENS + 3, scores) == 3 and filling() > 0
        until(lambda: sequence.sync() == 3)
        assert filling() == 0
        expect_kept(space, sequence, kept(rows, TOKENS + 3))


def test_scores_in_blocks_of_the_caller(space):
    with space.sequence(8) as sequence:
        scores, rows = scored(space, sequence)
        blocks = space.alloc(-(-len(scores) * 4 // space.block_bytes))
        space.write(blocks, bytes(scores).ljust(len(blocks) * space.block_bytes))
        assert sequence.compact(0, 3, TOKENS, blocks) == 3 and sequence.wait(60) == 3
        assert all(block.data for block in blocks)      # they remain the caller's
        space.free(blocks)
        expect_kept(space, sequence, kept(rows, TOKENS))
        with raises(kvd.Invalid):
            sequence.compact(0, 1, 1, [])


def test_scores_as_arrays_of_numpy(space):
    if not np:
        return
    with space.sequence(8) as sequence:
        scores, rows = scored(space, sequence)
        right = np.array(scores, "f4").reshape(LAYERS, HEADS, -1)
        for wrong in (right.astype("f8"), right[:, :, 1:].copy(), right.astype("i4"), right.reshape(HEADS, LAYERS, -1, 1),
                      bytes(scores)):
            with raises(ValueError, "scores must be float32 of shape"):
                sequence.compact(0, 3, TOKENS, wrong)
        right[0, 0, :2] = np.nan, np.inf
        assert sequence.compact(0, 3, TOKENS, right) == 3 and sequence.wait(60) == 3 and filling() == 0
        chosen = kept(np.nan_to_num(right.reshape(LAYERS * HEADS, -1), nan=-1.0).tolist(), TOKENS)
        assert 0 not in chosen[0] and 1 in chosen[0]
        expect_kept(space, sequence, chosen)


def test_scores_are_given_back_when_nothing_comes_of_them(space):
    with space.sequence(8) as sequence:
        scores, _ = scored(space, sequence)
        assert sequence.compact(0, 3, 3 * TOKENS, scores) == 0 and filling() == 0
        sequence.cool([1], "drop")
        with raises(kvd.Busy, "entry 1 is busy"):
            sequence.compact(0, 3, TOKENS, scores)
        assert filling() == 0
        assert sequence.wait(60) == 1
        with raises(ValueError, "scores must be float32 of shape"):
            sequence.compact(0, 3, TOKENS, scores)          # dropped entries have none
        assert sequence.compact(0, 1, 1, scores[:LAYERS * HEADS * TOKENS]) == 1
    assert filling() == 0      # closed before it has come


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
        self.plant(number, planes.reshape(LAYERS, 2, HEADS, TOKENS, DIM))
        self.sequence.append([block], [1 + number] * n)

    def plant(self, number: int, planes: np.ndarray) -> None:
        """Alter the keys and values of a block: [layers, K and V, heads, tokens, dim]."""

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



# ---- readers ---------------------------------------------------------------------------------------------------------

PLANTED = (20, 39, 50, 77)      # slots whose keys a query needs, of a sequence of 8 blocks


class Reading(Attending):
    """Random keys are short, and those of some slots are long, in a direction of their own for each layer and head."""

    def __init__(self, space: kvd.Space, tokens: list[int], planted: tuple[int, ...] = PLANTED):
        self.planted = planted
        self.far = np.random.default_rng(1).standard_normal((LAYERS, HEADS, DIM), dtype="f4") * 3
        super().__init__(space, tokens, 1)
        self.reader = kvd.Reader(self.sequence, QUERIES, SCALE, timeout_s=600)

    def plant(self, number: int, planes: np.ndarray) -> None:
        planes[:, 0] *= 0.1
        for slot in self.planted:
            if slot // TOKENS == number:
                planes[:, 0, :, slot % TOKENS] = self.far

    def prompt(self) -> None:
        """A pass of one query, as if it completed the prompt; then decoding begins."""
        self.ask(np.zeros((LAYERS, QUERIES, DIM), "f4"))
        self.reader.decode(1)

    def ask(self, q: np.ndarray) -> np.ndarray:
        """A pass of a token that is behind the entries."""
        out = np.empty_like(q)
        self.reader.begin(1, 1)
        for layer in range(LAYERS):
            self.table.attend(layer, 0, 1, QUERIES, SCALE, q[layer].ctypes.data, QUERIES * DIM, out[layer].ctypes.data,
                              QUERIES * DIM, after=self.reader)
        self.reader.end()
        return out

    def needing(self) -> np.ndarray:
        """Queries that need what is planted."""
        return np.repeat(self.far, 2, 1) * 0.5

    def seen(self, q: np.ndarray, chosen=None) -> np.ndarray:
        """Attention over what is there, or over these slots of it."""
        out = np.empty_like(q)
        for layer in range(LAYERS):
            self.table.attend(layer, 0, 1, QUERIES, SCALE, q[layer].ctypes.data, QUERIES * DIM, out[layer].ctypes.data,
                              QUERIES * DIM, after=self.sequence, chosen=chosen and [array("I", chosen)] * HEADS)
        return out

    def close(self) -> None:
        self.reader.close()
        super().close()


@contextmanager
def reading(**settings: float):
    """A space of its own with these settings, because a space's settings last."""
    if not np:
        return
    with instance.Instance(*options()) as it, kvd.connect(it.socket) as daemon:
        with daemon.space("reading", geometry()) as space:
            for name, value in settings.items():
                space.set(name, value)
            yield space
        it.check()


def test_a_reader_without_methods_sees_all(_space):
    with reading() as space:
        it = Reading(space, [TOKENS, 9, TOKENS])
        q = it.random.standard_normal((LAYERS, QUERIES, DIM), dtype="f4")
        assert (it.ask(q) == it.seen(q)).all()
        it.reader.decode(1)
        it.sequence.cool([0], "drop")
        it.sequence.wait(600)
        assert (it.ask(q) == it.seen(q)).all() and it.reader.stats().selections == 0
        it.close()


def test_a_reader_selects_what_a_query_needs(_space):
    """HShare: the first tokens, the newest, and those with the largest scores; then blocks that leave and are compacted."""
    window = {"hshare.sinks": 4, "hshare.recent": 8, "hshare.top": len(PLANTED)}
    each = {"hshare.dense_layers": 0, "hshare.layer_ratio": 1, "hshare.head_ratio": 1}
    with reading(hshare=1, **window, **each) as space:
        it = Reading(space, [TOKENS] * 8)
        it.prompt()
        q = it.needing()
        for _ in range(3):
            assert (it.ask(q) == it.seen(q, [0, 1, 2, 3, *PLANTED, *range(8 * TOKENS - 7, 8 * TOKENS)])).all()
        assert it.reader.stats().selections == 3 * LAYERS * HEADS
        it.append(8, 9)     # another entry, which is not full: the newest 8 tokens are its last 7, and the new one
        it.sequence.wait(600)
        newest = range(8 * TOKENS + 2, 8 * TOKENS + 9)
        assert (it.ask(q) == it.seen(q, [0, 1, 2, 3, *PLANTED, *newest])).all()
        it.sequence.cool([PLANTED[1] // TOKENS], "drop")
        it.sequence.wait(600)
        got, here = it.ask(q), {*PLANTED} - {PLANTED[1]}
        others = [slot for slot in range(4, 8 * TOKENS + 2) if slot // TOKENS != PLANTED[1] // TOKENS and slot not in here]
        assert any((got[0, 0] == it.seen(q, sorted([0, 1, 2, 3, *here, other, *newest]))[0, 0]).all() for other in others)
        it.close()


class Packed(Reading):
    """Each layer and head keeps what is planted, and other tokens of its own, so that a slot is another token in each."""

    def keep_half(self) -> None:
        n = 6 * TOKENS
        scores = self.random.random((LAYERS, HEADS, n), dtype="f4")
        scores[:, :, list(self.planted)] = 2
        assert self.sequence.compact(0, 6, n // 2, scores) > 0 and self.sequence.wait(600) > 0

    def needed(self, layer: int, head: int) -> set[int]:
        return {i * TOKENS + slot for i, it in enumerate(self.sequence.entries()) if it.data
                for slot, key in enumerate(self.entry(it)[layer, 0, head]) if np.allclose(key, self.far[layer, head])}


def test_heads_that_keep_other_tokens_do_not_share_selections(_space):
    """The slots that another head selects are other tokens there. Compacted before decoding begins, or behind that."""
    settings = {"hshare.sinks": 1, "hshare.recent": 8, "hshare.top": len(PLANTED), "hshare.dense_layers": 0,
                "hshare.layer_ratio": 0.01, "hshare.head_ratio": 0.01, "pressure": 0}
    for late in False, True:
        with reading(hshare=1, **settings) as space:
            it = Packed(space, [TOKENS] * 8)
            if late:
                it.prompt()
                it.ask(it.needing())
                it.keep_half()
            else:
                it.keep_half()
                it.prompt()
            q, newest = it.needing(), {*range(8 * TOKENS - 7, 8 * TOKENS)}
            got = it.ask(q)
            for layer in range(LAYERS):
                chosen = [{0} | newest | it.needed(layer, head) for head in range(HEADS)]
                assert all(len(slots) == 8 + len(PLANTED) for slots in chosen)
                right, _ = it.expected(q[layer][None], layer, 0, chosen)
                assert np.allclose(got[layer], right[0], atol=1e-5), (late, layer)
            it.close()


class Selecting(Reading):
    """What select() must return, computed from the labels as they are documented, and from the keys."""

    def label_scores(self, q: np.ndarray, layer: int, head: int) -> dict[int, np.ndarray]:
        """For each entry that has labels, the scores of its tokens: [query head, token]."""
        scores = {}
        for i, entry in enumerate(self.sequence.entries()):
            labels = self.sequence.labels(i)
            if not labels or entry.flags & kvd.EntryFlags.DROPPED:
                continue
            n, at = labels.channels, layer * labels.layer_stride + head * labels.head_stride
            first = (layer * HEADS + head) * n
            rows = np.frombuffer(labels.data, "u1", entry.tokens * labels.label_bytes, at).reshape(entry.tokens, -1)
            codes = np.stack([rows[:, :-4] & 15, rows[:, :-4] >> 4], 2).reshape(entry.tokens, -1)[:, :n]
            least, step = np.ascontiguousarray(rows[:, -4:]).view("<f2").T.astype("f8")
            scores[i] = np.stack([self.label(row[list(labels.channel[first:first + n])])
                                  @ (least[:, None] + codes * step[:, None]).T for row in q[2 * head:2 * head + 2]])
        return scores

    @staticmethod
    def label(channels: np.ndarray) -> np.ndarray:
        """A query's channels at 4 bits."""
        least = channels.min()
        step = (channels.max() - least) / 15 or 1
        return least + np.rint((channels - least) / step).astype("f8") * step

    def weights(self, scores: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
        """The sum of softmax over the query heads, of the entries' columns."""
        every = np.concatenate([SCALE * it for it in scores.values()], 1)
        every = np.exp(every - every.max(1, keepdims=True))
        every = (every / every.sum(1, keepdims=True)).sum(0)
        return dict(zip(scores, np.split(every, np.cumsum([it.shape[1] for it in scores.values()])[:-1])))

    def bounds(self, q: np.ndarray, layer: int, head: int) -> dict[int, np.ndarray]:
        scores = {}
        for i, entry in enumerate(self.sequence.entries()):
            if entry.data:
                keys = self.entry(entry)[layer, 0, head]
                row = q[2 * head:2 * head + 2]
                scores[i] = np.maximum(row * keys.min(0), row * keys.max(0)).sum(1, keepdims=True)
        return scores

    def right(self, what: str, q: np.ndarray, layer: int, head: int) -> dict[int, float]:
        if what == "bounds":
            return {i: it[0] for i, it in self.weights(self.bounds(q, layer, head)).items()}
        weights = self.weights(self.label_scores(q, layer, head))
        if what == "blocks":
            return {i: it.sum() for i, it in weights.items()}
        return {i * TOKENS + j: weight for i, it in weights.items() for j, weight in enumerate(it)}

    def check_selection(self, n: int, *kinds: str) -> None:
        q = self.random.standard_normal((LAYERS, QUERIES, DIM), dtype="f4")
        self.reader.begin(1, 1)
        for what in kinds:
            for layer in range(LAYERS):
                for head, got in enumerate(self.reader.select(layer, q[layer].ctypes.data, n, what)):
                    right = self.right(what, q[layer], layer, head)
                    assert list(got) == sorted(set(got)) and len(got) == min(n, len(right)), (what, got)
                    others = [weight for i, weight in right.items() if i not in got]
                    assert min(right[i] for i in got) >= max(others, default=0) * (1 - 1e-4), (what, layer, head, got)


def test_a_query_selects_what_it_needs(_space):
    """By labels and by bounds: full entries, one that is not, compacted ones, one that has left, and one that is gone."""
    with reading(hshare=1, kvreviver=1, keydiff=1, **{"kvreviver.budget": 1, "pressure": 0}) as space:
        it = Selecting(space, [TOKENS] * 4 + [9] + [TOKENS] * 3, (20, 39, 50, 71))
        it.prompt()
        q = it.needing()
        it.reader.begin(1, 1)
        for layer in range(LAYERS):
            for what, needed in ("tokens", [20, 39, 50, 71]), ("blocks", [1, 2, 3, 4]), ("bounds", [1, 2, 3, 4]):
                got = it.reader.select(layer, q[layer].ctypes.data, 4, what)
                assert [list(row) for row in got] == [needed] * HEADS, (what, got)
        for n in 1, 3, 8, 200:
            it.check_selection(n, "tokens", "blocks", "bounds")
        assert it.sequence.compact(5, 3, TOKENS + 3) > 0 and it.sequence.wait(600) > 0
        it.check_selection(5, "tokens", "blocks", "bounds")
        it.sequence.cool([0], "drop")
        it.sequence.wait(600)
        it.check_selection(5, "tokens", "blocks", "bounds")
        it.sequence.cool([2], "spill")
        it.sequence.wait(600)
        assert not it.sequence.entries()[2].data
        it.check_selection(5, "tokens", "blocks")       # its labels remain
        q = it.needing()
        assert list(it.reader.select(0, q[0].ctypes.data, 1, "tokens")[0])[0] in (20, 39, 50, 71)
        with raises(ValueError, "what must be one of tokens, blocks, bounds"):
            it.reader.select(0, q[0].ctypes.data, 1, "pages")
        with raises(kvd.Invalid, "layer 2 of 2"):
            it.reader.select(LAYERS, q[0].ctypes.data, 1)
        it.close()


def test_bounds_of_wide_heads_have_all_dimensions(space):
    """More than are measured together. A query of one dimension needs the block with the largest value there."""
    if not np:
        return
    dim = 150
    shape = kvd.Geometry(layers=1, kv_heads=1, head_dim=dim, vocab=50000, dtype="f32")
    with space.daemon.space("wide", shape) as wide, wide.sequence(4) as sequence:
        keys = np.random.default_rng(5).standard_normal((4, TOKENS, dim), dtype="f4")
        for number, rows in enumerate(keys):
            (block,) = wide.alloc(1)
            np.ctypeslib.as_array((ctypes.c_float * rows.size).from_address(block.data))[:] = rows.ravel()
            sequence.append([block], [1 + number] * TOKENS)
        reader = kvd.Reader(sequence, 1, 1.0)
        reader.begin(1, 1)
        for d in range(dim):
            q = np.zeros(dim, "f4")
            for q[d] in 1, -1:
                (got,) = reader.select(0, q.ctypes.data, 1, "bounds")
                assert list(got) == [(keys[:, :, d] * q[d]).max(1).argmax()], (d, got)
        reader.close()


def test_what_has_no_labels_yet_is_selected_first(_space):
    """The worker is stopped, so that the labels of new entries are not made."""
    if not np:
        return
    with (instance.Instance(*options()) as server, kvd.connect(server.socket) as daemon,
          daemon.space("s", geometry()) as space):
        space.set("hshare", 1)
        it, pid = Selecting(space, [TOKENS] * 4), server.process.pid
        it.prompt()
        children = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        (worker,) = [child for child in children if b"--worker" in Path(f"/proc/{child}/cmdline").read_bytes()]
        os.kill(worker, signal.SIGSTOP)
        try:
            it.append(4, 5)
            it.reader.begin(1, 1)
            assert it.sequence.labels(4) is None
            q = it.random.standard_normal((LAYERS, QUERIES, DIM), dtype="f4")
            for head, got in enumerate(it.reader.select(1, q[1].ctypes.data, 7)):
                assert list(got)[2:] == [*range(4 * TOKENS, 4 * TOKENS + 5)] and len(got) == 7, got
            assert all(len(got) == 2 and got[1] == 4 for got in it.reader.select(1, q[1].ctypes.data, 2, "blocks"))
            assert [list(got) for got in it.reader.select(1, q[1].ctypes.data, 9, "bounds")] == [[0, 1, 2, 3, 4]] * HEADS
        finally:
            os.kill(worker, signal.SIGCONT)
        it.sequence.wait(600)
        it.check_selection(7, "tokens", "blocks")
        it.close()


def test_a_reader_with_few_tokens_sees_all(_space):
    with reading(hshare=1, kvreviver=1, **{"kvreviver.budget": 1}) as space:
        it = Reading(space, [TOKENS] * 3)
        it.prompt()
        q = it.needing()
        assert (it.ask(q) == it.seen(q)).all()
        stats = it.reader.stats()
        assert (stats.selections, stats.misses, stats.most_resident) == (0, 0, 3), stats
        it.close()


def test_a_reader_brings_back_what_a_query_needs(_space):
    """KVReviver: of 8 blocks, 3 stay: the first, the newest, and one for those that are needed."""
    with reading(kvreviver=1, **{"kvreviver.wanted": 0.3}) as space:
        it = Reading(space, [TOKENS] * 8, planted=(50,))

        def here() -> list[int]:
            return [i for i, entry in enumerate(it.sequence.entries()) if entry.data]

        it.prompt()
        assert len(here()) == 3 and here()[0] == 0 and here()[-1] == 7, here()
        if 3 in here():             # which of equal ones stays is not defined
            it.sequence.cool([3], "spill")
            it.sequence.wait(600)
        diffuse = it.random.standard_normal((LAYERS, QUERIES, DIM), dtype="f4") * 0.01
        assert (it.ask(diffuse) == it.seen(diffuse)).all() and it.reader.stats().misses == 0
        q = it.needing()
        assert (it.ask(q) == it.seen(q)).all()
        assert here() == [0, 3, 7] and it.reader.stats().misses == 1 == it.sequence.stats().revived_exact
        it.ask(q)
        assert it.reader.stats().misses == 1 and it.reader.stats().most_resident == 3
        it.close()


class Sinking(Reading):
    """The first slot gets twenty times the attention that a later one gets."""

    def plant(self, number: int, planes: np.ndarray) -> None:
        super().plant(number, planes)
        if number == self.planted[1] // TOKENS:
            planes[:, 0, :, self.planted[1] % TOKENS] *= 1 - 3 / (SCALE * 0.5 * (self.far ** 2).sum(-1, keepdims=True))


def test_a_first_token_with_most_of_the_attention_hides_no_block(_space):
    """As in many heads of pretrained models. A missing block got too little of all attention for kvreviver.wanted."""
    with reading(kvreviver=1, **{"kvreviver.wanted": 0.2}) as space:
        it = Sinking(space, [TOKENS] * 8, planted=(0, 50))
        right = it.seen(it.needing())
        it.prompt()
        if it.sequence.entries()[3].data:
            it.sequence.cool([3], "spill")
            it.sequence.wait(600)
        out = it.ask(it.needing())
        assert it.reader.stats().misses == 1 and it.sequence.entries()[3].data
        assert np.abs(out - right).mean() < 0.1     # the others, which get little, are missing
        it.close()


def test_what_a_reader_waits_for_is_a_setting(_space):
    """kvreviver.wanted: with 1, for nothing that gets less than all of the attention; with 0, for all."""
    with reading(kvreviver=1, **{"kvreviver.wanted": 1, "kvreviver.budget": 0.5}) as space:
        it = Reading(space, [TOKENS] * 8, planted=(50,))
        right = it.seen(it.needing() * 0.3)
        it.prompt()
        if it.sequence.entries()[3].data:
            it.sequence.cool([3], "spill")
            it.sequence.wait(600)
        it.ask(it.needing() * 0.3)
        assert it.reader.stats().misses == 0
        it.reader.close()
        space.set("kvreviver.wanted", 0)
        it.reader = kvd.Reader(it.sequence, QUERIES, SCALE, timeout_s=600)
        it.prompt()
        assert np.allclose(it.ask(it.needing() * 0.3), right, atol=1e-5)
        assert it.reader.stats().misses and it.sequence.stats().resident == 4
        it.close()


def test_what_a_query_sees_does_not_depend_on_the_budget(_space):
    """Of 8 blocks, 3 stay. The others that a query needs come one after the other, within each layer."""
    with reading(kvreviver=1, **{"kvreviver.wanted": 0}) as space:
        it = Reading(space, [TOKENS] * 8, planted=(20, 39, 50, 77))
        queries = (it.needing(), it.needing() * 0.1, it.random.standard_normal((LAYERS, QUERIES, DIM), dtype="f4"))
        right = [it.seen(q) for q in queries]
        it.prompt()
        for q, expected in zip(queries, right):
            assert np.allclose(it.ask(q), expected, atol=1e-5)
        assert it.reader.stats().most_resident == 3 and it.reader.stats().misses > 3 * LAYERS * 3, it.reader.stats()
        it.close()


def test_each_of_many_queries_brings_back_what_it_needs(_space):
    """A pass of 40 tokens, of which only the first ones need a block that has left."""
    with reading(kvreviver=1, **{"kvreviver.wanted": 0.3}) as space:
        it = Reading(space, [TOKENS] * 8, planted=(50,))
        it.prompt()
        if it.sequence.entries()[3].data:
            it.sequence.cool([3], "spill")
            it.sequence.wait(600)
        more = space.alloc(2)
        it.table.extend(more[0], [block.id for block in more])
        for layer in range(LAYERS):
            it.table.write(layer, 0, 40, *(np.zeros((40, HEADS, DIM), "f4").ctypes.data for _ in range(2)), HEADS * DIM)
        q = np.zeros((40, QUERIES, DIM), "f4")
        q[:5] = it.needing()[0]
        out, right = np.empty_like(q), np.empty_like(q)
        it.reader.begin(40, 40)
        for after, to in ((it.reader, out), (it.sequence, right)):
            it.table.attend(0, 0, 40, QUERIES, SCALE, q.ctypes.data, QUERIES * DIM, to.ctypes.data, QUERIES * DIM, after=after)
        assert it.reader.stats().misses == 1 and (out == right)[:16].all()
        space.free(more)
        it.close()


def test_the_first_and_the_newest_blocks_come_back_unasked(_space):
    """The daemon may take them under pressure; no query needs them here."""
    with reading(kvreviver=1, **{"kvreviver.wanted": 0.9, "kvreviver.budget": 0.5}) as space:
        it = Reading(space, [TOKENS] * 8)
        it.prompt()
        diffuse = np.zeros((LAYERS, QUERIES, DIM), "f4")
        for slot in (0, 7):
            it.sequence.cool([slot], "spill")
            it.sequence.wait(600)
            assert not it.sequence.entries()[slot].data
            got = it.ask(diffuse)
            assert it.sequence.entries()[slot].data and (got == it.seen(diffuse)).all(), slot
        it.close()


def test_a_reader_in_a_forked_child(_space):
    with reading(kvreviver=1, hshare=1) as space:
        it = Reading(space, [TOKENS] * 8)
        it.prompt()
        child = os.fork()
        if child == 0:
            refused = 0
            for call in (lambda: it.ask(it.needing()), lambda: it.reader.decode(1),
                         lambda: it.reader.look(0, it.needing().ctypes.data, QUERIES * DIM)):
                try:
                    call()
                except kvd.Forked:
                    refused += 1
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        it.close()


def test_what_does_not_fit_a_reader(_space):
    with reading(kvreviver=1) as space:
        it = Reading(space, [TOKENS] * 8)
        for heads, scale in ((HEADS + 1, SCALE), (0, SCALE), (QUERIES, 0.0), (QUERIES, float("nan"))):
            with raises(kvd.Invalid):
                kvd.Reader(it.sequence, heads, scale)
        it.reader.begin(1, 1)
        q = np.zeros((2, 2 * QUERIES, DIM), "f4")

        def ask(layer: int, n: int, heads: int) -> None:
            it.table.attend(layer, 0, n, heads, SCALE, q.ctypes.data, heads * DIM, q.ctypes.data, heads * DIM, after=it.reader)

        for layer, n, heads in ((LAYERS, 1, QUERIES), (0, 0, QUERIES), (0, 1, HEADS)):
            with raises(kvd.Invalid):
                ask(layer, n, heads)
        with raises(kvd.Invalid):
            it.reader.look(LAYERS, q.ctypes.data, QUERIES * DIM)
        ask(0, 1, QUERIES)
        it.reader.close()
        with raises(kvd.Closed):
            ask(0, 1, QUERIES)
        it.close()


def test_a_reader_whose_daemon_is_gone(_space):
    """What is here is seen; a block that is needed and gone is an error, and not left out."""
    if not np:
        return
    with instance.Instance(*options()) as daemon, kvd.connect(daemon.socket) as connection:
        with connection.space("reading", geometry()) as space:
            space.set("kvreviver", 1)
            space.set("kvreviver.wanted", 0.3)
            it = Reading(space, [TOKENS] * 8, planted=(50,))
            it.prompt()
            it.sequence.cool([3], "spill")
            it.sequence.wait(600)
            q = it.needing()
            it.ask(q * 0)
            daemon.kill()
            assert (it.ask(q * 0) == it.seen(q * 0)).all()
            with raises(kvd.Error):
                it.ask(q)
            it.close()
        daemon.start()


if __name__ == "__main__":
    sys.exit(main(globals()))
