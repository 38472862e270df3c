# SPDX-License-Identifier: Apache-2.0
"""The newest tokens of a row as the model computed them, where blocks are quantised to few bits (struct kvd_exact)."""

from __future__ import annotations

import ctypes

import torch

import kvd

SPANS = {"q4": 128}     # dtypes of blocks, and tokens of a span


class Exact:
    """Keys and values of the tokens in a row's last span, for each layer: float32 [2, tokens, kv_heads * head_dim]."""

    def __init__(self, geometry: kvd.Geometry):
        self.span, self.width = SPANS[geometry.dtype], geometry.kv_heads * geometry.head_dim
        self.rows = [torch.empty(2, self.span, self.width) for _ in range(geometry.layers)]
        self.begins = [0] * geometry.layers     # position of each layer's first row
        self.seen: tuple[torch.Tensor, int] | None = None       # rows, and how many, of the attention that comes next

    def add(self, layer: int, position: int, n: int, k: int, v: int) -> None:
        """Add n tokens from a position on, whose keys and values are at these addresses."""
        first, size = self.begins[layer], self.width * 4
        before = position - first if position // self.span * self.span <= first <= position else 0
        rows = self.rows[layer]
        if before + n > self.span:          # several spans, of which end() keeps the last
            rows = torch.cat([rows[:, :before], torch.empty(2, n, self.width)], 1)
        elif not before:
            self.begins[layer] = position
        for plane, at in zip(rows, (k, v)):
            ctypes.memmove(plane.data_ptr() + before * size, at, n * size)
        self.seen = rows, before + n

    def of(self) -> kvd.Exact | None:
        """Return what the attention of the layer to which tokens were added sees; None: there are no new tokens."""
        if self.seen is None:
            return None
        rows, n = self.seen
        return kvd.Exact(rows[0].data_ptr(), rows[1].data_ptr(), self.width, n, self.span)

    def end(self, layer: int, length: int) -> None:
        """End a layer's pass, with so many positions written: keep the rows of the last span."""
        if self.seen is None:
            return
        (rows, n), self.seen = self.seen, None
        if rows is not self.rows[layer]:
            rest = min(length % self.span, n)
            self.rows[layer][:, :rest] = rows[:, n - rest:n]
            self.begins[layer] = length - rest
