# SPDX-License-Identifier: Apache-2.0
"""Layout BLHNC (a block's layers are adjacent) for vLLM's CPU backend. Its kernels support any distance between
blocks, but it declares only LBHNC. GPU backends declare BLHNC themselves. For methods, the CPU backend gets another
attention (_vllm_attention_cpu.py), and on GPUs CUSTOM is kvd's (_vllm_attention_gpu.py).

This is an entry point of vllm.general_plugins (see wheel_of_kvd.py). It runs in every process of vLLM, before vLLM
chooses a layout, and changes nothing unless this layout, or methods, are requested."""


from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

BACKEND = "kvd.engines._vllm_attention_gpu.Backend"     # --attention-backend CUSTOM, on GPUs


def asks_for_methods(config: VllmConfig | None) -> bool:
    """Return whether a configuration asks for methods."""
    transfer = config.kv_transfer_config if config else None
    return bool(transfer and transfer.kv_connector_module_path == "kvd.engines.vllm"
                and transfer.get_from_extra_config("methods", False))


def register() -> None:
    from vllm.platforms import current_platform
    if not current_platform.is_cpu():
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
        if not AttentionBackendEnum.CUSTOM.is_overridden():
            register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.kv_cache_layout import KVCacheLayout
    declared = CPUAttentionBackend.supported_kv_cache_layouts()
    if KVCacheLayout.BLHNC not in declared:
        CPUAttentionBackend.supported_kv_cache_layouts = classmethod(lambda cls: (*declared, KVCacheLayout.BLHNC))
        from . import _vllm_attention_cpu
        _vllm_attention_cpu.register()
