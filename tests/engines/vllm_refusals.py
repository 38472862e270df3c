# SPDX-License-Identifier: Apache-2.0
"""For test_vllm.py: every refused configuration is named, and different models get different spaces."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_interface import (FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor,
                                        MLAAttentionSpec, SlidingWindowSpec)
from vllm_engine import connector

import kvd
from kvd.engines import _vllm_space as space
from kvd.engines._vllm_layout import register

SOCKET, MODEL = sys.argv[1:3]
PLAIN = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}


def config_of(model: str = MODEL, **extra):
    arguments = EngineArgs(model=model, skip_tokenizer_init=True, enforce_eager=True, dtype="float32", block_size=32)
    made = arguments.create_engine_config()
    from vllm.config import KVTransferConfig
    made.kv_transfer_config = KVTransferConfig(**connector("in place", socket=SOCKET, **extra))
    made.cache_config.kv_cache_layout = "BLHNC"
    return made


def caches_of(spec, groups: int = 1) -> KVCacheConfig:
    names = [f"layer{i}" for i in range(8)]
    tensor = KVCacheTensor(size=8 * 16 * spec.page_size_bytes, layers=names, layer_stride=spec.page_size_bytes,
                           block_stride=8 * spec.page_size_bytes)
    return KVCacheConfig(num_blocks=16, kv_cache_tensors=[tensor],
                         kv_cache_groups=[KVCacheGroupSpec(names, spec)] * groups)


def refused(words: str, config, caches) -> None:
    try:
        space.refuse_in_place(config, caches)
    except (ValueError, RuntimeError) as error:
        assert words in str(error), f"{words!r} is not in {error}"
    else:
        raise AssertionError(f"not refused: {words}")


def check_configurations() -> None:
    config, plain = config_of(), caches_of(FullAttentionSpec(**PLAIN))
    space.refuse_in_place(config, plain)            # this one is accepted
    for words, part, name, value in [
            ("pipeline parallelism", "parallel_config", "pipeline_parallel_size", 2),
            ("decode context", "parallel_config", "decode_context_parallel_size", 2),
            ("prefill context", "parallel_config", "prefill_context_parallel_size", 2),
            ("data parallelism", "parallel_config", "data_parallel_size", 2),
            ("prefix caching disabled", "cache_config", "enable_prefix_caching", False),
            ("quantised KV cache", "cache_config", "cache_dtype", "fp8"),
            ("layout LBHNC", "cache_config", "kv_cache_layout", "LBHNC"),
            ("sleep mode", "model_config", "enable_sleep_mode", True),
            ("residency metrics", "observability_config", "kv_cache_metrics", True),
            ("kv_role", "kv_transfer_config", "kv_role", "kv_producer")]:
        owner = getattr(config, part)
        before = getattr(owner, name)
        object.__setattr__(owner, name, value)
        refused(words, config, plain)
        object.__setattr__(owner, name, before)
    for part, value, words in [("speculative_config", object(), "speculative decoding"),
                               ("kv_events_config", type("", (), {"enable_kv_cache_events": True})(), "events")]:
        object.__setattr__(config, part, value)
        refused(words, config, plain)
        object.__setattr__(config, part, None)


def check_caches() -> None:
    config = config_of()
    refused("sliding window", config, caches_of(FullAttentionSpec(**PLAIN, sliding_window=64)))
    refused("chunked local", config, caches_of(FullAttentionSpec(**PLAIN, attention_chunk_size=64)))
    refused("not causal", config, caches_of(FullAttentionSpec(**PLAIN, non_causal=True)))
    refused("SlidingWindowSpec", config, caches_of(SlidingWindowSpec(**PLAIN, sliding_window=64)))
    refused("MLAAttentionSpec", config, caches_of(MLAAttentionSpec(**PLAIN | {"num_kv_heads": 1})))
    refused("2 KV cache groups", config, caches_of(FullAttentionSpec(**PLAIN), groups=2))
    loose = caches_of(FullAttentionSpec(**PLAIN))
    loose.kv_cache_tensors[0].block_stride += 64
    refused("not packed", config, loose)


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


def check_layout() -> None:
    register()
    register()
    assert [layout.name for layout in CPUAttentionBackend.supported_kv_cache_layouts()] == ["LBHNC", "BLHNC"]


if __name__ == "__main__":
    for check in (check_version, check_configurations, check_caches, check_spaces, check_layout):
        check()
