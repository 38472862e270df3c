# SPDX-License-Identifier: Apache-2.0
"""Keys and values of bidirectional models in blocks, and attention over them in place; see kvd.engines.diffusion."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from ctypes import byref
from typing import Any, Sequence

import torch

import kvd

from .. import _kernels as native
from ._transformers_model import DTYPES, refuse

_ALONE = 1 << 14        # queries x keys for which threads are not worth their start


class Planes:
    """Blocks of one layer, by address: keys and values [2, kv_heads, block_tokens, head_dim] of the space's dtype, then, if
    `size` bytes have room for it, the state plane [block_tokens, state_width]. Its owner keeps the memory."""

    def __init__(self, geometry: kvd.Geometry, at: Sequence[int], size: int):
        self.geometry, self.at, self.size = geometry, list(at), size
        self.runs: list[tuple[int, torch.Tensor]] = []      # first block, and blocks [n, elements] that are adjacent
        first, dtype = 0, DTYPES[geometry.dtype]
        for i in range(1, len(self.at) + 1):
            if i == len(self.at) or self.at[i] != self.at[i - 1] + size:
                memory = (ctypes.c_uint8 * ((i - first) * size)).from_address(self.at[first])
                self.runs.append((first, torch.frombuffer(memory, dtype=dtype).view(i - first, -1)))
                first = i

    def _kv(self, run: torch.Tensor) -> torch.Tensor:
        g = self.geometry
        plain = 2 * g.kv_heads * g.block_tokens * g.head_dim
        return run[:, :plain].view(-1, 2, g.kv_heads, g.block_tokens, g.head_dim)

    def write(self, first: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values [kv_heads, n, head_dim] in slots first to first + n - 1, all of which are here."""
        size, n = self.geometry.block_tokens, keys.shape[1]
        for block, run in self.runs:
            begin, end = max(first, block * size), min(first + n, (block + len(run)) * size)
            if begin < end:
                for plane, states in enumerate((keys, values)):
                    _fill(self._kv(run)[:, plane], begin - block * size, states[:, begin - first:end - first])

    def write_states(self, rows: torch.Tensor) -> None:
        """Store the rows after the layer [n, state_width] from slot 0 on."""
        for block, run in self.runs:
            part = rows[block * self.geometry.block_tokens:(block + len(run)) * self.geometry.block_tokens]
            _fill(self._states(run)[:, None], 0, part[None])

    def states(self, n: int) -> torch.Tensor:
        """Copy the rows of the first n slots: [n, state_width]."""
        return torch.cat([self._states(run).flatten(0, 1) for _, run in self.runs])[:n]

    def _states(self, run: torch.Tensor) -> torch.Tensor:
        g = self.geometry
        first = 2 * g.kv_heads * g.block_tokens * g.head_dim
        return run[:, first:first + g.block_tokens * g.state_width].view(-1, g.block_tokens, g.state_width)

    def clear_last(self) -> None:
        """Zero the last block, so that slots of no token are the same in all processes."""
        self.runs[-1][1][-1].zero_()


def _fill(plane: torch.Tensor, first: int, states: torch.Tensor) -> None:
    """Copy states [heads, n, dim] to slots from first on of a plane [blocks, heads, block_tokens, dim]."""
    size, n, at = plane.shape[2], states.shape[1], 0
    while at < n:
        block, slot = divmod(first + at, size)
        whole = (n - at) // size if slot == 0 else 0
        if whole:
            plane[block:block + whole] = states[:, at:at + whole * size].reshape(len(states), whole, size, -1).transpose(0, 1)
        take = whole * size or min(size - slot, n - at)
        if not whole:
            plane[block, :, slot:slot + take] = states[:, at:at + take]
        at += take


def plain_bytes(g: kvd.Geometry) -> int:
    """Return the size of a block of one layer without its state plane."""
    return 2 * g.kv_heads * g.block_tokens * g.head_dim * DTYPES[g.dtype].itemsize


class Private:
    """n blocks in memory of this process, with states or without."""

    def __init__(self, geometry: kvd.Geometry, n: int, states: bool):
        size = geometry.block_bytes if states else plain_bytes(geometry)
        self.memory = torch.zeros(n * size, dtype=torch.uint8)
        self.planes = Planes(geometry, range(self.memory.data_ptr(), self.memory.data_ptr() + n * size, size), size)


class Place:
    """Where a request's keys and values are, which layers get as past_key_values. Every position is seen by every query.

    Position p is in slot p if it is in the prefix. The rest begins in a block of its own, so that stored blocks are never
    written."""

    def __init__(self, geometry: kvd.Geometry, prefix: int, tokens: int):
        size = geometry.block_tokens
        self.geometry, self.prefix, self.tokens = geometry, prefix, tokens
        self.prefix_blocks = -(-prefix // size)
        self.gap = self.prefix_blocks * size - prefix
        self.rest_blocks = -(-(tokens - prefix) // size)
        self.layers: dict[int, tuple[list[Planes], Any]] = {}   # by layer: of the prefix and the rest; their addresses
        self.held: list[Any] = []                               # memory of the planes
        self.first = 0                                          # position of the first row
        slots = [*range(prefix), *range(prefix + self.gap, tokens + self.gap)]
        self.n_keys = slots[-1] + 1
        hole = self.gap and tokens > prefix
        self.chosen = (ctypes.c_uint32 * tokens)(*slots) if hole else None
        self.scratch = torch.empty(geometry.kv_heads, 0)
        self.pool: ThreadPoolExecutor | None = None

    def add(self, layer: int, *parts: Planes) -> None:
        """Say where a layer's blocks are: those of the prefix, then the others."""
        self.layers[layer] = list(parts), native.pointers([at for it in parts for at in it.at])

    def add_private(self, layer: int, shared: Planes | None = None) -> None:
        """Give a layer private blocks, except for those of the prefix that are given."""
        n = 0 if shared else self.prefix_blocks
        own = Private(self.geometry, n + self.rest_blocks, False)
        self.held.append(own)
        at, size = own.planes.at, own.planes.size
        self.add(layer, shared or Planes(self.geometry, at[:n], size), Planes(self.geometry, at[n:], size))

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any) -> tuple[Place, int]:
        """Store a layer's keys and values [1, kv_heads, n, head_dim] of the rows. Returns what attend() needs."""
        g, n = self.geometry, keys.shape[2]
        for it in (keys, values):
            if it.shape != (1, g.kv_heads, n, g.head_dim) or it.dtype != DTYPES[g.dtype]:
                refuse(f"keys or values of shape {list(it.shape)} and {it.dtype} (autocast?) in a space of {g}")
        parts, inside = self.layers[layer][0], max(min(self.prefix - self.first, n), 0)
        if inside:
            parts[0].write(self.first, keys[0, :, :inside], values[0, :, :inside])
        if inside < n:
            parts[1].write(self.first + inside - self.prefix, keys[0, :, inside:], values[0, :, inside:])
        return self, layer

    def attend(self, layer: int, query: torch.Tensor, scale: float) -> torch.Tensor:
        """Attend from queries [1, heads, n, head_dim] to all positions, in place. Returns [1, n, heads, head_dim]."""
        g, (_, heads, n, dim), kernels = self.geometry, query.shape, native.pick(None)
        q = query[0].transpose(0, 1).to(torch.float32).contiguous()
        out = torch.empty_like(q)
        group, row = heads // g.kv_heads, dim * DTYPES[g.dtype].itemsize
        plane = g.block_tokens * row
        a = native.Attention(ops=kernels.address, blocks=self.layers[layer][1], stride=row, dim=dim, n=n, group=group,
                             type=native.NUMBERS[str(DTYPES[g.dtype]).removeprefix("torch.")], scale=scale,
                             block_tokens=g.block_tokens, n_keys=self.n_keys, ldq=heads * dim, ldo=heads * dim)
        if self.chosen is not None:
            a.chosen, a.n_chosen = ctypes.addressof(self.chosen), len(self.chosen)
        room = native.lib.kvd_attend_scratch(byref(a))
        if self.scratch.shape[1] < room:
            self.scratch = torch.empty(g.kv_heads, room)

        def attend_head(head: int) -> None:
            b = native.Attention.from_buffer_copy(a)
            b.k_offset, b.v_offset, b.scratch = head * plane, (g.kv_heads + head) * plane, self.scratch[head].data_ptr()
            b.q, b.out = (it.data_ptr() + 4 * head * group * dim for it in (q, out))
            native.lib.kvd_attend(byref(b))     # without the interpreter's lock

        for _ in (map if self._is_alone(n) else self._threads().map)(attend_head, range(g.kv_heads)):
            pass
        return out.to(query.dtype)[None]

    def _is_alone(self, n: int) -> bool:
        return torch.get_num_threads() == 1 or self.geometry.kv_heads == 1 or n * self.n_keys < _ALONE

    def _threads(self) -> ThreadPoolExecutor:
        """As many threads as torch has, for the rest of the request."""
        if self.pool is None:
            self.pool = ThreadPoolExecutor(min(torch.get_num_threads(), self.geometry.kv_heads))
        return self.pool
