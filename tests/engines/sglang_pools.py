# SPDX-License-Identifier: Apache-2.0
"""For test_sglang.py: the KV caches of models that need a GPU, without a model. SGLang's own device pools, on the
processor: random pages are offloaded from one and loaded into another, whose every byte is compared; and the lengths that
can be restored are those whose pages were offloaded.

    python sglang_pools.py SOCKET [ROUNDS]
"""

from __future__ import annotations

import random
import sys
from types import SimpleNamespace

import common
import torch
from sglang.srt.configs.mamba_utils import KimiLinearCacheParams, KimiLinearStateShape, Mamba2CacheParams, Mamba2StateShape
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.memory_pool import (DSATokenToKVPool, HybridLinearKVPool, HybridReqToTokenPool,
                                              MHATokenToKVPool, MLATokenToKVPool)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.runtime_context import get_context
from sglang.srt.server_args import ServerArgs

from kvd.engines.sglang import Linker

FULL, SWA, MAMBA = ComponentType.FULL, ComponentType.SWA, ComponentType.MAMBA
PAGES, PAGE, WINDOW = 24, 16, 3     # pages of a cache, tokens per page, pages of a window
CPU = {"device": "cpu", "enable_memory_saver": False}
HEADS = {"dtype": torch.bfloat16, "head_num": 2, "head_dim": 32}
STATE = Mamba2CacheParams(layers=[0, 2], shape=Mamba2StateShape.create(
    tp_world_size=1, intermediate_size=64, n_groups=1, num_heads=4, head_dim=16, state_size=8, conv_kernel=4))
KDA = KimiLinearCacheParams(layers=[0, 2], shape=KimiLinearStateShape.create(tp_world_size=1, num_heads=2, head_dim=32))


# ---- caches ----------------------------------------------------------------------------------------------------------


def states(params) -> HybridReqToTokenPool:
    return HybridReqToTokenPool(size=4, mamba_size=PAGES, mamba_spec_state_size=4, max_context_len=64, cache_params=params,
                                mamba_layer_ids=[0, 2], enable_mamba_extra_buffer=False, **CPU)


def linear(requests: HybridReqToTokenPool, **more) -> HybridLinearKVPool:
    return HybridLinearKVPool(size=PAGES * PAGE, page_size=PAGE, full_attention_layer_ids=[1, 3], **HEADS, **CPU,
                              mamba_pool=requests.mamba_pool, **more)


def plain(dtype: torch.dtype = torch.bfloat16) -> tuple:
    return MHATokenToKVPool(PAGES * PAGE, PAGE, layer_num=3, **HEADS | {"dtype": dtype}, **CPU), None, {FULL}


def scaled_types() -> tuple:
    return plain(torch.float8_e4m3fn)


def latents() -> tuple:
    return MLATokenToKVPool(PAGES * PAGE, PAGE, torch.bfloat16, 64, 16, 3, **CPU), None, {FULL}


def indexer() -> tuple:
    return DSATokenToKVPool(PAGES * 64, 64, 64, torch.bfloat16, 16, 3, index_head_dim=128, kv_cache_dim=80,
                            **CPU), None, {FULL}


def windows(**more) -> tuple:
    return SWAKVPool(PAGES * PAGE, PAGES * PAGE, PAGE, swa_attention_layer_ids=[0, 1, 3], full_attention_layer_ids=[2],
                     **HEADS, **CPU, **more), None, {FULL, SWA}


def windows_with_other_heads() -> tuple:
    return windows(swa_head_num=4, swa_head_dim=16)


def windows_and_states() -> tuple:
    cache, _, _ = windows()
    return cache, states(STATE), {FULL, SWA, MAMBA}


def states_and_keys() -> tuple:
    requests = states(STATE)
    return linear(requests), requests, {FULL, MAMBA}


def states_and_latents() -> tuple:
    requests = states(KDA)
    return linear(requests, use_mla=True, kv_lora_rank=64, qk_rope_head_dim=16), requests, {FULL, MAMBA}


def compressed() -> tuple:
    """DeepSeek V4: windows, keys of 4 and of 128 tokens in one, an indexer, and what the compression has in its hands."""
    tokens = PAGES * 256
    return DeepSeekV4TokenToKVPool(
        4, tokens, tokens // 4, tokens // 128, tokens // 16, tokens // 16, 256, 256, torch.float8_e4m3fn, torch.float32,
        torch.float32, qk_nope_head_dim=448, qk_rope_head_dim=64, indexer_head_dim=128, layer_num=4,
        compression_ratios=[0, 4, 128, 4], **CPU), None, {FULL, SWA}


KINDS = [plain, scaled_types, latents, indexer, windows, windows_with_other_heads, windows_and_states, states_and_keys,
         states_and_latents, compressed]


# ---- an engine without a model ---------------------------------------------------------------------------------------


class Engine:
    """SGLang's cache of a kind with kvd's linker, whose bytes are random."""

    def __init__(self, kind, socket: str, args: ServerArgs):
        cache, requests, components = kind()
        self.page = cache.page_size
        params = SimpleNamespace(page_size=self.page, is_eagle=False, req_to_token_pool=requests,
                                 mtp_draft_device_pools=(), sidecar_draft_device_pools=(),
                                 token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: cache))
        self.linker = Linker(args, params, components=components, extra_config={
            "socket": socket, "space": f"pools-{kind.__name__}"})
        self.buffers = {name: [it.view(torch.uint8).view(it.shape[0], -1) for entry in part.entries
                               for it in entry.kv_buffer] for name, part in self.linker.pools.items()}
        for it in self.every():
            it.random_(0, 256)
        self.free = {name: random.sample(range(1, PAGES), PAGES - 1) for name in self.buffers}

    def every(self):
        return [it for buffers in self.buffers.values() for it in buffers]

    def slots(self, name: PoolName, pages: list[int]) -> torch.Tensor:
        """SGLang's indices for pages: the tokens of each, or a state."""
        per = 1 if name == PoolName.MAMBA else self.page
        return (torch.tensor(pages)[:, None] * per + torch.arange(per)).reshape(-1)

    def rows(self, name: PoolName, page: int) -> list[tuple[torch.Tensor, slice]]:
        """The rows that a page has in each buffer: one, or one per token."""
        per = [self.page if it.shape[0] == (PAGES + 1) * self.page else 1 for it in self.buffers[name]]
        return [(it, slice(page * n, (page + 1) * n)) for it, n in zip(self.buffers[name], per)]


def transfer(name: PoolName, keys: list[str], slots: torch.Tensor | None = None) -> PoolTransfer:
    policy = PoolHitPolicy.ALL_PAGES if name == PoolName.KV else PoolHitPolicy.TRAILING_PAGES
    return PoolTransfer(name=name, keys=keys, device_indices=slots, hit_policy=policy)


def reach(name: PoolName, n: int) -> int:
    """How many pages of a part the last of n pages needs."""
    return {PoolName.KV: n, PoolName.SWA: min(n, WINDOW), PoolName.MAMBA: 1}[name]


def test(kind, socket: str, args: ServerArgs) -> int:
    """Returns how many pages were loaded."""
    one, two = Engine(kind, socket, args), Engine(kind, socket, args)
    keys = [random.randbytes(32).hex() for _ in range(random.randrange(4, 12))]
    where: dict[PoolName, dict[int, int]] = {}
    for name in one.buffers:        # keys and values up to a place; of the rest, any
        there = range(random.randrange(2, len(keys) + 1)) if name == PoolName.KV else [
            i for i in range(len(keys)) if random.random() < 0.8]
        where[name] = {i: one.free[name].pop() for i in there}
    for name, pages in where.items():
        if pages:
            assert one.linker.offload([transfer(name, [keys[i] for i in pages], one.slots(name, list(pages.values())))])
            assert one.linker.pop_completed_offload()
    can = [n for n in range(1, len(keys) + 1)
           if all(set(range(n - reach(name, n), n)) <= pages.keys() for name, pages in where.items())]
    asked = [transfer(name, keys[-reach(name, len(keys)):]) for name in where]
    assert two.linker.lookup("a", asked) == can, kind.__name__
    if not can:
        return 0
    n, expected, loads = random.choice(can), {id(it): it.clone() for it in two.every()}, []
    for name, pages in where.items():
        wanted = list(range(n - reach(name, n), n))
        to = [two.free[name].pop() for _ in wanted]
        loads.append(transfer(name, [keys[i] for i in wanted], two.slots(name, to)))
        for i, page in zip(wanted, to):
            for (to_buffer, to_rows), (from_buffer, from_rows) in zip(two.rows(name, page), one.rows(name, pages[i])):
                expected[id(to_buffer)][to_rows] = from_buffer[from_rows]
    assert two.linker.load("a", loads)
    assert two.linker.finish_layer_wise_loading(two.linker.start_layer_wise_loading())
    assert all(torch.equal(it, expected[id(it)]) for it in two.every()), f"{kind.__name__}: other bytes"
    assert not two.linker.load("b", [transfer(PoolName.KV, ["ab" * 32], two.slots(PoolName.KV, [1]))])
    for it in (one, two):
        it.linker.close()
    return sum(len(it.keys) for it in loads)


def main(socket: str, rounds: int) -> None:
    args = ServerArgs(model_path=common.MODEL, device="cpu", dtype="float32")
    get_context().set_server_args(args)
    for kind in KINDS:
        loaded = sum(test(kind, socket, args) for _ in range(rounds))
        assert loaded > rounds, f"{kind.__name__}: {loaded} pages were loaded in {rounds} rounds"
        print(f"{kind.__name__.replace('_', ' ')}: {loaded} pages in {rounds} rounds", flush=True)


if __name__ == "__main__":
    random.seed(7)
    torch.manual_seed(7)
    main(sys.argv[1], int(sys.argv[2]) if sys.argv[2:] else 20)
