# SPDX-License-Identifier: Apache-2.0
"""SGLang's device pools as kvd sees them: a page of a pool, of all its layers, is a block of a space."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache import linker_pool_assembler as assembler
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType

import kvd

POOLS = {ComponentType.FULL: PoolName.KV, ComponentType.SWA: PoolName.SWA, ComponentType.MAMBA: PoolName.MAMBA}


class Unsupported(ValueError):
    """A KV cache whose pages kvd cannot copy."""


class Part:
    """The pools that SGLang addresses by one kind of index (keys and values, sliding windows, or states), and the space
    for their pages."""

    def __init__(self, entries: list[assembler.DevicePoolEntry]):
        self.entries = entries
        self.salt = 0       # of keys; other than 0 once the weights are not those of the fingerprint
        self.at = [0]       # where each buffer begins within a block, in bytes; at last, the size of a block
        for entry in entries:
            for buffer in entry.kv_buffer:
                self.at.append(self.at[-1] + entry._row_span * buffer[0].numel() * buffer.element_size())

    def layout(self) -> list[tuple]:
        return [(str(entry.name), entry._row_span, [(list(it.shape[1:]), str(it.dtype)) for it in entry.kv_buffer])
                for entry in self.entries]

    def open(self, socket: str | None, name: str, fingerprint: tuple[int, int], max_blocks: int) -> None:
        geometry = kvd.Geometry.opaque(-(-self.at[-1] // 64) * 64, "sglang-pages", block_tokens=8,
                                       fingerprint=fingerprint)
        self.space = kvd.connect(socket).space(name, geometry, max_blocks=max_blocks, fixed=True)
        self.memory = torch.from_dlpack(self.space.memory())    # [blocks, bytes]

    def close(self) -> None:
        self.memory = None
        self.space.close()

    def find(self, keys: bytes) -> list[kvd.Pin]:
        """Pin the pages of these keys. The pin of a page that is absent is false."""
        self.space.catch_up()
        return self.space.lookup_keys(keys, salt=self.salt)

    def read(self, slots: torch.Tensor, pins: list[kvd.Pin]) -> None:
        """Copy pinned pages into SGLang's slots."""
        ids = torch.tensor([pin.blocks[0] for pin in pins], device=self.memory.device)
        for buffer, rows, begin, end in self._planes(slots):
            bytes_ = self.memory[ids, begin:end]
            buffer[rows] = bytes_.view(buffer.dtype).reshape(-1, *buffer.shape[1:]).to(buffer.device)

    def write(self, slots: torch.Tensor, keys: bytes) -> None:
        """Copy SGLang's slots into the space, except for pages that are there already."""
        pins = self.find(keys)
        fresh = [i for i, pin in enumerate(pins) if not pin]
        let_go(pins)
        if not fresh:
            return
        blocks = self.space.alloc(len(fresh))
        try:
            self._fill(slots.view(len(pins), -1)[fresh].reshape(-1), [block.id for block in blocks])
            for i, block in zip(fresh, blocks):
                self.space.seal_key(keys[32 * i:32 * i + 32], [block], salt=self.salt).release()
        finally:
            self.space.free(blocks)

    def _fill(self, slots: torch.Tensor, blocks: list[int]) -> None:
        ids = torch.tensor(blocks, dtype=torch.int64, device=self.memory.device)
        for buffer, rows, begin, end in self._planes(slots):
            bytes_ = buffer[rows].reshape(len(blocks), -1).view(torch.int8)
            self.memory[ids, begin:end] = bytes_.to(self.memory.device)
        self.synchronize()

    def _planes(self, slots: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor, int, int]]:
        """Each buffer, its rows that belong to these slots, and its stretch of a block."""
        planes, i = [], 0
        for entry in self.entries:
            first = torch.tensor(entry.prepare_locations(entry.translate_indices(slots)))
            rows = (first[:, None] + torch.arange(entry._row_span)).reshape(-1).to(entry.kv_buffer[0].device)
            for buffer in entry.kv_buffer:
                planes.append((buffer, rows, self.at[i], self.at[i + 1]))
                i += 1
        return planes

    def synchronize(self) -> None:
        """Wait until copies between a GPU and the space are done."""
        for device in {self.entries[0].kv_buffer[0].device, self.memory.device}:
            if device.type != "cpu":
                torch.get_device_module(device).current_stream().synchronize()


def let_go(pins: list[kvd.Pin]) -> None:
    for pin in pins:
        pin.release()


# ---- which pools there are -------------------------------------------------------------------------------------------


def parts(cache: Any, params: Any, components: set[ComponentType]) -> dict[PoolName, Part]:
    """The parts of SGLang's KV cache, by the pool that its transfers name. Raises Unsupported."""
    if components - POOLS.keys():
        raise Unsupported(f"a cache of {', '.join(sorted(it.name for it in components))}")
    try:
        entries = _entries(cache, params, components)
    except (ValueError, AssertionError, ZeroDivisionError) as e:    # the last: layers without an index of their own
        raise Unsupported(f"the KV cache {type(cache).__name__} ({e})") from e
    by_index = {POOLS[it]: [entry for entry in entries if entry.indices_from_pool == POOLS[it]] for it in components}
    if sum(map(len, by_index.values())) != len(entries) or not all(by_index.values()):
        raise Unsupported(f"the KV cache {type(cache).__name__} (pools {', '.join(str(it.name) for it in entries)})")
    return {name: Part(it) for name, it in by_index.items()}


def _entries(cache: Any, params: Any, components: set[ComponentType]) -> list[assembler.DevicePoolEntry]:
    """SGLang describes some of its caches to linkers. The rest is described here: plain keys and values, and latents of
    MLA, alone, with windows, and with states."""
    pools = {PoolName.KV: getattr(cache, "full_kv_pool", cache)}
    if ComponentType.SWA in components:
        pools[PoolName.SWA] = getattr(cache, "swa_kv_pool", None)
    if (type(cache) not in (MHATokenToKVPool, MLATokenToKVPool, SWAKVPool, HybridLinearKVPool)
            or not all(type(it) in (MHATokenToKVPool, MLATokenToKVPool) for it in pools.values())):
        return assembler.resolve_hybrid_device_pool_group(kvcache=cache, page_size=params.page_size, params=params,
                                                          components=components).entries
    entries = [_plain(name, pool, params.page_size) for name, pool in pools.items()]
    if ComponentType.MAMBA in components:
        entries.append(assembler._mamba_device_pool_entry(params.req_to_token_pool, cache.start_layer))
    return entries


def _plain(name: PoolName, pool: Any, page: int) -> assembler.DevicePoolEntry:
    if getattr(pool, "kv_cache_layout", "nhd") != "nhd":
        raise ValueError(f"layout {pool.kv_cache_layout}")
    if getattr(pool, "kv_scale_buffer", None) is not None:
        raise ValueError("scales beside the latents")
    if isinstance(pool, MHATokenToKVPool):
        return assembler._mha_device_pool_entry(name, pool, {}, page)
    return assembler.DevicePoolEntry(name=name, indices_from_pool=name, device_pool=pool, components=[pool.kv_buffer],
                                     layer_mapping={}, page_size=page, rows_are_pages=False)
