# SPDX-License-Identifier: Apache-2.0
"""Decoders of transformers as bidirectional models, layer by layer, and their spaces; see kvd.engines.diffusion."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any, Sequence

import torch
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import kvd

from ._diffusion_blocks import Place
from ._transformers_model import BIDIRECTIONAL, DTYPES, form_of, geometry_of, refuse, refuse_windows, state_of, thread

BLOCK_TOKENS = 16
_PARTS = ("embed_tokens", "layers", "norm", "rotary_emb")
_CAUSAL_PREFIX = "its prefix is encoded causally, and its keys and values do not change while it denoises"
_EXAMINED = 8           # tokens of the pass that is compared with the model's own
_NEAR = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}        # of the largest logit

# ---- models ----------------------------------------------------------------------------------------------------------

_examined: weakref.WeakKeyDictionary[PreTrainedModel, Any] = weakref.WeakKeyDictionary()


class Decoder:
    """A model's arithmetic: rows [n, hidden] are taken through some layers. Made for one request."""

    def __init__(self, model: PreTrainedModel):
        body: Any = getattr(model, "model", None)
        self.head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        name = f"{type(model).__name__} as a bidirectional model"
        if hasattr(body, "encoder"):
            refuse(f"{name}: {_CAUSAL_PREFIX}")
        if not all(hasattr(body, part) for part in _PARTS) or self.head is None:
            refuse(f"{name}: it has no output embeddings, or no model.{', .'.join(_PARTS)}")
        refuse_windows(model, "")
        self.model, self.body, self.layers = model, body, len(body.layers)
        if model.config._attn_implementation != BIDIRECTIONAL:
            refuse(f"attn_implementation={model.config._attn_implementation!r} for diffusion: load the model with "
                   f"attn_implementation={BIDIRECTIONAL!r}")
        if not form_of(model, bidirectional=True).attends:
            refuse(f"{name}: its attention does not go through attn_implementation")
        self.geometry = replace(geometry_of(model, BLOCK_TOKENS, bidirectional=True), layer_groups=self.layers,
                                state_width=model.config.get_text_config().hidden_size)
        self.computed = 0       # tokens x layers that it has taken through a layer
        if _examined.get(model) != state_of(model):
            self._examine(name)
            _examined[model], self.computed = state_of(model), 0

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        rows: torch.Tensor = self.body.embed_tokens(torch.tensor(tokens))
        return rows

    def run(self, rows: torch.Tensor, place: Place, first: int, layer: int, end_layer: int) -> torch.Tensor:
        """Take the rows of positions from `first` on through layers layer to end_layer - 1."""
        place.first = first
        x, positions = rows[None], torch.arange(first, first + len(rows))[None]
        turns = self.body.rotary_emb(x, position_ids=positions)
        for it in self.body.layers[layer:end_layer]:
            x = it(x, attention_mask=None, position_ids=positions, past_key_values=place, use_cache=True,
                   position_embeddings=turns)
        self.computed += len(rows) * (end_layer - layer)
        result: torch.Tensor = x[0]
        return result

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the logits [n, vocab] of rows after the last layer."""
        logits: torch.Tensor = self.head(self.body.norm(rows))
        return logits

    def _examine(self, name: str) -> None:
        """Compare a pass with the model's own, because decoders may do more than their parts show."""
        config, dtype = self.model.config.get_text_config(), DTYPES[self.geometry.dtype]
        tokens = [i * (config.vocab_size - 1) // _EXAMINED for i in range(_EXAMINED)]
        place = Place(self.geometry, 0, _EXAMINED)
        for layer in range(self.layers):
            place.add_private(layer)
        with torch.no_grad():
            expected = self.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
            try:
                rows = self.run(self.embed(tokens), place, 0, 0, self.layers)
                got = self.logits(rows)
            except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
                raise ValueError(f"kvd's cache for transformers does not support {name}: {error}") from error
        if rows.dtype != dtype:
            refuse(f"{name}: its rows are {rows.dtype}, and its keys {dtype}")
        if not bool((got - expected).abs().max() <= _NEAR[dtype] * expected.abs().max()):
            refuse(f"{name}: it does more than embed tokens, run its layers, and norm their rows")


def open_space(daemon: kvd.Daemon, model: PreTrainedModel, name: str | None = None, **options: Any) -> kvd.Space:
    """Open the bidirectional space of this model, where each layer is a layer group, and blocks have a state plane. By
    default it is named after the model's weights.

    With a name, raises kvd.Mismatch if the space is of other weights, or causal. options are those of Daemon.space(). Runs
    the model on a few tokens, and reads all weights once, at some GB/s. """
    geometry = Decoder(model).geometry
    return daemon.space(name or f"diffusion-{geometry.fingerprint[0]:016x}", geometry, kind="bidirectional", **options)


# ---- functions that transformers calls -------------------------------------------------------------------------------


def _attention(module: torch.nn.Module, query: torch.Tensor, key: Any, value: Any, attention_mask: Any,
               dropout: float = 0.0, scaling: float | None = None, softcap: float | None = None,
               s_aux: torch.Tensor | None = None, **options: Any) -> tuple[torch.Tensor, None]:
    if softcap or s_aux is not None or options.get("sliding_window"):
        refuse("soft caps, attention sinks and sliding windows in bidirectional attention")
    if type(key) is not Place:
        thread.attended = getattr(thread, "attended", 0) + 1
        options.pop("is_causal", None)
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling,
                                      is_causal=False, **options)
    if dropout or query.requires_grad:
        refuse("training")
    return key.attend(value, query, query.shape[3] ** -0.5 if scaling is None else scaling), None


def _mask(batch_size: int, q_length: int, kv_length: int, attention_mask: torch.Tensor | None = None, **_: Any
          ) -> torch.Tensor | None:
    """All positions are seen, except for padding."""
    if attention_mask is None or bool(attention_mask.all()):
        return None
    return attention_mask.bool()[:, None, None, :kv_length].expand(batch_size, 1, q_length, kv_length)


ALL_ATTENTION_FUNCTIONS.register(BIDIRECTIONAL, _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(BIDIRECTIONAL, _mask)
