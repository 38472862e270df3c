# SPDX-License-Identifier: Apache-2.0
"""Attention over blocks in place, on the CPU (kvd_attend.h)."""

from __future__ import annotations

import ctypes
from array import array
from ctypes import c_uint32, c_void_p, pointer
from typing import TYPE_CHECKING, Any, NamedTuple, Sequence

from ._block import Block
from ._native import ExactStruct, HeadsStruct, SeenStruct, TableStruct, check, lib, number
from ._pin import Pin
from ._reader import Reader
from ._tensor import Memory

if TYPE_CHECKING:
    from ._sequence import Sequence as TokenSequence
    from ._space import Space


def _base_of(holder: Pin | Block) -> int:
    return holder.address(0) if isinstance(holder, Pin) else holder.data - holder.id * holder._size


def _check_row(ld: int, row: int, n: int) -> None:
    """Check that rows do not overlap."""
    if ld < row and n > 1 or ld < 0:
        raise ValueError(f"a row of {row} floats does not fit into {ld}")


class Exact(NamedTuple):
    """Keys and values of a layer's newest tokens as they were before they were stored: n rows of floats at addresses k and v,
    [n, kv_heads, head_dim], ld floats apart, of which the last is the last new token's. A token at position p sees these from
    position p // span * span on, and what is stored before: see kvd_attend.h."""

    k: int
    v: int
    ld: int
    n: int
    span: int


class Table:
    """The blocks of one sequence, for attention over them in place (man 3 libkvd_attend).

    Position p is slot p % block_tokens of block p // block_tokens. A table does not hold blocks: its owner must keep
    the pins and blocks that it names. For one thread at a time. Inputs and outputs are float32 in host memory, passed
    by address (torch: tensor.data_ptr(), numpy: array.ctypes.data); ld is the number of floats from one token to the
    next. Stored values are rounded to the space's dtype, or quantised.

    Calls raise kvd.Invalid if a block is not mapped, if a block to write is not being filled, or if the space is on a
    GPU, is opaque, or has dtype i8.
    """

    def __init__(self, space: Space):
        self._handle = space._open()
        self._dim = space.geometry.head_dim
        self._row = space.geometry.kv_heads * self._dim     # floats of a token's keys
        self.base = 0
        """Address of block 0, of the daemon that these blocks belong to: block b is at base + b * block_bytes, and
        on several GPUs base + b * the bytes of a shard."""
        self._ids = (c_uint32 * 64)()
        self._struct = TableStruct(blocks=ctypes.addressof(self._ids))
        self._at = ctypes.addressof(self._struct)

    def __len__(self) -> int:
        return int(self._struct.n_blocks)

    @property
    def blocks(self) -> list[int]:
        """Ids of the blocks, in order of position."""
        return self._ids[:len(self)]

    def extend(self, holder: Pin | Block, ids: Sequence[int]) -> bool:
        """Append blocks, where holder is their pin or one of them that is being filled. Returns False, and changes
        nothing, if they belong to another daemon than the table, which was replaced in between."""
        view = holder._struct.view
        if self._struct.view not in (None, view):
            return False
        self.base = self.base or _base_of(holder)
        self._append(ids)
        self._struct.view = view
        return True

    def _append(self, ids: Sequence[int]) -> None:
        n = len(self) + len(ids)
        if n > len(self._ids):
            self._ids = (c_uint32 * (2 * n))(*self._ids)
            self._struct.blocks = ctypes.addressof(self._ids)
        self._ids[len(self):n] = [number("id", it) for it in ids]
        self._struct.n_blocks = n

    def assign(self, memory: Memory, ids: Sequence[int]) -> None:
        """Replace all blocks by others in this memory, which another process of the engine holds."""
        self.base, self._struct.view, self._struct.n_blocks = memory.base, memory._view, 0
        self._append(ids)

    def replace(self, first: int, ids: Sequence[int]) -> None:
        """Replace blocks with others of the same content, as returned by Pin.seal()."""
        if not 0 <= first <= len(self) - len(ids):
            raise ValueError(f"blocks {first} to {first + len(ids) - 1} of a table of {len(self)}")
        self._ids[first:first + len(ids)] = [number("id", it) for it in ids]

    def drop(self, n: int) -> None:
        """Remove the first n blocks: positions then begin behind them."""
        if not 0 <= n <= len(self):
            raise ValueError(f"{n} blocks of a table of {len(self)}")
        rest = self._ids[n:len(self)]
        self._ids[:len(rest)] = [*rest]
        self._struct.n_blocks = len(rest)

    def cut(self, n: int) -> None:
        """Remove all but the first n blocks."""
        self._struct.n_blocks = min(number("n", n), len(self))

    def write(self, layer: int, first: int, n: int, k: int, v: int, ld: int) -> None:
        """Store the keys and values of n tokens from position first on: [n, kv_heads, head_dim], rows ld floats
        apart."""
        _check_row(ld, self._row, n)
        self._struct.first, self._struct.n = number("first", first), number("n", n)
        result = lib.kvd_paged_write(self._handle, number("layer", layer), self._at, k, v, ld)
        if result:
            check(result)

    def attend(self, layer: int, first: int, n: int, heads: int, scale: float, q: int, ldq: int, out: int,
               ldo: int, *, window: int = 0, cap: float = 0.0, sinks: int = 0, after: TokenSequence | Reader | None = None,
               frequencies: int = 0, chosen: Sequence[array[int]] | None = None, mass: int = 0,
               exact: Exact | None = None) -> None:
        """Compute causal attention from n tokens at position first to all positions up to their own. Queries and
        results are [n, heads, head_dim], with rows ldq and ldo floats apart.

        window: a token sees only the last window positions up to its own; 0: all. cap: scores are cap * tanh(scale * q . k
        / cap); 0: they are not. sinks: address of a score per query head that takes weight and has no value; 0: none. exact:
        the newest tokens as they were.

        after: a sequence whose resident entries are seen first, as the methods have left them; positions of this table then
        begin behind it. frequencies: address of [head_dim / 2] radians per position, for entries with a delta. chosen: for
        each KV head the slots of the sequence that are seen (entry * block_tokens + token), ascending, in an array("I");
        None: all. mass: address of a float per entry to which its attention is added; 0: none. These three are a reader's own, if
        after is one. Raises kvd.Invalid for a
        window over compacted or partial entries, and kvd.Stale if a daemon was replaced in between."""
        row = number("heads", heads) * self._dim
        _check_row(ldq, row, n)
        _check_row(ldo, row, n)
        self._struct.first, self._struct.n = number("first", first), number("n", n)
        form = HeadsStruct(heads, number("window", window), scale, cap, sinks or None, self._exact(exact))
        if after is None:
            result = lib.kvd_paged_attention(self._handle, number("layer", layer), self._at, form, q, ldq, out, ldo)
        elif isinstance(after, Reader):
            result = lib.kvd_reader_attention(after._open(), number("layer", layer), self._at, form, q, ldq, out, ldo)
        else:
            seen = SeenStruct(after._open()._as_parameter_, frequencies or None, *self._lists(chosen), mass or None)
            result = lib.kvd_sequence_attention(seen, number("layer", layer), self._at, form, q, ldq, out, ldo)
        if result:
            check(result)

    def _exact(self, exact: Exact | None) -> Any:
        if exact is None:
            return None
        _check_row(exact.ld, self._row, exact.n)
        k, v, ld, n, span = exact
        return pointer(ExactStruct(k, v, ld, number("n", n), number("span", span)))

    def _lists(self, chosen: Sequence[array[int]] | None) -> tuple[int | None, int | None]:
        """Return the addresses of the lists' addresses and of their lengths, which the table keeps until the next call."""
        if chosen is None:
            return None, None
        if len(chosen) != self._row // self._dim or any(it.itemsize != 4 for it in chosen):
            raise ValueError(f"chosen must have an array of 32 bits for each of {self._row // self._dim} KV heads")
        self._chosen = ((c_void_p * len(chosen))(*(it.buffer_info()[0] for it in chosen)),
                        (c_uint32 * len(chosen))(*map(len, chosen)))
        return ctypes.addressof(self._chosen[0]), ctypes.addressof(self._chosen[1])
