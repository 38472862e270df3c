# SPDX-License-Identifier: Apache-2.0
"""Geometry of blocks."""

from __future__ import annotations

import errno
from ctypes import byref
from dataclasses import dataclass, fields
from typing import Any

from ._errors import Error
from ._native import GeometryStruct, c_string, lib, number

_CHOICES = {
    "dtype": {"f32": 1, "f16": 2, "bf16": 3, "i8": 4, "q8": 5, "q4": 6, "e4m3": 7, "e5m2": 8},
    "order": {"hnd": 1, "nhd": 2},
    "rope": {"post": 1, "pre": 2, "none": 3},
    "kind": {"causal": 1, "bidirectional": 2},
    "keys": {"serve": 1, "paper": 2},
    "policy": {"lru": 1, "fifo": 2, "priority": 3},
    "keep": {"high": 1, "pinned": 2},
}
_DTYPES = {"float32": "f32", "float": "f32", "float16": "f16", "half": "f16", "bfloat16": "bf16", "int8": "i8",
           "int4": "q4", "fp8": "e4m3", "fp8_e4m3": "e4m3", "float8_e4m3fn": "e4m3", "fp8_e5m2": "e5m2",
           "float8_e5m2": "e5m2"}


def choice(field: str, name: str) -> int:
    """Return libkvd's number for a name; ValueError lists the names."""
    try:
        return _CHOICES[field][name]
    except KeyError:
        raise ValueError(f"{field} must be one of {', '.join(_CHOICES[field])}, not {name!r}") from None


def dtype_name(dtype: Any) -> str:
    """Return f32, f16, bf16, i8, q8, q4, e4m3 or e5m2 for that name, a longer one ("bfloat16"), or a dtype of numpy, torch,
    jax or ml_dtypes."""
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", None) or getattr(dtype, "__name__", str(dtype))
    name = str(name).removeprefix("torch.")
    name = _DTYPES.get(name, name)
    choice("dtype", name)
    return name


@dataclass(frozen=True)
class Geometry:
    """Every field that changes the bytes of a block (struct kvd_geometry of kvd.h).

    A block contains block_tokens tokens of layers / layer_groups consecutive layers. For each layer it has the K plane,
    then the V plane, [kv_heads, block_tokens, head_dim] in order "hnd" or [block_tokens, kv_heads, head_dim] in order
    "nhd". The optional state plane, [block_tokens, state_width], follows the last layer.

    dtype applies to K, V and state: a name ("f32", "float32", "f16", "bf16", "bfloat16", "i8", ...) or a dtype of numpy
    or torch. "q8" and "q4" (or "int4") are quantised: a row of head_dim codes of 8 or 4 bits, with a scale and a least
    number for each 64 of them; keys are transformed first (kvd.ops.Quantised, libkvd(3)). "int8" is "i8", numbers without
    a scale. "e4m3" ("fp8") and "e5m2" are numbers of 8 bits; scales of the engine belong to the fingerprint. rope: keys are
    stored after rotation ("post"), before it ("pre"), or are not rotated ("none"). Token ids are below vocab. fingerprint,
    two numbers of 64 bits, covers everything else that changes bytes: see kvd.fingerprint.

    Programs share a space only if all of these are equal. For blocks with another layout, use Geometry.opaque.
    """

    layers: int
    kv_heads: int
    head_dim: int
    vocab: int
    dtype: Any = "f16"
    block_tokens: int = 16
    layer_groups: int = 1
    order: str = "hnd"
    rope: str = "post"
    state_width: int = 0
    fingerprint: tuple[int, int] = (0, 0)
    layout: str = ""
    size: int = 0

    def __post_init__(self) -> None:
        if self.is_opaque:
            return
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        choice("order", self.order)
        choice("rope", self.rope)

    @classmethod
    def opaque(cls, block_bytes: int, layout: str, *, block_tokens: int = 16, vocab: int = 0,
               fingerprint: tuple[int, int] = (0, 0)) -> Geometry:
        """Make a geometry of blocks of block_bytes bytes (a multiple of 64), whose format libkvd does not know.

        block_tokens is 1 to 4096. layout is the name of the format, at most 31 characters of [A-Za-z0-9._-]. vocab 0:
        every number of 32 bits is a token. Tensors of such blocks are uint8 [block_bytes], and on several GPUs
        [bytes of the shard].
        """
        if block_bytes <= 0:
            raise ValueError(f"block_bytes must be a positive multiple of 64, not {block_bytes}")
        if len(layout.encode()) > 31:
            raise ValueError(f"layout must have at most 31 characters, not {len(layout)}: {layout!r}")
        return cls(layers=0, kv_heads=0, head_dim=0, vocab=vocab, dtype="", block_tokens=block_tokens, layer_groups=0,
                   order="", rope="", fingerprint=fingerprint, layout=layout, size=block_bytes)

    @property
    def is_opaque(self) -> bool:
        return self.size != 0

    @property
    def block_bytes(self) -> int:
        """Size of a block in bytes. Raises kvd.Invalid if the geometry is invalid."""
        size: int = lib.kvd_block_bytes(byref(self._struct()))
        if not size:
            raise Error(errno.EINVAL, f"invalid geometry: {self}")
        return size

    def _struct(self) -> GeometryStruct:
        words = {field: 0 if self.is_opaque else choice(field, getattr(self, field))
                 for field in ("dtype", "order", "rope")}
        numbers = {field: number(field, getattr(self, field))
                   for field in ("layers", "kv_heads", "head_dim", "block_tokens", "layer_groups", "state_width",
                                 "vocab")}
        fingerprint = tuple(number("fingerprint", it, 64) for it in self.fingerprint)
        return GeometryStruct(**words, **numbers, fingerprint=fingerprint,
                              block_bytes=number("block_bytes", self.size, 64), layout=c_string("layout", self.layout))

    def __repr__(self) -> str:
        values = {it.name: getattr(self, it.name) for it in fields(self)}
        shown = [f"{it.name}={values[it.name]!r}" for it in fields(self)
                 if values[it.name] not in (it.default, "") and (values[it.name] or not self.is_opaque)]
        return f"kvd.Geometry({', '.join(shown)})"
