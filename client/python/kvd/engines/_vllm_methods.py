# SPDX-License-Identifier: Apache-2.0
"""Methods for vLLM's requests ("methods": true), on the scheduler's side: KeyDiff, KVReviver, HShare, MemShare.

The tables of the daemon (kvd.Sequence) are the worker's (_vllm_rows.py). With each step it is told which blocks earlier steps
have filled. It answers how many of them it has copied to a table of the daemon: in vLLM's table these are the null block from
then on, as are those that a sliding window has left, so that positions go on, and their memory is the pool's. The first block
stays: by its id, the worker reports a request whose tokens cannot be attended to any more, and vLLM recomputes that.

A request that may exceed keydiff.budget while keydiff is on, and every request while kvreviver is on, shares no blocks with
others. With hshare alone, blocks stay where they are, and are shared. With memshare, those of the prompt do, and those of the
answer are the worker's: they are approximate, and the blocks of steps that are said again go back to the pool.

Answers do not depend on how fast the daemon is, for the worker waits. They do depend on how vLLM divides prompts into steps,
which depends on the other requests.
"""

from __future__ import annotations

import sys
from itertools import count
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

import kvd

from ._reduction import LONG_STEP, methods_of
from ._vllm_chain import Chain
from ._vllm_rows import Done, Rows, Told
from ._vllm_steps import Steps

if TYPE_CHECKING:
    from ._vllm_ledger import Ledger

logger = init_logger("vllm." + __name__)

_numbers = count(1)


class Kept:
    """What is known of a request that follows methods. number: of its admission. own: it shares no blocks. steps: it follows
    MemShare. target: number of tokens that it computes before it samples. told: number of full blocks of which the worker was
    told. moved: number of those that its table has. held: number of blocks that the worker has instead. gone: number of blocks
    that have left the pool, and may come back. published: number of its first blocks that may be. stays: number of those that
    stay in vLLM's table."""

    def __init__(self, own: bool, target: int, steps: bool = False, size: int = 1) -> None:
        self.number, self.own, self.steps, self.target = next(_numbers), own, steps, target
        self.published = target // size if steps else sys.maxsize
        self.stays = 1 if own else self.published + 1       # by whose id its worker reports it, see Row.named()
        self.told = self.moved = self.held = self.gone = 0
        self.settled = False


class Methods:
    """longest: tokens of the longest request. chunk: tokens of the longest step. rows: the worker's, if it is in this process.
    steps: what is known of the model's; None: it is not followed."""

    def __init__(self, ledger: Ledger, null: KVCacheBlock, longest: int, chunk: int, rows: Rows | None = None,
                 steps: Steps | None = None):
        self.ledger, self.null, self.chunk, self.worker = ledger, null, chunk, rows
        self.space, self.size = ledger.space, ledger.size
        self.blocks = cdiv(longest, self.size) + 1
        self.steps, self.told = steps, False

    def budget(self) -> int:
        """Return the number of tokens that a request may keep; 0: all."""
        return int(self.space.setting("keydiff.budget")) if self.space.setting("keydiff") else 0

    def follow(self, request: Request, salt: int | None) -> Kept | None:
        """Return what a request that is looked up follows; None: no method. salt: of its chain; None: it shares no blocks."""
        on = methods_of(self.space)
        reduced = 0 < self.budget() < request.num_prompt_tokens + request.max_tokens
        own, steps = reduced or "kvreviver" in on, "memshare" in on and self._shares_steps() and not request.resumable
        if steps and salt != 0 and self.space.setting("memshare.cross_seq"):
            steps = False           # steps of all requests are compared, and a salt keeps its apart
        if not own and (salt is None or not (steps or "hshare" in on)):
            return None
        return Kept(own, request.num_tokens, steps, self.size)

    def _shares_steps(self) -> bool:
        """Return whether MemShare can be followed. If not, say why, once."""
        why = self.steps.missing() if self.steps else "this vLLM's model is not known"
        if why and not self.told:
            self.told = True
            logger.warning("kvd: memshare is on for space %s, and has no effect: %s", self.space.name, why)
        return not why

    def most_blocks(self, chain: Chain | None) -> int | None:
        """Return the largest number of blocks that a request has between steps; None: as many as it has tokens for."""
        budget = self.budget()
        if not chain or not chain.kept or not chain.kept.own or not budget:
            return None
        tokens = chain.request.num_prompt_tokens + chain.request.max_tokens
        budget = max(budget, (int(self.space.setting("keydiff.sink_blocks")) + 1) * self.size)
        most = cdiv(budget, self.size) + cdiv(int(self.space.setting("keydiff.slack")), self.size) + 2
        return self._with_partial(min(cdiv(tokens, self.size), most), chain.kept.steps)

    @staticmethod
    def _with_partial(blocks: int, steps: bool) -> int:
        """Return the largest number of blocks instead of so many, if the last one of a long step of reasoning is partial."""
        return blocks + blocks // LONG_STEP + 1 if steps else blocks

    def reserved(self) -> int:
        """Return the number of blocks that running requests may need: to grow; for a time, in a step, for copies of what it
        has filled, and for its reduction; and for blocks that have left the pool, of the request of which most have. Without
        these, more requests would be admitted than can stay."""
        kept = [(it, it.kept) for it in self.ledger.chains.values() if it.kept and it.kept.own]
        growth = [most - it.held - len(chain.tables[0]) + it.moved for chain, it in kept
                  if (most := self.most_blocks(chain))]
        left = max((it.gone for chain, it in kept if not self.most_blocks(chain)), default=0)
        step = cdiv(2 * self.chunk + self.budget(), self.size) if kept else 0
        answers = 2 * sum(it.kept.steps and not it.kept.own for it in self.ledger.chains.values() if it.kept)
        return sum(max(it, 0) for it in growth) + left + step + answers

    def held(self) -> int:
        """Return the number of blocks that requests have in place of those that have moved."""
        return sum(it.kept.held for it in self.ledger.chains.values() if it.kept)

    def tell(self, scheduled: dict[str, int]) -> dict[int, Told]:
        """Return what the worker must know of the requests of a step, by the id of the block that a request writes next, which
        is no other request's."""
        told = {}
        for name in scheduled:
            chain = self.ledger.chains.get(name)
            if chain and chain.kept:
                tokens, table = chain.request.num_computed_tokens, chain.tables[0]
                told[table[tokens // self.size].block_id] = self._tell(chain, chain.kept, tokens)
        return told

    def _tell(self, chain: Chain, kept: Kept, tokens: int) -> Told:
        first, kept.told = kept.told, tokens // self.size
        ids = [it.block_id for it in chain.tables[0][first:kept.told]]
        words = self.ledger.words(chain.request, first, kept.told)
        told = Told(kept.number, chain.request.request_id, kept.target, tokens, ids, words,
                    self._with_partial(self.blocks, kept.steps), None if kept.own else chain.salts[0], kept.steps)
        if kept.steps and tokens >= kept.target:
            self._settle(kept)
            self._tell_end(chain.request, told)
        return told

    def _tell_end(self, request: Request, told: Told) -> None:
        """Tell what is behind the full blocks, and whether a step of reasoning has ended behind the prompt."""
        assert self.steps is not None
        told.tail = list(request.all_token_ids[told.tokens // self.size * self.size:told.tokens])
        told.ends = told.tokens > told.target and request.all_token_ids[told.tokens - 1] in self.steps.ends

    def _settle(self, kept: Kept) -> None:
        """Have the daemon publish a prompt that is complete, since the worker will look it up."""
        if kept.own or kept.settled or self.ledger.state is not self.ledger.SERVING:
            return
        kept.settled = True
        try:
            self.space.flush()
        except kvd.Error as error:      # what was refused is not found
            logger.warning("kvd: %s", error)

    def numbers(self) -> set[int]:
        """Return the numbers of the requests that run. The worker drops the others' tables."""
        return {it.kept.number for it in self.ledger.chains.values() if it.kept}

    def end(self) -> None:
        """A request has ended, and no step is in flight. A worker in another process hears of it with the next step, which vLLM
        runs without tokens if need be."""
        if self.worker:
            self.worker.keep(self.numbers())

    def take(self, done: Done) -> None:
        """Take the worker's answer to a step: no step is in flight."""
        for chain in self.ledger.chains.values():
            kept = chain.kept
            if kept and kept.number in done.rows:
                moved, kept.held, kept.gone = done.rows[kept.number]
                self._free(chain, kept, moved)
            if kept and kept.number in done.broken:
                self.ledger.doubtful.add(chain.request.request_id)

    def _free(self, chain: Chain, kept: Kept, moved: int) -> None:
        table = chain.tables[0]
        for i in range(max(kept.moved, kept.stays), moved):
            block, table[i] = table[i], self.null
            block.ref_cnt = 0
            self.ledger.give_back(block.block_id)
        kept.moved = moved
