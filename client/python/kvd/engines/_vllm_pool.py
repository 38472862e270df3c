# SPDX-License-Identifier: Apache-2.0
"""Subclasses of vLLM's BlockPool and KVCacheManager that use a ledger of kvd's blocks (_vllm_ledger.py)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request, RequestStatus

from ._vllm_chain import Chain
from ._vllm_ledger import Ledger

logger = init_logger("vllm." + __name__)


class Pool(BlockPool):
    """Made from an existing BlockPool by changing its class, so that references to it stay valid. vLLM looks up prefixes
    itself, in all groups, and asks this pool for each block; where vLLM has a hash, Manager puts the block's number."""

    ledger: Ledger
    admitting = False       # vLLM asks whether a whole request would fit

    def get_num_free_blocks(self) -> int:
        ledger = self.ledger
        if not self.admitting:
            return len(ledger.free)
        reserved = ledger.methods.reserved() if ledger.methods else 0
        return len(ledger.free) + ledger.space.available() - reserved

    def get_cached_block(self, block_hash: int, kv_cache_group_ids: list[int]) -> list[KVCacheBlock] | None:
        ids = self.ledger.cached((block_hash + 1) * self.hash_block_size, kv_cache_group_ids)
        return [self.blocks[i] for i in ids] if ids else None

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        got = [self.blocks[i] for i in self.ledger.hand_out(num_blocks)]
        for block in got:
            block.ref_cnt = 1
        return got

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Use blocks that were found, while Manager._taking has a reference to each of them."""
        for block in blocks:
            if not block.is_null:
                self.ledger.used += block.ref_cnt == 1
                block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock | Chain]) -> None:
        for block in ordered_blocks:
            if isinstance(block, Chain):
                self.ledger.close(block)
            elif not block.is_null:
                block.ref_cnt -= 1
                self.ledger.end_use(block.block_id)
                if block.ref_cnt == 0:
                    self.ledger.give_back(block.block_id)
        self.ledger.let_go()

    def cache_full_blocks(self, request: Request, blocks: list[KVCacheBlock], num_cached_blocks: int,
                          num_full_blocks: int, block_size: int, kv_cache_group_id: int,
                          block_mask: list[bool] | None = None) -> None:
        """Plan to publish the blocks that a step will fill; of groups with windows, those that a lookup may want."""
        if kv_cache_group_id in self.ledger.groups.dense:
            self.ledger.plan(request, num_full_blocks)
        elif kv_cache_group_id in self.ledger.groups.places:
            for i in range(num_cached_blocks, num_full_blocks):
                if not blocks[i].is_null and (block_mask is None or block_mask[i - num_cached_blocks]):
                    self.ledger.plan_object(request, kv_cache_group_id, (i + 1) * block_size, blocks[i].block_id)

    def cache_partial_block(self, request: Request, block: KVCacheBlock, num_tokens: int, kv_cache_group_id: int,
                            block_size: int, replace_existing_hashes: bool = False) -> None:
        """Do nothing, because hits end where blocks of all groups end; but if a step will leave a state of Mamba's at
        num_tokens in this block, and not at the block's own end, plan that."""
        if replace_existing_hashes and num_tokens % block_size == 0 and not block.is_null:
            self.ledger.plan_object(request, kv_cache_group_id, num_tokens, block.block_id)
        elif replace_existing_hashes:
            self.ledger.forget_plan_of(block.block_id)

    def _maybe_evict_cached_block(self, block: KVCacheBlock) -> bool:
        """A step will overwrite a state of Mamba's that was planned to be published."""
        self.ledger.forget_plan_of(block.block_id)
        return False

    def reset_prefix_cache(self) -> bool:
        """Stop sharing: this vLLM finds no previous blocks, and keeps its new ones for itself, because a reset means
        that its weights changed. The cache stays for other processes."""
        if self.ledger.is_busy():
            logger.warning("Failed to reset prefix cache because some blocks (%d) are not freed yet",
                           self._in_use())
            return False
        self.ledger.epoch = os.urandom(16)
        self.ledger.salts.forget()
        self.ledger.forget()        # vLLM also resets before it sleeps, and holds no block until it serves again
        logger.info("kvd: reset; this vLLM does not share with others any more")
        return True

    def get_usage(self) -> float:
        return self._in_use() / max(self.num_gpu_blocks - 1, 1)

    def _in_use(self) -> int:
        return self.ledger.used + (self.ledger.methods.held() if self.ledger.methods else 0)


class Manager(KVCacheManager):
    """Made from an existing KVCacheManager as Pool from a BlockPool."""

    ledger: Ledger

    @classmethod
    def adopt(cls, manager: KVCacheManager, ledger: Ledger) -> None:
        if type(manager) is not KVCacheManager or type(manager.block_pool) is not BlockPool:
            raise RuntimeError(f"kvd does not know {type(manager).__name__} with {type(manager.block_pool).__name__}")
        manager.__class__, manager.ledger = cls, ledger
        manager.block_pool.__class__, manager.block_pool.ledger = Pool, ledger

    def get_computed_blocks(self, request: Request, max_cache_hit_length: int | None = None
                            ) -> tuple[KVCacheBlocks, int, int]:
        """Find a request's prefix in the pool, in all groups: by default without its last token, which vLLM computes
        itself. vLLM 0.33 may allow less."""
        most = request.num_tokens - 1 if max_cache_hit_length is None else max_cache_hit_length
        self.ledger.find(request, most)
        numbers = range(request.num_tokens // self.block_pool.hash_block_size)
        blocks, tokens, uncached = self.coordinator.find_longest_cache_hit(numbers, most)
        self.ledger.settle(tokens)
        return self.create_kv_cache_blocks(blocks), tokens, tokens + uncached if uncached else 0

    @contextmanager
    def _taking(self, more: int, hits: list[KVCacheBlock], most: int | None) -> Iterator[None]:
        """Meanwhile, whenever vLLM counts the blocks that a request needs now, allocate them from the pool, and `more` if
        the pool has them, so that vLLM finds them free. Blocks that were found have a reference, and are not free. A
        request that runs alone need not fit as a whole now: others can only be waited for while it runs, too. most: the
        largest number of blocks that the request has at a time, if it does not keep all."""
        coordinator, count = self.coordinator, self.coordinator.get_num_blocks_to_allocate

        def take(*arguments, apply_admission_cap: bool = False, **options) -> int:
            need = count(*arguments, apply_admission_cap=apply_admission_cap, **options)
            if apply_admission_cap and most is not None:
                need = min(need, most)
            self.block_pool.admitting = apply_admission_cap
            if apply_admission_cap and not self.ledger.is_busy():       # what may be filled at a time is less than the pool
                return min(need, max(self.block_pool.get_num_free_blocks(), 1))
            if not apply_admission_cap and not self.ledger.fetch(need + more) and more:
                self.ledger.fetch(need)     # vLLM asks for no watermark if no other request runs
            return need

        coordinator.get_num_blocks_to_allocate = take
        for block in hits:
            block.ref_cnt += 1
        try:
            yield
        finally:
            coordinator.get_num_blocks_to_allocate = count
            self.block_pool.admitting = False
            for block in hits:
                block.ref_cnt -= 1

    def _goes_on(self, request: Request) -> bool:
        """Return whether a request runs, and nothing is unusual. Most of its steps need no block, or one that is free."""
        return (request.status == RequestStatus.RUNNING and self.ledger.state is self.ledger.SERVING
                and not self.ledger.doubtful)

    def _may_run(self, request: Request) -> bool:
        """Return whether a request may be admitted, or go on, as far as the daemon's life is concerned."""
        ledger, running = self.ledger, request.status == RequestStatus.RUNNING
        if ledger.state is not ledger.SERVING:
            ledger.recover()
        if ledger.state is ledger.STALE or (ledger.state is ledger.AWAY and not running):
            return False
        # Without a chain, its lookup was dropped with the last daemon's blocks: the next step looks up again.
        return request.request_id not in ledger.doubtful and (
            request.request_id in ledger.chains or ledger.found is not None)

    def allocate_slots(self, request: Request, num_new_tokens: int, num_new_computed_tokens: int = 0,
                       new_computed_blocks: KVCacheBlocks | None = None, *arguments, **options
                       ) -> KVCacheBlocks | None:
        """Do as vLLM, with blocks from the pool. None: vLLM must wait, or preempt."""
        if self._goes_on(request):
            blocks = super().allocate_slots(request, num_new_tokens, num_new_computed_tokens, new_computed_blocks,
                                            *arguments, **options)
            if blocks is not None:
                return blocks
        if not self._may_run(request):
            return None
        groups = new_computed_blocks.blocks if new_computed_blocks else ()
        hits = [block for group in groups for block in group if not block.is_null]
        most = self.ledger.methods.most_blocks(self.ledger.found) if self.ledger.methods else None
        with self._taking(0 if request.status == RequestStatus.RUNNING else self.watermark_blocks, hits, most):
            blocks = super().allocate_slots(request, num_new_tokens, num_new_computed_tokens, new_computed_blocks,
                                            *arguments, **options)
        if blocks is not None and request.request_id not in self.ledger.chains:
            tables = self.coordinator.get_blocks(request.request_id)
            self.ledger.admit(request, tables, num_new_computed_tokens)
        return blocks

    def remove_skipped_blocks(self, request_id: str, processed_computed_tokens: int,
                              num_prompt_tokens: int | None = None) -> None:
        """Publish what finished steps have written of a request that ends, before vLLM frees the blocks that its window
        has left: its last step may have filled them."""
        self.ledger.publish_of(request_id)
        super().remove_skipped_blocks(request_id, processed_computed_tokens, num_prompt_tokens)

    def free(self, request: Request) -> None:
        chain = self.ledger.leave(request)
        super().free(request)
        if chain:
            self.ledger.close(chain)

    def pop_blocks_for_free(self, request: Request) -> list[KVCacheBlock]:
        """Return the request's blocks and its chain, to be freed together, because a step in flight may use them."""
        chain = self.ledger.leave(request)
        blocks = super().pop_blocks_for_free(request)
        return blocks + [chain] if chain else blocks
