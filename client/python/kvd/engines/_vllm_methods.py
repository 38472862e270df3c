# SPDX-License-Identifier: Apache-2.0
"""Methods for vLLM's requests ("methods": true): KeyDiff.

A request that may exceed keydiff.budget while keydiff is on shares no blocks with others. Whenever a step has left more
tokens than the budget (and, of a request that decodes, keydiff.slack), the request's full blocks move to a table of the
daemon (kvd.Sequence), which keeps the tokens of highest score in new blocks, all of them full. In vLLM's table the blocks
that have moved are the null block, as are those that a sliding window has left, so that positions go on; the ids of the new
blocks go to the workers with each step (_vllm_attention.py). Blocks that became free are the pool's, for any process.

The scheduler waits for the daemon, so that answers do not depend on how fast it is. They do depend on how vLLM divides
prompts into steps, which depends on the other requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

import kvd

from ._reduction import reduction
from ._vllm_chain import Chain

if TYPE_CHECKING:
    from ._vllm_ledger import Ledger

logger = init_logger("vllm." + __name__)

OTHERS = ("kvreviver", "hshare", "memshare")
PATIENCE_S = 10
GONE = (kvd.ConnectionLost, kvd.ConnectionRefused, kvd.NotFound, kvd.TimedOut)     # errors of a daemon that is gone


class Kept:
    """What is kept of a request. moved: number of blocks of vLLM's table that have moved. blocks: ids of those that are seen
    in their place. later: number of tokens at which a reduction that failed is tried again."""

    def __init__(self) -> None:
        self.sequence: kvd.Sequence | None = None
        self.moved, self.later = 0, 0
        self.blocks: list[int] = []

    def close(self) -> None:
        if self.sequence:
            self.sequence.close()


class Methods:
    """longest: tokens of the longest request. chunk: tokens of the longest step."""

    def __init__(self, ledger: Ledger, null: KVCacheBlock, longest: int, chunk: int):
        self.ledger, self.null, self.chunk = ledger, null, chunk
        self.space, self.size = ledger.space, ledger.size
        self.blocks = cdiv(longest, self.size) + 1
        self.told: set[str] = set()

    def budget(self) -> int:
        """Return the number of tokens that a request may keep; 0: all."""
        return int(self.space.setting("keydiff.budget")) if self.space.setting("keydiff") else 0

    def follows(self, request: Request) -> bool:
        """Return whether a request that is looked up will be reduced."""
        for name in OTHERS:
            if self.space.setting(name) and name not in self.told:
                self.told.add(name)
                logger.warning("kvd: %s is on for space %s, and has no effect on vLLM", name, self.space.name)
        return 0 < self.budget() < request.num_prompt_tokens + request.max_tokens

    def most_blocks(self, chain: Chain | None) -> int | None:
        """Return the largest number of blocks that a request has between steps; None: as many as it has tokens for."""
        budget = self.budget()
        if not chain or not chain.kept or not budget:
            return None
        tokens = chain.request.num_prompt_tokens + chain.request.max_tokens
        budget = max(budget, (int(self.space.setting("keydiff.sink_blocks")) + 1) * self.size)
        most = cdiv(budget, self.size) + cdiv(int(self.space.setting("keydiff.slack")), self.size) + 1
        return min(cdiv(tokens, self.size), most)

    def reserved(self) -> int:
        """Return the number of blocks that running requests may need: to grow, and for a time, in a step and for its
        reduction. Without these, more requests would be admitted than can stay."""
        growth = [most - len(it.kept.blocks) - len(it.tables[0]) + it.kept.moved for it in self.ledger.chains.values()
                  if it.kept and (most := self.most_blocks(it))]
        return sum(max(it, 0) for it in growth) + cdiv(self.chunk + self.budget(), self.size) if growth else 0

    def kept(self) -> int:
        """Return the number of blocks that requests have in place of those that have moved."""
        return sum(len(it.kept.blocks) for it in self.ledger.chains.values() if it.kept)

    def reduce(self) -> None:
        """Reduce the requests that have too many tokens. No step is in flight."""
        budget, slack = self.budget(), int(self.space.setting("keydiff.slack"))
        for chain in list(self.ledger.chains.values()) if budget else ():
            tokens = self.ledger.written(chain.request)
            decodes = tokens > chain.request.num_prompt_tokens
            if chain.kept and tokens >= chain.kept.later and self._used(chain.kept, tokens) > budget + slack * decodes:
                self._reduce(chain, chain.kept, tokens, budget)

    def _used(self, kept: Kept, tokens: int) -> int:
        return tokens + (len(kept.blocks) - kept.moved) * self.size

    def _reduce(self, chain: Chain, kept: Kept, tokens: int, budget: int) -> None:
        kept.later = tokens + self.size
        if self._move(chain, kept, tokens // self.size) and kept.sequence:
            self._compact(chain, kept, tokens - kept.moved * self.size, budget)
        if kept.sequence:
            self._see(chain, kept.sequence)

    def _compact(self, chain: Chain, kept: Kept, behind: int, budget: int) -> None:
        assert kept.sequence
        try:
            for it in reduction(self.space, kept.sequence.entries(), behind, budget, unit=self.size):
                if kept.sequence.compact(it.first, it.n, it.keep):
                    kept.sequence.wait(PATIENCE_S)
                    kept.later = 0
        except kvd.Error as error:
            logger.info("kvd: request %s is reduced later: %s", chain.request.request_id, error)

    def _move(self, chain: Chain, kept: Kept, done: int) -> bool:
        """Move full blocks from vLLM's table to the daemon's."""
        ledger, table = self.ledger, chain.tables[0]
        mine, moved = [ledger.ours[it.block_id] for it in table[kept.moved:done]], 0
        try:
            kept.sequence = kept.sequence or self.space.sequence(self.blocks)
            kept.sequence.sync()        # what was late before
            moved = kept.sequence.append(mine, ledger.words(chain.request, kept.moved, done)) if mine else 0
        except kvd.Error as error:
            logger.warning("kvd: request %s is reduced later: %s", chain.request.request_id, error)
            if isinstance(error, kvd.Stale):
                ledger.doubtful.add(chain.request.request_id)
            if isinstance(error, GONE) or self.space.counters().reconnects != ledger.era:
                ledger.lose(error)
        if any(not it.data for it in mine[moved:]):     # perhaps another process's by now
            ledger.doubtful.add(chain.request.request_id)
        for i in range(kept.moved, kept.moved + moved):
            ledger.move(table[i])
            table[i] = self.null
        kept.moved += moved
        return moved == len(mine)

    def _see(self, chain: Chain, sequence: kvd.Sequence) -> None:
        """Note what is seen now. All blocks but vLLM's last one are full, so that their order is all that matters."""
        entries = [it for it in sequence.entries() if not it.flags & kvd.EntryFlags.DROPPED]
        assert chain.kept
        chain.kept.blocks = [it.block for it in entries]
        self.ledger.top = max(self.ledger.top, max(chain.kept.blocks, default=-1) + 1)
        if any(not it.data or it.tokens < self.size for it in entries):     # taken by a method that vLLM does not follow
            self.ledger.doubtful.add(chain.request.request_id)

    def rows(self, scheduled: dict[str, int]) -> dict[int, tuple[int, list[int]]]:
        """Return, for the requests of a step, Kept.moved and Kept.blocks by the id of the block that a request writes next,
        which is no other request's."""
        chains = [self.ledger.chains[it] for it in scheduled if it in self.ledger.chains]
        return {it.tables[0][it.request.num_computed_tokens // self.size].block_id: (it.kept.moved, it.kept.blocks)
                for it in chains if it.kept and it.kept.moved}
