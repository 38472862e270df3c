# SPDX-License-Identifier: Apache-2.0
"""The layout BLHNC (a block's layers side by side) for vLLM's CPU backend. Its kernels take any distance between
blocks, but it declares LBHNC alone. GPU backends declare BLHNC themselves.

An entry point of vllm.general_plugins (see pyproject.toml): runs in every process of vLLM, before it chooses a layout,
and changes nothing for who does not ask for this one."""


def register() -> None:
    from vllm.platforms import current_platform
    if not current_platform.is_cpu():
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.kv_cache_layout import KVCacheLayout
    declared = CPUAttentionBackend.supported_kv_cache_layouts()
    if KVCacheLayout.BLHNC not in declared:
        CPUAttentionBackend.supported_kv_cache_layouts = classmethod(lambda cls: (*declared, KVCacheLayout.BLHNC))
