# SPDX-License-Identifier: Apache-2.0
"""Copies of prefixes in plain caches of transformers: load_prefix() and store() of kvd.engines.transformers."""

from __future__ import annotations

import ctypes
from typing import Any, Iterator

import torch
from transformers import DynamicCache, PreTrainedModel

import kvd

from ._transformers_model import BYTES, DTYPES, check_space, form_of, refuse, refuse_windows

_GROUP = 64     # quantised numbers with a common scale
_SIGNS = 0x243f6a8885a308d3


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
    """Copy blocks to a tensor [layers, 2 (K, V), 1, heads, length, dim]. Quantised numbers and those of 8 bits become
    float32."""
    g, size, row = geometry, geometry.block_bytes, _row_bytes(geometry.dtype, geometry.head_dim)
    used = g.layers * 2 * g.kv_heads * g.block_tokens * row     # the rest of a block is padding
    out = torch.empty(g.layers, 2, 1, g.kv_heads, len(ids), g.block_tokens, row, dtype=torch.uint8)
    for first, block, n in _runs(ids):
        run = torch.frombuffer((ctypes.c_uint8 * (n * size)).from_address(base + block * size), dtype=torch.uint8)
        run = run.view(n, size)[:, :used].unflatten(1, (g.layers, 2, 1, g.kv_heads, g.block_tokens, row))
        out[..., first:first + n, :, :] = run.permute(1, 2, 3, 4, 0, 5, 6)
    rows = out.flatten(4, 5)[..., :length, :]
    if g.dtype in DTYPES:
        return rows.view(DTYPES[g.dtype])
    if g.dtype in BYTES:
        return rows.contiguous().view(BYTES[g.dtype]).to(torch.float32)
    states = _expanded(rows, g.dtype, g.head_dim)
    states[:, 0] = _turned(states[:, 0])
    return states


def _row_bytes(dtype: str, dim: int) -> int:
    plain = DTYPES | BYTES
    if dtype in plain:
        return dim * plain[dtype].itemsize
    return _code_bytes(dtype, dim) + -(-dim // _GROUP) * 4


def _code_bytes(dtype: str, dim: int) -> int:
    return dim if dtype == "q8" else dim // 2


def _expanded(rows: torch.Tensor, dtype: str, dim: int) -> torch.Tensor:
    """The numbers that quantised rows stand for (ipc/base/format.h): codes, then scale and least number of each 64."""
    codes, ends = rows.tensor_split([_code_bytes(dtype, dim)], -1)
    if dtype == "q4":
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    of = ends.contiguous().view(torch.float16).unflatten(-1, (-1, 2)).to(torch.float32)
    scale, least = of.repeat_interleave(_GROUP, -2)[..., :dim, :].unbind(-1)
    return codes * scale + least


def _turned(keys: torch.Tensor) -> torch.Tensor:
    """The numbers of quantised keys, of which blocks have the orthonormal Walsh-Hadamard transform between signs
    (kernels/turn.h)."""
    parts, signs = [], torch.tensor([-1. if _SIGNS >> i & 1 else 1. for i in range(_GROUP)], dtype=torch.float32)
    for group in keys.split(_GROUP, -1):
        while group.shape[-1]:
            steps = group.shape[-1].bit_length() - 1
            part, group = group.tensor_split([1 << steps], -1)
            part = part * signs[:1 << steps]
            for _ in range(steps):
                a, b = part[..., ::2], part[..., 1::2]
                part = torch.cat([a + b, a - b], -1)
            parts.append(part * (1 / torch.tensor(1 << steps, dtype=torch.float32).sqrt()) * signs[:1 << steps])
    return torch.cat(parts, -1)


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
        stored = gather(space.geometry, pin.address(0), pin.blocks, pin.tokens).to(form_of(model).dtype)
        for layer, (keys, values) in zip(cache.layers, stored):
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
        return cache, pin.tokens


def store(space: kvd.Space, cache: Any, input_ids: Any) -> int:
    """Publish keys and values of these tokens, the prompt's and the generated ones, from a cache of load_prefix(). Full
    blocks that are not in the pool yet are copied. Returns the number of blocks copied."""
    if getattr(cache, "kvd_space", None) != space.name:
        raise ValueError(f"the cache was not made by load_prefix() for space {space.name!r}")
    if space.geometry.dtype not in DTYPES:
        refuse(f"blocks of dtype {space.geometry.dtype} by copy: a KvdCache stores them")
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
