# SPDX-License-Identifier: Apache-2.0
"""kvd's attention (_vllm_attention.py) as a backend of vLLM for GPUs: CUSTOM, which vLLM uses with --attention-backend CUSTOM.

All requests of a step are one kvd.Batch. Kernels run in vLLM's stream, outside of CUDA graphs: what a step sees depends on
addresses that are valid for it only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.utils.math_utils import cdiv
from vllm.v1.attention.backend import (AttentionBackend, AttentionImpl, AttentionMetadata, AttentionMetadataBuilder, AttentionType,
                                       CommonAttentionMetadata)
from vllm.v1.kv_cache_layout import KVCacheLayout

import kvd

from ._reduction import NOTED
from ._vllm_attention import Attention, Metadata, requests_of
from ._vllm_layout import asks_for_methods
from ._vllm_rows import Row


def stream_of(tensor: torch.Tensor) -> int | None:
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else None


class Step:
    """The requests of a step. heads: number of query heads. scale: of scores."""

    def __init__(self, connector: Any, metadata: Metadata, heads: int, scale: float):
        self.connector, self.metadata, self.heads, self.scale = connector, metadata, heads, scale
        self.requests: list[tuple[kvd.Request, int, Row | None]] = []       # with places of their first queries
        self.begun, self.stream = False, None
        for ids, start, first, n, row in requests_of(connector, metadata):
            table = kvd.Table(connector.space)
            table.assign(connector.memory, ids)
            self.requests.append((kvd.Request(table, first, n), start, row))
            if row:
                row.open(n, heads, scale)

    def _batch(self, dtype: torch.dtype) -> kvd.Batch:
        """Return the worker's batch."""
        if self.connector.batch is None:
            steps = self.connector.rows.steps
            angles = steps.frequencies if steps else None
            self.connector.batch = kvd.Batch(self.connector.space, self.heads, self.scale, dtype=dtype,
                                             frequencies=0 if angles is None else angles.data_ptr())
        return self.connector.batch

    def attend(self, layer: int, q: torch.Tensor, out: torch.Tensor, cap: float = 0, sinks: int = 0) -> None:
        """Attend from queries [tokens, heads * dim] to results of the same shape and type, both on the GPU."""
        if cap or sinks:
            raise NotImplementedError("kvd supports no soft caps and sinks on GPUs")
        self._look(layer, q)
        batch, self.stream = self._batch(q.dtype), stream_of(q)
        while True:
            try:
                if not self.begun:
                    batch.begin([it._replace(after=self._after(row)) for it, _, row in self.requests], self.stream)
                self.begun = True
                batch.attend(layer, q.data_ptr(), q.stride(0), out.data_ptr(), out.stride(0), self.stream)
                return
            except kvd.Error as error:
                self._fail(error)

    @staticmethod
    def _after(row: Row | None) -> kvd.Reader | kvd.Sequence | None:
        """A request that cannot go on gets any result, and is recomputed."""
        return row.after() if row and not row.broken else None

    def _look(self, layer: int, q: torch.Tensor) -> None:
        """Let readers note the last queries of prompts."""
        for it, start, row in self.requests:
            if row and row.reader and not row.decodes:
                end = start + it.n
                last = q[end - min(it.n, NOTED):end].to("cpu", torch.float32).contiguous()
                row.look(layer, len(last), last.data_ptr(), last.shape[1])

    def _fail(self, error: kvd.Error) -> None:
        """Go on without readers: which of them failed is not known."""
        reading = [row for _, _, row in self.requests if row and row.reader]
        failed = [row for row in reading if row.decodes] or reading
        if not failed:
            raise error
        for row in failed:
            row.fail(error)
        self.begun = False

    def end(self) -> None:
        """The step's last layer has attended."""
        if self.begun:
            self.begun = False
            self.connector.batch.end(self.stream)


# ---- for vLLM --------------------------------------------------------------------------------------------------------


@dataclass
class GpuMetadata(AttentionMetadata):
    """slot_mapping is on the GPU, the others are not."""

    num_actual_tokens: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor


class Builder(AttentionMetadataBuilder[GpuMetadata]):
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata,
              fast_build: bool = False) -> GpuMetadata:
        """Waits for the copies, since tables name what libkvd sees on the processor."""
        it = common_attn_metadata
        most = cdiv(it.max_seq_len, self.kv_cache_spec.block_size)
        return GpuMetadata(it.num_actual_tokens, it.query_start_loc_cpu, it.seq_lens.cpu(),
                           it.block_table_tensor[:, :most].cpu(), it.slot_mapping)


class GpuAttention(Attention, AttentionImpl[GpuMetadata]):
    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None,
                 alibi_slopes: list[float] | None = None, sliding_window: int | None = None, kv_cache_dtype: str = "auto",
                 logits_soft_cap: float | None = None, attn_type: str = AttentionType.DECODER,
                 kv_sharing_target_layer_name: str | None = None, sinks: torch.Tensor | None = None):
        if not asks_for_methods(get_current_vllm_config_or_none()):
            raise ValueError('the attention backend CUSTOM is kvd\'s, for "methods": true in the extra configuration of'
                             " kvd.engines.vllm: choose another one")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads or num_heads, kv_cache_dtype
        self.alibi_slopes, self.sliding_window, self.attn_type = alibi_slopes, sliding_window or -1, attn_type
        self.logits_soft_cap, self.sinks = logits_soft_cap or 0, sinks
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.prepare(kv_cache_dtype.startswith("fp8"), {"soft caps": bool(logits_soft_cap), "sinks": sinks is not None})

    def do_kv_cache_update(self, layer: torch.nn.Module, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
                           slot_mapping: torch.Tensor) -> None:
        self.store(layer, key, value, kv_cache, slot_mapping)


class Backend(AttentionBackend):
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[GpuAttention]:
        return GpuAttention

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.BLHNC,)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and head_size <= 256
