# SPDX-License-Identifier: Apache-2.0
"""Methods for vLLM's requests ("methods": true), on the worker's side: tables of the daemon, and what tokens see of them.

Before a step, the full blocks of its requests are copied to blocks of the worker's own, which are appended to a table of the
daemon (kvd.Sequence), and the table is reduced if it has too many tokens. Until the scheduler has heard of it
(_vllm_methods.py), the old blocks stay what they were, so that nothing is lost if the pool is full, or the daemon gone.

A request with HShare alone is shared. When its prompt is complete, the worker looks its blocks up, and borrows them for the
table of the daemon. Those of its answer follow, some at a time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.logger import init_logger

import kvd

from . import _reduction
from ._reduction import NOTED, bring_back, budget_of, fetch_all, methods_of, missing, reduction, slack_of, tokens_of

logger = init_logger("vllm." + __name__)

AHEAD = 8           # blocks of an answer that are borrowed at a time, or steps until it is tried again


@dataclass
class Told:
    """What a scheduler says of a request before a step. number: of its admission. target: number of tokens that it computes
    before it samples. tokens: number that earlier steps have computed. ids, words: the full blocks among them, and their words,
    without those that were told before. blocks: the largest number of blocks. salt: of its chain; None: it shares no blocks."""

    number: int
    name: str
    target: int
    tokens: int
    ids: list[int]
    words: list[int]
    blocks: int
    salt: int | None


@dataclass
class Done(KVConnectorWorkerMetadata):
    """What a worker answers. rows: by number, how many of a request's first blocks are not read any more, and how many blocks
    it has instead. broken: numbers of requests that must be recomputed."""

    rows: dict[int, tuple[int, int]] = field(default_factory=dict)
    broken: set[int] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        raise NotImplementedError("kvd follows methods with one worker")


class Row:
    """A request. moved: number of its first blocks that its table has. decodes: what its tokens see is decided for each of
    them, and blocks may leave. broken: why it cannot go on."""

    def __init__(self, space: kvd.Space, memory: kvd.Memory, told: Told):
        methods = methods_of(space)
        self.space, self.memory, self.size, self.told = space, memory, space.geometry.block_tokens, told
        self.own = told.salt is None
        self.moves = self.own and "kvreviver" in methods
        self.looks = self.moves or "hshare" in methods
        self.ids: list[int] = []
        self.words: list[int] = []
        self.moved = self.later = 0     # later: number of tokens at which what failed, or was not published yet, is tried again
        self.sequence: kvd.Sequence | None = None
        self.reader: kvd.Reader | None = None
        self.decodes, self.broken = False, ""

    # ---- before a step

    def begin(self, told: Told) -> None:
        self.told = told
        self.ids += told.ids
        self.words += told.words
        try:
            if self.sequence is None:
                self.sequence = self.space.sequence(told.blocks)
            self._grow(self.sequence)
            self._reduce(self.sequence)
            self._decode()
        except kvd.Error as error:
            logger.info("kvd: request %s follows the methods later: %s", told.name, error)
            self.later = told.tokens + self.size
        if self.sequence is not None:
            self._complete(self.sequence)

    def _grow(self, sequence: kvd.Sequence) -> None:
        if self.own:
            self._move(sequence)
        elif self.told.tokens >= max(self.told.target, self.later) and len(self.ids) > self.moved:
            self._borrow(sequence)

    def _move(self, sequence: kvd.Sequence) -> None:
        """Copy what earlier steps have filled."""
        ids, size = self.ids[self.moved:], self.space.block_bytes
        if not ids:
            return
        blocks, done = self.space.alloc(len(ids)), 0
        try:
            for block, old in zip(blocks, ids):
                if block.data != self.memory.base + block.id * size:
                    raise kvd.Stale(0, "the daemon was replaced")
                ctypes.memmove(block.data, self.memory.base + old * size, size)
            done = sequence.append(blocks, self.words[self.moved * self.size:])
        finally:
            self.space.free(blocks[done:])
            self.moved += done

    def _borrow(self, sequence: kvd.Sequence) -> None:
        """Borrow what is published. What was written last will be in a moment."""
        pin = self.space.lookup(self.words, salt=self.told.salt or 0)
        n = pin.tokens // self.size
        self.later = self.told.tokens + (AHEAD * self.size if n == len(self.ids) else AHEAD)
        if n <= self.moved:
            pin.release()
            return
        sequence.borrow(pin, self.words[self.moved * self.size:n * self.size], self.moved)
        self.moved = n

    def behind(self) -> int:
        """Return the number of tokens that the table does not have."""
        return self.told.tokens - self.moved * self.size

    def _reduce(self, sequence: kvd.Sequence) -> None:
        budget, used = budget_of(self.space), self.behind() + sum(tokens_of(sequence.entries()))
        most = budget + slack_of(self.space, budget, self.told.tokens > self.told.target, self.moves)
        if not self.own or not budget or used <= most or self.told.tokens < self.later:
            return
        if self.moves:
            fetch_all(sequence)
        for it in reduction(self.space, sequence.entries(), self.behind(), budget):
            if sequence.compact(it.first, it.n, it.keep):
                sequence.wait(_reduction.PATIENCE_S)

    def _decode(self) -> None:
        if self.reader and not self.decodes and self.moved and self.told.tokens >= self.told.target:
            self.reader.decode(self.behind())
            self.decodes = True

    def _complete(self, sequence: kvd.Sequence) -> None:
        """Let blocks come back that have left unasked."""
        if self.moves and self.decodes:
            return          # the reader asks for what is needed
        try:
            sequence.sync()
            bring_back(sequence)
        except (kvd.Error, RuntimeError) as error:
            if missing(sequence):
                self.fail(error)

    # ---- in a step

    def open(self, n: int, heads: int, scale: float) -> None:
        """Begin a step of n tokens."""
        if not self.looks or self.sequence is None or self.broken:
            return
        try:
            if self.reader is None:
                self.reader = kvd.Reader(self.sequence, heads, scale, timeout_s=_reduction.PATIENCE_S)
            self.reader.begin(self.behind() + n, n if self.decodes else min(n, NOTED))
        except kvd.Error as error:
            self.fail(error)

    def look(self, layer: int, n: int, q: int, ldq: int) -> None:
        """Note the last queries of n tokens of a prompt, at address q."""
        if self.reader and not self.decodes:
            try:
                self.reader.look(layer, q + (n - min(n, NOTED)) * ldq * 4, ldq)
            except kvd.Error as error:
                self.fail(error)

    def after(self) -> kvd.Reader | kvd.Sequence | None:
        """Return what is seen before vLLM's own table."""
        return self.reader if self.decodes else self.sequence if self.moved else None

    def fail(self, error: Exception) -> None:
        """The reader failed. If all blocks are there, they are read without it; otherwise the request cannot go on."""
        if self.reader:
            self.reader.close()
        self.reader, self.looks, self.decodes = None, False, False
        if self.sequence is not None and missing(self.sequence):
            self.broken = str(error)
        what = "is recomputed" if self.broken else "reads all its tokens"
        logger.warning("kvd: request %s %s: %s", self.told.name, what, error)

    # ---- after a step

    def end(self) -> None:
        if self.reader:
            try:
                self.reader.end()
            except kvd.Error as error:
                self.fail(error)

    def done(self) -> tuple[int, int]:
        """Return what Done.rows has of it."""
        entries = self.sequence.entries() if self.own and self.sequence is not None else []
        return self.moved if self.own else 0, sum(bool(it.data) for it in entries)

    def close(self) -> None:
        if self.reader:
            self.reader.close()
        if self.sequence is not None:
            self.sequence.close()


class Rows:
    """The requests of a worker, by number; `now`: those of the step in progress, by the block that each writes next. anchor:
    keeps the pool mapped that the scheduler uses. Without it, a call here could meet the next daemon first, and map its pool
    over the keys of running requests."""

    def __init__(self, space: kvd.Space):
        self.space = space
        self.all: dict[int, Row] = {}
        self.now: dict[int, Row] = {}
        self.anchor: kvd.Sequence | None = None

    def hold(self) -> None:
        """Hold the pool that is mapped now."""
        self.anchor = self.space.sequence(1)

    def let_go(self) -> None:
        """Let the next daemon's pool be mapped."""
        self.keep(())
        if self.anchor is not None:
            self.anchor.close()
        self.anchor = None

    def keep(self, numbers: Collection[int]) -> None:
        """Close all but these."""
        self.now = {}
        for number in [it for it in self.all if it not in numbers]:
            self.all.pop(number).close()

    def begin(self, told: dict[int, Told], memory: kvd.Memory) -> None:
        for block, it in told.items():
            if it.number not in self.all:
                self.all[it.number] = Row(self.space, memory, it)
            self.now[block] = self.all[it.number]
            self.now[block].begin(it)

    def end(self) -> None:
        for row in self.now.values():
            row.end()

    def broken_blocks(self) -> set[int]:
        """Return the first block of each request whose results of this step are wrong."""
        return {row.ids[0] for row in self.now.values() if row.broken}

    def done(self) -> Done | None:
        if not self.now:
            return None
        return Done({row.told.number: row.done() for row in self.now.values()},
                    {row.told.number for row in self.now.values() if row.broken})
