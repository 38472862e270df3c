# SPDX-License-Identifier: Apache-2.0
"""Contexts kept in a pool: KvdCache in a space of a private daemon, with KeyDiff switched by the space's settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from transformers import PreTrainedModel

import kvd
from kvd.engines import _transformers_sequence
from kvd.engines.transformers import KvdCache, open_space

from engine import Failed
from instance import Instance

from .rows import Row

PATIENCE_S = 600        # the daemon's worker has what others leave of the processor


class Pooled:
    """A context in a KvdCache, continued by the model."""

    def __init__(self, model: PreTrainedModel, cache: KvdCache, block: int) -> None:
        self.model, self.cache, self.block = model, cache, block

    @property
    def tokens(self) -> int:
        """Room for tokens in the blocks that it has."""
        return len(self.cache.blocks) * self.block

    def more(self, ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = self.model(torch.tensor([ids]), past_key_values=self.cache).logits
        if self.cache.private:
            raise Failed("a request left the pool, which has no room")
        return logits[0]


class Pool:
    """A daemon and a space of the model, whose contexts have up to `longest` tokens with what follows them."""

    def __init__(self, model: PreTrainedModel, kvd_exe: str, kvctl: str, longest: int) -> None:
        _transformers_sequence.PATIENCE_S = PATIENCE_S
        shape = model.config.get_text_config()
        width = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
        token = shape.num_hidden_layers * 2 * shape.num_key_value_heads * width * model.dtype.itemsize
        room = 3 * longest * token // 2 ** 20 + 64
        self.model, self.stack = model, ExitStack()
        self.daemon = self.stack.enter_context(Instance("--backend", "host", "--pool", f"{room}M", kvd=kvd_exe,
                                                        kvctl=kvctl))
        self.client = self.stack.enter_context(kvd.connect(self.daemon.socket))
        self.space = self.stack.enter_context(open_space(self.client, model))
        self.block = self.space.geometry.block_tokens

    @contextmanager
    def kept(self, row: Row, context: list[int], more: int) -> Iterator[Pooled]:
        """The context as a row keeps it, in a space whose budget then has room for `more` tokens."""
        budget = round(row.share * len(context)) if row.share < 1 else 0
        self._set(budget)
        with KvdCache(self.model, self.space, context) as cache:
            it = Pooled(self.model, cache, self.block)
            step = row.chunk or len(context)
            for at in range(cache.found, len(context), step):
                with torch.inference_mode():
                    self.model.model(torch.tensor([context[at:at + step]]), past_key_values=cache)
            if budget and it.tokens > budget + 3 * self.block:
                raise Failed(f"KeyDiff has kept {it.tokens} tokens, not {budget}")
            if budget:
                self._set(budget + more)
            yield it

    def _set(self, budget: int) -> None:
        self.space.set("keydiff", 1 if budget else 0)
        if budget:
            self.space.set("keydiff.budget", budget)

    def close(self) -> None:
        self.stack.close()
