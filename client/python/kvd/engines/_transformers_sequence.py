# SPDX-License-Identifier: Apache-2.0
"""A row of a KvdCache: the blocks of its tokens, and what queries see of them."""

from __future__ import annotations

import errno
import logging
from math import lcm
from typing import Any, Callable, NamedTuple

import torch

import kvd

from . import _reduction
from ._reduction import (LONG_STEP, LOOKS, NOTED, OWN, STEPS, bring_back, budget_of, drops_tokens, fetch_all, methods_of, missing,
                         reduction, slack_of, tokens_of)
from ._transformers_copy import gather
from ._transformers_exact import SPANS, Exact

log = logging.getLogger("kvd.engines.transformers")


class Rows:
    """Floats [rows, columns, heads, dim] of a tensor [rows, heads, columns, dim], by address, because views of single rows
    would cost a step more than its attention does. Copies only if necessary."""

    def __init__(self, states: torch.Tensor):
        _, heads, self.columns, dim = states.shape
        if self.columns > 1 or states.dtype != torch.float32 or not states.is_contiguous():
            states = states.transpose(1, 2).to(torch.float32).contiguous()
        self.states, self.width, self.at = states, heads * dim, states.data_ptr()       # the tensor keeps the memory

    def last(self, row: int, n: int) -> int:
        """Return the address of a row's last n columns."""
        return self.at + ((row + 1) * self.columns - n) * self.width * 4


class Sequence:
    """A row's blocks: found ones, which are pinned, then its own, which are sealed when they are full."""

    def __init__(self, space: kvd.Space, tokens: list[int], pad: int, salt: int):
        self.space, self.size = space, space.geometry.block_tokens
        self.prompt, self.pad = tokens, pad
        self.exact = Exact(space.geometry) if space.geometry.dtype in SPANS else None
        self.pin = self._find(salt)
        self.filling: list[kvd.Block] = []      # blocks behind the pinned ones
        self.found = self.pin.tokens // self.size * self.size   # a partial last block cannot be continued
        self.length = self.found                # number of positions written in all layers
        self.tokens = tokens[:self.found]
        self.new: list[int] = []                # tokens of the forward pass in progress that have no keys yet
        self.asking, self.queries = 0, 0        # position of its first query that is not padding, and number of queries
        self.publishing, self.closed = True, False
        self.first = 0                          # position of the table's first token
        self.after: kvd.Sequence | None = None  # what is seen before the table
        self.table = kvd.Table(space)
        if self.found:
            self.table.extend(self.pin, self.pin.blocks[:self.found // self.size])

    @property
    def blocks(self) -> list[int]:
        """Ids of its blocks, in order of position."""
        return self.table.blocks

    def _find(self, salt: int) -> kvd.Pin:
        return self._find_prefix(self.prompt[:-1], salt)

    def _find_prefix(self, tokens: list[int], salt: int) -> kvd.Pin:
        """Find the longest stored prefix. With exact rows it has whole spans, because found tokens have no exact rows."""
        step = lcm(self.size, self.exact.span) if self.exact else 1
        pin = self.space.find(tokens, salt=salt)
        while pin.tokens % step:
            whole = pin.tokens // step * step
            pin.release()
            pin = self.space.find(tokens[:whole], salt=salt)
        return pin

    def begin(self, new: list[int], first: int) -> None:
        """Begin a forward pass of tokens from position first on, which is negative before the end of the padding."""
        self.asking, padding = max(first, 0), max(-first, 0)
        self.queries = max(first + len(new) - self.asking, 0)
        known = self.tokens + self.prompt[len(self.tokens):] if self.asking < len(self.tokens) else self.prompt
        expected = known[self.asking:self.asking + self.queries]
        if new[padding:padding + len(expected)] != expected:
            raise ValueError(f"from position {self.asking} on, these are not the tokens that this cache was made for:"
                             " the model must get the same input_ids, with the same padding")
        self.new = new[max(self.length - first, 0):]
        if self.exact:
            self.exact.begin(self.length)

    def make_room(self) -> None:
        """Allocate blocks for the new tokens. Raises kvd.Error if that fails."""
        need = -(-(self.length - self.first + len(self.new)) // self.size) - len(self.table)
        if need <= 0:
            return
        blocks = self.space.alloc(need)
        if not self.table.extend(blocks[0], [block.id for block in blocks]):
            self.space.free(blocks)
            raise kvd.Error(errno.ESTALE, "the daemon was replaced during this sequence")
        self.filling += blocks

    def write(self, layer: int, k: Rows, v: Rows, row: int) -> None:
        """Store the keys and values of the new tokens, the last of a row."""
        n = len(self.new)
        if n:
            self.table.write(layer, self.length - self.first, n, k.last(row, n), v.last(row, n), k.width)
        if n and self.exact:
            self.exact.add(layer, n, k.last(row, n), v.last(row, n))

    def attend(self, layer: int, q: Rows, out: int, row: int, heads: int, scale: float, **form: Any) -> None:
        """Attend from the queries of a row that are not padding. The results lie behind out like the queries behind q.at."""
        if self.queries:
            self._attend(layer, q, out, row, heads, scale, after=self.after, **form)

    def _attend(self, layer: int, q: Rows, out: int, row: int, heads: int, scale: float, **form: Any) -> None:
        at, n = q.last(row, self.queries), self.queries
        exact = self.exact.of() if self.exact else None
        self.table.attend(layer, self.asking - self.first, n, heads, scale, at, q.width, out + at - q.at, q.width, exact=exact,
                          **form)
        if self.exact:
            self.exact.end(layer)

    def end(self) -> None:
        """End a forward pass, after all layers."""
        self.tokens += self.new
        self.length += len(self.new)
        if self.exact:
            self.exact.commit(self.length)
        self.publish()

    def publish(self) -> None:
        """Seal full blocks."""
        self._seal(self.length)

    def _seal(self, end: int) -> int:
        """Seal blocks that are full with the tokens before position end. Returns how many."""
        at = len(self.table) - len(self.filling)
        first = self.first // self.size + at
        n = end // self.size - first
        if n <= 0 or not self.publishing:
            return 0
        try:
            ids = self.pin.seal(self.filling[:n], self.tokens[first * self.size:(first + n) * self.size])
        except kvd.Error as error:      # the blocks remain in use here, but unpublished
            if not isinstance(error, kvd.ConnectionLost) and not all(it.data for it in self.filling[:n]):
                raise                   # perhaps published, and evicted since; a daemon that has ended evicts nothing
            self.publishing = False
            log.warning("kvd: the results of this request are not shared: %s", error)
            return 0
        self.table.replace(at, ids)
        del self.filling[:len(ids)]
        return len(ids)

    def copy(self, n: int) -> torch.Tensor:
        """Copy the first n positions: [layers, 2 (K, V), 1, heads, n, dim]."""
        return gather(self.space.geometry, self.table.base, self.table.blocks[:-(-n // self.size)], n)

    def leave(self) -> None:
        self.publishing = False
        self.space.free(self.filling)
        self.filling, self.table = [], kvd.Table(self.space)
        self.pin.release()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.leave()


# ---- methods ---------------------------------------------------------------------------------------------------------

Scorer = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


class Keeping(NamedTuple):
    """What a cache was asked for: to keep so many tokens of each layer and head, those to which scorer gives the highest
    scores; and which tokens end a step of reasoning, with the frequencies of the rotary embedding, to compare steps."""

    scorer: Scorer | None = None
    budget: int = 0
    ends: frozenset[int] = frozenset()
    frequencies: torch.Tensor | None = None     # [head_dim / 2] radians per position


class Followed(Sequence):
    """A row that follows the methods of its space. Its full blocks are in a table of the daemon, and the last block of a long
    step of reasoning, too.

    Under a budget, each layer and KV head keeps the tokens whose keys differ most (arXiv:2504.15364), beside the first blocks
    and the newest tokens. Most blocks may leave the pool when the prompt is complete, and come back when a query needs them
    (arXiv:2512.17917). With one of these, the row shares no blocks with others, nor is its prompt published; tokens behind the
    prompt never are, since they are approximate. Decoded tokens may see a selection, and a step that repeats an earlier one may
    use that one's blocks (arXiv:2507.21433).
    """

    def __init__(self, space: kvd.Space, tokens: list[int], pad: int, salt: int, most: int, finds: bool,
                 keeping: Keeping = Keeping()):
        methods = methods_of(space)
        self.keeping = keeping
        self.own = bool(keeping.budget) or not methods.isdisjoint(OWN)
        self.moves = "kvreviver" in methods             # blocks may be missing
        self.looks = not methods.isdisjoint(LOOKS)
        self.finds = finds and not self.own
        self.reader: kvd.Reader | None = None
        self.decodes = False
        self.rotation = keeping.frequencies if methods & STEPS else None    # keeps the memory
        self.frequencies = self.rotation.data_ptr() if self.rotation is not None else 0
        self.step = len(tokens)                 # first token of the step of reasoning in progress
        self.used = 0       # tokens that each layer and head has
        self.later = 0      # length at which a compaction that failed is tried again
        self.scores: list[torch.Tensor] = []    # of the pass in progress, layer by layer: [kv_heads, tokens]
        self.scored: list[tuple[int, int, int]] = []    # the entries of which these are
        self.before: torch.Tensor | None = None         # what was seen before it
        self.probing = False                            # its tokens will not stay
        super().__init__(space, tokens, pad, salt)
        blocks = -(-max(most, len(tokens)) // self.size) + 1
        self.kept = space.sequence(blocks + (blocks // LONG_STEP if self.frequencies else 0))      # with partial ones
        if self.found:
            self.kept.borrow(self.pin, tokens[:self.found])
            self._move(self.found // self.size, self.found)

    @property
    def blocks(self) -> list[int]:
        return [it.block for it in self._entries() if it.data] + self.table.blocks

    def _entries(self) -> list[kvd.Entry]:
        return self.kept.entries() if self.publishing or self.after else []

    def _find(self, salt: int) -> kvd.Pin:
        if self.finds:
            return self._find_prefix(self.prompt[:-NOTED], salt)
        return kvd.Pin(self.space, salt=salt)

    def _move(self, n: int, tokens: int) -> None:
        """Remove the table's first n blocks with so many tokens, which the daemon's table has now."""
        self.after = self.kept
        self.first += tokens
        self.table.drop(n)

    # ---- reading -----------------------------------------------------------------------------------------------------

    def _read(self, layer: int, heads: int, scale: float, n: int) -> kvd.Reader:
        """Return the reader, for a pass of n queries."""
        if self.reader is None:
            self.reader = kvd.Reader(self.kept, heads, scale, frequencies=self.frequencies, timeout_s=_reduction.PATIENCE_S)
        if layer == 0:
            self.reader.begin(self.length + len(self.new) - self.first, n)
        return self.reader

    def note(self, layer: int, q: Rows, row: int, heads: int, scale: float) -> None:
        """Note the last queries of a pass whose attention transformers computes."""
        n = min(self.queries, q.columns)
        if self.looks and n:
            self._read(layer, heads, scale, n).look(layer, q.last(row, n), q.width)

    def attend(self, layer: int, q: Rows, out: int, row: int, heads: int, scale: float, **form: Any) -> None:
        n = self.queries
        if not self.looks or not n:
            form = {**form, "frequencies": self.frequencies} if self.after else form
            return super().attend(layer, q, out, row, heads, scale, **form)
        reader = self._read(layer, heads, scale, n)
        if not self.after:
            reader.look(layer, q.last(row, n), q.width)
        self._attend(layer, q, out, row, heads, scale, after=reader if self.after else None, **form)

    def end(self) -> None:
        self.used += len(self.new)
        super().end()
        if self.frequencies and self.publishing and self.tokens and self.tokens[-1] in self.keeping.ends:
            self._end_step()
        if self.reader:
            self.reader.end()
        if self.own and self.publishing and self.length >= self.later:
            self._reduce()
        if self.reader and not self.decodes and self.length >= len(self.prompt):
            self.decodes = True
            self.reader.decode(self.length - self.first)
        if not self.moves and self.space.setting("kvreviver"):
            bring_back(self.kept)

    # ---- scores ------------------------------------------------------------------------------------------------------

    def _most(self) -> int:
        """Return the number of tokens that may stay now; 0: all."""
        if not (self.keeping.scorer and self.keeping.budget or drops_tokens(self.space)):
            return 0
        return self.keeping.budget or budget_of(self.space)

    def _has_too_many(self, new: int) -> bool:
        """Return whether more tokens than the budget are there with so many new ones; while decoding, some more may be."""
        slack = slack_of(self.space, self._most(), self.length + new > len(self.prompt), self.moves)
        return 0 < self._most() < self.used + new - slack and self.own and self.publishing

    def _layout(self) -> list[tuple[int, int, int]]:
        return [(it.block, it.generation, it.tokens if it.data else 0) for it in self._entries()]

    def wants_scores(self) -> bool:
        due = self.probing or self.length + len(self.new) >= self.later and self._has_too_many(len(self.new))
        return self.keeping.scorer is not None and due

    def score(self, layer: int, queries: torch.Tensor, new: tuple[torch.Tensor, torch.Tensor], scale: float) -> None:
        """Let the scorer score what is seen in a layer, before the pass's attention: queries and new keys and values
        [heads, tokens, dim]."""
        if layer == 0:
            self.scores.clear()
            self.scored = self._layout()
            self.before = self.copy(self.length).to(new[0].dtype) if self.length else None
        before = None if self.before is None else self.before[layer, :, 0]
        keys, values = (states if before is None else torch.cat([before[i], states], 1) for i, states in enumerate(new))
        assert self.keeping.scorer
        self.scores.append(self.keeping.scorer(layer, queries, keys, values, scale).to(torch.float32))

    def end_probe(self) -> None:
        """End a pass whose tokens do not stay, and keep what it needs."""
        self.cut()
        self._reduce()

    def cut(self) -> None:
        """Free blocks behind the row's tokens."""
        n = -(-(self.length - self.first) // self.size)
        self.new = []
        self.space.free(self.filling[n:])
        self.table.cut(n)
        del self.filling[n:]

    # ---- writing -----------------------------------------------------------------------------------------------------

    def publish(self) -> None:
        """Move full blocks from the table to the daemon's table."""
        if self.own or self._publish_prompt():
            self._append((self.length - self.first) // self.size * self.size)

    def _publish_prompt(self) -> bool:
        """Seal the prompt's full blocks, and move them. Returns whether the prompt is complete, and all is moved."""
        first, end = self.first, len(self.prompt) // self.size * self.size
        n = self._seal(min(self.length, end))
        if n:
            try:
                self.kept.borrow(self.pin, self.tokens[first:first + n * self.size], first // self.size)
            except kvd.Error as error:
                self.publishing = False         # the blocks remain in the table
                log.warning("kvd: this request follows the methods no further: %s", error)
                return False
            self._move(n, n * self.size)
        return self.first >= end

    def _append(self, tokens: int) -> None:
        n = -(-tokens // self.size)
        if not n or not self.publishing:
            return
        try:
            done = self.kept.append(self.filling[:n], self.tokens[self.first:self.first + tokens])
        except kvd.Error as error:
            if not all(it.data for it in self.filling[:n]):     # perhaps the daemon's by now, and free
                raise
            self.publishing = False                             # the blocks remain in use here
            log.warning("kvd: this request follows the methods no further: %s", error)
            return
        self._move(done, min(done * self.size, tokens))
        del self.filling[:done]

    def _end_step(self) -> None:
        """Let the daemon compare the step that has ended with earlier ones. Only steps that begin alike in their blocks are
        found to be alike, so the one after a long step begins in a block of its own."""
        step, self.step = self.step, self.length
        if self.length <= len(self.prompt) or self.length - step < 1:
            return
        try:
            if (self.length - step) // self.size >= LONG_STEP and self.first >= len(self.prompt) // self.size * self.size:
                self._append(self.length - self.first)
            if self.first > step:
                self.kept.step(step, self.first - step)
                self._take_changes(_reduction.PATIENCE_S)
        except kvd.Error as error:
            log.info("kvd: a step is not compared: %s", error)

    # ---- a budget ----------------------------------------------------------------------------------------------------

    def _reduce(self) -> None:
        """Compact the daemon's table if the row has more tokens than the budget; while it decodes, some more. If that fails,
        because the pool is full, or the daemon busy or gone, it is tried again a block later."""
        budget = self._most()
        if not self._has_too_many(0) or self.keeping.scorer and len(self.scores) != self.space.geometry.layers:
            return
        try:
            self._take_changes(0)
            self._tokens()
            if self.keeping.scorer and self._layout()[:len(self.scored)] != self.scored:
                raise kvd.Error(errno.EAGAIN, "the scores are of what was there before a change")
            if self.moves:
                fetch_all(self.kept)
            self._compact(budget)
        except kvd.Error as error:
            log.info("kvd: this request is reduced later: %s", error)
            self.later = self.length + self.size
        self._tokens()

    def _tokens(self) -> None:
        """Count the tokens of the entries and of the table."""
        self.used = self.length - self.first + sum(tokens_of(self._entries()))

    def _compact(self, budget: int) -> None:
        """Keep the tokens of highest score."""
        scores, done = self._take_scores(), 0
        for it in reduction(self.space, self._entries(), self.length - self.first, budget, own=scores is not None):
            columns = None if scores is None else scores[:, :, it.column:it.column + it.tokens].contiguous()
            changing = self.kept.compact(it.first, it.n, it.keep, columns)
            if changing:
                self._take_changes(_reduction.PATIENCE_S)
            done += changing
        if not done:
            self.later = self.length + self.size

    def _take_scores(self) -> torch.Tensor | None:
        """Return the scores of what is seen [layers, kv_heads, tokens]; None: the daemon's."""
        if self.keeping.scorer is None:
            return None
        g, scores = self.space.geometry, torch.stack(self.scores)
        self.scores.clear()
        self.before = None
        if scores.shape[:2] != (g.layers, g.kv_heads) or scores.shape[2] < self.used:
            raise ValueError(f"scores of shape {list(scores.shape)} for {g.layers} layers, {g.kv_heads} KV heads and"
                             f" {self.used} tokens")
        return scores

    def _take_changes(self, patience_s: float) -> None:
        """Wait for what was asked for, and take what has come, also if the rest has not."""
        try:
            if patience_s:
                self.kept.wait(patience_s)
            else:
                self.kept.sync()
        finally:
            if not self.moves or not self.decodes:      # else the reader asks for what is needed
                bring_back(self.kept)

    def copy(self, n: int) -> torch.Tensor:
        """Copy what is seen: [layers, 2 (K, V), 1, heads, tokens, dim]."""
        if missing(self.kept):
            raise kvd.NoData(errno.ENODATA, f"{len(missing(self.kept))} blocks of this request are not in the pool (KVReviver),"
                             " and it cannot go on without")
        g = self.space.geometry
        parts = [self._turned(gather(g, self.table.base, [it.block], it.tokens), it.delta) for it in self._entries() if it.data]
        if n > self.first:
            parts.append(super().copy(n - self.first))
        return torch.cat(parts, 4)

    def _turned(self, states: torch.Tensor, delta: int) -> torch.Tensor:
        """Rotate the keys of a block that stands in for another one, delta positions after its own."""
        if delta:
            assert self.rotation is not None
            angles = delta * self.rotation.to(torch.float64)
            cos, sin = angles.cos().repeat(2), angles.sin().repeat(2)
            keys = states[:, 0].to(torch.float64)
            a, b = keys.chunk(2, -1)
            states[:, 0] = keys * cos + torch.cat([-b, a], -1) * sin
        return states

    def leave(self) -> None:
        if self.reader:
            self.reader.close()
        self.reader = self.after = None
        self.kept.close()
        super().leave()
