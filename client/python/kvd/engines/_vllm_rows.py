# SPDX-License-Identifier: Apache-2.0
"""Methods for vLLM's requests ("methods": true), on the worker's side: tables of the daemon, and what tokens see of them.

Before a step, the full blocks of its requests are copied to blocks of the worker's own, which are appended to a table of the
daemon (kvd.Sequence), and the table is reduced if it has too many tokens. Until the scheduler has heard of it
(_vllm_methods.py), the old blocks stay what they were, so that nothing is lost if the pool is full, or the daemon gone.

A request without KeyDiff and KVReviver is shared. When its prompt is complete, the worker looks its blocks up, and borrows them
for the table of the daemon. Those of its answer follow: with HShare alone, some at a time, as they are published; if steps of
reasoning are compared, they are copied.

Only steps that begin alike in their blocks are found to be alike. So the last block of a long step is copied before it is full,
and the next token is the first of a block of the table. From then on, the request's keys are in other slots of its blocks than
vLLM thinks (Rows.placed()).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.logger import init_logger

import kvd

from . import _reduction
from ._reduction import (LONG_STEP, NOTED, bring_back, budget_of, compares_steps, fetch_all, methods_of, missing, reduction,
                         room_for_steps, slack_of, tokens_of)
from ._vllm_steps import Steps

logger = init_logger("vllm." + __name__)

# Numbers, since operators of flags take microseconds.
BORROWED, DROPPED = int(kvd.EntryFlags.BORROWED), int(kvd.EntryFlags.DROPPED)
HOST = 1            # DLPack's number of the processor
AHEAD = 8           # blocks of an answer that are borrowed at a time, or steps until it is tried again


def wait_for_gpu() -> None:
    """Wait until this thread's stream has done what is in it."""
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


@dataclass
class Told:
    """What a scheduler says of a request before a step. number: of its admission. target: number of tokens that it computes
    before it samples. tokens: number that earlier steps have computed. ids, words: the full blocks among them, and their words,
    without those that were told before. blocks: the largest number of blocks. salt: of its chain; None: it shares no blocks.
    steps: its steps of reasoning are compared. tail: words of its answer behind the full blocks, if so. ends: its last token
    ends a step."""

    number: int
    name: str
    target: int
    tokens: int
    ids: list[int]
    words: list[int]
    blocks: int
    salt: int | None
    steps: bool = False
    tail: list[int] = field(default_factory=list)
    ends: bool = False


class Count(NamedTuple):
    """moved: how many of a request's first blocks are not read any more. held: how many blocks it has instead, each counted
    once, however often it is used. gone: how many have left the pool, and may come back."""

    moved: int
    held: int = 0
    gone: int = 0


class Stored(NamedTuple):
    """Where tokens' keys and values are stored: blocks, and slots in them. real: which of a step's tokens they are; None: all,
    otherwise some are padding."""

    blocks: torch.Tensor
    slots: torch.Tensor
    real: torch.Tensor | None


@dataclass
class Done(KVConnectorWorkerMetadata):
    """What a worker answers, by number of a request. broken: numbers of requests that must be recomputed."""

    rows: dict[int, Count] = field(default_factory=dict)
    broken: set[int] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        raise NotImplementedError("kvd follows methods with one worker")


class Row:
    """A request. first: number of its first tokens that its table has. decodes: what its tokens see is decided for each of
    them, and blocks may leave. broken: why it cannot go on. frequencies: address of the angles by which keys turn; 0: steps
    of reasoning are not compared."""

    def __init__(self, space: kvd.Space, memory: kvd.Memory, told: Told, frequencies: int = 0):
        methods = methods_of(space)
        self.space, self.memory, self.size, self.told = space, memory, space.geometry.block_tokens, told
        self.own = told.salt is None
        self.moves = self.own and "kvreviver" in methods
        self.looks = self.moves or "hshare" in methods
        self.frequencies = frequencies if told.steps else 0
        self.step = told.target         # first token of the step of reasoning in progress
        self.ids: list[int] = []
        self.words: list[int] = []
        self.writes = -1                # the block that vLLM writes next
        # Numbers of tokens at which what failed, or was not published yet, is tried again. full: copies, for which there was no
        # room.
        self.first = self.later = self.full = 0
        self.sequence: kvd.Sequence | None = None
        self.reader: kvd.Reader | None = None
        self.decodes, self.broken = False, ""

    @property
    def moved(self) -> int:
        """Number of vLLM's first blocks that are not read any more."""
        return self.first // self.size

    # ---- before a step

    def begin(self, told: Told, writes: int, until: float) -> None:
        """until: when the daemon is not waited for any longer, in the clock of time.monotonic()."""
        self.told, self.writes = told, writes
        self.ids += told.ids
        self.words += told.words
        try:
            if self.sequence is None:
                self.sequence = self.space.sequence(told.blocks)
            self._grow(self.sequence)
            if told.ends:
                self._end_step(self.sequence, until)
            self._reduce(self.sequence)
            self._decode()
        except kvd.Error as error:
            logger.info("kvd: request %s follows the methods later: %s", told.name, error)
            self.later = told.tokens + self.size
        if self.sequence is not None:
            self._complete(self.sequence)

    def _others(self) -> int:
        """Return how many of its blocks so far are others', too."""
        return 0 if self.own else self.told.target // self.size if self.told.steps else len(self.ids)

    def _grow(self, sequence: kvd.Sequence) -> None:
        if self.moved < self._others() and self.told.tokens >= max(self.told.target, self.later):
            self._borrow(sequence, self._others())
        if not self._has_own() or self.told.tokens < self.full:
            return
        try:
            self._copy(sequence, self.behind() // self.size * self.size)
        except kvd.Error as error:
            logger.info("kvd: the blocks of request %s are copied later: %s", self.told.name, error)
            self.full = self.told.tokens + self.size

    def _has_own(self) -> bool:
        """Return whether its next block is its own."""
        return self.own or self.told.steps and self.told.tokens >= self.told.target and self.moved >= self._others()

    def _copy(self, sequence: kvd.Sequence, tokens: int) -> None:
        """Copy what earlier steps have written: so many tokens. Only their last block may be partial."""
        ids, size = [*self.ids[self.moved:], self.writes][:-(-tokens // self.size)], self.space.block_bytes
        if not ids:
            return
        blocks, done = self.space.alloc(len(ids)), 0
        try:
            if any(block.data != self.memory.base + block.id * size for block in blocks):
                raise kvd.Stale(0, "the daemon was replaced")
            self._copy_all(ids, [block.id for block in blocks])
            done = sequence.append(blocks, (self.words + self.told.tail)[self.first:self.first + tokens])
        finally:
            self.space.free(blocks[done:])
            self.first += min(done * self.size, tokens)

    def _copy_all(self, ids: list[int], to: list[int]) -> None:
        """Copy blocks. They are there when it returns."""
        if self.space.device[0] == HOST:
            base, size = self.memory.base, self.space.block_bytes
            for old, new in zip(ids, to):
                ctypes.memmove(base + new * size, base + old * size, size)
            return
        pool = torch.from_dlpack(self.space.memory())       # [blocks, bytes]
        for old, new in zip(ids, to):
            pool[new].copy_(pool[old])
        wait_for_gpu()

    def _borrow(self, sequence: kvd.Sequence, most: int) -> None:
        """Borrow what is published of its first blocks. What was written last will be in a moment."""
        pin = self.space.lookup(self.words[:most * self.size], salt=self.told.salt or 0)
        n = pin.tokens // self.size
        self.later = self.told.tokens + (AHEAD * self.size if n == most else AHEAD)
        if n <= self.moved:
            pin.release()
            return
        try:
            sequence.borrow(pin, self.words[self.first:n * self.size], self.moved)
            self.first = n * self.size
        except kvd.Error:               # the table may have a part: vLLM's has all of it
            self.close()
            self.sequence, self.reader, self.decodes, self.first = None, None, False, 0
            raise

    def _end_step(self, sequence: kvd.Sequence, until: float) -> None:
        """Let the daemon compare the step that has ended with earlier ones. If it is slow, what is alike is replaced later."""
        step, self.step = self.step, self.told.tokens
        if not self.frequencies or not self._has_own() or not compares_steps(self.space):
            return
        try:
            if self.own and not room_for_steps(self.space, sequence.entries(), self.told.target):
                return
            if (self.step - step) // self.size >= LONG_STEP:
                self._copy(sequence, self.behind())
            if self.first > step:
                sequence.step(step, self.first - step)
                sequence.wait(max(until - time.monotonic(), 0))
        except kvd.Error as error:
            logger.info("kvd: a step of request %s is not compared: %s", self.told.name, error)

    def place(self) -> tuple[int, int] | None:
        """Return the slot in which vLLM writes the next token's keys, and the one in which they belong; None if it is the
        same."""
        at = self.told.tokens - self.first
        if not self.first % self.size:
            return None
        block = [*self.ids[self.moved:], self.writes][at // self.size]
        return self.writes * self.size + self.told.tokens % self.size, block * self.size + at % self.size

    def behind(self) -> int:
        """Return the number of tokens that the table does not have."""
        return self.told.tokens - self.first

    def _reduce(self, sequence: kvd.Sequence) -> None:
        budget = budget_of(self.space)
        if not self.own or not budget or self.told.tokens < self.later:
            return
        most = budget + slack_of(self.space, budget, self.told.tokens > self.told.target, self.moves)
        if self.behind() + sum(tokens_of(sequence.entries())) <= most:
            return
        if self.moves:
            fetch_all(sequence)
        for it in reduction(self.space, sequence.entries(), self.behind(), budget):
            if sequence.compact(it.first, it.n, it.keep):
                sequence.wait(_reduction.PATIENCE_S)

    def _decode(self) -> None:
        if self.reader and not self.decodes and self.first and self.told.tokens >= self.told.target:
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
                self.reader = kvd.Reader(self.sequence, heads, scale, frequencies=self.frequencies,
                                         timeout_s=_reduction.PATIENCE_S)
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
        return self.reader if self.decodes else self.sequence if self.first else None

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

    def done(self) -> Count:
        if not self.own and not self.told.steps:
            return Count(0)
        entries = self.sequence.entries() if self.sequence is not None else []
        blocks = {it.block for it in entries if it.data and not int(it.flags) & BORROWED}
        gone = sum(not it.data and not int(it.flags) & DROPPED for it in entries)
        return Count(self.moved, len(blocks), gone)

    def named(self) -> int:
        """Return a block that is in vLLM's table of this request, and of no other one, once blocks may have left."""
        n = 0 if self.own else self._others()
        return self.ids[n] if n < len(self.ids) else self.writes

    def close(self) -> None:
        if self.reader:
            self.reader.close()
        if self.sequence is not None:
            self.sequence.close()


class Rows:
    """The requests of a worker, by number; `now`: those of the step in progress, by the block that each writes next. anchor:
    keeps the pool mapped that the scheduler uses. Without it, a call here could meet the next daemon first, and map its pool
    over the keys of running requests. places: slots of this step's tokens, by vLLM's."""

    def __init__(self, space: kvd.Space, steps: Steps | None = None):
        self.space, self.steps = space, steps
        self.all: dict[int, Row] = {}
        self.now: dict[int, Row] = {}
        self.anchor: kvd.Sequence | None = None
        self.places: dict[int, int] = {}
        self.running = False                        # between begin() and end()
        self.stored: Stored | None = None           # of this step, once they are known

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
        until = time.monotonic() + _reduction.PATIENCE_S
        if told and self.space.device[0] != HOST:
            wait_for_gpu()              # for the last step, which reads what may change now
        for block, it in told.items():
            if it.number not in self.all:
                self.all[it.number] = Row(self.space, memory, it, self._frequencies() if it.steps else 0)
            row = self.now[block] = self.all[it.number]
            row.begin(it, block, until)
        self.running, self.stored = True, None
        self.places = dict(it for it in (row.place() for row in self.now.values()) if it)

    def _frequencies(self) -> int:
        """Return the address of the angles by which keys turn, of which the daemon knows; 0: they turn otherwise."""
        if self.steps is None or self.steps.frequencies is None:
            why = self.steps.missing() if self.steps else "this vLLM's model is not known"
            logger.warning_once("kvd: steps of reasoning are not compared: %s", why)
            return 0
        try:
            if self.space.setting("model.rope_theta") != self.steps.theta:
                self.space.set("model.rope_theta", self.steps.theta)
        except kvd.Error as error:
            logger.info("kvd: the daemon does not know how keys turn: %s", error)
        return self.steps.frequencies.data_ptr()

    def placed(self, slots: torch.Tensor) -> Stored:
        """Return where the keys of a step belong that vLLM writes to these slots: the same in all layers."""
        if self.stored is not None and self.running:
            return self.stored
        if self.places:
            slots = torch.tensor([self.places.get(it, it) for it in slots.tolist()], dtype=slots.dtype, device=slots.device)
        real = slots >= 0 if len(slots) and int(slots.min()) < 0 else None
        if real is not None:
            slots = slots[real]
        size = self.space.geometry.block_tokens
        self.stored = Stored(slots // size, slots % size, real)
        return self.stored

    def end(self) -> None:
        self.places, self.running = {}, False
        for row in self.now.values():
            row.end()

    def broken_blocks(self) -> set[int]:
        """Return a block of each request whose results of this step are wrong."""
        return {row.named() for row in self.now.values() if row.broken}

    def done(self) -> Done | None:
        if not self.now:
            return None
        return Done({row.told.number: row.done() for row in self.now.values()},
                    {row.told.number for row in self.now.values() if row.broken})
