# SPDX-License-Identifier: Apache-2.0
"""The space for a vLLM's KV cache: refused configurations, geometry, and fingerprint."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm import envs
from vllm.config import CUDAGraphMode, ModelConfig, VllmConfig
from vllm.distributed.utils import get_pp_indices
from vllm.platforms import current_platform
from vllm.utils.math_utils import cdiv
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import (AttentionSpec, FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheSpec,
                                        KVQuantMode, MambaSpec, MLAAttentionSpec, iter_layer_specs)

import kvd

from ._common import weights
from ._vllm_groups import is_dense, is_sparse
from ._vllm_layout import BACKEND, asks_for_methods

OLDEST = (0, 31)
PACKED_AS_SERVED = ("longrope", "dynamic")      # RoPE kinds whose keys depend on the maximum sequence length
SPECULATION = ("ngram", "ngram_gpu", "suffix", "draft_model")
HEADS = ("eagle", "eagle3", "mtp")              # draft heads, whose keys are in the blocks
CONFIGURATIONS = ("config.json", "params.json")
# Modes by name, since vLLMs differ in what they have. Scales are among the weights, or in the page that they belong to:
# a block is then complete, and may be moved or shared as ordinary bytes.
SCALES_WITH_WEIGHTS = ("NONE", "FP8_PER_TENSOR")        # the latter also of fp8_ds_mla, which has others in the page
NUMBERS = {"fp8": "e4m3", "fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}       # kv_cache_dtypes, and those of planes
SCALES_IN_PAGES = ("NVFP4", "NVFP4_DS_MLA", "ULTRAQUANT_4BIT", "TURBOQUANT_K8V4", "TURBOQUANT_4BIT_NC",
                   "TURBOQUANT_K3V4_NC", "TURBOQUANT_3BIT_NC")


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
    specs = [spec for _, spec in layer_specs(caches)]
    unknown = sorted({type(spec).__name__ for spec in specs if not (is_dense(spec) or is_sparse(spec))})
    guess = config.speculative_config.method if config.speculative_config else None
    refuse([
        (config.kv_transfer_config.kv_role != "kv_both", "a kv_role other than kv_both"),
        (bool(unknown), f"{', '.join(unknown)}; full attention, MLA, windows, chunks and Mamba are what it takes"),
        (not any(is_dense(spec) for spec in specs), "a model without full attention in any layer"),
        (any(getattr(spec, "non_causal", False) for spec in specs), "attention that is not causal"),
        (any(getattr(spec, "mamba_cache_mode", "align") != "align" for spec in specs), "Mamba states of no fixed positions"),
        *_with_quantised(config, specs),
        (guess is not None and guess not in SPECULATION + HEADS,
         f"speculative decoding by {guess}; {', '.join(SPECULATION + HEADS)} are what it takes"),
        (guess is not None and any(isinstance(spec, MambaSpec) for spec in specs), "speculation with Mamba states"),
        (guess in ("draft_model", *HEADS) and config.parallel_config.pipeline_parallel_size > 1,
         "a draft with pipeline parallelism"),
        (config.parallel_config.decode_context_parallel_size > 1, "decode context parallelism"),
        (config.parallel_config.prefill_context_parallel_size > 1, "prefill context parallelism"),
        (config.model_config.runner_type != "generate", f"a model of kind {config.model_config.runner_type}"),
        (config.model_config.is_encoder_decoder, "encoder and decoder models"),
    ])


def _with_quantised(config: VllmConfig, specs: list[KVCacheSpec]) -> list[tuple[bool, str]]:
    modes, dtype = {it.name for it in map(mode_of, specs)}, f"kv_cache_dtype {config.cache_config.cache_dtype}"
    others = modes.difference(SCALES_WITH_WEIGHTS, SCALES_IN_PAGES)
    reset = {mode for mode in others if mode.endswith("PER_TOKEN_HEAD")}
    return [(bool(reset), f"{dtype}, since vLLM's first step resets the scales in all blocks, also in those of other processes"),
            (bool(others - reset), f"{dtype}, whose scales may be outside of its pages"),
            (any(mode.startswith("TURBOQUANT") for mode in modes) and current_platform.is_rocm(),
             f"{dtype} on ROCm, where its format depends on what is installed (FlyDSL)")]


def refuse_in_place(config: VllmConfig, caches: KVCacheConfig) -> None:
    refuse_always(config, caches)
    on_gpus, guess, parallel = not current_platform.is_cpu(), config.speculative_config, config.parallel_config
    many = parallel.tensor_parallel_size * parallel.pipeline_parallel_size > 1
    refuse([
        (many and parallel.distributed_executor_backend == "external_launcher",
         "external_launcher with tensor or pipeline parallelism, whose schedulers take different blocks"),
        (not on_gpus and any(isinstance(spec, MLAAttentionSpec) for _, spec in layer_specs(caches)),
         "MLA in place on CPUs, whose kernels need a layer's blocks side by side: use kvd.engines.vllm_copy"),
        (len(caches.kv_cache_groups) > 1 and parallel.pipeline_parallel_size > 1,
         "pipeline parallelism of layers of several kinds"),     # the scheduler does not know what other stages have
        (on_gpus and (parallel.data_parallel_size > 1 or parallel.data_parallel_index > 0),  # the size in a rank may be 1
         "data parallelism inside of one vLLM on GPUs: start a vLLM for each GPU, with the daemon of that GPU"),
        (on_gpus and guess is not None and guess.method in ("draft_model", *HEADS),
         "a draft in place on GPUs, which may still be writing a block that is published (for a draft model, use"
         " kvd.engines.vllm_copy)"),
        (guess is not None and guess.use_multi_module_mtp(), "several MTP layers"),
        # Model runner V2 zeroes blocks before its worker has mapped them, unless the scheduler is in the same process.
        (on_gpus and caches.needs_kv_cache_zeroing and parallel.distributed_executor_backend not in (None, "uni"),
         "blocks that are zeroed by workers in other processes on GPUs"),
        *(_with_methods(config, caches) if asks_for_methods(config) else []),
        (not config.cache_config.enable_prefix_caching, "prefix caching disabled (--no-enable-prefix-caching)"),
        (config.observability_config.kv_cache_metrics, "KV cache residency metrics (--kv-cache-metrics)"),
    ])
    layout = caches.kv_cache_layout or config.cache_config.kv_cache_layout
    if layout != "BLHNC":
        raise RuntimeError(
            f"vLLM chose the KV cache layout {layout}; in place needs BLHNC, where a block's layers lie side by side."
            " The CPU backend offers it once kvd is installed where vLLM is (pip install client/python; it has an entry"
            " point of vllm.general_plugins); on GPUs choose FlashAttention, Triton or FlashInfer, and do not set"
            " VLLM_KV_CACHE_LAYOUT")
    dense = {spec.block_size for spec in _dense(caches)}
    if len(dense) > 1:
        raise RuntimeError(f"vLLM's groups of full attention have blocks of different sizes: {sorted(dense)} tokens")
    strides = {tensor.block_stride for tensor in caches.kv_cache_tensors}
    for tensor in caches.kv_cache_tensors:
        if len(strides) > 1 or tensor.offset + len(tensor.layers) * tensor.layer_stride > tensor.block_stride:
            raise RuntimeError(f"vLLM's blocks are not packed: {tensor}")


def _attends(config: VllmConfig) -> bool:
    """Return whether vLLM uses kvd's attention on GPUs."""
    backend = config.attention_config.backend
    return backend is AttentionBackendEnum.CUSTOM and backend.get_path() == BACKEND


def _captures(config: VllmConfig) -> bool:
    """Return whether vLLM would capture in a graph where keys are stored, which is valid for one step."""
    it = config.compilation_config
    return it.cudagraph_mode != CUDAGraphMode.NONE and (envs.VLLM_USE_BREAKABLE_CUDAGRAPH
                                                        or not it.splitting_ops_contain_kv_cache_update())


def _with_methods(config: VllmConfig, caches: KVCacheConfig) -> list[tuple[bool, str]]:
    parallel, specs = config.parallel_config, [spec for _, spec in layer_specs(caches)]
    windows = any(getattr(specs[0], it, None) for it in ("sliding_window", "attention_chunk_size"))
    on_gpus = not current_platform.is_cpu()
    others = [(on_gpus and not _attends(config), "another attention than kvd's: use --attention-backend CUSTOM"),
              (on_gpus and _captures(config), "keys that are stored in CUDA graphs: use --enforce-eager"),
              (config.scheduler_config.async_scheduling, "asynchronous scheduling"),
              (any(spec != specs[0] for spec in specs) or type(specs[0]) is not FullAttentionSpec or windows,
               "layers that differ, or have other than full attention"),
              (_numbers(config, specs[0]) is None, f"kv_cache_dtype {config.cache_config.cache_dtype}"),
              (parallel.tensor_parallel_size * parallel.pipeline_parallel_size > 1, "tensor or pipeline parallelism"),
              (config.speculative_config is not None, "speculation")]
    return [(is_so, f"methods with {name}") for is_so, name in others]


# ---- blocks ----------------------------------------------------------------------------------------------------------

def layer_specs(caches: KVCacheConfig) -> Iterator[tuple[str, KVCacheSpec]]:
    """Layers by name. The layers of a group may differ in their pages, like an index beside what it selects from."""
    for group in caches.kv_cache_groups:
        own = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        yield from ((name, own.get(name, group.kv_cache_spec)) for name in group.layer_names)


def mode_of(spec: KVCacheSpec) -> KVQuantMode:
    return getattr(spec, "kv_quant_mode", KVQuantMode.NONE)


def _dense(caches: KVCacheConfig) -> list[KVCacheSpec]:
    return [spec for _, spec in layer_specs(caches) if is_dense(spec)]


def block_tokens(caches: KVCacheConfig) -> int:
    """Return the tokens per block of full attention."""
    return _dense(caches)[0].block_size


def stages(config: VllmConfig) -> list[int]:
    """Return the number of layers of each stage of a pipeline; [] without one."""
    n, layers = config.parallel_config.pipeline_parallel_size, config.model_config.get_total_num_hidden_layers()
    ends = [get_pp_indices(layers, i, n) for i in range(n)] if n > 1 else []
    return [end - first for first, end in ends]


def workers(config: VllmConfig) -> int:
    """Return how many parts a block in place has: in host memory, of tensor parallelism, in each stage of a pipeline; on
    GPUs, one for each worker, which is a shard of the pool."""
    parallel = config.parallel_config
    return parallel.tensor_parallel_size * (1 if current_platform.is_cpu() else parallel.pipeline_parallel_size)


def _block_bytes(config: VllmConfig, caches: KVCacheConfig, kind: str, stage: int) -> int:
    """Return the bytes of a block, or of a worker's part of it: by copy, of the only group, in a stage of a pipeline; in place,
    all groups take turns in it. In host memory the stages have their layers one after the other. On GPUs each shard has room
    for the largest stage, since the GPU with the largest shards decides how many blocks there are."""
    if kind == "blhnc":
        tensor, together = caches.kv_cache_tensors[0], sum if current_platform.is_cpu() else max
        return together(stages(config) or [0]) * tensor.layer_stride or tensor.block_stride
    (group,) = caches.kv_cache_groups
    return group.kv_cache_spec.page_size_bytes * (stages(config) or [len(group.layer_names)])[stage]


def blocks_needed(config: VllmConfig, caches: KVCacheConfig) -> int:
    """Return the number of blocks that a sequence of max_model_len needs, with vLLM's null block."""
    specs = [group.kv_cache_spec for group in caches.kv_cache_groups]
    return 1 + sum(cdiv(spec.max_memory_usage_bytes(config), spec.page_size_bytes) for spec in specs)


# ---- fingerprint -----------------------------------------------------------------------------------------------------

def _written(model: ModelConfig) -> tuple:
    """Return a model's configuration as its files have it: loading changes what vLLM holds of it, and only workers load."""
    folder, changes = Path(model.hf_config_path or model.model), model.hf_overrides
    texts = [(folder / name).read_text() for name in CONFIGURATIONS if (folder / name).is_file()]
    return (texts, json.dumps(changes, sort_keys=True, default=str) if isinstance(changes, dict) else changes.__qualname__,
            getattr(model.hf_config, "_commit_hash", None) or "")


def _model(config: VllmConfig, model: ModelConfig) -> tuple:
    """Return what distinguishes a model, or a draft model, from others: its weights, among them the scales of an fp8
    cache, its configuration, and its precision."""
    if config.load_config.load_format == "dummy":
        bytes_of_weights = ("dummy", os.urandom(16))        # random weights, which no other process has
    else:
        given = config.kv_transfer_config.get_from_extra_config("fingerprint", None)
        bytes_of_weights = weights(model.model, given, getattr(model.hf_config, "_commit_hash", None))
    served = model.max_model_len if any(kind in str(model.hf_config) for kind in PACKED_AS_SERVED) else 0
    return bytes_of_weights, _written(model), str(model.dtype), str(model.quantization), served


def _draft(config: VllmConfig) -> tuple:
    """Return the same for a draft model or head, whose keys and values are in the blocks, too; () for other speculation,
    which leaves nothing in a block."""
    guess = config.speculative_config
    if guess is None or guess.method not in ("draft_model", *HEADS):
        return ()
    return guess.method, _model(config, guess.draft_model_config)


def compare_next_token(config: VllmConfig, caches: KVCacheConfig) -> int:
    """With a draft head, keep vLLM from dropping the last block that is found, since its next token is compared (see
    _vllm_groups.py), and return 1; otherwise 0. vLLM asks afterwards."""
    guess = config.speculative_config
    if guess is None or guess.method not in HEADS:
        return 0
    guess.disable_eagle_block_drop = True
    for group in caches.kv_cache_groups:
        group.is_eagle_group = False
    return 1


def _kernels(config: VllmConfig, spec: KVCacheSpec) -> str:
    """Return what determines the bytes of a block: the backend, and on CPUs its instruction set."""
    if isinstance(spec, MambaSpec):
        return f"{current_platform.device_type}-{torch.cpu._is_avx512_bf16_supported()}-{config.mamba_config}"
    if current_platform.is_cpu() and isinstance(spec, MLAAttentionSpec):
        return f"cpu-mla-{'amx' if torch.cpu._is_amx_tile_supported() else 'any'}"
    return _attention_kernels(config, spec)


def _attention_kernels(config: VllmConfig, spec: AttentionSpec) -> str:
    if not current_platform.is_cpu():
        return f"{current_platform.device_type}-{config.attention_config.backend or 'default'}"
    if asks_for_methods(config):
        return "cpu-kvd"
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
    return "cpu-" + _get_attn_isa(spec.dtype, spec.block_size, spec.head_size, config.cache_config.cache_dtype)


def _first(group: KVCacheGroupSpec) -> KVCacheSpec:
    """Of a group whose layers differ, the scheduler knows the first."""
    return next(iter(iter_layer_specs(group.kv_cache_spec)))


def _group(config: VllmConfig, group: KVCacheGroupSpec) -> tuple:
    """Of a pipeline, each process knows one stage."""
    spec = _first(group)
    return repr(spec), stages(config) or group.layer_names, _kernels(config, spec)


def _format(config: VllmConfig, caches: KVCacheConfig) -> tuple:
    """Return what the format of quantised pages depends on beside their dtype: a page of nvfp4 has data before scales, in the
    order of the layout, and kernels for other GPUs write other scales. () for plain numbers, which all kernels read alike."""
    if all(mode_of(_first(group)) == KVQuantMode.NONE for group in caches.kv_cache_groups):
        return ()
    return caches.kv_cache_layout or config.cache_config.kv_cache_layout, str(current_platform.get_device_capability())


def fingerprint(config: VllmConfig, caches: KVCacheConfig, kind: str, part: tuple) -> tuple[int, int]:
    """Return a fingerprint that is equal if two vLLMs write the same bytes for the same tokens. part is the part of the
    model with tensor parallelism. By copy, it ignores the places of layers, which depend on the size of vLLM's memory."""
    places = [(stages(config) or it.layers, *((it.layer_stride, it.offset) if kind == "blhnc" else ()))
              for it in caches.kv_cache_tensors]
    return kvd.fingerprint(
        "vllm", vllm.__version__, kind, part, _model(config, config.model_config), config.cache_config.cache_dtype,
        [_group(config, it) for it in caches.kv_cache_groups], places, _draft(config), *_format(config, caches))


def _numbers(config: VllmConfig, spec: AttentionSpec) -> Any:
    """Return the dtype of planes, or None if the daemon cannot read such a cache."""
    return spec.dtype if mode_of(spec) == KVQuantMode.NONE else NUMBERS.get(config.cache_config.cache_dtype)


def _planes(layers: int, spec: FullAttentionSpec, dtype: Any, number: tuple[int, int]) -> kvd.Geometry:
    """Return the geometry of blocks that the daemon can read. Words that stand for pictures are not in a vocabulary."""
    return kvd.Geometry(layers=layers, kv_heads=spec.num_kv_heads, head_dim=spec.head_size, dtype=dtype,
                        vocab=2**32 - 1, block_tokens=spec.block_size, fingerprint=number)


def open_space(config: VllmConfig, caches: KVCacheConfig, kind: str, *, part: tuple[int, int] = (0, 1), stage: int = 0,
               shares: int = 1, share: int | None = 0) -> kvd.Space:
    """Open the space of this model, named after the model and its fingerprint, so that other models, versions and
    kernels have spaces of their own. With parallelism, either part is a worker's part of the model, and stage its
    stage of a pipeline, or blocks contain all stages and the shares of `shares` workers, which on GPUs are the pool's
    shards. share: of this worker; None: a scheduler, which uses no GPU. fixed is set if possible, so that vLLM's views
    of the pool survive a restart of the daemon."""
    extra = config.kv_transfer_config.get_from_extra_config
    number = fingerprint(config, caches, kind, (*part, shares))
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(config.model_config.model).name)[:24].strip("-.") or "model"
    name = extra("space", None) or f"vllm-{slug}-{number[0]:016x}"
    if part[1] > 1:
        name += f"-{part[0]}of{part[1]}"
    dense = _dense(caches)
    planes = asks_for_methods(config)
    geometry = _planes(len(dense), dense[0], _numbers(config, dense[0]), number) if planes else kvd.Geometry.opaque(
        _block_bytes(config, caches, kind, stage) * shares, f"vllm-{kind}-{_kernels(config, dense[0])}"[:31].lower(),
        block_tokens=block_tokens(caches), fingerprint=number)
    daemon = kvd.connect(extra("socket", None))
    daemon.join(hashlib.sha256(config.kv_transfer_config.engine_id.encode()).digest()[:16])
    try:
        return daemon.space(name, geometry, fixed=True)
    except kvd.Error as error:
        if error.errno != errno.ENOTSUP:
            raise
    # On GPUs, the next daemon's pool has other addresses.
    shard = share if shares > 1 else None
    return check_shards(daemon.space(name, geometry, shard=shard, index_only=share is None), shares)


def check_shards(space: kvd.Space, shares: int) -> kvd.Space:
    """Refuse a pool that is divided among another number of GPUs than a model is."""
    if space.shards != shares:
        raise RuntimeError(f"the daemon's pool is on {space.shards} GPU{'s' * (space.shards > 1)}, and vLLM has {shares}"
                           f" worker{'s' * (shares > 1)}: name as many with device in kvd.conf(5), such as device = 0,1")
    return space


def check_device(space: kvd.Space) -> None:
    """Refuse a worker that runs on another GPU than its shard is on."""
    if space.shards > 1 and space.device[1] != torch.cuda.current_device():
        raise RuntimeError(f"worker {space.shard} runs on cuda:{torch.cuda.current_device()},"
                           f" and shard {space.shard} of the daemon's pool is on cuda:{space.device[1]}: name the GPUs"
                           " in the same order with device in kvd.conf(5) and CUDA_VISIBLE_DEVICES")
