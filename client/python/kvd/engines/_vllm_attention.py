# SPDX-License-Identifier: Apache-2.0
"""vLLM's attention on CPUs over planes of kvd, for requests that follow the methods of a space ("methods": true).

vLLM's own kernel keeps keys in an order that depends on the processor, into which the daemon cannot look. Here, a layer's
page has the planes of libkvd, and libkvd attends. A request that follows methods has a table of the daemon (_vllm_rows.py),
which is seen before the rest of vLLM's table.
"""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.utils.math_utils import cdiv
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl, CPUAttentionMetadata

import kvd

from ._vllm_layout import asks_for_methods
from ._vllm_rows import Row

PIECE = 32              # queries of a request that one thread computes at a time, at least
ALONE = 1 << 14         # scores of a step below which one thread computes them all


@lru_cache
def _threads(n: int) -> ThreadPoolExecutor:
    """Threads that run on the processors of all threads of this process: vLLM binds each to one."""
    processors: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):      # it has ended
            processors |= os.sched_getaffinity(int(thread))
    return ThreadPoolExecutor(n, initializer=lambda: os.sched_setaffinity(0, processors))


class Part(NamedTuple):
    """n queries of a request. table: what vLLM has of it. start: place of the first query in the batch. first: its position in
    the table. row: what is seen before the table."""

    table: kvd.Table
    start: int
    first: int
    n: int
    row: Row | None


class Step:
    """The requests of a step, in pieces for threads. heads: number of query heads. scale: of scores."""

    def __init__(self, connector: Any, metadata: CPUAttentionMetadata, heads: int, scale: float):
        self.space, self.memory, self.metadata = connector.space, connector.memory, metadata
        self.heads, self.scale = heads, scale
        self.parts: list[Part] = []
        self.looking: list[tuple[Row, int, int]] = []   # rows, and places and numbers of their queries
        self.threads, work = torch.get_num_threads(), 0
        size, starts = self.space.geometry.block_tokens, metadata.query_start_loc.tolist()
        lengths, tables = metadata.seq_lens.tolist(), metadata.block_table
        slots = metadata.slot_mapping[metadata.query_start_loc[:len(lengths)]].tolist()
        for i, (start, length) in enumerate(zip(starts, lengths)):
            n, row = starts[i + 1] - start, connector.rows.now.get(slots[i] // size)    # known by the block that it writes next
            moved, before = (row.moved, row.first) if row else (0, 0)
            if row:
                row.open(n, heads, scale)
                self.looking.append((row, start, n))
            ids, first = tables[i, moved:cdiv(length, size)].tolist(), length - n - before
            self._add(ids, start, first, n, row)
            work += n * length
        if work < ALONE:
            self.threads = 1

    def _add(self, ids: list[int], start: int, first: int, n: int, row: Row | None) -> None:
        one = self.threads == 1 or row and row.decodes
        piece = n if one else max(cdiv(n, 2 * self.threads), PIECE)
        for at in range(0, n, max(piece, 1)):
            table = kvd.Table(self.space)
            table.assign(self.memory, ids)
            self.parts.append(Part(table, start + at, first + at, min(piece, n - at), row))

    def attend(self, layer: int, q: torch.Tensor, out: torch.Tensor, **form: Any) -> None:
        """Attend from queries [tokens, heads * dim] to results of the same shape, both floats."""
        width, at, to = q.shape[1], q.data_ptr(), out.data_ptr()
        for row, start, n in self.looking:
            row.look(layer, n, at + start * width * 4, width)

        def work(i: int) -> None:
            for it in self.parts[i::self.threads]:
                skip = it.start * width * 4
                self._attend(layer, it, at + skip, to + skip, width, **form)

        if self.threads == 1:
            work(0)
        else:
            list(_threads(self.threads).map(work, range(self.threads)))

    def _attend(self, layer: int, part: Part, q: int, out: int, width: int, **form: Any) -> None:
        """A request that cannot go on gets zeros, and is recomputed."""
        row = part.row
        for _ in range(2):
            if row and row.broken:
                ctypes.memset(out, 0, part.n * width * 4)
                return
            try:
                part.table.attend(layer, part.first, part.n, self.heads, self.scale, q, width, out, width,
                                  after=row.after() if row else None, frequencies=row.frequencies if row else 0, **form)
                return
            except kvd.Error as error:
                if not row or not row.reader:
                    raise
                row.fail(error)         # once more, without the reader


def _scales(layer: Any) -> tuple[float, float]:
    """Return by what a layer's keys and values were divided before they were stored."""
    return layer._k_scale_float, layer._v_scale_float


class Attention(CPUAttentionBackendImpl):
    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        others = [(self.alibi_slopes is not None, "ALiBi"), (self.sliding_window > 0, "sliding windows"),
                  (self.attn_type != AttentionType.DECODER, f"attention of kind {self.attn_type}"),
                  (self.kv_sharing_target_layer_name is not None, "layers that share their cache")]
        names = [name for is_so, name in others if is_so]
        if names:
            raise ValueError(f"kvd does not support this with methods: {'; '.join(names)}")
        self.planes: torch.Tensor | None = None     # [blocks, 2 (K, V), kv_heads, block_tokens, dim]
        self.layer = -1
        self.bytes = None if not self.is_fp8_kv_cache else torch.float8_e5m2 if "e5m2" in self.kv_cache_dtype else torch.float8_e4m3fn

    def _place(self, cache: torch.Tensor) -> torch.Tensor:
        """Find the layer's place in a block of kvd."""
        if self.planes is None or self.planes.data_ptr() != cache.data_ptr():
            memory, blocks = get_kv_transfer_group().memory, cache.shape[0]
            self.planes = cache.view(blocks, 2, self.num_kv_heads, -1, self.head_size)
            self.layer = (cache.data_ptr() - memory.base) // (self.planes[0].numel() * cache.element_size())
        return self.planes

    def do_kv_cache_update(self, layer: torch.nn.Module, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
                           slot_mapping: torch.Tensor) -> None:
        planes, n = self._place(kv_cache), min(len(slot_mapping), len(key))
        slots, states = get_kv_transfer_group().rows.placed(slot_mapping[:n]), torch.stack([key[:n], value[:n]], 1)
        if self.bytes:
            scales, most = torch.tensor(_scales(layer), dtype=torch.float32).view(2, 1, 1), torch.finfo(self.bytes).max
            states = (states / scales).clamp(-most, most).to(self.bytes).view(planes.dtype)
        else:
            states = states.to(planes.dtype)
        if n and int(slots.min()) < 0:          # padding
            states, slots = states[slots >= 0], slots[slots >= 0]
        size = planes.shape[3]
        planes[slots // size, :, :, slots % size] = states

    def forward(self, layer: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                kv_cache: torch.Tensor, attn_metadata: CPUAttentionMetadata | None, output: torch.Tensor,
                output_scale: torch.Tensor | None = None, output_block_scale: torch.Tensor | None = None) -> torch.Tensor:
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("kvd does not support fused output quantization")
        if attn_metadata is None:               # a step that vLLM invents to warm up
            return output
        connector, n = get_kv_transfer_group(), attn_metadata.num_actual_tokens
        self._place(kv_cache)
        if connector.step is None or connector.step.metadata is not attn_metadata:      # the first layer of a step
            connector.step = Step(connector, attn_metadata, self.num_heads, self.scale)
        q = query[:n].reshape(n, -1).to(torch.float32).contiguous()
        key_scale, value_scale = _scales(layer) if self.bytes else (1., 1.)
        if key_scale != 1:
            q = q * key_scale
        to = output[:n].view(n, -1)
        out = to if to.dtype == torch.float32 and to.is_contiguous() else torch.empty_like(q)
        sinks = None if self.sinks is None else self.sinks.to(torch.float32).contiguous()
        connector.step.attend(self.layer, q, out, cap=self.logits_soft_cap,
                              sinks=0 if sinks is None else sinks.data_ptr())
        if value_scale != 1:
            out.mul_(value_scale)
        if out is not to:
            to.copy_(out)
        return output


_stock = CPUAttentionBackend.get_impl_cls


def _implementation() -> type[CPUAttentionBackendImpl]:
    return Attention if asks_for_methods(get_current_vllm_config_or_none()) else _stock()


def register() -> None:
    """Let vLLM's CPU backend use this attention where methods are asked for."""
    CPUAttentionBackend.get_impl_cls = staticmethod(_implementation)
