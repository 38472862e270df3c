# SPDX-License-Identifier: Apache-2.0
"""What a sequence's tokens see of it (kvd_attend.h)."""

from __future__ import annotations

from array import array
from ctypes import byref, c_void_p
from typing import NamedTuple

from ._handle import Handle
from ._native import ReaderOptionsStruct, ReaderStatsStruct, check, closed, lib, number, ticks
from ._sequence import Sequence


class ReaderStats(NamedTuple):
    """What a reader has counted."""

    selections: int
    """Selections of a layer and head (HShare)."""
    misses: int
    """Blocks that queries missed (KVReviver)."""
    late: int
    """Waits for blocks that did not come in time."""
    most_resident: int
    """Maximum number of resident blocks since decoding began."""
    select_ns: int
    fetch_ns: int
    """Nanoseconds of estimating, and of waiting for blocks."""


_SELECT = {"tokens": 1, "blocks": 2, "bounds": 3}


class Reader:
    """Decides what a sequence's tokens see of it, as the space's settings hshare and kvreviver say when it is made. For the
    thread that uses the sequence; keeps the sequence open.

    For each pass: begin(), then in each layer Table.attend(..., after=reader), then end(). After the pass that completes the
    prompt: decode().

    heads and scale are those of Table.attend(); frequencies: address of [head_dim / 2] radians per position, for entries with
    a delta. If a block that is needed does not come within timeout_s seconds, attention raises kvd.TimedOut, if there is no room
    for it kvd.PoolFull, without its daemon kvd.Stale or kvd.ConnectionLost.
    """

    def __init__(self, sequence: Sequence, heads: int, scale: float, *, frequencies: int = 0, timeout_s: float = 10.0):
        self.sequence, pointer, handle = sequence, c_void_p(), sequence._open()
        options = ReaderOptionsStruct(number("heads", heads), scale, frequencies or None, ticks(timeout_s, 10**9, 62))
        check(lib.kvd_reader_new(handle, byref(options), byref(pointer)))
        self._handle: Handle | None = Handle(pointer, lib.kvd_reader_free, handle)

    def begin(self, behind: int, n: int) -> None:
        """Begin a pass of n tokens. behind: number of tokens behind the sequence's last entry, with the new ones."""
        lib.kvd_reader_begin(self._open(), number("behind", behind), number("n", n))

    def look(self, layer: int, q: int, ldq: int) -> None:
        """Note what the queries of a prompt's pass need, whose attention is computed otherwise: [n, heads, head_dim], rows
        ldq floats apart. Of its queries the last 32 matter: a pass of only these may be described instead."""
        check(lib.kvd_reader_look(self._open(), number("layer", layer), q, ldq))

    def select(self, layer: int, q: int, n: int, what: str = "tokens") -> list[array[int]]:
        """What one query, [heads, head_dim] floats at address q, needs most of the sequence, for an attention of your own:
        for each KV head up to n slots of "tokens", or indices of entries: "blocks" by the share of the attention that they
        get, "bounds" by the largest score that any of their keys can have (Quest). Ascending; slot s is token s %
        block_tokens of entry s // block_tokens. "tokens" and "blocks" go by labels (HShare), which remain when a block
        leaves; entries without labels yet come first. Call begin() before. Raises kvd.NotSupported if neither hshare nor
        kvreviver was on when the reader was made; "bounds" needs neither."""
        if what not in _SELECT:
            raise ValueError(f"what must be one of {', '.join(_SELECT)}, not {what!r}")
        heads = self.sequence.space.geometry.kv_heads
        to, found = array("I", bytes(4 * heads * number("n", n))), array("I", bytes(4 * heads))
        check(lib.kvd_reader_select(self._open(), number("layer", layer), _SELECT[what], q, n, to.buffer_info()[0],
                                    found.buffer_info()[0]))
        return [to[head * n:head * n + found[head]] for head in range(heads)]

    def end(self) -> int:
        """End a pass. Once decoding has begun, blocks may leave. Returns how many entries may have changed."""
        return check(lib.kvd_reader_end(self._open()))

    def decode(self, behind: int) -> int:
        """Begin decoding, after the pass that completes the prompt, with so many tokens behind the last entry. Returns how
        many entries may have changed."""
        return check(lib.kvd_reader_decode(self._open(), number("behind", behind)))

    def stats(self) -> ReaderStats:
        """Return what it has counted so far."""
        struct = ReaderStatsStruct()
        lib.kvd_reader_stats(self._open(), byref(struct))
        return ReaderStats(*(getattr(struct, name) for name in ReaderStats._fields))

    def close(self) -> None:
        """Free the reader. Does nothing if already closed."""
        self._handle = None

    def _open(self) -> Handle:
        if not self._handle:
            raise closed("this reader")
        return self._handle
