# SPDX-License-Identifier: Apache-2.0
"""Copies of prefixes in plain caches of transformers: load_prefix() and store() of kvd.engines.transformers."""

from __future__ import annotations

import ctypes
from typing import Any, Iterator

import torch
from transformers import DynamicCache, PreTrainedModel

import kvd

from ._transformers_model import DTYPES, check_space, refuse, refuse_windows


def _tokens_of(input_ids: Any) -> list[int]:
    """Return the token ids of one sequence."""
    tokens = input_ids.tolist() if hasattr(input_ids, "tolist") else list(input_ids)
    if tokens and isinstance(tokens[0], list):
        if len(tokens) != 1:
            refuse(f"{len(tokens)} sequences in one copy: make one for each")
        tokens = tokens[0]
    if not tokens:
        raise ValueError("there are no tokens")
    return tokens


def gather(geometry: kvd.Geometry, base: int, ids: list[int], length: int) -> torch.Tensor:
    """Copy blocks to a tensor [layers, 2 (K, V), 1, heads, length, dim]."""
    g, size = geometry, geometry.block_bytes
    out = torch.empty(g.layers, 2, 1, g.kv_heads, len(ids), g.block_tokens, g.head_dim, dtype=DTYPES[g.dtype])
    for first, block, n in _runs(ids):
        run = torch.frombuffer((ctypes.c_uint8 * (n * size)).from_address(base + block * size), dtype=out.dtype)
        run = run.view(n, g.layers, 2, 1, g.kv_heads, g.block_tokens, g.head_dim)
        out[..., first:first + n, :, :] = run.permute(1, 2, 3, 4, 0, 5, 6)
    return out.flatten(4, 5)[..., :length, :]


def _runs(ids: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield runs of consecutive ids as (index of the first, first id, number of ids)."""
    first = 0
    for i in range(1, len(ids) + 1):
        if i == len(ids) or ids[i] != ids[i - 1] + 1:
            yield first, ids[first], i - first
            first = i


def load_prefix(space: kvd.Space, model: PreTrainedModel, input_ids: Any, *, salt: int = 0) -> tuple[DynamicCache, int]:
    """Return a DynamicCache with a copy of the longest stored prefix of all but the prompt's last token, and the number
    of tokens in it."""
    refuse_windows(model)
    check_space(space, model)
    cache: Any = DynamicCache(config=model.config)
    cache.kvd_space, cache.kvd_salt = space.name, salt
    if len(cache.layers) != space.geometry.layers:
        refuse(f"a DynamicCache of {len(cache.layers)} layers for a model of {space.geometry.layers}")
    with space.find(_tokens_of(input_ids)[:-1], salt=salt) as pin:
        if not pin:
            return cache, 0
        stored = gather(space.geometry, pin.address(0), pin.blocks, pin.tokens)
        for layer, (keys, values) in zip(cache.layers, stored):
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
        return cache, pin.tokens


def store(space: kvd.Space, cache: Any, input_ids: Any) -> int:
    """Publish keys and values of these tokens, the prompt's and the generated ones, from a cache of load_prefix(). Full
    blocks that are not in the pool yet are copied. Returns the number of blocks copied."""
    if getattr(cache, "kvd_space", None) != space.name:
        raise ValueError(f"the cache was not made by load_prefix() for space {space.name!r}")
    tokens, size = _tokens_of(input_ids), space.geometry.block_tokens
    full = min(len(tokens), cache.get_seq_length()) // size
    _check_copied(space.geometry, cache, full * size)
    with space.lookup(tokens[:full * size], salt=cache.kvd_salt) as pin:
        if not pin:
            pin = kvd.Pin(space, salt=cache.kvd_salt)
        return _store_blocks(space, cache, tokens, pin, len(pin.blocks), full)


def _check_copied(g: kvd.Geometry, cache: Any, tokens: int) -> None:
    """Refuse tensors that do not match the geometry, because an assignment would broadcast or convert them."""
    for layer in cache.layers if tokens else ():
        for it in (layer.keys, layer.values):
            if (it.shape[:2], it.shape[3:], it.dtype) != ((1, g.kv_heads), (g.head_dim,), DTYPES[g.dtype]):
                refuse(f"keys or values of shape {list(it.shape)} and {it.dtype} in a space of {g}")
            if it.shape[2] < tokens:
                refuse(f"a cache that has {it.shape[2]} of {tokens} tokens")


def _store_blocks(space: kvd.Space, cache: Any, tokens: list[int], pin: kvd.Pin, first: int, end: int) -> int:
    size = space.geometry.block_tokens
    blocks = space.alloc(end - first)
    for i, block in enumerate(blocks, first):
        to = torch.utils.dlpack.from_dlpack(block)
        for layer, (keys, values) in enumerate((it.keys, it.values) for it in cache.layers):
            to[layer, 0] = keys[0, :, i * size:(i + 1) * size]
            to[layer, 1] = values[0, :, i * size:(i + 1) * size]
        del to
    try:
        if blocks:
            pin.seal(blocks, tokens[first * size:end * size])
    finally:
        space.free(blocks)
        pin.release()
    return len(blocks)
