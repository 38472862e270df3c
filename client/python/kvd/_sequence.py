# SPDX-License-Identifier: Apache-2.0
"""One request's table of blocks, and the methods on it (kvd_methods.h)."""

from __future__ import annotations

import enum
from array import array
from ctypes import byref, c_uint8, c_uint32, c_void_p, string_at
from typing import TYPE_CHECKING, Iterable, NamedTuple, Sequence as List

from ._block import Block, structs_of
from ._handle import Handle
from ._native import LabelShapeStruct, StatsStruct, check, closed, lib, number, ticks
from ._pin import Pin
from ._tokens import Tokens, words

if TYPE_CHECKING:
    from ._space import Space


class EntryFlags(enum.IntFlag):
    """What an entry of a sequence is; of those not resident, how it may come back."""

    OWN = 1
    """Filled by this sequence."""
    BORROWED = 2
    """Of the prefix cache: held by the caller's pin, never changed."""
    SHARED = 4
    """MemShare: a similar block stands in."""
    APPROX = 8
    """KVReviver: contents came from the sketch."""
    SPILLED = 16
    """Not resident: there is an exact copy."""
    VAGUE = 32
    """Not resident: it is in the sketch (and there may be an exact copy)."""
    DROPPED = 64
    """Not resident, and nothing can bring it back."""
    COMPACT = 128
    """KeyDiff: slot j has, for each layer and head, another token: see Sequence.compact()."""


class Entry(NamedTuple):
    """A block in a sequence's table, as it was when Sequence.entries() was called."""

    data: int
    """The block's address, to be read only; 0: not resident, so attention must leave its tokens out."""
    block: int
    """Its id."""
    generation: int
    position: int
    """Of its first token in the sequence."""
    tokens: int
    delta: int
    """Its keys were rotated for positions so much lower: rotate queries by -delta."""
    flags: EntryFlags


class Stats(NamedTuple):
    """Of a sequence. MemShare's affected ratio is shared_tokens / tokens."""

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
    """Of blocks in the pool that it uses; one that stands in for others counts once."""
    label_bytes: int
    """Of its blocks' summaries: labels, anchors, norms."""
    copy_bytes: int
    """Of exact copies, as the daemon said at the last sync."""
    sketch_bytes: int


class Labels(NamedTuple):
    """HShare's labels of an entry's tokens, a copy: [layer][kv head][token], label_bytes each."""

    data: bytes
    channels: int
    label_bytes: int
    layer_stride: int
    """Bytes from layer to layer."""
    head_stride: int
    """Bytes from KV head to KV head."""
    channel: array[int]
    """Which channels of a key a label is of: [layers][kv_heads][channels]."""


class Sharing(NamedTuple):
    """HShare's configuration: whose selection of critical tokens each layer and head uses."""

    layers: bytes
    """[layer]: the layer whose selection it uses."""
    heads: bytes
    """[layer * kv_heads + head]: the KV head, of the same layer, whose selection it uses."""


_COOL = {"spill": 1, "vague": 2, "drop": 3}
_REVIVE = {"exact": 1, "approx": 2, "both": 3}


class Sequence:
    """A table of blocks. Made by Space.sequence(); one thread's at a time. True if anything is in it.

    Nothing changes between two calls of sync(). What is computed with an entry that is SHARED, APPROX or COMPACT is an
    approximation and must not be published with Pin.seal(). kvd.Stale, from any call: its daemon is gone; it still can
    be read and closed.
    """

    def __init__(self, space: Space, handle: Handle, max_blocks: int):
        self.space = space
        pointer = c_void_p()
        check(lib.kvd_sequence_open(handle, number("max_blocks", max_blocks), byref(pointer)))
        self._pins: list[Pin] = []      # of what was borrowed: held until the sequence is closed
        self._handle: Handle | None = Handle(pointer, lib.kvd_sequence_close, handle, self._pins)

    def __len__(self) -> int:
        n = c_uint32()
        lib.kvd_sequence_entries(self._open(), byref(n))
        return n.value

    def entries(self) -> list[Entry]:
        """The table, first to last, as it is now. Addresses are valid until the next sync()."""
        n = c_uint32()
        table = lib.kvd_sequence_entries(self._open(), byref(n))
        return [Entry(it.data or 0, it.block, it.generation, it.position, it.n_tokens, it.delta, EntryFlags(it.flags))
                for it in table[:n.value]]

    def borrow(self, pin: Pin, tokens: Tokens) -> None:
        """Puts the full blocks of a prefix behind the table, with their tokens. The pin is kept until close()."""
        row = words(tokens)
        n = len(row) // (self.space.geometry.block_tokens or 16)
        ids = array("I", pin.blocks[:n])
        check(lib.kvd_sequence_borrow(self._open(), byref(pin._struct), len(ids), ids.buffer_info()[0],
                                      row.buffer_info()[0]))
        self._pins.append(pin)

    def append(self, blocks: List[Block], tokens: Tokens) -> None:
        """Puts filled blocks with these tokens behind the table. They are the sequence's: in no index, read-only. Only
        the last one may be filled in part. Errors as of Pin.seal()."""
        row, room = words(tokens), structs_of(list(blocks))
        result = lib.kvd_sequence_append(self._open(), len(room), room, *row.buffer_info())
        for block, struct in zip(blocks, room):
            block._became(struct, sealed=result >= 0)
        check(result)

    def step(self, first: int, n: int) -> None:
        """MemShare: tokens [first, first + n) are a step that is complete. Nothing happens if memshare is off."""
        check(lib.kvd_sequence_step(self._open(), number("first", first), number("n", n)))

    def sync(self) -> int:
        """Takes over what the daemon proposes, where nothing reads the table. How many entries changed."""
        return check(lib.kvd_sequence_sync(self._open()))

    def wait(self, timeout_s: float) -> int:
        """Waits until nothing that this sequence asked for is under way, and takes over what came of it, as sync()
        does. How many entries changed. TimeoutError: something is under way still; what arrived is taken over all the
        same."""
        return check(lib.kvd_sequence_wait(self._open(), ticks(timeout_s, 10**9, 62)))

    def cool(self, slots: Iterable[int], how: str) -> None:
        """Offers own blocks to leave the pool at a later sync: "spill" (an exact copy is kept), "vague" (in the sketch)
        or "drop"."""
        rows = array("I", slots)
        check(lib.kvd_sequence_cool(self._open(), len(rows), rows.buffer_info()[0], _way(_COOL, how)))

    def revive(self, slots: Iterable[int], how: str = "exact") -> None:
        """Asks for entries that are not resident, to arrive at a later sync: "exact", "approx" or "both", one after the
        other. kvd.NoData: the sketch was asked alone and cannot."""
        rows = array("I", slots)
        check(lib.kvd_sequence_revive(self._open(), len(rows), rows.buffer_info()[0], _way(_REVIVE, how)))

    def compact(self, first: int, n: int, keep: int) -> int:
        """KeyDiff: of the tokens in own resident entries [first, first + n), each layer and KV head keeps the `keep`
        ones whose keys are least like the mean direction of the sequence's keys. They arrive together at a later
        sync, in the range's first entries (COMPACT), in order of position within each head; the others are DROPPED.
        How many entries will change. kvd.PoolFull: no room for the new blocks beside the old ones; kvd.NotSupported:
        keydiff is off, or keys are stored before rotation or as 8 bits."""
        return check(lib.kvd_sequence_compact(self._open(), number("first", first), number("n", n),
                                              number("keep", keep)))

    def use(self, slot: int, mass: float, hits: float) -> None:
        """What this step's attention says of an entry: its share of the attention per token, 1 the average, and how
        many of its tokens were selected per step. Kept as moving averages."""
        lib.kvd_sequence_use(self._open(), number("slot", slot), mass, hits)

    def stats(self) -> Stats:
        """Numbers of the table, as it is now."""
        struct = StatsStruct()
        lib.kvd_sequence_stats(self._open(), byref(struct))
        return Stats(*(getattr(struct, name) for name in Stats._fields))

    # ---- HShare ------------------------------------------------------------------------------------------------------

    def labels(self, slot: int) -> Labels | None:
        """Labels of an entry's tokens, resident or not; None: not made (yet)."""
        shape = LabelShapeStruct()
        data = lib.kvd_sequence_labels(self._open(), number("slot", slot), byref(shape))
        geometry = self.space.geometry
        if not data:
            return None
        return Labels(string_at(data, geometry.layers * shape.layer_stride), shape.channels, shape.label_bytes,
                      shape.layer_stride, shape.head_stride,
                      array("H", shape.channel[:geometry.layers * geometry.kv_heads * shape.channels]))

    def critical(self, blocks: List[Block], queries: int, words_: int, selected: int) -> None:
        """What the last prompt queries select, as bits [layers][kv_heads][queries][words_] of 64 tokens each, in blocks
        that the caller keeps until sharing() answers."""
        room = structs_of(list(blocks))
        check(lib.kvd_sequence_critical(self._open(), len(room), room, number("queries", queries),
                                        number("words_", words_), number("selected", selected)))

    def sharing(self) -> Sharing | None:
        """The sharing configuration made of critical(); None: not yet. kvd.NoData: it was not called, or none could be
        made."""
        geometry = self.space.geometry
        layers = (c_uint8 * geometry.layers)()
        heads = (c_uint8 * (geometry.layers * geometry.kv_heads))()
        if not check(lib.kvd_sequence_sharing(self._open(), layers, heads)):
            return None
        return Sharing(bytes(layers), bytes(heads))

    def close(self) -> None:
        """Everything goes back. Again does nothing."""
        self._handle, self._pins = None, []

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


def _way(ways: dict[str, int], name: str) -> int:
    if name not in ways:
        raise ValueError(f"how is one of {', '.join(ways)}, not {name!r}")
    return ways[name]
