# SPDX-License-Identifier: Apache-2.0
"""vLLM's attention on CPUs over planes of kvd, for requests that follow the methods of a space ("methods": true).

vLLM's own kernel keeps keys in an order that depends on the processor, into which the daemon cannot look. Here, a layer's
page has the planes of libkvd, and libkvd attends. A request whose tokens were reduced has blocks that are not in vLLM's
table (_vllm_methods.py): they come with the step's metadata, and are seen before the blocks of the table.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.utils.math_utils import cdiv
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl, CPUAttentionMetadata

import kvd

from ._vllm_layout import asks_for_methods

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


class Step:
    """The requests of a step: a table for each piece of a request, with the place of its first query in the batch, the
    first query's position in the table, and the number of queries."""

    def __init__(self, connector: Any, metadata: CPUAttentionMetadata):
        space, self.memory, self.metadata = connector.space, connector.memory, metadata
        self.parts: list[tuple[kvd.Table, int, int, int]] = []
        self.threads, work = torch.get_num_threads(), 0
        size, starts = space.geometry.block_tokens, metadata.query_start_loc.tolist()
        lengths, tables = metadata.seq_lens.tolist(), metadata.block_table
        slots = metadata.slot_mapping[metadata.query_start_loc[:len(lengths)]].tolist()
        for row, (start, length) in enumerate(zip(starts, lengths)):
            n = starts[row + 1] - start
            moved, blocks = connector.kept.get(slots[row] // size, (0, []))       # known by the block that it writes next
            ids = blocks + tables[row, moved:cdiv(length, size)].tolist()
            self._add(space, ids, start, length - n + (len(blocks) - moved) * size, n)
            work += n * length
        if work < ALONE:
            self.threads = 1

    def _add(self, space: kvd.Space, ids: list[int], start: int, first: int, n: int) -> None:
        piece = max(cdiv(n, 2 * self.threads), PIECE) if self.threads > 1 else n
        for at in range(0, n, max(piece, 1)):
            table = kvd.Table(space)
            table.assign(self.memory, ids)
            self.parts.append((table, start + at, first + at, min(piece, n - at)))

    def attend(self, layer: int, heads: int, scale: float, q: torch.Tensor, out: torch.Tensor, **form: Any) -> None:
        """Attend from queries [tokens, heads * dim] to results of the same shape, both floats."""
        width, at, to = q.shape[1], q.data_ptr(), out.data_ptr()

        def work(i: int) -> None:
            for table, start, first, n in self.parts[i::self.threads]:
                skip = start * width * 4
                table.attend(layer, first, n, heads, scale, at + skip, width, to + skip, width, **form)

        if self.threads == 1:
            work(0)
        else:
            list(_threads(self.threads).map(work, range(self.threads)))


class Attention(CPUAttentionBackendImpl):
    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        others = [(self.alibi_slopes is not None, "ALiBi"), (self.sliding_window > 0, "sliding windows"),
                  (self.attn_type != AttentionType.DECODER, f"attention of kind {self.attn_type}"),
                  (self.is_fp8_kv_cache, "fp8 caches"),
                  (self.kv_sharing_target_layer_name is not None, "layers that share their cache")]
        names = [name for is_so, name in others if is_so]
        if names:
            raise ValueError(f"kvd does not support this with methods: {'; '.join(names)}")
        self.planes: torch.Tensor | None = None     # [blocks, 2 (K, V), kv_heads, block_tokens, dim]
        self.layer = -1

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
        slots, states = slot_mapping[:n], torch.stack([key[:n], value[:n]], 1).to(planes.dtype)
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
            connector.step = Step(connector, attn_metadata)
        q = query[:n].reshape(n, -1).to(torch.float32).contiguous()
        to = output[:n].view(n, -1)
        out = to if to.dtype == torch.float32 and to.is_contiguous() else torch.empty_like(q)
        sinks = None if self.sinks is None else self.sinks.to(torch.float32).contiguous()
        connector.step.attend(self.layer, self.num_heads, self.scale, q, out, cap=self.logits_soft_cap,
                              sinks=0 if sinks is None else sinks.data_ptr())
        if out is not to:
            to.copy_(out)
        return output


_stock = CPUAttentionBackend.get_impl_cls


def _implementation() -> type[CPUAttentionBackendImpl]:
    return Attention if asks_for_methods(get_current_vllm_config_or_none()) else _stock()


def register() -> None:
    """Let vLLM's CPU backend use this attention where methods are asked for."""
    CPUAttentionBackend.get_impl_cls = staticmethod(_implementation)
