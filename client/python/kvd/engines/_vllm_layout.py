# SPDX-License-Identifier: Apache-2.0
"""Layout BLHNC (a block's layers are adjacent) for vLLM's CPU backend. Its kernels support any distance between
blocks, but it declares only LBHNC. GPU backends declare BLHNC themselves.

This is an entry point of vllm.general_plugins (see wheel_of_kvd.py). It runs in every process of vLLM, before vLLM
chooses a layout, and changes nothing unless this layout is requested."""


def register() -> None:
    from vllm.platforms import current_platform
    if not current_platform.is_cpu():
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.kv_cache_layout import KVCacheLayout
    declared = CPUAttentionBackend.supported_kv_cache_layouts()
    if KVCacheLayout.BLHNC not in declared:
        CPUAttentionBackend.supported_kv_cache_layouts = classmethod(lambda cls: (*declared, KVCacheLayout.BLHNC))
