# SPDX-License-Identifier: Apache-2.0
"""The newest tokens of a row as the model computed them, where blocks are quantised to few bits (struct kvd_exact)."""

from __future__ import annotations

import ctypes
from ctypes import addressof
from typing import Any

import torch

import kvd

SPANS = {"q4": 128}     # dtypes of blocks, and tokens of a span


class Exact:
    """Keys and values of the tokens in a row's last span: for each layer floats [2, span, kv_heads * head_dim].

    They change when a pass ends, so that one that failed may be done again.
    """

    def __init__(self, geometry: kvd.Geometry):
        self.span, self.row = SPANS[geometry.dtype], geometry.kv_heads * geometry.head_dim * 4
        self.shape = geometry.kv_heads, geometry.head_dim
        self.rows = [self._buffer(self.span) for _ in range(geometry.layers)]
        self.first, self.count = 0, 0       # positions of the rows
        self.position, self.before = 0, 0   # of the pass in progress: its first position, and rows before it
        self.new: dict[int, Any] = {}       # rows of the next span, by layer
        self.seen: tuple[Any, int, int] | None = None   # by the attention that comes next: a buffer, its room, and its rows

    def _buffer(self, tokens: int) -> Any:
        return (ctypes.c_uint8 * (2 * tokens * self.row))()

    def begin(self, position: int) -> None:
        """Begin a pass whose first new token is at this position."""
        self.new.clear()
        self.seen, self.position = None, position
        is_next = position // self.span * self.span <= self.first <= position <= self.first + self.count
        self.before = position - self.first if is_next else 0

    def add(self, layer: int, n: int, k: int, v: int) -> None:
        """Add n tokens, whose keys and values are at these addresses."""
        buffer, room = self.rows[layer], self.span
        if self.before + n > room:
            room = self.before + n
            buffer = self._copy(buffer, self.span, 0, self.before, room)
        for plane, at in enumerate((k, v)):
            ctypes.memmove(addressof(buffer) + (plane * room + self.before) * self.row, at, n * self.row)
        self.seen = buffer, room, self.before + n

    def _copy(self, buffer: Any, room: int, first: int, n: int, to: int) -> Any:
        """Copy n rows to a buffer with room for so many."""
        copy = self._buffer(to)
        for plane in range(2):
            ctypes.memmove(addressof(copy) + plane * to * self.row, addressof(buffer) + (plane * room + first) * self.row,
                           n * self.row)
        return copy

    def of(self) -> kvd.Exact | None:
        """Return what the attention of the layer to which tokens were added sees; None: there are no new tokens."""
        if self.seen is None:
            return None
        buffer, room, n = self.seen
        return kvd.Exact(addressof(buffer), addressof(buffer) + room * self.row, self.row // 4, n, self.span)

    def end(self, layer: int) -> None:
        """End a layer's attention. Only the last span's rows are kept."""
        if self.seen is None:
            return
        (buffer, room, n), self.seen = self.seen, None
        rest = (self.position - self.before + n) % self.span
        if room > self.span:
            self.new[layer] = self._copy(buffer, room, n - rest, rest, self.span)

    def commit(self, length: int) -> None:
        """End a pass, after which so many positions are written."""
        if self.new:
            self.rows, self.first = [self.new[i] for i in range(len(self.rows))], length // self.span * self.span
            self.new = {}
        elif not self.before:
            self.first = self.position
        self.count = length - self.first

    def put(self, states: torch.Tensor) -> None:
        """Replace what was read from blocks: [layers, 2 (K, V), heads, positions, dim]."""
        heads, dim = self.shape
        for to, buffer in zip(states, self.rows):
            rows = torch.frombuffer(buffer, dtype=torch.float32).view(2, self.span, heads, dim)[:, :self.count]
            to[:, :, self.first:self.first + self.count] = rows.transpose(1, 2)
