# SPDX-License-Identifier: Apache-2.0
"""For test_vllm.py: every refused configuration is named, and different models get different spaces."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import torch
from safetensors.torch import load_file, save_file
from vllm.config import CUDAGraphMode
from vllm.config.cache import CacheDType
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.torch_utils import nvfp4_kv_cache_full_dim
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionBackend
from vllm.v1.kv_cache_interface import (FullAttentionSpec, HiddenStateCacheSpec, KVCacheConfig, KVCacheGroupSpec,
                                        KVCacheTensor, KVQuantMode, MambaSpec, MLAAttentionSpec, SlidingWindowMLASpec,
                                        SlidingWindowSpec, create_kv_cache_views, get_kv_quant_mode)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm_engine import connector

import kvd
from kvd.engines import _vllm_space as space
from kvd.engines import _vllm_connector as connectors
from kvd.engines._vllm_connector import KvdConnector, KVConnectorRole
from kvd.engines._vllm_copier import Copier, Job
from kvd.engines._vllm_layout import BACKEND, register

SOCKET, MODEL = sys.argv[1:3]
PLAIN = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
LATENT = PLAIN | {"num_kv_heads": 1}
GPU = SimpleNamespace(is_cpu=lambda: False, is_rocm=lambda: False, get_device_capability=lambda: (10, 0))
STATE = MambaSpec(block_size=32, shapes=((64, 64),), dtypes=(torch.float32,), mamba_cache_mode="align")


def config_of(model: str = MODEL, **extra):
    arguments = EngineArgs(model=model, skip_tokenizer_init=True, enforce_eager=True, dtype="float32", block_size=32)
    made = arguments.create_engine_config()
    from vllm.config import KVTransferConfig
    made.kv_transfer_config = KVTransferConfig(**connector("in place", socket=SOCKET, **extra))
    made.cache_config.kv_cache_layout = "BLHNC"
    return made


def caches_of(spec, *more) -> KVCacheConfig:
    names = [f"layer{i}" for i in range(8)]
    tensor = KVCacheTensor(size=8 * 16 * spec.page_size_bytes, layers=names, layer_stride=spec.page_size_bytes,
                           block_stride=8 * spec.page_size_bytes)
    return KVCacheConfig(num_blocks=16, kv_cache_tensors=[tensor],
                         kv_cache_groups=[KVCacheGroupSpec(names, it) for it in (spec, *more)])


def refused(words: str, config, caches) -> None:
    try:
        space.refuse_in_place(config, caches)
    except (ValueError, RuntimeError) as error:
        assert words in str(error), f"{words!r} is not in {error}"
    else:
        raise AssertionError(f"not refused: {words}")


@contextmanager
def changed(owner, name: str, value):
    before, put = getattr(owner, name), (type if isinstance(owner, type) else object).__setattr__
    put(owner, name, value)
    yield
    put(owner, name, before)


def speculation(method: str, modules: bool = False):
    return SimpleNamespace(method=method, draft_model_config=None, use_multi_module_mtp=lambda: modules)


def check_configurations() -> None:
    config, plain = config_of(), caches_of(FullAttentionSpec(**PLAIN))
    space.refuse_in_place(config, plain)            # this one is accepted
    for words, part, name, value in [
            ("decode context", "parallel_config", "decode_context_parallel_size", 2),
            ("prefill context", "parallel_config", "prefill_context_parallel_size", 2),
            ("prefix caching disabled", "cache_config", "enable_prefix_caching", False),
            ("layout LBHNC", "cache_config", "kv_cache_layout", "LBHNC"),
            ("residency metrics", "observability_config", "kv_cache_metrics", True),
            ("kv_role", "kv_transfer_config", "kv_role", "kv_producer")]:
        with changed(getattr(config, part), name, value):
            refused(words, config, plain)
    for method in ("dflash", "dspark", "medusa", "custom_class"):
        with changed(config, "speculative_config", speculation(method)):
            refused(f"speculative decoding by {method};", config, plain)
    for part, name, value in [("parallel_config", "data_parallel_size", 2), ("model_config", "enable_sleep_mode", True)]:
        with changed(getattr(config, part), name, value):
            space.refuse_in_place(config, plain)
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        with changed(config.parallel_config, "distributed_executor_backend", "external_launcher"):
            space.refuse_in_place(config, plain)
            with changed(config.parallel_config, name, 2):
                refused("external_launcher with tensor or pipeline parallelism", config, plain)
    with changed(config.parallel_config, "pipeline_parallel_size", 2):
        space.refuse_in_place(config, plain)
        refused("layers of several kinds", config, caches_of(*(2 * [FullAttentionSpec(**PLAIN)])))
        with changed(config, "speculative_config", speculation("draft_model")):
            refused("a draft with pipeline parallelism", config, plain)
    for method in space.SPECULATION + space.HEADS:
        with changed(config, "speculative_config", speculation(method)):
            space.refuse_in_place(config, plain)
            refused("speculation with Mamba states", config, caches_of(FullAttentionSpec(**PLAIN), STATE))
    with changed(config, "speculative_config", speculation("mtp", modules=True)):
        refused("several MTP layers", config, plain)


def check_methods() -> None:
    config, plain = config_of(methods=True), caches_of(FullAttentionSpec(**PLAIN))
    space.refuse_in_place(config, plain)
    for words, part, name, value in [
            ("asynchronous scheduling", "scheduler_config", "async_scheduling", True),
            ("methods with tensor or pipeline parallelism", "parallel_config", "tensor_parallel_size", 2),
            ("methods with tensor or pipeline parallelism", "parallel_config", "pipeline_parallel_size", 2)]:
        with changed(getattr(config, part), name, value):
            refused(words, config, plain)
    with changed(config, "speculative_config", speculation("ngram")):
        refused("methods with speculation", config, plain)
    for caches in (caches_of(FullAttentionSpec(**PLAIN, sliding_window=64)),
                   caches_of(FullAttentionSpec(**PLAIN), FullAttentionSpec(**PLAIN | {"num_kv_heads": 4}))):
        refused("methods with layers that differ", config, caches)
    for dtype, is_taken in ("fp8", True), ("fp8_e5m2", True), ("int8_per_token_head", False), ("nvfp4", False):
        with changed(config.cache_config, "cache_dtype", dtype):
            caches = caches_of(FullAttentionSpec(**PLAIN | {"dtype": torch.uint8}, kv_quant_mode=get_kv_quant_mode(dtype)))
            if is_taken:
                space.refuse_in_place(config, caches)
                assert space.open_space(config, caches, "blhnc").geometry.dtype == {"fp8": "e4m3", "fp8_e5m2": "e5m2"}[dtype]
            else:
                refused(f"kv_cache_dtype {dtype}", config, caches)
    custom = AttentionBackendEnum.CUSTOM
    with changed(space, "current_platform", GPU):
        for backend, path in (None, BACKEND), (AttentionBackendEnum.FLASH_ATTN, BACKEND), (custom, "another.Backend"):
            register_backend(custom, path)
            with changed(config.attention_config, "backend", backend):
                refused("use --attention-backend CUSTOM", config, plain)
        register_backend(custom, BACKEND)
        with changed(config.attention_config, "backend", custom):
            space.refuse_in_place(config, plain)
            for splitting, is_taken in (None, True), ([], False):
                with changed(config.compilation_config, "cudagraph_mode", CUDAGraphMode.PIECEWISE), \
                        changed(config.compilation_config, "splitting_ops", splitting):
                    if is_taken:
                        space.refuse_in_place(config, plain)
                    else:
                        refused("stored in CUDA graphs", config, plain)
    custom.clear_override()


def check_shards() -> None:
    """Parallelism on GPUs: the pool must be divided as the model is, and each worker must run where its shard is. Shards have
    room for the largest stage of a pipeline."""
    pool = SimpleNamespace(shards=2, shard=1, device=(2, 1), block_bytes=4096)
    config, plain = config_of(), caches_of(FullAttentionSpec(**PLAIN))
    page = plain.kv_cache_tensors[0].layer_stride
    with changed(config.parallel_config, "tensor_parallel_size", 2), changed(space, "stages", lambda _: [3, 5]):
        with changed(config.parallel_config, "pipeline_parallel_size", 2), changed(space, "current_platform", GPU):
            space.refuse_in_place(config, plain)
            assert (space.workers(config), space._block_bytes(config, plain, "blhnc", 0)) == (4, 5 * page)
        assert (space.workers(config), space._block_bytes(config, plain, "blhnc", 0)) == (2, 8 * page)
    assert space.check_shards(pool, 2) is pool
    said(lambda: space.check_shards(pool, 4), "the daemon's pool is on 2 GPUs, and vLLM has 4 workers")
    with changed(torch.cuda, "current_device", lambda: 1):
        space.check_device(pool)
    with changed(torch.cuda, "current_device", lambda: 3):
        said(lambda: space.check_device(pool), "runs on cuda:3, and shard 1 of the daemon's pool is on cuda:1")
    # Shards of GPUs, and shares of a block in host memory, of tensor parallelism and of the second stage of a pipeline.
    for stride, layers, shares, offset in (2048, [], 2, 0), (4096, [], 2, 1024), (2048, [3, 5], 2, 0), (4096, [3, 5], 1, 384):
        worker, caches = object.__new__(KvdConnector), caches_of(FullAttentionSpec(**PLAIN))
        (tensor,), rank = caches.kv_cache_tensors, SimpleNamespace(rank_in_group=1)
        tensor.block_stride, tensor.layer_stride = (640, 128) if layers else (1024, 128)
        worker.space, worker.blocks, worker._role = pool, 7, KVConnectorRole.WORKER
        with changed(connectors, "get_pp_group", lambda: rank), changed(connectors, "get_tensor_model_parallel_rank", lambda: 1):
            worker._place(caches, layers, shares, shares - 1, stride)
            assert (tensor.offset, tensor.block_stride, tensor.size) == (offset, stride, 7 * stride)
            for platform, share in (GPU, 3), (SimpleNamespace(is_cpu=lambda: True), 1):
                with changed(connectors, "current_platform", platform), \
                        changed(config.parallel_config, "tensor_parallel_size", 2):
                    assert worker._share(config) == share


def said(call, words: str) -> None:
    try:
        call()
    except RuntimeError as error:
        assert words in str(error), f"{words!r} is not in {error}"
    else:
        raise AssertionError(f"not said: {words}")


def check_gpus() -> None:
    """What is refused on GPUs only; a stand-in says that there are some."""
    config, plain = config_of(), caches_of(FullAttentionSpec(**PLAIN))
    with changed(space, "current_platform", SimpleNamespace(is_cpu=lambda: False)):
        space.refuse_in_place(config, plain)
        space.refuse_in_place(config, caches_of(MLAAttentionSpec(**LATENT)))
        with changed(config.parallel_config, "distributed_executor_backend", "uni"):    # zeroes, as in the loop below
            space.refuse_in_place(config, caches_of(STATE, MLAAttentionSpec(**LATENT)))
        for words, part, name, value in [
                ("data parallelism", "parallel_config", "data_parallel_size", 2),
                ("data parallelism", "parallel_config", "data_parallel_index", 1)]:
            with changed(getattr(config, part), name, value):
                refused(words, config, plain)
                space.refuse_always(config, plain)
        for method in ("draft_model", *space.HEADS):
            with changed(config, "speculative_config", speculation(method)):
                refused("a draft in place on GPUs", config, plain)
        with changed(config, "speculative_config", speculation("ngram")):
            space.refuse_in_place(config, plain)
        with changed(KVCacheConfig, "needs_kv_cache_zeroing", True):
            for executor, is_refused in ((None, False), ("uni", False), ("mp", True)):
                with changed(config.parallel_config, "distributed_executor_backend", executor):
                    if is_refused:
                        refused("zeroed by workers in other processes", config, plain)
                    else:
                        space.refuse_in_place(config, plain)


def check_caches() -> None:
    config = config_of()
    for spec in (FullAttentionSpec(**PLAIN, sliding_window=64), FullAttentionSpec(**PLAIN, attention_chunk_size=64)):
        space.refuse_in_place(config, caches_of(spec))
    refused("not causal", config, caches_of(FullAttentionSpec(**PLAIN, non_causal=True)))
    window = SlidingWindowSpec(**PLAIN, sliding_window=64)
    refused("without full attention", config, caches_of(window))
    refused("without full attention", config, caches_of(STATE))
    refused("no fixed positions", config, caches_of(FullAttentionSpec(**PLAIN), dataclasses.replace(STATE, mamba_cache_mode="none")))
    refused("MLA in place on CPUs", config, caches_of(MLAAttentionSpec(**LATENT)))
    refused("HiddenStateCacheSpec", config, caches_of(HiddenStateCacheSpec(**LATENT)))
    refused("SlidingWindowMLASpec", config, caches_of(
        FullAttentionSpec(**PLAIN), SlidingWindowMLASpec(**LATENT, sliding_window=64, bounded_replay=True)))
    space.refuse_in_place(config, caches_of(FullAttentionSpec(**PLAIN), window, STATE, FullAttentionSpec(**PLAIN)))
    refused("blocks of different sizes", config,
            caches_of(FullAttentionSpec(**PLAIN), FullAttentionSpec(**PLAIN | {"block_size": 64})))
    for change in ({"block_stride": 64}, {"offset": 64}):
        loose = caches_of(FullAttentionSpec(**PLAIN))
        loose.kv_cache_tensors[0] = dataclasses.replace(loose.kv_cache_tensors[0], **change)
        refused("not packed", config, loose)


def quantised(dtype: str) -> FullAttentionSpec:
    """The pages of a kv_cache_dtype, as the backends that have it describe them."""
    mode, latent = get_kv_quant_mode(dtype), {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}.get(dtype)
    if latent:
        return MLAAttentionSpec(**LATENT | {"head_size": 576, "dtype": torch.uint8}, kv_quant_mode=mode, cache_dtype_str=dtype,
                                state_content_bytes=latent)
    spec = FullAttentionSpec(**PLAIN | {"dtype": torch.uint8}, kv_quant_mode=mode)
    if mode.is_nvfp4:           # as FlashInfer's, which is not installed here
        return dataclasses.replace(spec, num_head_slots=4, state_content_bytes=nvfp4_kv_cache_full_dim(32))
    return (TurboQuantAttentionBackend if mode.is_turboquant else TritonAttentionBackend).customize_spec(spec)


def check_quantised() -> None:
    """Each kv_cache_dtype of vLLM is taken with its scales, in a space of its own, or refused with the reason."""
    config, names = config_of(), {}
    for dtype in get_args(CacheDType):
        caches = caches_of(quantised(dtype))
        with changed(config.cache_config, "cache_dtype", dtype), changed(space, "_kernels", lambda *_: "gpu"), \
                changed(space, "current_platform", GPU):
            if dtype.endswith("per_token_head"):
                refused(f"{dtype}, since vLLM's first step resets the scales in all blocks", config, caches)
                continue
            space.refuse_in_place(config, caches)
            names[dtype] = space.open_space(config, caches, "blhnc").name
            assert space.open_space(config, caches, "blhnc").name == names[dtype]
    assert len({*names.values()}) == len(names) == len(get_args(CacheDType)) - 3, names
    mode = SimpleNamespace(name="FP2_ELSEWHERE")
    refused("whose scales may be outside of its pages", config, caches_of(FullAttentionSpec(**PLAIN, kv_quant_mode=mode)))


def check_formats() -> None:
    """Quantised pages of another layout, or written by another kind of GPU, are in other spaces; plain numbers are not."""
    config, fours, plain = config_of(), caches_of(quantised("nvfp4")), caches_of(FullAttentionSpec(**PLAIN))
    names = []
    for capability, layout in ((10, "BLHNC"), (12, "BLHNC"), (10, "LBNHC")):
        gpu = SimpleNamespace(**vars(GPU) | {"get_device_capability": lambda it=capability: (it, 0)})
        with changed(space, "current_platform", gpu), changed(config.cache_config, "kv_cache_layout", layout), \
                changed(space, "_kernels", lambda *_: "gpu"):
            names += [[space.open_space(config, it, "lhnc").name for it in (fours, plain)]]
    assert [len({*it}) for it in zip(*names)] == [3, 1], names
    with changed(space, "current_platform", SimpleNamespace(**vars(GPU) | {"is_rocm": lambda: True})):
        space.refuse_in_place(config, fours)
        refused("depends on what is installed", config, caches_of(quantised("turboquant_4bit_nc")))


def check_pages_by_copy() -> None:
    """All bytes of a quantised page are copied, numbers and scales, from the views that vLLM makes of them."""
    for dtype in ("nvfp4", "fp8_ds_mla", "nvfp4_ds_mla", "turboquant_k8v4"):
        caches, memory = caches_of(quantised(dtype)), []
        (tensor,) = caches.kv_cache_tensors
        space.refuse_always(config_of(), caches)
        for job in (Job("store", 0, 0, [3, 4], [*range(64)]), Job("load", 0, 0, [8, 9], [*range(64)])):
            with changed(space, "current_platform", GPU), changed(space, "_kernels", lambda *_: "gpu"):
                copier = Copier(space.open_space(config_of(space=dtype, fingerprint=dtype), caches, "lhnc"), 32)
            memory += [torch.randint(256, (tensor.size,), dtype=torch.uint8)]
            copier.register(create_kv_cache_views(memory[-1], caches.kv_cache_groups[0].kv_cache_spec, caches.num_blocks,
                                                  KVCacheLayout.BLHNC, tensor))
            getattr(copier, job.request_id)(job)
            copier.forget()
            assert not copier.failed
        one, two = (it.view(caches.num_blocks, -1) for it in memory)
        assert torch.equal(one[3:5], two[8:10]) and not torch.equal(one[5], two[10]), dtype


def check_scales_of_fp8() -> None:
    """The scales of an fp8 cache are among the weights, so that other scales give another space."""
    names = []
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(MODEL, other := Path(folder) / "model")
        file = other / "model.safetensors"
        tensors = load_file(file)
        for key, value in ((1.0, 1.0), (0.5, 1.0), (1.0, 0.5)):
            at = "model.layers.0.self_attn.attn."
            save_file(tensors | {at + "k_scale": torch.tensor(key), at + "v_scale": torch.tensor(value)}, file)
            config = config_of(str(other))
            with changed(config.cache_config, "cache_dtype", "fp8"), changed(space, "_kernels", lambda *_: "cpu-vec"):
                names += [space.open_space(config, caches_of(quantised("fp8")), "blhnc").name]
    assert len({*names}) == 3, names


def check_version() -> None:
    real = space.vllm.__version__
    for version, is_refused in (("0.30.2", True), ("0.31.0", False), ("1.0", False), (real, False)):
        space.vllm.__version__ = version
        try:
            space.require_vllm()
            assert not is_refused, version
        except RuntimeError as error:
            assert is_refused and version in str(error), error
    space.vllm.__version__ = real


def check_spaces() -> None:
    """Other weights, another RoPE or other kernels give another space. Under the same name they are refused."""
    caches = caches_of(FullAttentionSpec(**PLAIN))
    mine = space.open_space(config_of(), caches, "blhnc")
    assert space.open_space(config_of(), caches, "blhnc").name == mine.name
    assert space.open_space(config_of(), caches, "lhnc").name != mine.name
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "model"
        shutil.copytree(MODEL, other)
        weights = bytearray((other / "model.safetensors").read_bytes())
        weights[-1] ^= 1
        (other / "model.safetensors").write_bytes(weights)
        apart = space.open_space(config_of(str(other)), caches, "blhnc")
        assert apart.name != mine.name
        words = json.loads((other / "config.json").read_text())
        (other / "config.json").write_text(json.dumps(words | {"rope_theta": 10000.0}))
        assert space.open_space(config_of(str(other)), caches, "blhnc").name not in (mine.name, apart.name)
        space.open_space(config_of(space="mine"), caches, "blhnc")
        try:
            space.open_space(config_of(str(other), space="mine"), caches, "blhnc")
            raise AssertionError("another model's blocks under the same name")
        except kvd.Mismatch as error:
            assert "fingerprint" in str(error), error
    wider = caches_of(FullAttentionSpec(**dataclasses.replace(FullAttentionSpec(**PLAIN), head_size=64).__dict__ | {
        "head_size_v": 64}))
    assert space.open_space(config_of(), wider, "blhnc").name != mine.name


def check_spaces_of_drafts() -> None:
    """A draft model's keys and values are in the blocks, and other speculation leaves nothing there. An fp8 cache is
    another space for each set of scales, because these are weights."""
    caches, config = caches_of(FullAttentionSpec(**PLAIN)), config_of()
    names = [space.open_space(config, caches, "blhnc").name]
    with changed(config, "speculative_config", speculation("ngram")):
        assert space.open_space(config, caches, "blhnc").name == names[0]
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(MODEL, other := Path(folder) / "draft")
        for _ in range(2):
            with changed(config, "speculative_config", speculation("draft_model")):
                config.speculative_config.draft_model_config = config_of(str(other)).model_config
                names += [space.open_space(config, caches, "blhnc").name]
                assert space.open_space(config, caches, "blhnc").name == names[-1]
            weights = bytearray((other / "model.safetensors").read_bytes())
            weights[-1] ^= 1
            (other / "model.safetensors").write_bytes(weights)
    with changed(config.cache_config, "cache_dtype", "fp8"), changed(space, "_kernels", lambda *_: "cpu-vec"):
        names += [space.open_space(config, caches, "blhnc").name]
    assert len({*names}) == 4, names


def check_layout() -> None:
    register()
    register()
    assert [layout.name for layout in CPUAttentionBackend.supported_kv_cache_layouts()] == ["LBHNC", "BLHNC"]


if __name__ == "__main__":
    for check in (check_version, check_configurations, check_methods, check_gpus, check_shards, check_caches, check_spaces, check_spaces_of_drafts,
                  check_quantised, check_formats, check_pages_by_copy, check_scales_of_fp8, check_layout):
        check()
