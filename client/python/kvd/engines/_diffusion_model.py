# SPDX-License-Identifier: Apache-2.0
"""Decoders of transformers as bidirectional models, layer by layer, with keys and values in blocks; see
kvd.engines.diffusion."""

from __future__ import annotations

import ctypes
import weakref
from ctypes import byref
from dataclasses import replace
from typing import Any, Sequence

import torch
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import kvd

from .. import _kernels as native
from ._transformers_model import (BIDIRECTIONAL, DTYPES, check_space, form_of, geometry_of, refuse, refuse_windows, state_of,
                                  thread)

BLOCK_TOKENS = 16
_PARTS = ("embed_tokens", "layers", "norm", "rotary_emb")
_CAUSAL_PREFIX = "its prefix is encoded causally, and its keys and values do not change while it denoises"
_EXAMINED = 8           # tokens of the pass that is compared with the model's own
_NEAR = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}        # of the largest logit

# ---- blocks ----------------------------------------------------------------------------------------------------------


class Planes:
    """Blocks of one layer, by address: keys and values [2, kv_heads, block_tokens, head_dim] of the space's dtype, then, if
    `size` bytes have room for it, the state plane [block_tokens, state_width]. Its owner keeps the memory."""

    def __init__(self, geometry: kvd.Geometry, at: Sequence[int], size: int):
        self.geometry, self.at, self.size = geometry, list(at), size
        self.runs: list[tuple[int, torch.Tensor]] = []      # first block, and blocks [n, elements] that are adjacent
        first, dtype = 0, DTYPES[geometry.dtype]
        for i in range(1, len(self.at) + 1):
            if i == len(self.at) or self.at[i] != self.at[i - 1] + size:
                memory = (ctypes.c_uint8 * ((i - first) * size)).from_address(self.at[first])
                self.runs.append((first, torch.frombuffer(memory, dtype=dtype).view(i - first, -1)))
                first = i

    def _kv(self, run: torch.Tensor) -> torch.Tensor:
        g = self.geometry
        plain = 2 * g.kv_heads * g.block_tokens * g.head_dim
        return run[:, :plain].view(-1, 2, g.kv_heads, g.block_tokens, g.head_dim)

    def write(self, first: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values [kv_heads, n, head_dim] in slots first to first + n - 1, all of which are here."""
        size, n = self.geometry.block_tokens, keys.shape[1]
        for block, run in self.runs:
            begin, end = max(first, block * size), min(first + n, (block + len(run)) * size)
            if begin < end:
                for plane, states in enumerate((keys, values)):
                    _fill(self._kv(run)[:, plane], begin - block * size, states[:, begin - first:end - first])

    def write_states(self, rows: torch.Tensor) -> None:
        """Store the rows after the layer [n, state_width] from slot 0 on."""
        for block, run in self.runs:
            part = rows[block * self.geometry.block_tokens:(block + len(run)) * self.geometry.block_tokens]
            _fill(self._states(run)[:, None], 0, part[None])

    def states(self, n: int) -> torch.Tensor:
        """Copy the rows of the first n slots: [n, state_width]."""
        return torch.cat([self._states(run).flatten(0, 1) for _, run in self.runs])[:n]

    def _states(self, run: torch.Tensor) -> torch.Tensor:
        g = self.geometry
        first = 2 * g.kv_heads * g.block_tokens * g.head_dim
        return run[:, first:first + g.block_tokens * g.state_width].view(-1, g.block_tokens, g.state_width)

    def clear_last(self) -> None:
        """Zero the last block, so that slots of no token are the same in all processes."""
        self.runs[-1][1][-1].zero_()


def _fill(plane: torch.Tensor, first: int, states: torch.Tensor) -> None:
    """Copy states [heads, n, dim] to slots from first on of a plane [blocks, heads, block_tokens, dim]."""
    size, n, at = plane.shape[2], states.shape[1], 0
    while at < n:
        block, slot = divmod(first + at, size)
        whole = (n - at) // size if slot == 0 else 0
        if whole:
            plane[block:block + whole] = states[:, at:at + whole * size].reshape(len(states), whole, size, -1).transpose(0, 1)
        take = whole * size or min(size - slot, n - at)
        if not whole:
            plane[block, :, slot:slot + take] = states[:, at:at + take]
        at += take


def plain_bytes(g: kvd.Geometry) -> int:
    """Return the size of a block of one layer without its state plane."""
    return 2 * g.kv_heads * g.block_tokens * g.head_dim * DTYPES[g.dtype].itemsize


class Private:
    """n blocks in memory of this process, with states or without."""

    def __init__(self, geometry: kvd.Geometry, n: int, states: bool):
        size = geometry.block_bytes if states else plain_bytes(geometry)
        self.memory = torch.zeros(n * size, dtype=torch.uint8)
        self.planes = Planes(geometry, range(self.memory.data_ptr(), self.memory.data_ptr() + n * size, size), size)


class Place:
    """Where a request's keys and values are, which layers get as past_key_values. Every position is seen by every query.

    Position p is in slot p if it is in the prefix. The rest begins in a block of its own, so that stored blocks are never
    written."""

    def __init__(self, geometry: kvd.Geometry, prefix: int, tokens: int):
        size = geometry.block_tokens
        self.geometry, self.prefix, self.tokens = geometry, prefix, tokens
        self.prefix_blocks = -(-prefix // size)
        self.gap = self.prefix_blocks * size - prefix
        self.rest_blocks = -(-(tokens - prefix) // size)
        self.layers: dict[int, tuple[list[Planes], Any]] = {}   # by layer: of the prefix and the rest; their addresses
        self.held: list[Any] = []                               # memory of the planes
        self.first = 0                                          # position of the first row
        slots = [*range(prefix), *range(prefix + self.gap, tokens + self.gap)]
        self.n_keys = slots[-1] + 1
        hole = self.gap and tokens > prefix
        self.chosen = (ctypes.c_uint32 * tokens)(*slots) if hole else None
        self.scratch = torch.empty(0)

    def add(self, layer: int, *parts: Planes) -> None:
        """Say where a layer's blocks are: those of the prefix, then the others."""
        self.layers[layer] = list(parts), native.pointers([at for it in parts for at in it.at])

    def add_private(self, layer: int, shared: Planes | None = None) -> None:
        """Give a layer private blocks, except for those of the prefix that are given."""
        n = 0 if shared else self.prefix_blocks
        own = Private(self.geometry, n + self.rest_blocks, False)
        self.held.append(own)
        at, size = own.planes.at, own.planes.size
        self.add(layer, shared or Planes(self.geometry, at[:n], size), Planes(self.geometry, at[n:], size))

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any) -> tuple[Place, int]:
        """Store a layer's keys and values [1, kv_heads, n, head_dim] of the rows. Returns what attend() needs."""
        g, n = self.geometry, keys.shape[2]
        for it in (keys, values):
            if it.shape != (1, g.kv_heads, n, g.head_dim) or it.dtype != DTYPES[g.dtype]:
                refuse(f"keys or values of shape {list(it.shape)} and {it.dtype} (autocast?) in a space of {g}")
        parts, inside = self.layers[layer][0], max(min(self.prefix - self.first, n), 0)
        if inside:
            parts[0].write(self.first, keys[0, :, :inside], values[0, :, :inside])
        if inside < n:
            parts[1].write(self.first + inside - self.prefix, keys[0, :, inside:], values[0, :, inside:])
        return self, layer

    def attend(self, layer: int, query: torch.Tensor, scale: float) -> torch.Tensor:
        """Attend from queries [1, heads, n, head_dim] to all positions, in place. Returns [1, n, heads, head_dim]."""
        g, (_, heads, n, dim), kernels = self.geometry, query.shape, native.pick(None)
        q = query[0].transpose(0, 1).to(torch.float32).contiguous()
        out = torch.empty_like(q)
        group, plane = heads // g.kv_heads, g.block_tokens * dim * DTYPES[g.dtype].itemsize
        a = native.Attention(ops=kernels.address, blocks=self.layers[layer][1], stride=dim, dim=dim, n=n, group=group,
                             type=native.NUMBERS[str(DTYPES[g.dtype]).removeprefix("torch.")], scale=scale,
                             block_tokens=g.block_tokens, n_keys=self.n_keys, ldq=heads * dim, ldo=heads * dim)
        if self.chosen is not None:
            a.chosen, a.n_chosen = ctypes.addressof(self.chosen), len(self.chosen)
        room = native.lib.kvd_attend_scratch(byref(a))
        if self.scratch.numel() < room:
            self.scratch = torch.empty(room)
        a.scratch = self.scratch.data_ptr()
        for head in range(g.kv_heads):
            a.k_offset, a.v_offset = head * plane, (g.kv_heads + head) * plane
            a.q, a.out = (it.data_ptr() + 4 * head * group * dim for it in (q, out))
            native.lib.kvd_attend(byref(a))
        return out.to(query.dtype)[None]


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


def check(space: kvd.Space | None, decoder: Decoder) -> None:
    if space is not None:
        check_space(space, decoder.model, ("bicache",), decoder.geometry)


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
