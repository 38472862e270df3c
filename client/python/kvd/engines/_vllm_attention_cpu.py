# SPDX-License-Identifier: Apache-2.0
"""kvd's attention (_vllm_attention.py) in vLLM's CPU backend. vLLM's own kernel keeps keys in an order that depends on the
processor, into which the daemon cannot look."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from ._vllm_attention import Attention
from ._vllm_layout import asks_for_methods


class CpuAttention(Attention, CPUAttentionBackendImpl):
    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.prepare(self.is_fp8_kv_cache)

    def do_kv_cache_update(self, layer: torch.nn.Module, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
                           slot_mapping: torch.Tensor) -> None:
        self.store(layer, key, value, kv_cache, slot_mapping)


_stock = CPUAttentionBackend.get_impl_cls


def _implementation() -> type[CPUAttentionBackendImpl]:
    return CpuAttention if asks_for_methods(get_current_vllm_config_or_none()) else _stock()


def register() -> None:
    """Let vLLM's CPU backend use this attention where methods are asked for."""
    CPUAttentionBackend.get_impl_cls = staticmethod(_implementation)
