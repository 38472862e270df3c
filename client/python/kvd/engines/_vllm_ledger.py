# SPDX-License-Identifier: Apache-2.0
"""Ledger of the blocks that a vLLM process holds in a kvd space. vLLM uses kvd's block ids; vLLM's own classes are in
_vllm_pool.py.

A block in vLLM's tables is of one of two kinds. Either it is *ours*: this process allocated it, and one request writes
it. Or a lookup found it, and each request that uses it has a pin on it. Blocks of full attention are chains of tokens,
which a request holds until it ends; other blocks are objects, which it releases when its window has left them (see
_vllm_groups.py). Our blocks are published (Pin.post, Space.post_key, which do not wait for a reply) only when the output of the step that wrote them has arrived. vLLM itself registers a block as
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

import kvd

from ._vllm_chain import Chain, Object, Plan
from ._vllm_events import Salts
from ._vllm_groups import Groups, Kind
from ._vllm_keys import extra_key, salt_ahead, tokens_of
from ._vllm_methods import Methods
from ._vllm_session import Session

logger = init_logger("vllm." + __name__)       # vLLM prints only loggers under its own name

REFUSED = (errno.ENOBUFS, errno.EDQUOT)     # the pool is full; other errors of alloc and seal mean: no daemon
UNUSABLE = (errno.ENOSPC, errno.EEXIST, errno.EPROTO, errno.EACCES)     # a larger pool, another space, version or user
RETRY = 0.05                                # seconds between attempts to reach a daemon
TELL = 60                                   # seconds between log lines about a full pool
BATCH = 64                                  # objects per lookup


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


class Ledger:
    SERVING, AWAY, STALE = "serving", "away", "stale"

    def __init__(self, space: kvd.Space, groups: Groups, keep: int, wait: float, pin: bool = False):
        self.space, self.groups, self.keep, self.wait, self.pin = space, groups, keep, wait, pin
        self.size, self.salts = groups.size, Salts()
        self.free: list[kvd.Block] = []                 # allocated, and unused
        self.ours: dict[int, kvd.Block] = {}            # being written by a request, or published by us
        self.gone: list[kvd.Block] = []                 # returned by vLLM, and no longer writable
        self.null: kvd.Block | None = None              # block 0 means "none" in vLLM: held so that no one publishes it
        self.used = 0                                   # blocks in vLLM's tables
        self.top, self.era = 0, 0                       # all ids so far are below top; see _note_pool()
        self.cache = space.cache                        # whose blocks the ids are
        self.found: Chain | None = None                 # looked up, and not yet admitted
        # Of requests not yet admitted, with deadlines, and the number of tokens that were there before.
        self.below: dict[str, tuple[list[kvd.Fetch], float, int]] = {}
        self.chains: dict[str, Chain] = {}
        self.held: dict[int, list[Object]] = {}         # by block id, one for each use of a block of an object
        self.planned: dict[str, Plan] = {}
        self.filling: dict[int, tuple[Plan, tuple[Kind, int]]] = {}     # which planned object a block belongs to
        self.doubtful: set[str] = set()                 # requests that must be recomputed
        self.epoch = b""                                # changes when vLLM resets its cache, as for new weights
        self.state, self.retry = self.SERVING, 0.0
        self.lost: int | None = None                    # error that was logged last
        self.tell = 0.0                                 # time of the next log line about a full pool
        self.methods: Methods | None = None
        self.numbers = Numbers()

    # ---- blocks to fill

    def fetch(self, n: int) -> bool:
        """Allocate until n blocks are free, if the pool has them. Returns whether they are."""
        if len(self.free) < n and self.state is self.SERVING:
            start = time.perf_counter()
            self._take(n - len(self.free))
            self.numbers.take_s += time.perf_counter() - start
        return len(self.free) >= n

    def _take(self, n: int) -> None:
        """Allocate n blocks, or a batch of more."""
        start, era = time.perf_counter(), self.space.counters().reconnects
        try:
            got = self.space.alloc(self.keep if n < self.keep <= self.space.available() else n)
        except kvd.Error as error:
            self.numbers.refused += 1
            if error.errno in REFUSED:
                self._tell_full(error)
            else:
                self.lose(error, start)
            return
        now = self.space.counters().reconnects
        if now != self.era and (now != era or self.is_busy() or self.found):
            self.space.free(got)        # the daemon was replaced: these and what requests have may be of different pools
            self.lose(kvd.Stale(errno.ESTALE, "requests have blocks of the previous daemon"))
            return
        if self.state is not self.SERVING:
            logger.info("kvd: a daemon is available again")
            self.state = self.SERVING
        self.numbers.blocks_taken += len(got)
        self._note_pool()
        self.top = max(self.top, *(block.id + 1 for block in got))
        for block in got:
            if block.id:
                self.free.append(block)
            else:
                self.null = block

    def _note_pool(self) -> None:
        """Note that the blocks just allocated are of a new pool: workers in other processes must map that. If the daemon is
        replaced while this vLLM holds nothing, no call fails."""
        era = self.space.counters().reconnects
        if era != self.era:
            chains = [*self.chains.values(), *([self.found] if self.found else [])]
            pins = [pin for chain in chains for pin in chain.pins]
            pins += [it.pin for chain in chains for it in chain.objects.values() if it]
            self.top, self.era = max((it + 1 for pin in pins for it in pin.blocks), default=0), era
            self.cache = self.space.cache

    def _tell_full(self, error: kvd.Error) -> None:
        """Log once a minute why requests wait."""
        now = time.perf_counter()
        if now >= self.tell:
            logger.warning("kvd: requests wait for blocks: %s", error)
            self.tell = now + TELL

    def is_busy(self) -> bool:
        """Return whether requests use blocks."""
        return bool(self.used or self.chains)

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
        self.forget_plan_of(block_id)
        block = self.ours.pop(block_id, None)
        if block:
            (self.free if block.data and not block.posted else self.gone).append(block)

    def end_use(self, block_id: int) -> None:
        """Note that one request does not use a block any more that it may have found as a part of an object."""
        uses = self.held.get(block_id)
        if uses:
            self._release(uses.pop())
            if not uses:
                del self.held[block_id]

    def _release(self, found: Object) -> None:
        found.users -= 1
        if found.users <= 0:
            found.pin.release()

    def let_go(self) -> None:
        """Free blocks that vLLM returned and that were published."""
        if self.gone:
            start = time.perf_counter()
            self.space.free(self.gone)
            self.gone = []
            self.numbers.let_go_s += time.perf_counter() - start

    def trim(self) -> None:
        """Free unused blocks beyond what is needed soon; keep fewer when idle."""
        if len(self.free) > (2 * self.keep if self.is_busy() else self.keep):
            start = time.perf_counter()
            surplus, self.free = self.free[self.keep:], self.free[:self.keep]
            self.space.free(surplus)
            self.numbers.let_go_s += time.perf_counter() - start

    # ---- chains

    def find(self, request: Request, most: int) -> Chain:
        """Look up the longest prefix of a request in the pool, of at most `most` tokens."""
        self.drop_found()
        start = time.perf_counter()
        salt, pins, below = extra_key(request, self.epoch, min(self.size, self.groups.step)), [], False
        kept = self.methods.follow(request, salt) if self.methods else None
        if self.groups.ahead:
            salt = salt_ahead(request, salt)
        if salt is not None and not (kept and kept.own):
            self.salts.note(salt, request, self.groups.ahead)
            salts = self.groups.salts(salt)
            if request.skip_reading_prefix_cache or self.state is not self.SERVING or not self._meet():
                pins = [kvd.Pin(self.space, salt=it) for it in salts]
            else:
                tokens = self.words(request, 0, most // self.size)
                found = [self._lookup(tokens, it) for it in salts]
                below = any(pin.below for pin in found)
                pins = self._cut(found, salts, tokens)
                self.numbers.lookups += 1
                self.numbers.tokens_asked += len(tokens)
        self.found = Chain(request, salt or 0, pins, self.groups)
        self.found.below, self.found.kept = below, kept
        self.numbers.lookup_s += time.perf_counter() - start
        return self.found

    def _meet(self) -> bool:
        """Attach to the next daemon if this one was replaced. Returns False while requests still run in the old pool. Otherwise
        unused blocks of it are given up: they are in the way of the new one, which has the same addresses, so that nothing
        would be found there."""
        self.space.catch_up()
        if self.space.counters().reconnects == self.era:
            return True
        if self.is_busy():
            return False
        self.forget()
        self.space.catch_up()
        self._note_pool()
        return True

    def words(self, request: Request, first: int, end: int) -> list[int]:
        """Return the words of blocks [first, end) of a request."""
        ahead = self.groups.ahead
        return tokens_of(request, first * self.size + ahead, end * self.size + ahead, self.size)

    def _lookup(self, tokens: Sequence[int], salt: int) -> kvd.Pin:
        pin = self.space.lookup(tokens, salt=salt)
        self.top = max(self.top, max(pin.blocks, default=-1) + 1)
        if 0 not in pin.blocks:
            return pin
        with pin:                       # another client, not a vLLM, published vLLM's null block
            before = pin.blocks.index(0) * self.size
        return self.space.lookup(tokens[:before], salt=salt)

    def _cut(self, pins: list[kvd.Pin], salts: list[int], tokens: Sequence[int]) -> list[kvd.Pin]:
        """Return pins of the part of a prefix that all chains have. Later blocks are posted behind them."""
        least = min(len(tokens), *(pin.tokens for pin in pins))
        return [pin if pin.tokens == least else self._shorter(pin, salt, tokens[:least])
                for pin, salt in zip(pins, salts)]

    def _shorter(self, pin: kvd.Pin, salt: int, tokens: Sequence[int]) -> kvd.Pin:
        with pin:
            return self.space.lookup(tokens, salt=salt)

    def cached(self, end: int, group_ids: Sequence[int]) -> Sequence[int] | None:
        """Return the blocks that end at a position of the found request, one for each of these groups; None if the pool
        lacks one of them. They are all dense, or all of one kind."""
        chain, i = self.found, end // self.size - 1
        if not chain.length:
            return None
        if group_ids[0] in self.groups.places:
            kind = self.groups.places[group_ids[0]][0]
            found = self._object(chain, kind, end) if end % kind.tokens == 0 else None
            return found.pin.blocks if found else None
        return [chain.blocks[it][i] for it in group_ids] if end % self.size == 0 and i < chain.length else None

    def _object(self, chain: Chain, kind: Kind, end: int) -> Object | None:
        """Look up an object, and those before it, which vLLM asks for next."""
        if (kind, end) not in chain.objects:
            start = time.perf_counter()
            ends = [it for it in range(end, 0, -kind.tokens)[:BATCH] if (kind, it) not in chain.objects]
            keys = [chain.keys.upto(it) for it in reversed(ends)][::-1]
            for it, pin in zip(ends, self.space.lookup_keys(keys, len(kind.groups), salt=kind.number)):
                chain.objects[kind, it] = Object(pin) if pin and 0 not in pin.blocks else None
                chain.below |= not pin and pin.below != 0
                self.top = max(self.top, max(pin.blocks, default=-1) + 1)
            self.numbers.lookup_s += time.perf_counter() - start
        return chain.objects[kind, end]

    def settle(self, tokens: int) -> None:
        """Cut the found chain to what vLLM will use of it: as much as its windows' objects are there for. If there may
        be more below the pool, load that."""
        chain = self.found
        if chain.below and self.wait > 0 and self._asks_below(chain):
            self._ask_below(chain)
        self.numbers.tokens_found += tokens
        if tokens < chain.length * self.size:
            chain.length = tokens // self.size
            words = self.words(chain.request, 0, chain.length)
            chain.pins = self._cut(chain.pins, chain.salts, words)

    def _asks_below(self, chain: Chain) -> bool:
        """Return whether to ask for more of a request: a fetch brings a part of a long prompt."""
        fetches, until, before = self.below.get(chain.request.request_id, ([], float("inf"), -1))
        return not any(fetches) and time.perf_counter() < until and chain.length > before

    def _ask_below(self, chain: Chain) -> None:
        """Fetch missing blocks: of the chains, and the objects that a hit of all of them would need. Allocate block 0
        first: as vLLM's null block, it must not receive fetched data."""
        if not self.fetch(1):
            return
        tokens = self.words(chain.request, 0, (chain.request.num_tokens - 1) // self.size)
        fetches: list[kvd.Fetch] = []
        try:
            fetches += [self.space.fetch(tokens, salt=it) for it in chain.salts]
            reached = min(it.tokens for it in fetches)
            for kind in self.groups.kinds:
                fetches += self._fetch_objects(chain, kind, reached)
        except kvd.Error:               # compute it, as if there were no tier below the pool
            pass
        _, until, _ = self.below.get(chain.request.request_id, ([], time.perf_counter() + self.wait, 0))
        self.below[chain.request.request_id] = fetches, until, chain.length
        self.numbers.fetches += any(fetches)

    def _fetch_objects(self, chain: Chain, kind: Kind, reached: int) -> list[kvd.Fetch]:
        """Fetch the last objects before a position that a hit needs, all of which are in the pool or below."""
        fetches, row = [], 0
        for end in range(reached // kind.tokens * kind.tokens, 0, -kind.tokens)[:BATCH + kind.tail]:
            if self._object(chain, kind, end):
                row += 1
            else:
                fetches.append(self.space.fetch_key(chain.keys.upto(end), len(kind.groups), salt=kind.number))
                row = row + 1 if fetches[-1] else 0
            if row == kind.tail:
                break
        return fetches

    def waits(self, request_id: str) -> bool:
        """Return whether blocks for a request are being loaded or have just arrived, so that it must be looked up
        again."""
        fetches, until, _ = self.below.get(request_id, ([], 0.0, 0))
        under_way = [it for it in fetches if it]
        if not under_way:
            return False
        if not all([it.wait(0) for it in under_way]) and time.perf_counter() > until:
            self._close(under_way)
            return False
        return True

    def end_waiting(self, request_id: str) -> None:
        self._close(self.below.pop(request_id, ([], 0.0, 0))[0])

    @staticmethod
    def _close(fetches: list[kvd.Fetch]) -> None:
        for it in fetches:
            it.close()

    def drop_found(self) -> None:
        """A request that was looked up and could not be admitted holds nothing while it waits."""
        chain, self.found = self.found, None
        if chain:
            self._drop(chain.objects)
            self._close_pins(chain)

    @staticmethod
    def _drop(objects: dict[tuple[Kind, int], Object | None]) -> None:
        """Release the objects that no table uses."""
        for found in objects.values():
            if found and not found.users:
                found.pin.release()
        objects.clear()

    @staticmethod
    def _close_pins(chain: Chain) -> None:
        for pin in chain.pins:
            pin.release()

    def admit(self, request: Request, tables: Sequence[list[KVCacheBlock]], tokens: int) -> None:
        """The found request runs now. Its tables, one for each group, begin with what was found of `tokens` tokens."""
        chain, self.found = self.found, None
        self.end_waiting(request.request_id)
        chain.tables = [tables[group] for group in self.groups.dense]
        for kind in self.groups.kinds:
            self._hold(chain, kind, [tables[group] for group in kind.groups], tokens // kind.tokens)
        self._drop(chain.objects)
        self.chains[request.request_id] = chain

    def _hold(self, chain: Chain, kind: Kind, tables: list[list[KVCacheBlock]], n: int) -> None:
        """Keep the objects in the first n blocks of these tables. Those before the window are not there any more."""
        for i in reversed(range(n)):
            if tables[0][i].is_null:
                break
            found = chain.objects[kind, (i + 1) * kind.tokens]
            found.users = len(tables)
            for table in tables:
                self.held.setdefault(table[i].block_id, []).append(found)

    def leave(self, request: Request) -> Chain | None:
        """Publish and remove a request's chain, before its blocks are released."""
        request_id = request.request_id
        chain, plan = self.chains.pop(request_id, None), self.planned.pop(request_id, Plan())
        if chain:
            self._publish(chain, plan)
        self._forget_plan(plan)
        session = Session.of(request, self.pin) if request.is_finished() else None
        if session and session.ttl == 0 and self.state is self.SERVING:
            session.end(self.space)         # whatever became of the request
        elif chain and request_id not in self.doubtful:
            chain.session = session
        self.doubtful.discard(request_id)
        return chain

    def _look_up_again(self, chain: Chain) -> list[kvd.Pin]:
        """Return pins of what has been published of a request."""
        try:
            self.space.flush()
        except kvd.Error as error:      # what was refused is not found
            logger.warning("kvd: %s", error)
        words = self.words(chain.request, 0, chain.length)
        pins = [self._lookup(words, it) for it in chain.salts]
        for kind in self.groups.kinds:
            pins += self._last_objects(chain, kind)
        return pins

    def _last_objects(self, chain: Chain, kind: Kind) -> list[kvd.Pin]:
        """Return pins of the last objects of a chain, as many as a hit needs one after the other."""
        ends = range(chain.length * self.size // kind.tokens * kind.tokens, 0, -kind.tokens)[:BATCH + kind.tail]
        keys = [chain.keys.upto(it) for it in reversed(ends)][::-1]
        pins, row = [], 0
        for pin in self.space.lookup_keys(keys, len(kind.groups), salt=kind.number):
            if row < kind.tail:
                pins.append(pin)
                row = row + 1 if pin else 0
            else:
                pin.release()
        return pins

    def close(self, chain: Chain) -> None:
        """Release a chain whose blocks are not read any more."""
        start = time.perf_counter()
        self._close_pins(chain)
        if chain.session and chain.session.ttl and chain.length and self.state is self.SERVING:
            chain.session.tell(self.space, self._look_up_again(chain))
        if chain.kept and self.methods:
            self.methods.end()
        self.numbers.let_go_s += time.perf_counter() - start
        self.trim()

    # ---- publishing

    def plan(self, request: Request, length: int) -> None:
        """Note that a step will fill the first `length` blocks of a request's dense groups."""
        plan = self.planned.setdefault(request.request_id, Plan())
        plan.length = max(plan.length, length)

    def plan_object(self, request: Request, group: int, end: int, block_id: int) -> None:
        """Note that a step will fill a block of another group, which ends at a position."""
        plan = self.planned.setdefault(request.request_id, Plan())
        kind, place = self.groups.places[group]
        if self.filling.get(block_id, (plan, (kind, end)))[1] != (kind, end):
            self.forget_plan_of(block_id)
        blocks = plan.objects.setdefault((kind, end), [None] * len(kind.groups))
        blocks[place] = self.ours[block_id]
        self.filling[block_id] = plan, (kind, end)

    def forget_plan_of(self, block_id: int) -> None:
        """A block was freed, or will be overwritten: the planned object that it is a part of cannot be published."""
        plan, key = self.filling.pop(block_id, (None, None))
        if plan:
            plan.objects.pop(key, None)

    def _forget_plan(self, plan: Plan) -> None:
        for key in list(plan.objects):
            self._take_object(plan, key)

    def _take_object(self, plan: Plan, key: tuple[Kind, int]) -> list[kvd.Block]:
        blocks = [it for it in plan.objects.pop(key) if it]
        for it in blocks:
            self.filling.pop(it.id, None)
        return blocks

    def publish(self) -> None:
        """Publish blocks that finished steps have written."""
        if self.state is not self.SERVING:
            return
        start = time.perf_counter()
        for request_id, plan in list(self.planned.items()):
            chain = self.chains.get(request_id)
            if not chain or self._publish(chain, plan):
                self._forget_plan(self.planned.pop(request_id))
        self.numbers.publish_s += time.perf_counter() - start

    def publish_of(self, request_id: str) -> None:
        """Publish blocks of one request that finished steps have written."""
        chain, plan = self.chains.get(request_id), self.planned.get(request_id)
        if chain and plan and self.state is self.SERVING:
            self._publish(chain, plan)

    def _publish(self, chain: Chain, plan: Plan) -> bool:
        """Post the blocks that are complete, ignoring steps in flight, and tokens that were guessed and computed but are
        behind the request's end. Returns whether all that was planned is complete."""
        tokens = self.written(chain.request)
        done = tokens // self.size
        if chain.publishes(done) > chain.length and not chain.ended and self.state is self.SERVING:
            self._publish_chains(chain, chain.publishes(done))
        for key in [it for it in plan.objects if it[1] <= tokens and self.state is self.SERVING]:
            blocks = self._take_object(plan, key)
            if len(blocks) == len(key[0].groups) and not chain.ended:
                self._publish_object(chain, key, blocks)
        return done >= plan.length and not plan.objects

    def written(self, request: Request) -> int:
        """Return how many of a request's tokens are complete in their blocks."""
        return min(request.num_computed_tokens - request.num_in_flight_tokens, request.num_tokens - self.groups.ahead)

    def _publish_chains(self, chain: Chain, done: int) -> None:
        words = self.words(chain.request, chain.length, done)
        for pin, table in zip(chain.pins, chain.tables):
            mine = [self.ours[block.block_id] for block in table[chain.length:done]]
            if not self._post(chain, mine, lambda: pin.post(mine, words)):
                return
        chain.length = done

    def _publish_object(self, chain: Chain, key: tuple[Kind, int], blocks: list[kvd.Block]) -> None:
        kind, end = key
        name = chain.keys.upto(end)
        self._post(chain, blocks, lambda: self.space.post_key(name, blocks, salt=kind.number))

    def _post(self, chain: Chain, blocks: list[kvd.Block], post: Callable[[], None]) -> bool:
        try:
            try:
                post()
            except (kvd.Refused, kvd.ConnectionLost) as error:      # of earlier posts of any request; nothing was posted now
                logger.warning("kvd: %s", error)
                self.numbers.refused += 1
                post()
        except kvd.Error as error:
            self._could_not(chain, blocks, error)
        self.numbers.blocks_posted += sum(block.posted for block in blocks)
        return not chain.ended

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

    def lose(self, error: kvd.Error, start: float | None = None) -> None:
        """Note that the daemon is gone. AWAY: no daemon runs. STALE: a new one runs, and all blocks of the old one must be
        released. start: of the call that failed. One that hangs is asked again after as long as that took."""
        now = time.perf_counter()
        self.retry = now + RETRY + (now - start if start else 0)
        if error.errno in UNUSABLE and error.errno != self.lost:
            logger.error("kvd: requests wait, since the next daemon's pool cannot be used; restart vLLM (%s)", error)
            self.lost = error.errno
        elif self.state is self.SERVING or error.errno not in (self.lost, errno.EAGAIN):
            logger.warning("kvd: the daemon is gone; running requests continue unshared, new ones wait (%s)", error)
            self.lost = error.errno
        if error.errno == errno.ESTALE and self.state is not self.STALE:
            logger.warning("kvd: the daemon was replaced; running requests are recomputed in the new pool")
            self.numbers.restarts += 1
            self.state = self.STALE
        elif self.state is self.SERVING:
            self.state = self.AWAY

    def recover(self) -> None:
        """Look for a daemon. While a request is admitted this would be too early: what was found for it is released. Blocks
        that libkvd still has of the old pool do not count as a daemon's."""
        if not self.is_busy():
            self.forget()
        start = time.perf_counter()
        if self.state is self.STALE or start < self.retry:
            return
        try:
            self.space.catch_up(strict=True)
        except kvd.Error as error:
            self.lose(error, start)
        else:
            self._take(1)

    def forget(self) -> None:
        """Release everything that is unused."""
        self.drop_found()
        self.space.free(self.free + ([self.null] if self.null else []))
        self.free, self.null = [], None
        if self.state is self.STALE:
            self.state, self.retry = self.AWAY, 0.0
            self.top = 0

    def shut(self) -> None:
        for chain in self.chains.values():
            self.close(chain)
        for uses in self.held.values():
            for found in uses:
                found.pin.release()
        self.held = {}
        self.forget()
        self.space.free(list(self.ours.values()))
        self.chains, self.ours = {}, {}
