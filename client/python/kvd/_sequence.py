# SPDX-License-Identifier: Apache-2.0
"""Block table of one request, and the methods on it (kvd_methods.h)."""

from __future__ import annotations

import enum
from array import array
from ctypes import byref, c_uint8, c_uint32, c_void_p, string_at
from typing import TYPE_CHECKING, Any, Iterable, NamedTuple, Sequence as List

from ._block import Block, structs_of
from ._buffer import memory
from ._handle import Handle
from ._native import LabelShapeStruct, ScoresStruct, StatsStruct, check, closed, lib, number, ticks
from ._pin import Pin
from ._tokens import Tokens, words

if TYPE_CHECKING:
    from ._space import Space


class EntryFlags(enum.IntFlag):
    """State of an entry of a sequence; for entries that are not resident, how they can be revived."""

    OWN = 1
    """Filled by this sequence."""
    BORROWED = 2
    """From the prefix cache: held by the caller's pin, never changed."""
    SHARED = 4
    """A similar block is used instead."""
    APPROX = 8
    """Reconstructed from the sketch."""
    SPILLED = 16
    """Not resident; there is an exact copy."""
    VAGUE = 32
    """Not resident; in the sketch (and perhaps an exact copy)."""
    DROPPED = 64
    """Not resident, and cannot be revived."""
    COMPACT = 128
    """Each layer and head has its own tokens, see Sequence.compact()."""


class Entry(NamedTuple):
    """A block in a sequence's table, as it was when Sequence.entries() was called."""

    data: int
    """Address of the block, read-only; 0 if not resident: attention must skip its tokens."""
    block: int
    """Id of the block."""
    generation: int
    position: int
    """Position of its first token in the sequence."""
    tokens: int
    delta: int
    """Its keys are rotated for positions lower by delta: rotate queries by -delta."""
    flags: EntryFlags


class Stats(NamedTuple):
    """Statistics of a sequence. MemShare's affected ratio is shared_tokens / tokens."""

    blocks: int
    resident: int
    own: int
    borrowed: int
    shared: int
    shared_tokens: int
    tokens: int
    bytes_saved: int
    spilled: int
    vague: int
    approximate: int
    dropped: int
    revived_exact: int
    revived_approx: int
    compacted: int
    resident_bytes: int
    """Bytes of resident blocks of unshared entries."""
    label_bytes: int
    """Bytes of its blocks' summaries: labels, anchors, norms."""
    copy_bytes: int
    """Bytes of exact copies, as of the last sync."""
    sketch_bytes: int


class Labels(NamedTuple):
    """Copy of the labels of an entry's tokens: [layer][kv head][token], label_bytes each."""

    data: bytes
    channels: int
    label_bytes: int
    layer_stride: int
    """Bytes from layer to layer."""
    head_stride: int
    """Bytes from KV head to KV head."""
    channel: array[int]
    """Indices of a key's channels in its label: [layers][kv_heads][channels]."""


class Sharing(NamedTuple):
    """Whose selection of critical tokens each layer and head uses."""

    layers: bytes
    """[layer]: the layer whose selection it uses."""
    heads: bytes
    """[layer * kv_heads + head]: the KV head, of the same layer, whose selection it uses."""


_COOL = {"spill": 1, "vague": 2, "drop": 3}
_REVIVE = {"exact": 1, "approx": 2, "both": 3}


class Sequence:
    """A table of blocks, made by Space.sequence(). For one thread at a time. True if it has entries.

    Entries change only in sync() and wait(). Keys and values computed with an entry that is SHARED, APPROX or COMPACT
    are approximate and must not be published with Pin.seal(). Calls raise kvd.Stale if the daemon is gone; the sequence
    can still be read and closed.
    """

    def __init__(self, space: Space, handle: Handle, max_blocks: int):
        self.space = space
        pointer = c_void_p()
        check(lib.kvd_sequence_open(handle, number("max_blocks", max_blocks), byref(pointer)))
        self._pins: list[Pin] = []      # pins of borrowed blocks, held until the sequence is closed
        self._scores: list[Block] = []  # blocks that compact() has filled, held until the compaction is complete
        self._scored = (0, 0, 0)        # its first entry, and the block and generation of that entry
        self._handle: Handle | None = Handle(pointer, lib.kvd_sequence_close, handle, self._pins)

    def __len__(self) -> int:
        n = c_uint32()
        lib.kvd_sequence_entries(self._open(), byref(n))
        return n.value

    def entries(self) -> list[Entry]:
        """Return the current table, first to last. Addresses are valid until the next sync()."""
        n = c_uint32()
        table = lib.kvd_sequence_entries(self._open(), byref(n))
        return [Entry(it.data or 0, it.block, it.generation, it.position, it.n_tokens, it.delta, EntryFlags(it.flags))
                for it in table[:n.value]]

    def borrow(self, pin: Pin, tokens: Tokens, first: int = 0) -> None:
        """Append full blocks of a prefix to the table, from block first of the pin on, with their tokens. The pin is kept
        until close()."""
        row = words(tokens)
        n = len(row) // (self.space.geometry.block_tokens or 16)
        ids = array("I", pin.blocks[first:first + n])
        check(lib.kvd_sequence_borrow(self._open(), byref(pin._struct), len(ids), ids.buffer_info()[0],
                                      row.buffer_info()[0]))
        if pin not in self._pins:
            self._pins.append(pin)

    def append(self, blocks: List[Block], tokens: Tokens) -> int:
        """Append filled blocks with these tokens to the table. They then belong to the sequence: read-only, and in no
        index. Only the last one may be partial. Returns how many were appended: fewer than given if a part of a large
        request failed. Raises the same errors as Pin.seal(); then none was appended."""
        row, room = words(tokens), structs_of(list(blocks))
        result = lib.kvd_sequence_append(self._open(), len(room), room, *row.buffer_info())
        for i, (block, struct) in enumerate(zip(blocks, room)):
            block._became(struct, sealed=i < result)
        return check(result)

    def step(self, first: int, n: int) -> None:
        """MemShare: report that tokens [first, first + n) are a complete step. Does nothing if memshare is off."""
        check(lib.kvd_sequence_step(self._open(), number("first", first), number("n", n)))

    def sync(self) -> int:
        """Apply the changes that the daemon proposes. Call it while no kernel reads the table. Returns the number of
        entries changed."""
        changed = check(lib.kvd_sequence_sync(self._open()))
        if self._scores and self._seen(self._scored[0]) != self._scored:
            self._free_scores()
        return changed

    def wait(self, timeout_s: float) -> int:
        """Wait until everything that this sequence requested is complete, and apply changes as sync() does. Returns the
        number of entries changed. Raises kvd.TimedOut if something is not complete after timeout_s seconds; changes
        that had arrived are applied."""
        changed = check(lib.kvd_sequence_wait(self._open(), ticks(timeout_s, 10**9, 62)))
        self._free_scores()
        return changed

    def cool(self, slots: Iterable[int], how: str) -> int:
        """Offer the sequence's own blocks for removal from the pool at a later sync: "spill" (an exact copy is kept),
        "vague" (added to the sketch) or "drop". Returns how many will be removed: fewer than given if the memory for
        copies is not enough for all. Raises kvd.QuotaExceeded or kvd.PoolFull if none will, since it is used up."""
        rows = array("I", slots)
        return check(lib.kvd_sequence_cool(self._open(), len(rows), rows.buffer_info()[0], _way(_COOL, how)))

    def revive(self, slots: Iterable[int], how: str = "exact") -> None:
        """Request entries that are not resident; they arrive at a later sync: "exact", "approx", or "both", first
        approximately and then exactly. Raises kvd.NoData if only "approx" was requested and the sketch cannot restore
        them."""
        rows = array("I", slots)
        check(lib.kvd_sequence_revive(self._open(), len(rows), rows.buffer_info()[0], _way(_REVIVE, how)))

    def compact(self, first: int, n: int, keep: int, scores: Any = None) -> int:
        """Among the tokens in own resident entries [first, first + n), keep for each layer and KV head the `keep`
        tokens of highest score.

        They arrive together at a later sync, in the range's first entries (COMPACT), in order of position within each
        head; the other entries are DROPPED. Returns how many entries will change.

        scores: float32 [layers of a block, kv_heads, tokens], the tokens being those of the entries, Entry.tokens of
        each but none of DROPPED ones; the others must be resident. NaN is less than every number; of equal scores, those of later tokens are kept. A
        contiguous array (anything with a buffer, or a CPU tensor of torch) is copied to blocks of the space, which are
        freed when the compaction has arrived. A list of blocks that the caller has filled, one after the other, works
        on a GPU, too; keep them unchanged until then. None: KeyDiff's scores, which are high if a key is unlike the
        mean direction of the sequence's keys; entries that cannot be compacted are left as they are.

        Raises kvd.PoolFull if there is no room for the new blocks in addition to the old ones; kvd.NotSupported if keys
        are stored before rotation, and without scores if keydiff is off, or keys are stored as 8 bits; kvd.Busy if the
        previous compaction is not complete, or an entry that has scores is busy; kvd.Invalid if it cannot be
        compacted."""
        places = number("first", first), number("n", n), number("keep", keep)
        theirs = scores is None or isinstance(scores, (list, tuple))
        done = [] if theirs else self._score_blocks(first, n, scores)
        room = structs_of(list(scores or ()) if theirs else done)
        given = None if scores is None else byref(ScoresStruct(room, len(room)))
        try:
            changing = check(lib.kvd_sequence_compact(self._open(), *places, given))
            if changing:    # so the previous compaction is complete
                done, self._scores, self._scored = self._scores, done, self._seen(first)
            return changing
        finally:
            self.space.free(done)

    def _score_blocks(self, first: int, n: int, scores: Any) -> list[Block]:
        """Allocate blocks, and fill them with an array of scores."""
        geometry, size = self.space.geometry, self.space.block_bytes
        tokens = sum(it.tokens for it in self.entries()[first:first + n] if not it.flags & EntryFlags.DROPPED)
        shape = geometry.layers // (geometry.layer_groups or 1), geometry.kv_heads, tokens
        with memory(scores) as (at, given):
            right = tuple(getattr(scores, "shape", shape)) == shape and given == 4 * shape[0] * shape[1] * tokens
            if not right or _dtype(scores) != "float32":
                raise ValueError(f"scores must be float32 of shape {shape}")
            self.space._check_copy(self.space._open())
            blocks = self.space.alloc(-(-given // size))
            for i, block in enumerate(blocks):
                lib.kvd_copy(block.data, at + i * size, min(size, given - i * size))
        return blocks

    def _free_scores(self) -> None:
        self.space.free(self._scores)
        self._scores = []

    def _seen(self, slot: int) -> tuple[int, int, int]:
        entry = lib.kvd_sequence_entries(self._open(), byref(c_uint32()))[slot]
        return slot, entry.block, entry.generation

    def use(self, slot: int, mass: float, hits: float) -> None:
        """Report how this step's attention used an entry: mass is its attention per token, relative to the average of
        1; hits is how many of its tokens were selected. Updates moving averages."""
        lib.kvd_sequence_use(self._open(), number("slot", slot), mass, hits)

    def stats(self) -> Stats:
        """Return current statistics of the table."""
        struct = StatsStruct()
        lib.kvd_sequence_stats(self._open(), byref(struct))
        return Stats(*(getattr(struct, name) for name in Stats._fields))

    # ---- labels and shared selections --------------------------------------------------------------------------------

    def labels(self, slot: int) -> Labels | None:
        """Return the labels of an entry's tokens, whether or not it is resident; None if they have not been made."""
        shape = LabelShapeStruct()
        data = lib.kvd_sequence_labels(self._open(), number("slot", slot), byref(shape))
        geometry = self.space.geometry
        if not data:
            return None
        return Labels(string_at(data, geometry.layers * shape.layer_stride), shape.channels, shape.label_bytes,
                      shape.layer_stride, shape.head_stride,
                      array("H", shape.channel[:geometry.layers * geometry.kv_heads * shape.channels]))

    def critical(self, blocks: List[Block], queries: int, words_: int, selected: int) -> None:
        """Request a sharing configuration from the tokens that the last prompt queries select, `selected` per query:
        bits [layers][kv_heads][queries][words_], 64 tokens per word, in blocks that the caller keeps until sharing()
        returns it or raises."""
        room = structs_of(list(blocks))
        check(lib.kvd_sequence_critical(self._open(), len(room), room, number("queries", queries),
                                        number("words_", words_), number("selected", selected)))

    def sharing(self) -> Sharing | None:
        """Return the sharing configuration requested by critical(), or None if it is not ready. Raises kvd.NoData if
        none was requested or it could not be made."""
        geometry = self.space.geometry
        layers = (c_uint8 * geometry.layers)()
        heads = (c_uint8 * (geometry.layers * geometry.kv_heads))()
        if not check(lib.kvd_sequence_sharing(self._open(), layers, heads)):
            return None
        return Sharing(bytes(layers), bytes(heads))

    def close(self) -> None:
        """Free the sequence, its blocks and pins. Does nothing if already closed."""
        self._handle, self._pins = None, []
        self._free_scores()

    def _open(self) -> Handle:
        handle = self._handle
        if not handle:
            raise closed("this sequence")
        return handle

    def __enter__(self) -> Sequence:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<kvd.Sequence of {len(self)} blocks>" if self._handle else "<kvd.Sequence, closed>"


def _dtype(array: Any) -> str:
    """Name of the type of an array's elements, such as float32."""
    dtype = getattr(array, "dtype", None)
    if dtype is None:
        return "float32" if memoryview(array).format == "f" else ""
    return str(dtype).replace("torch.", "")


def _way(ways: dict[str, int], name: str) -> int:
    if name not in ways:
        raise ValueError(f"how must be one of {', '.join(ways)}, not {name!r}")
    return ways[name]
