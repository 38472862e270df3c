# SPDX-License-Identifier: Apache-2.0
"""Subclasses of vLLM's BlockPool and KVCacheManager that use a ledger of kvd's blocks (_vllm_ledger.py)."""

from __future__ import annotations

import os
from collections.abc import Iterable

from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request, RequestStatus

from ._vllm_ledger import Chain, Ledger

logger = init_logger("vllm." + __name__)


class Pool(BlockPool):
    """Made from an existing BlockPool by changing its class, so that references to it stay valid."""

    ledger: Ledger
    lent = 0        # blocks found by a lookup that are in no table yet: vLLM counts them as free

    def get_num_free_blocks(self) -> int:
        return len(self.ledger.free) + self.lent

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        got = [self.blocks[i] for i in self.ledger.hand_out(num_blocks)]
        for block in got:
            block.ref_cnt = 1
        return got

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        for block in blocks:
            self.ledger.used += block.ref_cnt == 0
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock | Chain]) -> None:
        for block in ordered_blocks:
            if isinstance(block, Chain):
                self.ledger.close(block)
                continue
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self.ledger.give_back(block.block_id)
        self.ledger.let_go()

    def cache_full_blocks(self, request: Request, blocks: list[KVCacheBlock], num_cached_blocks: int,
                          num_full_blocks: int, *_, **__) -> None:
        self.ledger.plan(request, num_full_blocks)

    def reset_prefix_cache(self) -> bool:
        """Stop sharing: this vLLM finds no previous blocks, and keeps its new ones for itself, because a reset means
        that its weights changed. The cache stays for other processes."""
        if self.ledger.used:
            logger.warning("Failed to reset prefix cache because some blocks (%d) are not freed yet", self.ledger.used)
            return False
        self.ledger.epoch = os.urandom(16)
        self.ledger.forget()        # vLLM also resets before it sleeps, and holds no block until it serves again
        logger.info("kvd: reset; this vLLM does not share with others any more")
        return True

    def get_usage(self) -> float:
        return self.ledger.used / max(self.num_gpu_blocks - 1, 1)


class Manager(KVCacheManager):
    """Made from an existing KVCacheManager as Pool from a BlockPool."""

    ledger: Ledger

    @classmethod
    def adopt(cls, manager: KVCacheManager, ledger: Ledger) -> None:
        if type(manager) is not KVCacheManager or type(manager.block_pool) is not BlockPool:
            raise RuntimeError(f"kvd does not know {type(manager).__name__} with {type(manager.block_pool).__name__}")
        manager.__class__, manager.ledger = cls, ledger
        manager.block_pool.__class__, manager.block_pool.ledger = Pool, ledger

    @property
    def _tables(self) -> dict[str, list[KVCacheBlock]]:
        return self.coordinator.single_type_managers[0].req_to_blocks

    def get_computed_blocks(self, request: Request, max_cache_hit_length: int | None = None
                            ) -> tuple[KVCacheBlocks, int, int]:
        """Find a request's prefix in the pool. vLLM 0.33 may allow less than the whole prompt without its last token."""
        chain = self.ledger.find(request, max_cache_hit_length)
        blocks = [self.block_pool.blocks[i] for i in chain.pin.blocks] if chain.pin else []
        return self.create_kv_cache_blocks((blocks,)), chain.length * self.ledger.size, 0

    def _goes_on(self, request: Request, num_new_tokens: int) -> bool:
        """Return whether a request needs no further blocks, as in most decoding steps."""
        ledger, table = self.ledger, self._tables.get(request.request_id)
        return bool(table and request.num_computed_tokens + num_new_tokens <= len(table) * ledger.size
                    and request.status == RequestStatus.RUNNING and ledger.state is ledger.SERVING
                    and not ledger.doubtful)

    def allocate_slots(self, request: Request, num_new_tokens: int, num_new_computed_tokens: int = 0,
                       new_computed_blocks: KVCacheBlocks | None = None, num_lookahead_tokens: int = 0, *,
                       full_sequence_must_fit: bool = False, **options) -> KVCacheBlocks | None:
        """Allocate the needed blocks from the pool, then do as vLLM. None: vLLM must wait, or preempt. Beyond its new
        tokens, a step needs slots for num_lookahead_tokens, into which a draft model writes."""
        options["num_lookahead_tokens"] = num_lookahead_tokens
        if self._goes_on(request, num_new_tokens + num_lookahead_tokens):
            return super().allocate_slots(request, num_new_tokens, num_new_computed_tokens, new_computed_blocks,
                                          **options)
        ledger, running = self.ledger, request.status == RequestStatus.RUNNING
        hits = new_computed_blocks.blocks[0] if new_computed_blocks else ()
        have = len(hits) + len(self._tables.get(request.request_id, ()))
        tokens = min(request.num_computed_tokens + num_new_computed_tokens + num_new_tokens + num_lookahead_tokens,
                     self.max_model_len)
        need = cdiv(tokens, ledger.size) - have + (0 if running else self.watermark_blocks)
        ledger.fetch(max(need, 0))
        if ledger.state is ledger.STALE or (ledger.state is ledger.AWAY and not running):
            return None
        if request.request_id in ledger.doubtful:
            return None
        if request.request_id not in ledger.chains and ledger.found is None:
            return None         # its lookup was dropped with the last daemon's blocks: the next step looks up again
        whole = cdiv(min(request.num_tokens, self.max_model_len), ledger.size) - have
        if full_sequence_must_fit and not ledger.could(whole):
            return None
        self.block_pool.lent = sum(block.ref_cnt == 0 for block in hits)
        blocks = super().allocate_slots(request, num_new_tokens, num_new_computed_tokens, new_computed_blocks,
                                        **options)
        self.block_pool.lent = 0
        if blocks is not None and request.request_id not in ledger.chains:
            ledger.admit(request, self._tables[request.request_id])
        return blocks

    def free(self, request: Request) -> None:
        chain = self.ledger.leave(request.request_id)
        super().free(request)
        if chain:
            self.ledger.close(chain)

    def pop_blocks_for_free(self, request: Request) -> list[KVCacheBlock]:
        """Return the request's blocks and its chain, to be freed together, because a step in flight may use them."""
        chain = self.ledger.leave(request.request_id)
        blocks = super().pop_blocks_for_free(request)
        return blocks + [chain] if chain else blocks
