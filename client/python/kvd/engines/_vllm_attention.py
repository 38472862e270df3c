# SPDX-License-Identifier: Apache-2.0
"""Attention over planes of kvd in vLLM, for requests that follow the methods of a space ("methods": true).

A layer's page has the planes of libkvd, and libkvd attends: in host memory here, on a GPU in _vllm_attention_gpu.py. A request
that follows methods has a table of the daemon (_vllm_rows.py), which is seen before the rest of vLLM's table.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.utils.math_utils import cdiv
from vllm.v1.attention.backend import AttentionType

import kvd

from ._vllm_rows import HOST, Row

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


class Metadata(Protocol):
    """What vLLM says of a step, as CPUAttentionMetadata. All but the last are on the processor."""

    num_actual_tokens: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor


def requests_of(connector: Any, metadata: Metadata) -> Iterator[tuple[list[int], int, int, int, Row | None]]:
    """Yield for each request of a step the ids of vLLM's blocks that are read, the place of its first query in the batch, that
    query's position in these blocks, the number of queries, and its row, if it has one."""
    size, tables = connector.space.geometry.block_tokens, metadata.block_table
    starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    for i, (start, length) in enumerate(zip(starts, lengths)):
        n = starts[i + 1] - start
        if n == 0:          # padding
            continue
        ids = tables[i, :cdiv(length, size)].tolist()
        row = connector.rows.now.get(ids[(length - n) // size])     # known by the block that it writes next
        moved, before = (row.moved, row.first) if row else (0, 0)
        yield ids[moved:], start, length - n - before, n, row


class Step:
    """The requests of a step, in pieces for threads. heads: number of query heads. scale: of scores."""

    def __init__(self, connector: Any, metadata: Metadata, heads: int, scale: float):
        self.space, self.memory, self.metadata = connector.space, connector.memory, metadata
        self.heads, self.scale = heads, scale
        self.parts: list[Part] = []
        self.looking: list[tuple[Row, int, int]] = []   # rows, and places and numbers of their queries
        requests = list(requests_of(connector, metadata))
        work = sum(n * (first + n + (row.first if row else 0)) for _, _, first, n, row in requests)
        self.threads = torch.get_num_threads() if work >= ALONE else 1
        for ids, start, first, n, row in requests:
            if row:
                row.open(n, heads, scale)
                self.looking.append((row, start, n))
            self._add(ids, start, first, n, row)

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

    def end(self) -> None:
        """The step's last layer has attended."""


# ---- for vLLM --------------------------------------------------------------------------------------------------------


def step_of(connector: Any, *given: Any) -> Any:
    """Return a step where the connector's space is."""
    if connector.space.device[0] == HOST:
        return Step(connector, *given)
    from . import _vllm_attention_gpu
    return _vllm_attention_gpu.Step(connector, *given)


def _scales(layer: Any) -> tuple[float, float]:
    """Return by what a layer's keys and values were divided before they were stored."""
    return layer._k_scale_float, layer._v_scale_float


class Attention:
    """What the implementations of vLLM's backends have in common. Their constructors set the members that vLLM's have, and call
    prepare()."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    alibi_slopes: Any
    sliding_window: int
    kv_cache_dtype: str
    logits_soft_cap: float
    attn_type: str
    kv_sharing_target_layer_name: str | None
    sinks: torch.Tensor | None

    def prepare(self, is_fp8: bool, others: dict[str, bool] | None = None) -> None:
        """others: what is not supported, by name, and whether it is asked for."""
        refused = {"ALiBi": self.alibi_slopes is not None, "sliding windows": self.sliding_window > 0,
                   f"attention of kind {self.attn_type}": self.attn_type != AttentionType.DECODER,
                   "layers that share their cache": self.kv_sharing_target_layer_name is not None, **(others or {})}
        names = [name for name, is_so in refused.items() if is_so]
        if names:
            raise ValueError(f"kvd does not support this with methods: {'; '.join(names)}")
        self.planes: torch.Tensor | None = None     # [blocks, 2 (K, V), kv_heads, block_tokens, dim]
        self.layer = -1
        self.bytes = None if not is_fp8 else torch.float8_e5m2 if "e5m2" in self.kv_cache_dtype else torch.float8_e4m3fn

    def _place(self, cache: torch.Tensor) -> torch.Tensor:
        """Find the layer's place in a block of kvd."""
        if self.planes is None or self.planes.data_ptr() != cache.data_ptr():
            memory, blocks = get_kv_transfer_group().memory, cache.shape[0]
            self.planes = cache.view(blocks, 2, self.num_kv_heads, -1, self.head_size)
            self.layer = (cache.data_ptr() - memory.base) // (self.planes[0].numel() * cache.element_size())
        return self.planes

    def store(self, layer: torch.nn.Module, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
              slot_mapping: torch.Tensor) -> None:
        """Store keys and values of a step's tokens, [tokens, kv_heads, dim] each."""
        if not has_kv_transfer_group():         # a step that vLLM invents, perhaps before it has the pool
            return
        planes, n = self._place(kv_cache), min(len(slot_mapping), len(key))
        blocks, slots, real = get_kv_transfer_group().rows.placed(slot_mapping[:n])
        if self.bytes:
            most = torch.finfo(self.bytes).max
            states = torch.stack([it[:n].to(torch.float32) / scale for it, scale in zip((key, value), _scales(layer))], 1)
            states = states.clamp(-most, most).to(self.bytes).view(planes.dtype)
        else:
            states = torch.stack([key[:n], value[:n]], 1).to(planes.dtype)
        planes[blocks, :, :, slots] = states if real is None else states[real]

    def forward(self, layer: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                kv_cache: torch.Tensor, attn_metadata: Metadata | None, output: torch.Tensor,
                output_scale: torch.Tensor | None = None, output_block_scale: torch.Tensor | None = None) -> torch.Tensor:
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("kvd does not support fused output quantization")
        if attn_metadata is None or not has_kv_transfer_group():       # a step that vLLM invents
            return output.fill_(0)
        connector, n = get_kv_transfer_group(), attn_metadata.num_actual_tokens
        self._place(kv_cache)
        if connector.step is None or connector.step.metadata is not attn_metadata:      # the first layer of a step
            connector.form = connector.form or (self.num_heads, self.scale)
            connector.step = step_of(connector, attn_metadata, *connector.form)
        if connector.form != (self.num_heads, self.scale):
            raise NotImplementedError("kvd follows no methods in models whose layers differ in heads or scale")
        numbers = torch.float32 if connector.space.device[0] == HOST else query.dtype
        q = query[:n].reshape(n, -1).to(numbers).contiguous()
        key_scale, value_scale = _scales(layer) if self.bytes else (1., 1.)
        if key_scale != 1:
            q = q * key_scale
        to = output[:n].view(n, -1)
        out = to if to.dtype == q.dtype and to.is_contiguous() else torch.empty_like(q)
        sinks = None if self.sinks is None else self.sinks.to(torch.float32).contiguous()
        connector.step.attend(self.layer, q, out, cap=self.logits_soft_cap,
                              sinks=0 if sinks is None else sinks.data_ptr())
        if value_scale != 1:
            out.mul_(value_scale)
        if out is not to:
            to.copy_(out)
        return output
