# SPDX-License-Identifier: Apache-2.0
"""Continuous batching of transformers in the pool: use_pool() of kvd.engines.transformers, whose documentation is there.

transformers keeps the cache of continuous batching in one flat tensor, whose sectors it gives to its allocators. With full
attention only, a sector is a block: for each layer a plane of keys and one of values, as in a block of kvd in order "nhd".
Here the tensor is the pool, and sector n is block n, so that all that reads or writes the cache is transformers' own code.
Its first two sectors are for padding: no request has them. Whichever process is given blocks 0 and 1 holds them.

A block in a request's table is of one of two kinds, as in vLLM (_vllm_ledger.py): ours, which a request writes and which
is posted when it is full; or found, and held by a pin. Ours stay in the table even if another process was first. Forks
share full blocks of both kinds.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import torch
import transformers
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.generation.continuous_batching import cache as caches
from transformers.generation.continuous_batching import continuous_api
from transformers.generation.continuous_batching.cache_allocators import FULL_ATTENTION
from transformers.generation.continuous_batching.cache_allocators.cache_allocator import BlockLedger
from transformers.generation.continuous_batching.cache_allocators.cache_pool import CachePool
from transformers.generation.continuous_batching.cache_allocators.full_attention import FullAttentionCacheAllocator

import kvd

from ._transformers_model import check_model, fingerprint, refuse, refuse_windows

log = logging.getLogger("kvd.engines.transformers")

PADDING = 2             # sectors that transformers uses for padding
KEEP = 32               # unused blocks that are kept for later
PATIENCE = 60.0         # seconds for which requests wait in vain, before they fail
MOMENT = 0.01
_thread = threading.local()     # .space: of the cache that this thread makes


class Sectors(CachePool):
    """Blocks of kvd as transformers' sectors. Those in `free` are allocated and unused; more are allocated by fetch()."""

    num_free_sectors = 0        # transformers finds all blocks that it may use free already

    def __init__(self, num_sectors: int, num_allocators: int):
        self.space: kvd.Space = _thread.space
        self.free: list[kvd.Block] = []
        self.padding: list[kvd.Block] = []
        self.ours: dict[int, kvd.Block] = {}
        self.short = 0                  # blocks that the last request needs which did not fit in this batch
        self.waited = 0.0               # seconds since one did
        super().__init__(self.space.memory().blocks - PADDING, num_allocators, PADDING)

    def reset(self) -> None:
        self.space.free([*self.free, *self.ours.values()])
        self.free, self.ours = [], {}

    def set_blocks_per_sector(self, index: int, blocks_per_sector: int) -> None:
        if blocks_per_sector != 1:
            refuse(f"blocks of which {blocks_per_sector} are in a sector: choose a larger page_size")

    def fetch(self, n: int) -> bool:
        """Allocate until n blocks are free. Returns whether they are."""
        try:
            while len(self.free) < n:
                for block in self.space.alloc(n - len(self.free)):
                    (self.free if block.id >= PADDING else self.padding).append(block)
        except (kvd.PoolFull, kvd.QuotaExceeded):       # without a daemon, all requests fail with its error
            pass
        return len(self.free) >= n

    def get_free_blocks(self, index: int, num_blocks: int) -> list[int]:
        if not self.fetch(num_blocks):
            raise ValueError(f"the pool has {len(self.free)} blocks left, and not {num_blocks}")
        got, self.free = self.free[:num_blocks], self.free[num_blocks:]
        self.ours.update((block.id, block) for block in got)
        return [block.id for block in got]

    def free_blocks(self, index: int, block_ids: list[int]) -> None:
        blocks = [self.ours.pop(it) for it in block_ids]
        self.space.free([it for it in blocks if it.posted])
        self.free += [it for it in blocks if not it.posted]
        self._trim()

    def count_free_blocks(self, index: int) -> int:
        return len(self.free)

    def try_to_free_sectors(self) -> None:
        """Called before each batch is chosen."""
        self.short = 0
        self._trim()

    def _trim(self) -> None:
        self.space.free(self.free[KEEP:])
        del self.free[KEEP:]

    @property
    def free_sectors(self) -> range:
        """For transformers' estimate of how full the cache is."""
        return range(self.space.available())


class Ours(BlockLedger):
    """Counts the requests that use a block of ours. A block that was found is held by its pins."""

    def __init__(self, pool: Sectors):
        super().__init__()
        self.pool = pool

    def acquire(self, block_id: int) -> None:
        if block_id in self.pool.ours:
            super().acquire(block_id)

    def release(self, block_id: int, no_cache: bool = False) -> bool:
        return block_id in self.pool.ours and super().release(block_id, no_cache)


class Request:
    """What is known of a request: pins of blocks that were found, which forks share; the number of its blocks that are
    full; and the pin behind which the next ones are posted. None: not looked up yet, or nothing more is posted."""

    def __init__(self, pins: list[kvd.Pin], full: int):
        self.pins, self.full, self.ended = pins, full, False
        self.tail: kvd.Pin | None = None


class Allocator(FullAttentionCacheAllocator):
    pool: Sectors

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.requests: dict[str, Request] = {}
        self.found: kvd.Pin | None = None       # by the last search

    def register_cache_tensor(self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: torch.Tensor,
                              pool: CachePool) -> None:
        """Views of all blocks of the pool. transformers' own number of blocks is how many a batch reads at most."""
        blocks = cache_tensor.numel() - PADDING * bytes_per_sector
        super().register_cache_tensor(bytes_per_sector, blocks, cache_tensor, pool)
        self.num_blocks = min(non_trash_bytes, blocks) // bytes_per_sector
        self.ledger = Ours(self.pool)

    def needed(self, request_id: str, past_length: int, query_length: int) -> int:
        return int(self.needs_new_blocks(request_id, past_length, query_length))

    def match_prefix_blocks(self, prompt_ids: list[int]) -> list[int]:
        """Find the longest prefix of a prompt, without its last token, in the pool."""
        space, size = self.pool.space, self.tokens_per_page
        space.catch_up()
        self.found = space.lookup(prompt_ids[:(len(prompt_ids) - 1) // size * size])
        if any(it < PADDING for it in self.found):          # another client's, which has not asked use_pool()
            self.found = kvd.Pin(space)
        return list(self.found)

    def acquire_prefix_blocks(self, request_id: str, prefix_len: int, block_ids: list[int]) -> None:
        assert self.found is not None and prefix_len == self.found.tokens
        self.block_table[request_id] = list(block_ids)
        for it in block_ids:            # some may be ours, of a request that is still running
            self.ledger.acquire(it)
        self.requests[request_id] = Request([self.found], len(block_ids))
        self.requests[request_id].tail, self.found = self.found, None

    def mark_complete_blocks(self, request_id: str, token_ids: list[int], new_new_blocks: int) -> None:
        """Post the blocks that the last forward pass has filled."""
        request, size = self.requests.setdefault(request_id, Request([], 0)), self.tokens_per_page
        first, request.full = request.full, request.full + new_new_blocks
        if request.tail is None:
            request.tail = self._tail(token_ids[:first * size])
            request.ended = request.tail.tokens < first * size
        if not request.ended:
            blocks = [self.pool.ours[it] for it in self.block_table[request_id][first:request.full]]
            request.ended = not self._posts(request.tail, blocks, token_ids[first * size:request.full * size])

    def _posts(self, tail: kvd.Pin, blocks: list[kvd.Block], tokens: list[int]) -> bool:
        for _ in range(2):
            try:
                tail.post(blocks, tokens)
                return True
            except kvd.Refused as error:        # an earlier post of any request was refused; nothing was posted now
                log.warning("kvd: %s", error)
        return False

    def _tail(self, tokens: list[int]) -> kvd.Pin:
        """Return a pin behind which a fork's blocks, or a new request's, are posted."""
        if not tokens:
            return kvd.Pin(self.pool.space)
        try:
            self.pool.space.flush()
        except kvd.Refused as error:
            log.warning("kvd: %s", error)
        return self.pool.space.lookup(tokens)

    def fork_blocks(self, source_request_id: str, dest_request_id: str, past_length: int) -> tuple[list[int], list[int]]:
        source = self.requests.get(source_request_id, Request([], 0))
        self.requests[dest_request_id] = Request(source.pins, past_length // self.tokens_per_page)
        return super().fork_blocks(source_request_id, dest_request_id, past_length)

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        super().free_blocks(request_id, no_cache)
        self.requests.pop(request_id, None)     # with its last user, a pin is released


class Placed(TorchFunctionMode):
    """Answers the torch.zeros call for the cache with the pool, without zeroing, which would erase it."""

    def __init__(self, pool: torch.Tensor):
        super().__init__()
        self.pool, self.placed = pool, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and kwargs.get("dtype") is torch.uint8 and not self.placed:
            self.placed = True
            return self.pool
        return func(*args, **kwargs)


class PoolCache(caches.PagedAttentionCache):
    """transformers' cache of continuous batching, in a space."""

    pool: Sectors

    def __init__(self, **options: Any):
        memory = torch.from_dlpack(_thread.space.memory())
        with Placed(memory.view(-1)) as placed:
            super().__init__(**options)
        if not placed.placed or not self.use_prefix_sharing or self.bytes_per_sector != self.pool.space.block_bytes:
            refuse("a cache of continuous batching in other pieces, or without block sharing")
        self.num_sectors = self.pool.num_sectors
        self._hold_padding()

    def _hold_padding(self) -> None:
        """Have the blocks for padding written once, by the process that is given them."""
        self.pool.fetch(1)
        for block in self.pool.padding:
            torch.frombuffer(block.memoryview(), dtype=torch.uint8).zero_()

    def can_store_request_tokens(self, state: Any, request_len: int, dry_run: bool = False) -> bool:
        (allocator,) = self.cache_allocators.values()
        need = allocator.needed(state.request_id, state.current_len(), request_len)
        if dry_run:
            return bool(need <= len(self.pool.free) + self.pool.space.available())
        fits = self.pool.fetch(need) and bool(super().can_store_request_tokens(state, request_len))
        self.pool.short, self.pool.waited = (0, 0.0) if fits else (need, self.pool.waited)
        return fits

    def evict_cached_blocks(self) -> bool:
        """There are none; but other processes may leave blocks to a request that does not fit now. Returns whether it is
        worth trying again, after a moment."""
        if not self.pool.short or self.pool.short > self.num_sectors or self.pool.waited > PATIENCE:
            return False
        time.sleep(MOMENT)
        self.pool.waited += MOMENT
        return True

    def count_storable_requests(self, list_blocks_needed: list[dict[str, int]]) -> int:
        room, n = len(self.pool.free) + self.pool.space.available(), 0
        for it in list_blocks_needed:
            room -= sum(it.values())
            n += room >= 0
        return n

    def prepare_fork_request(self, src_state: Any, dst_req_ids: list[str], copy_src_and_dst: Any) -> list[str]:
        (allocator,) = self.cache_allocators.values()
        self.pool.fetch(len(dst_req_ids) * allocator.count_non_shareable_blocks(src_state.request_id,
                                                                                src_state.current_len()))
        return list(super().prepare_fork_request(src_state, dst_req_ids, copy_src_and_dst))


def _either(ours: type, theirs: type) -> type:
    """Return a class that makes one of ours in a thread that makes a cache in the pool, and one of theirs in others."""
    def make(_: type, *arguments: Any, **options: Any) -> Any:
        return (ours if getattr(_thread, "space", None) else theirs)(*arguments, **options)
    return type(theirs.__name__, (theirs,), {"__new__": make})


continuous_api.PagedAttentionCache = _either(PoolCache, caches.PagedAttentionCache)
caches.CachePool = _either(Sectors, CachePool)
caches.ATTN_TYPE_TO_ALLOCATOR[FULL_ATTENTION] = _either(Allocator, FullAttentionCacheAllocator)


def use_pool(manager: continuous_api.ContinuousBatchingManager, daemon: kvd.Daemon, name: str | None = None, *,
             max_blocks: int = 0) -> kvd.Space:
    """Keep the cache of continuous batching in the pool. Returns the space, which is named after the model's weights, and
    closed with the manager.

    The manager is of model.init_continuous_batching(), and was not started yet. name: raises kvd.Mismatch if the space of
    that name has other weights. max_blocks is as in Daemon.space(). Reads all weights once, at some GB/s. Raises
    ValueError for what is not supported, see the module.
    """
    options = manager.continuous_batching_config
    geometry = _geometry(manager.model, options.page_size)
    if manager.is_running():
        refuse("a manager that has been started")
    if options.cpu_offload_space:
        refuse("cpu_offload_space: the cache is in host memory")
    if not options.allow_block_sharing:
        refuse("allow_block_sharing=False")
    if manager.distributed_helper.tp_size > 1:
        refuse("tensor parallelism")
    space = daemon.space(name or f"transformers-batching-{geometry.fingerprint[0]:016x}", geometry, max_blocks=max_blocks)
    make = manager._create_batch_processor

    def create() -> Any:
        _thread.space = space
        try:
            return make()
        finally:
            _thread.space = None

    manager._create_batch_processor = create
    return space


def _geometry(model: PreTrainedModel, page_size: int) -> kvd.Geometry:
    """The blocks of a model. Kernels differ in how they round, so those of other attentions are in another space."""
    config = check_model(model)
    refuse_windows(model)
    words = kvd.fingerprint("transformers batching", transformers.__version__, fingerprint(model), page_size,
                            model.config._attn_implementation)
    return kvd.Geometry(layers=config.num_hidden_layers, kv_heads=caches.find_num_key_value_heads(config),
                        head_dim=caches.find_head_dim(config), vocab=config.vocab_size, dtype=model.dtype, order="nhd",
                        block_tokens=page_size, fingerprint=words)
