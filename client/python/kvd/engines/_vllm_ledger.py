# SPDX-License-Identifier: Apache-2.0
"""Ledger of the blocks that a vLLM process holds in a kvd space. vLLM uses kvd's block ids; vLLM's own classes are in
_vllm_pool.py.

A block in vLLM's tables is of one of two kinds. Either it is *ours*: this process allocated it, and one request writes
it. Or a lookup found it, and each request that uses it has a pin on it. Our blocks are published (Pin.post, which does
not wait for a reply) only when the output of the step that wrote them has arrived. vLLM itself registers a block as
cached when the step is merely planned, which is safe on one stream, but not between processes. Our blocks stay ours
until the request releases them, whether published or not, even if another process was first with their content.

Blocks that vLLM considers free have already been allocated by this process (Ledger.free), so that no allocation fails
inside its scheduler. If the pool has no more blocks, vLLM delays new requests and preempts running ones, as it does
when its own memory is full.

If the daemon dies, running requests continue in their memory and publish nothing; new requests wait. When a new daemon
is available, running requests are preempted, all blocks and pins of the old pool are released (the space is opened with
fixed=True, so the new pool is then mapped at the same addresses), and everything is recomputed.
"""

from __future__ import annotations

import errno
import time
from dataclasses import dataclass, fields

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

import kvd

from ._vllm_keys import extra_key, tokens_of

logger = init_logger("vllm." + __name__)       # vLLM prints only loggers under its own name

REFUSED = (errno.ENOBUFS, errno.EDQUOT)     # the pool is full; other errors of alloc and seal mean: no daemon
RETRY = 0.05                                # seconds between attempts to reach a daemon
TELL = 60                                   # seconds between log lines about a full pool


@dataclass
class Numbers:
    """Counts of this vLLM since it started. Times are seconds that the scheduler spent in this module."""

    steps: int = 0
    lookups: int = 0
    tokens_asked: int = 0
    tokens_found: int = 0
    fetches: int = 0                # from the daemon's file or servers
    blocks_taken: int = 0
    blocks_posted: int = 0
    refused: int = 0                # allocations refused, or posts not published
    restarts: int = 0               # restarts of the daemon
    lookup_s: float = 0.0
    take_s: float = 0.0
    publish_s: float = 0.0
    let_go_s: float = 0.0

    def __str__(self) -> str:
        spent = self.lookup_s + self.take_s + self.publish_s + self.let_go_s
        numbers = ", ".join(f"{it.name} {getattr(self, it.name)}" for it in fields(self) if it.type == "int")
        return f"{numbers}; scheduler {spent / max(self.steps, 1) * 1e6:.0f} us a step"


class Chain:
    """A request's chain in the pool: its pin holds the contents of its first `length` blocks. Without a pin, the
    request is not shared."""

    __slots__ = ("request", "pin", "length", "blocks", "ended")

    def __init__(self, request: Request, pin: kvd.Pin | None, block_tokens: int):
        self.request, self.pin = request, pin
        self.length = pin.tokens // block_tokens if pin else 0
        self.blocks: list[KVCacheBlock] = []
        self.ended = pin is None        # no further block is published


class Ledger:
    SERVING, AWAY, STALE = "serving", "away", "stale"

    def __init__(self, space: kvd.Space, block_tokens: int, keep: int, wait: float):
        self.space, self.size, self.keep, self.wait = space, block_tokens, keep, wait
        self.free: list[kvd.Block] = []                 # allocated, and unused
        self.ours: dict[int, kvd.Block] = {}            # being written by a request, or published by us
        self.gone: list[kvd.Block] = []                 # returned by vLLM, and no longer writable
        self.null: kvd.Block | None = None              # block 0 means "none" in vLLM: held so that no one publishes it
        self.used = 0                                   # blocks in vLLM's tables
        self.top, self.era = 0, 0                       # all ids so far are below top; number of previous daemons
        self.found: Chain | None = None                 # looked up, and not yet admitted
        self.below: dict[str, tuple[kvd.Fetch, float]] = {}     # fetches of requests not yet admitted, and deadlines
        self.chains: dict[str, Chain] = {}
        self.planned: dict[str, int] = {}               # number of blocks that steps will fill, by request to publish
        self.doubtful: set[str] = set()                 # requests that must be recomputed
        self.epoch = b""                                # changes when vLLM resets its cache, as for new weights
        self.state, self.retry = self.SERVING, 0.0
        self.tell = 0.0                                 # time of the next log line about a full pool
        self.numbers = Numbers()

    # ---- blocks to fill

    def fetch(self, n: int) -> bool:
        """Allocate until n blocks are free, if the pool has them. Returns whether they are."""
        if len(self.free) >= n and self.state is self.SERVING:
            return True
        start = time.perf_counter()
        if self.state is not self.SERVING and not self.used:
            self.forget()
        if self.state is not self.STALE and (self.state is self.SERVING or start > self.retry):
            self._take(max(n - len(self.free), 1))
        self.numbers.take_s += time.perf_counter() - start
        return len(self.free) >= n

    def _take(self, n: int) -> None:
        """Allocate n blocks, or a batch of more."""
        try:
            got = self.space.alloc(self.keep if n < self.keep <= self.space.available() else n)
        except kvd.Error as error:
            self.numbers.refused += 1
            if error.errno in REFUSED:
                self._tell_full(error)
            else:
                self.lose(error)
            return
        if self.state is not self.SERVING:
            logger.info("kvd: a daemon is available again")
            self.state = self.SERVING
        self.numbers.blocks_taken += len(got)
        self.top = max(self.top, *(block.id + 1 for block in got))
        for block in got:
            if block.id:
                self.free.append(block)
            else:
                self.null = block

    def _tell_full(self, error: kvd.Error) -> None:
        """Log once a minute why requests wait."""
        now = time.perf_counter()
        if now >= self.tell:
            logger.warning("kvd: requests wait for blocks: %s", error)
            self.tell = now + TELL

    def could(self, n: int) -> bool:
        """Return whether the pool could provide n blocks, by the estimate in shared memory."""
        return n <= len(self.free) or n <= len(self.free) + self.space.available()

    def hand_out(self, n: int) -> list[int]:
        got, self.free = self.free[:n], self.free[n:]
        if len(got) < n:
            raise ValueError(f"Cannot get {n} free blocks from the pool")
        self.ours.update((block.id, block) for block in got)
        self.used += n
        return [block.id for block in got]

    def give_back(self, block_id: int) -> None:
        """Take back a block that is in no table any more. A block that was found is released with its chain."""
        self.used -= 1
        block = self.ours.pop(block_id, None)
        if block:
            (self.free if block.data and not block.posted else self.gone).append(block)

    def let_go(self) -> None:
        """Free blocks that vLLM returned and that were published."""
        if self.gone:
            start = time.perf_counter()
            self.space.free(self.gone)
            self.gone = []
            self.numbers.let_go_s += time.perf_counter() - start

    def trim(self) -> None:
        """Free unused blocks beyond what is needed soon; keep fewer when idle."""
        if len(self.free) > (2 * self.keep if self.used else self.keep):
            start = time.perf_counter()
            surplus, self.free = self.free[self.keep:], self.free[:self.keep]
            self.space.free(surplus)
            self.numbers.let_go_s += time.perf_counter() - start

    # ---- chains

    def find(self, request: Request, most: int | None = None) -> Chain:
        """Look up the longest prefix of a request in the pool, of at most `most` tokens; None: without its last token,
        which vLLM computes itself."""
        self.drop_found()
        start = time.perf_counter()
        salt = extra_key(request, self.epoch, self.size)
        if salt is None:
            pin = None
        elif request.skip_reading_prefix_cache or self.state is not self.SERVING:
            pin = kvd.Pin(self.space, salt=salt)
        else:
            most = request.num_tokens - 1 if most is None else most
            tokens = tokens_of(request, 0, most // self.size * self.size, self.size)
            pin = self._lookup(tokens, salt)
            if pin.below and request.request_id not in self.below and self.wait > 0:
                self._ask_below(request.request_id, tokens, salt)
        self.found = Chain(request, pin, self.size)
        self.numbers.lookup_s += time.perf_counter() - start
        return self.found

    def _lookup(self, tokens: list[int], salt: int) -> kvd.Pin:
        self.space.catch_up()
        pin = self.space.lookup(tokens, salt=salt)
        self.numbers.lookups += 1
        self.numbers.tokens_asked += len(tokens)
        self.numbers.tokens_found += pin.tokens
        self.top = max(self.top, max(pin.blocks, default=-1) + 1)
        if 0 not in pin.blocks:
            return pin
        with pin:                       # another client, not a vLLM, published vLLM's null block
            before = pin.blocks.index(0) * self.size
        return self.space.lookup(tokens[:before], salt=salt)

    def _ask_below(self, request_id: str, tokens: list[int], salt: int) -> None:
        """Fetch missing blocks, once per request. Allocate block 0 first: as vLLM's null block, it must not receive
        fetched data."""
        if not self.fetch(1):
            return
        try:
            fetch = self.space.fetch(tokens, salt=salt)
        except kvd.Error:               # compute it, as if there were no tier below the pool
            return
        self.below[request_id] = fetch, time.perf_counter() + self.wait
        self.numbers.fetches += bool(fetch)

    def waits(self, request_id: str) -> bool:
        """Return whether blocks for a request are being loaded or have just arrived, so that it must be looked up
        again."""
        fetch, until = self.below.get(request_id, (None, 0.0))
        if not fetch:
            return False
        if not fetch.wait(0) and time.perf_counter() > until:
            fetch.close()
            return False
        return True

    def end_waiting(self, request_id: str) -> None:
        fetch, _ = self.below.pop(request_id, (None, 0.0))
        if fetch:
            fetch.close()

    def drop_found(self) -> None:
        """A request that was looked up and could not be admitted holds nothing while it waits."""
        if self.found and self.found.pin:
            self.found.pin.release()
        self.found = None

    def admit(self, request: Request, blocks: list[KVCacheBlock]) -> None:
        chain, self.found = self.found, None
        self.end_waiting(request.request_id)
        chain.blocks = blocks
        self.chains[request.request_id] = chain

    def leave(self, request_id: str) -> Chain | None:
        """Publish and remove a request's chain, before its blocks are released."""
        chain = self.chains.pop(request_id, None)
        if chain:
            self._publish(chain)
        self.planned.pop(request_id, None)
        self.doubtful.discard(request_id)
        return chain

    def close(self, chain: Chain) -> None:
        """Release a chain whose blocks are not read any more."""
        if chain.pin:
            start = time.perf_counter()
            chain.pin.release()
            self.numbers.let_go_s += time.perf_counter() - start

    # ---- publishing

    def plan(self, request: Request, length: int) -> None:
        """Note that a step will fill the first `length` blocks of a request."""
        self.planned[request.request_id] = length

    def publish(self) -> None:
        """Publish blocks that finished steps have written."""
        if not self.planned or self.state is not self.SERVING:
            return
        start = time.perf_counter()
        for request_id, length in list(self.planned.items()):
            chain = self.chains.get(request_id)
            if not chain or self._publish(chain) >= length:
                self.planned.pop(request_id, None)
        self.numbers.publish_s += time.perf_counter() - start

    def _publish(self, chain: Chain) -> int:
        """Post the blocks that are complete, ignoring steps in flight, and tokens that were guessed and computed but are
        behind the request's end. Returns the number of complete blocks."""
        request = chain.request
        done = min(request.num_computed_tokens - request.num_in_flight_tokens, request.num_tokens) // self.size
        if done > chain.length and not chain.ended and self.state is self.SERVING:
            mine = [self.ours[block.block_id] for block in chain.blocks[chain.length:done]]
            try:
                self._post(chain.pin, mine, tokens_of(request, chain.length * self.size, done * self.size, self.size))
                chain.length = done
            except kvd.Error as error:
                self._could_not(chain, mine, error)
            self.numbers.blocks_posted += sum(block.posted for block in mine)
        return done

    def _post(self, pin: kvd.Pin, blocks: list[kvd.Block], tokens: list[int]) -> None:
        try:
            pin.post(blocks, tokens)
        except kvd.Refused as error:    # an earlier post of any request was refused; nothing was posted now
            logger.warning("kvd: %s", error)
            self.numbers.refused += 1
            pin.post(blocks, tokens)

    def _could_not(self, chain: Chain, blocks: list[kvd.Block], error: kvd.Error) -> None:
        """Keep the rest of the request private. If it is unknown whether blocks are still ours, another process may get
        them at any time: such a request is recomputed."""
        logger.warning("kvd: request %s is not published any further: %s", chain.request.request_id, error)
        chain.ended = True
        if any(not block.posted and not block.data for block in blocks):
            self.doubtful.add(chain.request.request_id)
        if error.errno not in REFUSED:
            self.lose(error)

    # ---- the daemon's life

    def lose(self, error: kvd.Error) -> None:
        """Note that the daemon is gone. AWAY: no daemon runs. STALE: a new one runs, and all blocks of the old one must be
        released."""
        self.retry = time.perf_counter() + RETRY
        if self.state is self.SERVING:
            logger.warning("kvd: the daemon is gone; running requests continue unshared, new ones wait (%s)", error)
        if error.errno == errno.ESTALE and self.state is not self.STALE:
            logger.warning("kvd: the daemon was replaced; running requests are recomputed in the new pool")
            self.numbers.restarts += 1
            self.state = self.STALE
        elif self.state is self.SERVING:
            self.state = self.AWAY

    def forget(self) -> None:
        """Release everything that is unused."""
        self.drop_found()
        self.space.free(self.free + ([self.null] if self.null else []))
        self.free, self.null = [], None
        if self.state is self.STALE:
            self.state, self.retry = self.AWAY, 0.0
            self.top, self.era = 0, self.era + 1

    def shut(self) -> None:
        for chain in self.chains.values():
            self.close(chain)
        self.forget()
        self.space.free(list(self.ours.values()))
        self.chains, self.ours = {}, {}
