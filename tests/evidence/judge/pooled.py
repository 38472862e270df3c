# SPDX-License-Identifier: Apache-2.0
"""Contexts kept in a pool: KvdCache in a space of a private daemon, with methods switched by the space's settings."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

import kvd
from kvd.engines import _reduction
from kvd.engines.transformers import KvdCache, open_space

from engine import ROOT, Failed
from instance import Instance

from . import again, ask
from .rows import POOL, Row

PATIENCE_S = 600        # the daemon's worker has what others leave of the processor


class Pooled:
    """A context in a KvdCache, continued by the model."""

    def __init__(self, model: PreTrainedModel, cache: KvdCache, row: Row) -> None:
        self.model, self.cache = model, cache
        self.one_by_one = row.reads < 1 or row.stays < 1        # what follows is decoded, as an answer is

    @property
    def tokens(self) -> int:
        """Room for tokens in the blocks that it has."""
        return len(self.cache.blocks) * self.cache._geometry.block_tokens

    def more(self, ids: list[int]) -> torch.Tensor:
        pieces = [[it] for it in ids] if self.one_by_one else [ids]
        with torch.inference_mode():
            logits = [self.model(torch.tensor([it]), past_key_values=self.cache).logits[0] for it in pieces]
        if self.cache.private:
            raise Failed("a request left the pool, which has no room")
        return torch.cat(logits)


class Pool:
    """A daemon and a space of the model, whose contexts have up to `longest` tokens with what follows them."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any, kvd_exe: str, kvctl: str, longest: int) -> None:
        _reduction.PATIENCE_S = PATIENCE_S
        shape = model.config.get_text_config()
        width = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
        token = shape.num_hidden_layers * 2 * shape.num_key_value_heads * width * model.dtype.itemsize
        room = 3 * longest * token // 2 ** 20 + 64
        self.model, self.tokenizer, self.stack = model, tokenizer, ExitStack()
        self.daemon = self.stack.enter_context(Instance("--backend", "host", "--pool", f"{room}M", kvd=kvd_exe,
                                                        kvctl=kvctl))
        self.client = self.stack.enter_context(kvd.connect(self.daemon.socket))
        self.spaces: dict[str, kvd.Space] = {}
        self.space = self._space("")
        self.block = self.space.geometry.block_tokens

    def _space(self, dtype: str) -> kvd.Space:
        """The space whose blocks have that dtype; none: the model's."""
        if dtype not in self.spaces:
            self.spaces[dtype] = self.stack.enter_context(open_space(self.client, self.model, dtype=dtype or None))
        return self.spaces[dtype]

    @contextmanager
    def kept(self, row: Row, context: list[int], more: int) -> Iterator[Pooled]:
        """The context as a row keeps it, in a space whose budget then has room for `more` tokens."""
        budget = round(row.share * len(context)) if row.share < 1 else 0
        self.space = self._space(row.dtype)
        self._set(row, budget, len(context))
        scored = {"budget": len(context) + more} if row.scorer else {}
        with KvdCache(self.model, self.space, context, **scored) as cache:
            it, step = Pooled(self.model, cache, row), row.chunk or len(context)
            for at in range(cache.found, len(context), step):
                with torch.inference_mode():
                    self.model.model(torch.tensor([context[at:at + step]]), past_key_values=cache)
            if row.scorer:
                self._reduce(row.scorer, cache, context, budget)
            if budget and it.tokens > budget + 3 * self.block:
                raise Failed(f"{row.name} has kept {it.tokens} tokens, not {budget}")
            if budget:
                self.space.set("keydiff.budget", budget + more)
            yield it

    def said_again(self, ids: list[int], number: str) -> dict[str, Any]:
        """What MemShare shares of text that is said again, by kind, and the loss on what follows, with and without."""
        end = self.tokenizer("\n\n", add_special_tokens=False).input_ids[-1]
        before, told, behind = again.steps(ids, end, self.block, number)
        result: dict[str, Any] = {}
        self.space = self._space("")
        for name, on in (("plain", 0), ("loss", 1)):
            self._set(Row(name, POOL), 0, 0, 0)
            self.space.set("memshare", on)
            with KvdCache(self.model, self.space, before, step_ends=[end]) as cache, torch.inference_mode():
                for each in [before[cache.found:], *(step for _, step in told)]:
                    self.model.model(torch.tensor([each]), past_key_values=cache)
                if on:
                    shared = [it.position for it in cache._sequences[0].kept.entries() if it.flags & kvd.EntryFlags.SHARED]
                    result["shared"] = again.counted(shared, told, len(before), self.block)
                result[name] = ask.loss(Pooled(self.model, cache, Row(name, POOL)), behind)
        self.space.set("memshare", 0)
        return result

    def _reduce(self, scorer: str, cache: KvdCache, context: list[int], budget: int) -> None:
        examples = str(ROOT / "client/python/examples")
        if examples not in sys.path:
            sys.path.append(examples)
        module = __import__(f"scorer_{scorer}")
        module.compress(cache, self.tokenizer, torch.tensor([context]), budget)

    def _set(self, row: Row, budget: int, tokens: int) -> None:
        window = self.space.setting("hshare.sinks") + self.space.setting("hshare.recent")
        settings = {"keydiff": 0 < budget and not row.scorer, "keydiff.budget": budget,
                    "kvreviver": row.stays < 1, "kvreviver.budget": row.stays,
                    "hshare": row.reads < 1, "hshare.top": max(round(row.reads * tokens) - window, 1)}
        for name, value in settings.items():
            self.space.set(name, value)

    def close(self) -> None:
        self.stack.close()
