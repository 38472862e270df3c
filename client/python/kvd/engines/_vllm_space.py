# SPDX-License-Identifier: Apache-2.0
"""The space for a vLLM's KV cache: refused configurations, geometry, and fingerprint."""

from __future__ import annotations

import errno
import hashlib
import os
import re
from pathlib import Path

import vllm
from vllm.config import ModelConfig, VllmConfig
from vllm.platforms import current_platform
from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVQuantMode

import kvd

from ._common import weights
from ._vllm_groups import is_dense, is_sparse

OLDEST = (0, 31)
PACKED_AS_SERVED = ("longrope", "dynamic")      # RoPE kinds whose keys depend on the maximum sequence length
SPECULATION = ("ngram", "ngram_gpu", "suffix", "draft_model")
SCALES_WITH_WEIGHTS = (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR)   # other modes keep scales beside the blocks


def require_vllm() -> None:
    found = tuple(int(n) for n in re.findall(r"\d+", vllm.__version__)[:2])
    if found < OLDEST:
        raise RuntimeError(f"kvd needs vLLM {OLDEST[0]}.{OLDEST[1]} or later, where a connector may place the KV cache;"
                           f" this is {vllm.__version__}")


def refuse(reasons: list[tuple[bool, str]]) -> None:
    """Raise an error that names unsupported configurations at start, to prevent wrong answers later."""
    names = [name for is_so, name in reasons if is_so]
    if names:
        raise ValueError("kvd does not support this yet: " + "; ".join(names))


def refuse_always(config: VllmConfig, caches: KVCacheConfig) -> None:
    """Refuse what is unsupported both in place and by copy."""
    specs = [group.kv_cache_spec for group in caches.kv_cache_groups]
    unknown = sorted({type(spec).__name__ for spec in specs if not (is_dense(spec) or is_sparse(spec))})
    attention = [spec for spec in specs if is_dense(spec) or is_sparse(spec)]
    guess = config.speculative_config.method if config.speculative_config else None
    refuse([
        (config.kv_transfer_config.kv_role != "kv_both", "a kv_role other than kv_both"),
        (bool(unknown), f"{', '.join(unknown)} (MLA, Mamba, ...); full attention, windows and chunks are what it takes"),
        (not any(is_dense(spec) for spec in specs), "a model without full attention in any layer"),
        (any(getattr(spec, "non_causal", False) for spec in attention), "attention that is not causal"),
        (any(spec.kv_quant_mode not in SCALES_WITH_WEIGHTS for spec in attention),
         f"kv_cache_dtype {config.cache_config.cache_dtype}, whose scales are not in the weights; fp8 has its there"),
        (guess is not None and guess not in SPECULATION,
         f"speculative decoding by {guess}; {', '.join(SPECULATION)} are what it takes"),
        (config.parallel_config.decode_context_parallel_size > 1, "decode context parallelism"),
        (config.parallel_config.prefill_context_parallel_size > 1, "prefill context parallelism"),
        (config.parallel_config.pipeline_parallel_size > 1, "pipeline parallelism"),
        (config.model_config.runner_type != "generate", f"a model of kind {config.model_config.runner_type}"),
        (config.model_config.is_encoder_decoder, "encoder and decoder models"),
    ])


def refuse_in_place(config: VllmConfig, caches: KVCacheConfig) -> None:
    refuse_always(config, caches)
    on_gpus, guess, parallel = not current_platform.is_cpu(), config.speculative_config, config.parallel_config
    refuse([
        (on_gpus and parallel.tensor_parallel_size > 1,
         "tensor parallelism in place on GPUs: use kvd.engines.vllm_copy"),
        (on_gpus and (parallel.data_parallel_size > 1 or parallel.data_parallel_index > 0),  # the size in a rank may be 1
         "data parallelism inside of one vLLM on GPUs: start a vLLM for each GPU, with the daemon of that GPU"),
        (on_gpus and guess is not None and guess.method == "draft_model",
         "a draft model in place on GPUs, which may still be writing a block that is published: use"
         " kvd.engines.vllm_copy"),
        # Model runner V2 zeroes blocks before its worker has mapped them, unless the scheduler is in the same process.
        (on_gpus and caches.needs_kv_cache_zeroing and parallel.distributed_executor_backend not in (None, "uni"),
         "blocks that are zeroed by workers in other processes on GPUs"),
        (not config.cache_config.enable_prefix_caching, "prefix caching disabled (--no-enable-prefix-caching)"),
        (bool(config.kv_events_config and config.kv_events_config.enable_kv_cache_events), "KV cache events"),
        (config.observability_config.kv_cache_metrics, "KV cache residency metrics (--kv-cache-metrics)"),
    ])
    layout = caches.kv_cache_layout or config.cache_config.kv_cache_layout
    if layout != "BLHNC":
        raise RuntimeError(
            f"vLLM chose the KV cache layout {layout}; in place needs BLHNC, where a block's layers lie side by side."
            " The CPU backend offers it once kvd is installed where vLLM is (pip install client/python; it has an entry"
            " point of vllm.general_plugins); on GPUs choose FlashAttention, Triton or FlashInfer, and do not set"
            " VLLM_KV_CACHE_LAYOUT")
    dense = {group.kv_cache_spec.block_size for group in caches.kv_cache_groups if is_dense(group.kv_cache_spec)}
    if len(dense) > 1:
        raise RuntimeError(f"vLLM's groups of full attention have blocks of different sizes: {sorted(dense)} tokens")
    strides = {tensor.block_stride for tensor in caches.kv_cache_tensors}
    for tensor in caches.kv_cache_tensors:
        if len(strides) > 1 or tensor.offset + len(tensor.layers) * tensor.layer_stride > tensor.block_stride:
            raise RuntimeError(f"vLLM's blocks are not packed: {tensor}")


# ---- blocks ----------------------------------------------------------------------------------------------------------

def block_tokens(caches: KVCacheConfig) -> int:
    """Return the tokens per block of full attention."""
    return next(group.kv_cache_spec.block_size for group in caches.kv_cache_groups if is_dense(group.kv_cache_spec))


def _block_bytes(caches: KVCacheConfig, kind: str) -> int:
    """Return the bytes of a block: by copy, of the only group; in place, all groups take turns in it."""
    if kind == "blhnc":
        return caches.kv_cache_tensors[0].block_stride
    (group,) = caches.kv_cache_groups
    return group.kv_cache_spec.page_size_bytes * len(group.layer_names)


def blocks_needed(config: VllmConfig, caches: KVCacheConfig) -> int:
    """Return the number of blocks that a sequence of max_model_len needs, with vLLM's null block."""
    specs = [group.kv_cache_spec for group in caches.kv_cache_groups]
    return 1 + sum(cdiv(spec.max_memory_usage_bytes(config), spec.page_size_bytes) for spec in specs)


# ---- fingerprint -----------------------------------------------------------------------------------------------------

def _model(config: VllmConfig, model: ModelConfig) -> tuple:
    """Return what distinguishes a model, or a draft model, from others: its weights, among them the scales of an fp8
    cache, its configuration, and its precision."""
    if config.load_config.load_format == "dummy":
        bytes_of_weights = ("dummy", os.urandom(16))        # random weights, which no other process has
    else:
        given = config.kv_transfer_config.get_from_extra_config("fingerprint", None)
        bytes_of_weights = weights(model.model, given, getattr(model.hf_config, "_commit_hash", None))
    served = model.max_model_len if any(kind in str(model.hf_config) for kind in PACKED_AS_SERVED) else 0
    return (bytes_of_weights, model.hf_config.to_json_string(use_diff=False), str(model.dtype),
            str(model.quantization), served)


def _draft(config: VllmConfig) -> tuple:
    """Return the same for a draft model, whose keys and values are in the blocks, too; () for other speculation, which
    leaves nothing in a block."""
    guess = config.speculative_config
    return _model(config, guess.draft_model_config) if guess and guess.method == "draft_model" else ()


def _kernels(config: VllmConfig, spec: AttentionSpec) -> str:
    """Return what determines the packing of keys: the attention backend, and on CPUs its instruction set."""
    if not current_platform.is_cpu():
        return f"{current_platform.device_type}-{config.attention_config.backend or 'default'}"
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
    return "cpu-" + _get_attn_isa(spec.dtype, spec.block_size, spec.head_size, config.cache_config.cache_dtype)


def _group(config: VllmConfig, group: KVCacheGroupSpec) -> tuple:
    return repr(group.kv_cache_spec), group.layer_names, _kernels(config, group.kv_cache_spec)


def fingerprint(config: VllmConfig, caches: KVCacheConfig, kind: str, part: tuple) -> tuple[int, int]:
    """Return a fingerprint that is equal if two vLLMs write the same bytes for the same tokens. part is the part of the
    model with tensor parallelism."""
    places = [(it.layers, it.layer_stride, it.offset) for it in caches.kv_cache_tensors]
    return kvd.fingerprint(
        "vllm", vllm.__version__, kind, part, _model(config, config.model_config), config.cache_config.cache_dtype,
        [_group(config, it) for it in caches.kv_cache_groups], places, _draft(config))


def open_space(config: VllmConfig, caches: KVCacheConfig, kind: str, *, part: tuple[int, int] = (0, 1),
               shares: int = 1) -> kvd.Space:
    """Open the space of this model, named after the model and its fingerprint, so that other models, versions and
    kernels have spaces of their own. With tensor parallelism, either part is a worker's part of the model, or blocks
    contain the shares of `shares` workers. fixed is set if possible, so that vLLM's views of the pool survive a restart
    of the daemon."""
    extra = config.kv_transfer_config.get_from_extra_config
    number = fingerprint(config, caches, kind, (*part, shares))
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(config.model_config.model).name)[:24].strip("-.") or "model"
    name = extra("space", None) or f"vllm-{slug}-{number[0]:016x}"
    if part[1] > 1:
        name += f"-{part[0]}of{part[1]}"
    kernels = _kernels(config, caches.kv_cache_groups[0].kv_cache_spec)
    geometry = kvd.Geometry.opaque(_block_bytes(caches, kind) * shares, f"vllm-{kind}-{kernels}"[:31].lower(),
                                   block_tokens=block_tokens(caches), fingerprint=number)
    daemon = kvd.connect(extra("socket", None))
    daemon.join(hashlib.sha256(config.kv_transfer_config.engine_id.encode()).digest()[:16])
    try:
        return daemon.space(name, geometry, fixed=True)
    except kvd.Error as error:
        if error.errno != errno.ENOTSUP:
            raise
        return daemon.space(name, geometry)     # on a GPU, the next daemon's pool has other addresses
