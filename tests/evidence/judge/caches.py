# SPDX-License-Identifier: Apache-2.0
"""Contexts kept in transformers' own caches: whole, or as kvpress chooses. One exact pass over a context
serves all of them, since they only differ in what they leave of its keys and values.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .rows import ALONE, Row

log = logging.getLogger("judge")

ATTENTION = "judge"     # attn_implementation of models whose contexts are kept here

Layers = list[tuple[torch.Tensor, torch.Tensor]]        # keys and values: [1, heads, tokens, width]


def press_of(row: Row) -> Any:
    """kvpress's object for a row."""
    import kvpress
    name, _, chunks = row.press.partition(" in chunks of ")
    press = getattr(kvpress, f"{name}Press")(compression_ratio=1 - row.share)
    return kvpress.BlockPress(press=press, block_size=int(chunks)) if chunks else press


def runs_itself(row: Row) -> bool:
    """KVzip reads the context again by itself, and hides keys of single heads from attention."""
    return row.press == "KVzip"


def attend(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None,
           **options: Any) -> Any:
    """sdpa, without the keys that KVzip hides from single heads. kvpress itself replaces them by others that should get
    no attention, which it does not always find."""
    hidden, n, length = getattr(module, "masked_key_indices", None), query.shape[2], key.shape[2]
    if hidden is not None:
        _, heads, places = hidden
        shown = torch.ones(1, key.shape[1], n, length, dtype=torch.bool).tril(length - n)
        shown[0, heads, :, places] = False
        mask = shown.repeat_interleave(query.shape[1] // key.shape[1], 1)
    return sdpa_attention_forward(module, query, key, value, mask, **options)


class Kept:
    """What is left of a context of `length` tokens, continued by the model."""

    def __init__(self, model: PreTrainedModel, layers: Layers, length: int) -> None:
        self.model, self.length, self.cache = model, length, DynamicCache()
        for i, (keys, values) in enumerate(layers):
            self.cache.update(keys, values, i)

    def more(self, ids: list[int]) -> torch.Tensor:
        """The logits after each of further tokens."""
        positions = torch.arange(self.length, self.length + len(ids))[None]
        self.length += len(ids)
        with torch.inference_mode():
            logits: torch.Tensor = self.model(torch.tensor([ids]), past_key_values=self.cache,
                                              position_ids=positions).logits
        return logits[0]


class Context:
    """Keys and values of a context, computed once, and those that kvpress's rows keep of them."""

    def __init__(self, model: PreTrainedModel, ids: list[int], rows: list[Row]) -> None:
        self.model, self.ids, self.pressed = model, ids, {it.name: [] for it in rows}   # type: ignore[var-annotated]
        cache = DynamicCache()
        with ExitStack() as hooks, torch.inference_mode():
            presses = [(it.name, press_of(it)) for it in rows]
            for layer in model.model.layers if presses else ():
                layer.self_attn.rotary_emb = model.model.rotary_emb
                hook = layer.self_attn.register_forward_hook(self._hook(presses, cache), with_kwargs=True)
                hooks.callback(hook.remove)
            model.model(torch.tensor([ids]), past_key_values=cache)
        self.layers: Layers = [(it.keys, it.values) for it in cache.layers]

    def _hook(self, presses: list[tuple[str, Any]], cache: DynamicCache) -> Callable[..., None]:
        def press_layer(module: Any, _: Any, options: dict[str, Any], __: Any) -> None:
            it = cache.layers[module.layer_idx]
            for name, press in presses:
                self.pressed[name].append(
                    press.compress(module, options["hidden_states"], it.keys, it.values, None, options))
        return press_layer

    @contextmanager
    def kept(self, row: Row) -> Iterator[Kept]:
        """The context as a row keeps it."""
        if row.how == ALONE:
            yield Kept(self.model, self.layers, len(self.ids))
        elif runs_itself(row):
            yield from self._run(row)
        else:
            yield Kept(self.model, self.pressed[row.name], len(self.ids))

    def _run(self, row: Row) -> Iterator[Kept]:
        """The context computed again under kvpress, which does the rest; no key is hidden any more afterwards."""
        kept = Kept(self.model, [], len(self.ids))
        try:
            with torch.inference_mode(), press_of(row)(self.model):
                self.model(torch.tensor([self.ids]), past_key_values=kept.cache, logits_to_keep=1)
            yield kept
        finally:
            for layer in self.model.model.layers:
                layer.self_attn.masked_key_indices = None


def prepare() -> bool:
    """Register our attention, and return whether kvpress is there. It patches the attention functions that it finds, so
    that it must come before ours, and before kvd's."""
    found = has_kvpress()
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, sdpa_mask)
    return found


def has_kvpress() -> bool:
    for name in ("kvpress", "kvpress.presses.kvzip_press"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        import kvpress  # noqa: F401
    except Exception as error:      # whatever an unfitting version raises
        log.warning("kvpress cannot be used: %r", error)
        return False
    return True


def working(model: PreTrainedModel, rows: list[Row]) -> set[str]:
    """The presses that work with this model and this transformers, tried on a short context."""
    found, ids = set(), list(range(10, 210))
    for row in {it.press: it for it in rows if it.press}.values():
        try:
            with Context(model, ids, [] if runs_itself(row) else [row]).kept(row) as kept:
                kept.more(ids[:2])
            found.add(row.press)
        except Exception as error:      # whatever an unfitting version raises
            log.warning("kvpress's %s cannot be used: %r", row.press, error)
    return found
