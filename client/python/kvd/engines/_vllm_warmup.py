# SPDX-License-Identifier: Apache-2.0
"""Steps that vLLM invents when it starts must not write blocks of other engines.

To compile and tune kernels, model runner V2 runs prefill and decoding steps before the first request (warmup_kernels,
and for FlashInfer run_mixed_prefill_decode_warmup). They count block ids up from 1. In a pool that engines share, these
are somebody's sealed blocks, or memory that is not mapped yet. vLLM disables its connector during such steps; this is
how they are recognised here. They write nowhere, because all their slots are padding, and read block 0, vLLM's null
block. Setting kernel_config.enable_jit_warmup to False would not do: FlashInfer's warm-up runs regardless.

Profiling and the capture of CUDA graphs use padding and block 0 themselves (get_dummy_slot_mappings), as do all invented
steps of model runner V1.
"""

from __future__ import annotations

import torch
from vllm.distributed.kv_transfer import has_kv_transfer_group
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.block_table import BlockTables

_append, _slots = BlockTables.append_block_ids, BlockTables.compute_slot_mappings


def append_block_ids(self: BlockTables, req_index: int, new_block_ids: tuple[list[int], ...], overwrite: bool) -> None:
    if not has_kv_transfer_group():
        new_block_ids = tuple([0] * len(ids) for ids in new_block_ids)
    _append(self, req_index, new_block_ids, overwrite)


def compute_slot_mappings(self: BlockTables, *arguments, **options) -> torch.Tensor:
    slots = _slots(self, *arguments, **options)
    return slots if has_kv_transfer_group() else slots.fill_(PAD_SLOT_ID)


def guard() -> None:
    """Protect the pool from the steps that vLLM invents in this process, from now on."""
    BlockTables.append_block_ids, BlockTables.compute_slot_mappings = append_block_ids, compute_slot_mappings
