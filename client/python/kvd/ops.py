# SPDX-License-Identifier: Apache-2.0
"""Kernels of KV cache methods as functions on tensors: libkvd_kernels for Python. They need no daemon.

    import numpy as np
    from kvd import ops

    keys = np.random.default_rng(1).standard_normal((8, 1000, 128)).astype(np.float32)     # [heads, tokens, dim]
    sums, counts = ops.keydiff_anchor(keys)
    kept = ops.topk(ops.keydiff_scores(keys, sums), 250, later=True)        # [heads, 250]
    evicted = np.take_along_axis(keys, kept[:, :, None], 1)

kvd's workers and kvlm call the same functions, so measurements with them apply to the product. They take tensors of
numpy, PyTorch and other libraries with DLPack or numpy's array interface, such as views of blocks in a pool
(kvd.View). They return tensors of PyTorch if they were given such tensors, and of numpy otherwise. Keys and values are
float32, float16 or bfloat16 (in numpy: from ml_dtypes, or as bits.view("V2")), torch's float8_e4m3fn or float8_e5m2, or
Quantised rows. If a shape allows strides, memory is read in place as long as the elements of a row are contiguous; other
tensors are copied first. Shapes are given as [named, axes]; indices and counts are int64.

Raises TypeError for a wrong kind of tensor, dtype or device, and ValueError for a wrong shape, size or index; nothing
is changed then. Tensors must be in host memory. keydiff_anchor and keydiff_scores also take PyTorch tensors on a GPU,
if the library was built with CUDA, and launch in its current stream (RuntimeError if it was not, or if the GPU fails).
All functions are thread-safe.
"""

from __future__ import annotations

import ctypes
import importlib
import math
from ctypes import byref, c_uint32
from typing import Any, Sequence

from . import _kernels as native
from ._kernels import CODED, NUMBERS, Quantised, Tensor, alike, at, given, lib, np, pick, pointers, take

Array = Any
"""A tensor of numpy, of PyTorch, or of another library with DLPack."""

_variant: str | None = None


def variants() -> list[str]:
    """Return the instruction sets that this processor supports, out of avx512, avx2 and scalar, fastest first. All
    return the same bits."""
    return native.variants()


def use(variant: str | None) -> None:
    """Use one of variants() in this process from now on; None: the fastest. Raises ValueError if the processor does not
    support it."""
    global _variant
    pick(variant)
    _variant = variant


def _choice(name: str, value: str, numbers: dict[str, int]) -> int:
    if value not in numbers:
        raise ValueError(f"{name} must be one of {', '.join(numbers)}, not {value!r}")
    return numbers[value]


def _need(condition: bool, words: str) -> None:
    if not condition:
        raise ValueError(words)


# ---- quantised rows --------------------------------------------------------------------------------------------------


def quantise(x: Array, dtype: str, keys: bool = False) -> Quantised:
    """Return rows of numbers as blocks of dtype "q8" or "q4" hold them: codes of 8 or 4 bits, with a scale and a least
    number for each 64 of them. Or, with "e4m3" and "e5m2", as numbers of 8 bits.

    x: float32 [rows, dim], dim even of "q8" and "q4". Of these, a group with a NaN or an infinity becomes NaN. Numbers of
    8 bits are rounded to nearest, and limited to the largest finite one (448 or 57344). keys: the rows are keys, of which
    blocks of "q8" and "q4" have the Walsh-Hadamard transform (libkvd(3)); all functions here expect that of their keys.

        import numpy as np
        from kvd import ops
        values = ops.quantise(np.ones((1000, 128), np.float32), "q4")
        assert values.rows.shape == (1000, 72) and (ops.expand(values) == 1).all()
    """
    t = take("x", x, "rows dim", ["float32"])
    (n, dim), ops, number = t.shape, pick(_variant), _choice("dtype", dtype, {it: NUMBERS[it] for it in CODED})
    found = Quantised(given(np.empty((n, lib.kvd_row_bytes(number, dim)), np.uint8), x), dtype, dim)
    to = Tensor("rows", found)
    write = ops.write_key if keys else ops.write_row
    for i in range(n):
        write(to.pointer + i * to.row, t.pointer + 4 * i * dim, dim, number)
    return found


def expand(rows: Quantised, keys: bool = False) -> Array:
    """Return the numbers that quantised rows [..., dim] stand for, float32. keys: as of quantise()."""
    t = Tensor("rows", rows)
    t = t if t.is_dense else Tensor("rows", native.copied(rows))
    out, ops = np.empty((math.prod(t.shape[:-1]), t.shape[-1]), np.float32), pick(_variant)
    read = ops.read_key if keys else ops.read_row
    for i in range(len(out)):
        read(at(out[i]), t.pointer + i * t.row, t.shape[-1], t.number)
    return given(out.reshape(t.shape), rows.rows)


# ---- top k -----------------------------------------------------------------------------------------------------------


def topk(scores: Array, k: int, *, later: bool = False) -> Array:
    """Return the indices of the k largest scores of each row.

    scores: float32 [rows, n]. Returns int64 [rows, min(k, n)], ascending. Among equal scores, lower indices win, or
    with later=True higher ones. NaN is less than every number.
    """
    s = take("scores", scores, "rows n", ["float32"])
    rows, n = s.shape
    _need(k >= 0, "k must be 0 or more")
    out, scratch = np.empty((rows, min(k, n)), np.uint32), np.empty(max(n, 1), np.uint32)
    best = pick(_variant).block["topk"]
    for i in range(rows if out.size else 0):
        best(at(out[i]), s.pointer + 4 * i * n, n, min(k, n), later, at(scratch))
    return given(out.astype(np.int64), scores)


# ---- KeyDiff ---------------------------------------------------------------------------------------------------------


def _keys(keys: Array) -> Tensor:
    k = take("keys", keys, "heads tokens dim", list(NUMBERS), strided=True, cuda=True)
    _need(k.shape.count(0) == 0, "there are no keys")
    return k


class _OnGpu:
    """Keys on a GPU, and PyTorch memory for results, in PyTorch's current stream."""

    def __init__(self, k: Tensor):
        self.torch: Any = importlib.import_module("torch")
        self.device = self.torch.device("cuda", k.device[1])
        _need(k.shape[2] <= 256, f"on a GPU, keys must have up to 256 dimensions, not {k.shape[2]}")
        self.keys = native.CudaKeys(k.device[1], self.torch.cuda.current_stream(self.device).cuda_stream, k.pointer,
                                    k.strides[0], k.strides[1], *k.shape, k.number)
        self.scratch = self.room((lib.kvd_cuda_keydiff_scratch(byref(self.keys)),), "uint8")
        self.keys.scratch = self.scratch.data_ptr()

    def room(self, shape: Sequence[int], dtype: str) -> Any:
        return self.torch.zeros(shape, dtype=getattr(self.torch, dtype), device=self.device)

    def call(self, function: Any, *addresses: int) -> None:
        why = ctypes.create_string_buffer(native.CUDA_WHY)
        if function(byref(self.keys), *addresses, why) < 0:
            raise RuntimeError(f"KeyDiff on a GPU: {why.value.decode()}")


def _key_rows(k: Tensor) -> native.KeyRows:
    heads, tokens, dim = k.shape
    return native.KeyRows(pointers([k.pointer]), 0, k.step(0), k.step(1), tokens, heads, dim, k.number)


def _key_scratch(k: Tensor) -> Any:
    return np.empty(k.shape[0] * (-(-k.shape[2] // 16) * 16 + 1), np.float32)


def keydiff_anchor(keys: Array) -> tuple[Array, Array]:
    """Return the sum of the directions k / |k| of each head's keys, and the number of keys in it (equation 8 of
    KeyDiff, arXiv 2504.15364: the anchor is the mean, and scores do not depend on its length).

    keys: [heads, tokens, dim], with any strides. Returns float32 [heads, dim] and int64 [heads]. Keys that are zero or
    contain a NaN or an infinity have no direction. The sums of parts of a sequence add up to the sum of the whole.
    """
    k = _keys(keys)
    if native.on_gpu(keys):
        gpu = _OnGpu(k)
        found, n = gpu.room((k.shape[0], k.shape[2]), "float32"), gpu.room((k.shape[0],), "int32")
        gpu.call(lib.kvd_cuda_keydiff_anchor, found.data_ptr(), n.data_ptr())
        return found, n.long()
    rows = _key_rows(k)
    sums, counts = np.zeros((k.shape[0], k.shape[2]), np.float32), np.zeros(k.shape[0], np.uint32)
    scratch = _key_scratch(k)
    pick(_variant).keydiff["anchor"](at(sums), at(counts), byref(rows), 0, k.shape[1], at(scratch))
    return given(sums, keys), given(counts.astype(np.int64), keys)


def keydiff_scores(keys: Array, anchor: Array) -> Array:
    """Return -cos(anchor, key) of each key (equation 10): keep the keys with the largest scores.

    keys: [heads, tokens, dim], with any strides. anchor: float32 [heads, dim], a sum or mean of directions. Returns
    float32 [heads, tokens], between -1 and 1; -inf for keys without a direction.
    """
    k, m = _keys(keys), take("anchor", anchor, "heads dim", ["float32"], cuda=True)
    _need(m.device == k.device, "keys and anchor must be on one device")
    _need(m.shape == (k.shape[0], k.shape[2]), f"anchor must be {[k.shape[0], k.shape[2]]} for these keys")
    if native.on_gpu(keys):
        gpu = _OnGpu(k)
        found = gpu.room(k.shape[:2], "float32")
        gpu.call(lib.kvd_cuda_keydiff_score, m.pointer, found.data_ptr())
        return found
    rows = _key_rows(k)
    scores, scratch, n = np.empty(k.shape[:2], np.float32), _key_scratch(k), k.shape[1]
    pick(_variant).keydiff["score"](at(scores), n, byref(rows), 0, n, m.pointer, at(scratch))
    return given(scores, keys)


def keydiff_blocks(scores: Array, block_tokens: int) -> tuple[Array, Array]:
    """Return the mean over heads of each block's best score, and the best score of each head and block.

    scores: float32 [heads, tokens]. Returns float32 [blocks], the mean over the heads that have a key in the block, and
    [heads, blocks]; blocks is tokens / block_tokens, rounded up. -inf if no key has a score.
    """
    s = take("scores", scores, "heads tokens", ["float32"])
    _need(block_tokens > 0, "block_tokens must be 1 or more")
    heads, n = s.shape
    mean, best = (np.empty(it, np.float32) for it in ((-(-n // block_tokens),), (heads, -(-n // block_tokens))))
    pick(_variant).keydiff["blocks"](at(mean), at(best), s.pointer, n, heads, n, block_tokens)
    return given(mean, scores), given(best, scores)


def keydiff_priority(scores: Array) -> Array:
    """Return (1 + score) / 2, between 0 and 1, as float32 of scores' shape [n]: the priority by which kvd chooses
    victims. 0 for -inf and NaN."""
    s = take("scores", scores, "n", ["float32"])
    out = np.empty(s.shape, np.float32)
    pick(_variant).keydiff["priority"](at(out), s.pointer, out.size)
    return given(out, scores)


# ---- MemShare --------------------------------------------------------------------------------------------------------


def _bag(name: str, tokens: Sequence[int] | Array) -> tuple[native.Bag, Any]:
    t = np.ascontiguousarray(np.asarray(tokens, np.int64), np.uint32)
    ids, counts = np.empty(t.size + 1, np.uint32), np.empty(t.size + 1, np.uint16)
    bag = native.Bag()
    lib.kvd_bag_make(byref(bag), at(t), t.size, at(ids), at(counts))
    return bag, (ids[:bag.n], counts[:bag.n])


def bag_of_words(tokens: Sequence[int] | Array) -> tuple[Array, Array]:
    """Return the distinct ids in a list of tokens, ascending, and their counts (at most 65535): stage 1 of MemShare."""
    ids, counts = _bag("tokens", tokens)[1]
    return given(ids.astype(np.int64), tokens), given(counts.astype(np.int64), tokens)


def bag_cosine(a: Sequence[int] | Array, b: Sequence[int] | Array) -> float:
    """Return the cosine of the counts of two lists of tokens (section 3.1 of MemShare), 0 to 1; 0 if one is empty.

        from kvd import ops
        assert abs(ops.bag_cosine([1, 1, 2, 3], [1, 2, 2, 4]) - 4 / 6) < 1e-7
    """
    (x, _keep_a), (y, _keep_b) = _bag("a", a), _bag("b", b)
    return float(lib.kvd_bag_cosine(byref(x), byref(y)))


def _memshare_shape(t: Tensor) -> native.MemshareShape:
    layers, planes, heads, tokens, dim = t.shape
    _need(planes == 2, f"{t.name} must have 2 planes per layer, keys and values")
    _need(t.shape.count(0) == 0, f"{t.name} is empty")
    return native.MemshareShape(layers, heads, tokens, dim, t.number)


_BLOCK = "layers planes heads tokens dim"


def _norms(t: Tensor, shape: native.MemshareShape) -> Any:
    out = np.empty((t.shape[0], 2), np.float32)
    pick(_variant).memshare["norms"](byref(shape), t.pointer, at(out))
    return out


def memshare_norms(block: Array) -> Array:
    """Return the Frobenius norms of a block's keys and values: float32 [layers, 2] of [layers, 2, heads, tokens,
    dim]."""
    t = take("block", block, _BLOCK, list(NUMBERS))
    return given(_norms(t, _memshare_shape(t)), block)


_METRICS = {"fro_norm": 1, "mean_l2": 2, "relative": 3}


def memshare_distance(a: Array, b: Array, *, metric: str = "relative", delta: int = 0, theta: float = 1e4,
                      frequencies: Array | None = None, limit: float = math.inf) -> float:
    """Return the distance of two blocks: stage 2 of MemShare (section 3.2). It is the mean over layers of half the sum,
    for K and for V, of |A - B| / (tokens heads) (metric "fro_norm", that of the paper, with Frobenius norms), of the
    mean over tokens and heads of |a - b| ("mean_l2"), or of |A - B| / sqrt(|A| |B|) ("relative").

    a, b: [layers, 2, heads, tokens, dim], keys after RoPE. b's keys are first rotated by delta positions: pairs (i, i
    + n) of dimensions by frequencies[i] radians per position (float64 [n], n <= dim / 2; None: theta^(-i / n) with n =
    dim / 2). delta 0: no rotation. Returns inf if the distance exceeds the limit or a value is NaN.

        import numpy as np
        from kvd import ops
        block = np.ones((2, 2, 4, 16, 64), np.float32)
        assert ops.memshare_distance(block, block) == 0
    """
    x, y = (take(name, it, _BLOCK, list(NUMBERS)) for name, it in (("a", a), ("b", b)))
    alike(x, y)
    shape, dim = _memshare_shape(x), x.shape[4]
    usual = theta ** (-np.arange(dim // 2) / max(dim // 2, 1))
    w = usual if frequencies is None else np.ascontiguousarray(frequencies, float)
    _need(w.ndim == 1 and 2 * w.size <= dim, f"{w.size} frequencies rotate more than {dim} dimensions")
    angles, norms = np.empty((2, w.size), np.float32), (_norms(x, shape), _norms(y, shape))
    lib.kvd_memshare_angles(at(w), w.size, delta, at(angles), at(angles[1:]))
    query = native.MemshareQuery(ctypes.pointer(shape), _choice("metric", metric, _METRICS), limit, at(angles),
                                 at(angles) + 4 * w.size, w.size if delta else 0)
    blocks = [native.MemshareBlock(t.pointer, at(n)) for t, n in zip((x, y), norms)]
    return float(pick(_variant).memshare["distance"](byref(query), *map(byref, blocks)))


# ---- KVReviver -------------------------------------------------------------------------------------------------------

_FAMILIES = {"uniform": 1, "permutation": 2}
_SIGNS = {"none": 0, "key": 1 << 30, "value": 1 << 31}


def sketch_places(ordinals: Array, rows: int, columns: int, *, family: str = "permutation", salt: int = 0) -> Array:
    """Return the cells and signs of tokens in a count sketch (section 4.1 of KVReviver).

    ordinals: uint64 [n], unique for each token. family: "uniform", the value of a polynomial, or "permutation": no two
    of `columns` consecutive ordinals collide. Returns uint32 [n, rows]: a column below 2^30, bit 30 if keys are
    negated, bit 31 if values are negated.
    """
    u = take("ordinals", ordinals, "n", ["uint64"])
    _need(1 <= rows <= 8, f"a sketch has 1 to 8 rows, not {rows}")
    _need(1 <= columns <= 1 << 30, f"a sketch has 1 to 2^30 columns, not {columns}")
    out = np.empty((u.shape[0], rows), np.uint32)
    hash_ = native.SketchHash(_choice("family", family, _FAMILIES), rows, columns, salt)
    lib.kvd_sketch_place(byref(hash_), u.pointer, u.shape[0], at(out))
    return given(out, ordinals)


def _sketch(cells: Array, places: Array, sign: str, mean: Array | None) -> tuple[Any, ...]:
    """Return a part of a sketch, its places, and two objects that must live as long."""
    c, p = take("cells", cells, "rows columns dim", ["float32"]), take("places", places, "n rows", ["uint32"])
    m = None if mean is None else take("mean", mean, "dim", ["float32"])
    rows, columns, dim = c.shape
    _need(1 <= rows <= 8 and p.shape[1] == rows, f"a sketch has 1 to 8 rows, a place one in each, not {p.shape[1]}")
    _need(m is None or m.shape == (dim,), f"mean must be [dim], {dim} for these cells")
    numbers = np.asarray(p.source)
    _need(not numbers.size or int((numbers & ((1 << 30) - 1)).max()) < columns, f"there are only {columns} columns")
    part = native.SketchPart(c.pointer, dim, rows, columns, dim, _choice("sign", sign, _SIGNS), m and m.pointer)
    return part, p, c, m


def _vectors(pointer: int, row: int, number: int) -> native.SketchVectors:
    return native.SketchVectors(pointers([pointer]), 0, row, (1 << 32) - 1, number)


def sketch_insert(cells: Array, places: Array, x: Array, *, sign: str = "value", mean: Array | None = None,
                  weight: int = 1) -> None:
    """Add vectors to the cells at their places, in place.

    cells: float32 [rows, columns, dim], dense, zeros at first. places: from sketch_places. x: [n, dim]. sign: "key" or
    "value" multiplies by that sign of a place, "none" by 1 (for keys, as in the paper). mean: float32 [dim], subtracted
    from each vector. weight: 1 inserts; -1 deletes vectors that were inserted. Of quantised rows, what they stand for is
    added: of keys, their transform (quantise()), of which mean is then, too.
    """
    part, p, c, _keep = _sketch(cells, places, sign, mean)
    v = take("x", x, "n dim", list(NUMBERS))
    _need(c.source is cells, "cells are changed in place: they must be dense")
    _need(v.shape == (p.shape[0], c.shape[2]), f"x must be {[p.shape[0], c.shape[2]]} for these places and cells")
    _need(weight in (1, -1), "weight must be 1 or -1")
    vectors = _vectors(v.pointer, v.row, v.number)
    pick(_variant).sketch["insert"](byref(part), p.pointer, p.shape[0], byref(vectors), weight)


def sketch_query(cells: Array, places: Array, *, sign: str = "value", mean: Array | None = None,
                 shrink: float = 1.0) -> Array:
    """Estimate vectors from a sketch: for each dimension the median over rows of sign * cell, times shrink, plus mean.

    Arguments are as for sketch_insert. For N(0, 1) the squared error is smallest for shrink = 1 / (1 + 1.35 load),
    where load is tokens per cell. Returns float32 [n, dim]; NaN if a cell is NaN.
    """
    part, p, c, _keep = _sketch(cells, places, sign, mean)
    out = np.empty((p.shape[0], c.shape[2]), np.float32)
    vectors = _vectors(at(out), 4 * c.shape[2], NUMBERS["float32"])
    pick(_variant).sketch["query"](byref(part), p.pointer, p.shape[0], byref(vectors), shrink)
    return given(out, cells)


# ---- HShare ----------------------------------------------------------------------------------------------------------


def hshare_weights(q: Array, k: Array) -> Array:
    """Return the weight of each dimension in q . k: the sum of |q k| over tokens and query heads, float32 [dim].

    q: float32 [tokens, group, dim], the query heads of one KV head. k: [tokens, dim], at the same positions.
    """
    x, y = take("q", q, "tokens group dim", ["float32"]), take("k", k, "tokens dim", list(NUMBERS))
    tokens, group, dim = x.shape
    _need(y.shape == (tokens, dim), f"k must be [tokens, dim], {[tokens, dim]} for these queries")
    out = np.zeros(dim, np.float32)
    pick(_variant).hshare["weigh"](at(out), x.pointer, group * dim, group, y.pointer, y.row, y.number, tokens, dim)
    return given(out, q)


def hshare_channels(weights: Array, n: int = 32) -> Array:
    """Return the n dimensions with the largest weights, ascending: int64 [n] of float32 [dim]."""
    w = take("weights", weights, "dim", ["float32"])
    _need(0 < n <= min(w.shape[0], 256) and w.shape[0] < 1 << 16, f"{n} channels of {w.shape[0]} dimensions")
    out = np.empty(n, np.uint16)
    lib.kvd_label_channels(w.pointer, w.shape[0], n, at(out))
    return given(out.astype(np.int64), weights)


def _channels(channels: Array, dim: int) -> Any:
    it = np.asarray(channels)
    _need(it.ndim == 1 and 1 <= it.size <= 256, "a label must have 1 to 256 channels")
    _need(bool((it >= 0).all() and (it < dim).all()), f"channels must be below {dim}")
    return np.ascontiguousarray(it, np.uint16)


def hshare_labels(keys: Array, channels: Array) -> Array:
    """Return labels of keys: some of their channels in 4 bits, the official code's estimate of a key.

    keys: [tokens, dim] of one head. channels: integers [n], each below dim. Returns uint8 [tokens, (n + 1) / 2 + 4]:
    codes, two per byte, the even channel in the low half; then least and step, each float16. The value of a channel is
    least + code * step.
    """
    k = take("keys", keys, "tokens dim", list(NUMBERS), strided=True)
    c = _channels(channels, k.shape[1])
    out = np.empty((k.shape[0], (c.size + 1) // 2 + 4), np.uint8)
    pick(_variant).hshare["label"](at(out), k.pointer, k.step(0), k.number, *k.shape, at(c), c.size)
    return given(out, keys)


def hshare_scores(labels: Array, q: Array, channels: Array) -> Array:
    """Estimate q . k from labels: float32 [queries, tokens].

    labels: uint8 [tokens, bytes] from hshare_labels, with the same channels. q: float32 [queries, dim].
    """
    t, x = take("labels", labels, "tokens bytes", ["uint8"]), take("q", q, "queries dim", ["float32"])
    c = _channels(channels, x.shape[1])
    _need(t.shape[1] == (c.size + 1) // 2 + 4, f"a label of {c.size} channels has {(c.size + 1) // 2 + 4} bytes")
    (tokens, _), (queries, dim), hshare = t.shape, x.shape, pick(_variant).hshare
    of_queries = (native.LabelQuery * max(queries, 1))()
    for i in range(queries):
        hshare["query"](byref(of_queries[i]), x.pointer + 4 * i * dim, at(c), c.size)
    out = np.empty((queries, tokens), np.float32)
    hshare["scores"](at(out), tokens, pointers([t.pointer]), 0, max(tokens, 1), c.size, of_queries, queries, 0, tokens)
    return given(out, labels)


def hshare_aggregate(scores: Array, *, scale: float = 1.0, how: str = "sum") -> Array:
    """Return one score per token for the query heads that share a KV head: the "sum" or "max" over heads of
    softmax(scale scores). The scores of a single head are returned unchanged. float32 [tokens] of float32 [group,
    tokens]."""
    s = np.array(take("scores", scores, "group tokens", ["float32"]).source, np.float32)   # a copy: it is overwritten
    _need(s.shape[0] > 0 and scale > 0, "there must be at least one query head, and scale must be above 0")
    out = np.empty(s.shape[1], np.float32)
    pick(_variant).hshare["aggregate"](at(out), at(s), s.shape[1], s.shape[1], s.shape[0], scale,
                                       _choice("how", how, {"sum": 0, "max": 1}))
    return given(out, scores)


def hshare_select(scores: Array, *, sinks: int = 16, recent: int = 64, middle: int = 432,
                  now: int | None = None) -> Array:
    """Return the critical tokens: the first `sinks`, the last `recent`, and the best `middle` tokens between them.

    scores: float32 [tokens]; only those between are read, and -inf and NaN are never chosen. now: current number of
    tokens; tokens added since the scores were computed also count as recent. Returns positions, int64, ascending; all
    positions if there are no more than sinks + recent + middle tokens.
    """
    s = take("scores", scores, "tokens", ["float32"])
    then, after, start = s.shape[0], s.shape[0] if now is None else now, c_uint32()
    _need(min(sinks, recent, middle) >= 0 and max(sinks, recent, middle) < 1 << 31, "sizes must be from 0 to 2^31 - 1")
    _need(after >= then, f"now must be at least the number of scores, {then}")
    _need(after < 1 << 31, f"now must be below 2^31, not {after}")
    window, out, found = native.Window(sinks, recent, middle), np.empty(after + 1, np.uint32), 0
    best, scratch = np.empty(then + 1, np.uint32), np.empty(3 * then + 1, np.uint32)
    n = lib.kvd_window_middle(byref(window), then, byref(start))
    if n:
        found = pick(_variant).hshare["top"](at(best), s.pointer + 4 * start.value, n, middle, start.value, at(scratch))
    n = lib.kvd_window_positions(byref(window), at(best), found, then, after, at(out))
    return given(out[:n].astype(np.int64), scores)


def hshare_similarity(bits: Array) -> Array:
    """Return the similarity of sets of critical tokens (equation 3 of HShare): |A and B| / max(|A|, |B|), mean over
    rows.

    bits: uint64 [items, rows, words]: an item is a layer or head, and a row one of its sets; bit i of word w is token
    64 w + i. Returns float32 [items, items]: similarities below the diagonal, zeros elsewhere.
    """
    b = take("bits", bits, "items rows words", ["uint64"])
    items, rows, words = b.shape
    sizes, both = np.empty((items, rows), np.uint32), np.empty(rows, np.uint32)
    overlap = pick(_variant).hshare["overlap"]
    out, item = np.zeros((items, items), np.float32), [b.pointer + 8 * i * rows * words for i in range(items)]
    for i in range(items):
        overlap(at(sizes[i]), item[i], item[i], rows, words)
        for j in range(i):
            overlap(at(both), item[i], item[j], rows, words)
            out[i, j] = lib.kvd_share_similarity(at(both), at(sizes[i]), at(sizes[j]), rows)
    return given(out, bits)


_PLANS = {"greedy": 0, "greedy_root": 1, "star": 2}


def hshare_plan(similarity: Array, k: int | None = None, *, ratio: float | None = None,
                algorithm: str = "greedy_root") -> Array:
    """Return for each item the source of its critical tokens, itself or an earlier item: int64 [n].

    similarity: float32 [n, n], read below the diagonal. k: number of items that share; or ratio: fraction that does
    not. algorithm: "greedy", algorithm 1 as printed; "greedy_root", the official code: an item that shares is never a
    source; "star": sources are chosen by the resulting similarity of all other items with their sources.
    """
    s = take("similarity", similarity, "n n", ["float32"])
    n = s.shape[0]
    _need(s.shape[1] == n, "similarity must be square")
    _need((k is None) != (ratio is None) and (k or 0) >= 0, "exactly one of k (0 or more) and ratio must be given")
    out, scratch = np.empty(n, np.uint32), np.empty(n + 1, np.float32)
    count = min(k, n) if k is not None else lib.kvd_share_count(ratio, n)
    lib.kvd_share_plan(s.pointer, n, count, _choice("algorithm", algorithm, _PLANS), at(out), at(scratch))
    return given(out.astype(np.int64), similarity)


def hshare_check(plan: Sequence[int] | Array) -> int:
    """Return the first item whose source is later or itself shares; the number of items if the plan is valid."""
    p = np.ascontiguousarray(plan, np.uint32)
    _need(p.ndim == 1 and bool((p < p.size).all()), f"sources must be below {p.size}")
    return int(lib.kvd_share_check(at(p), p.size))


# ---- BiCache ---------------------------------------------------------------------------------------------------------


def bicache_similarity(keys: Array, values: Array, keys_ref: Array, values_ref: Array, *,
                       kind: str = "token_mean") -> float:
    """Return the similarity of a layer's keys and values of a prefix, computed alone and with the text that follows.

    All are [heads, tokens, dim], with any strides. kind: "flat", that of the paper: the cosine of all of them as one
    vector; "token_mean", that of the official code: the mean over tokens of cosines for keys and for values. Cosines
    are between -1 and 1; 0 for zeros.
    """
    _need(kind in ("flat", "token_mean"), f"kind must be flat or token_mean, not {kind!r}")
    names = ("keys", "values", "keys_ref", "values_ref")
    k, v, k_ref, v_ref = them = [take(name, x, "heads tokens dim", list(NUMBERS), strided=True)
                                 for name, x in zip(names, (keys, values, keys_ref, values_ref))]
    alike(*them)
    heads, tokens, dim = k.shape
    sums = [(native.Products * max(tokens, 1))() for _ in range(2)]
    for to, a, b in (sums[0], k, k_ref), (sums[1], v, v_ref):
        for h in range(heads):
            pick(_variant).bicache["products"](to, a.pointer + h * a.step(0), a.step(1), b.pointer + h * b.step(0),
                                               b.step(1), k.number, tokens, dim)
    return float((lib.kvd_similarity_flat if kind == "flat" else lib.kvd_similarity_token_mean)(*sums, tokens))


def bicache_table(percent: Array, similarity: Array, *, tau: float = 0.97,
                  estimator: str = "mean_first") -> list[tuple[int, int]]:
    """Return the table of BiCache, [(percent, layers)], both ascending: the number of layers reused from a prefix ratio
    of percent on.

    percent: integers [requests], 0 to 100. similarity: float32 [requests, layers]. estimator: "mean_b", that of the
    paper: the mean over requests, rounded down, of their number of first layers with similarity >= tau; "mean_first",
    that of the official code: the number of first layers with mean similarity > tau.
    """
    s, r = take("similarity", similarity, "requests layers", ["float32"]), np.asarray(percent)
    requests, layers = s.shape
    _need(r.shape == (requests,), f"percent must be [requests], {requests} for these similarities")
    total = np.zeros((native.BTABLE_STEPS, max(layers, 1)), np.float64)
    profile, table = native.BProfile(n_layers=layers, tau=tau, sum=at(total)), native.BTable()
    for i, it in enumerate(r.tolist()):
        _need(0 <= it <= 100 and lib.kvd_bprofile_add(byref(profile), it, s.pointer + 4 * i * layers) == 0,
              f"request {i} has no percentage up to 100, or no finite similarities")
    lib.kvd_btable_build(byref(profile), _choice("estimator", estimator, {"mean_b": 0, "mean_first": 1}), byref(table))
    return [(it.percent, it.b) for it in table.steps[:table.n]]


def bicache_layers(table: Sequence[Sequence[int]], percent: int) -> int:
    """Return the number of layers that a table allows to reuse at a prefix ratio of percent; 1 below its first step."""
    steps = [native.BStep(*it) for it in table]
    _need(len(steps) <= native.BTABLE_STEPS, f"a table must have at most {native.BTABLE_STEPS} steps")
    c_table = native.BTable(n=len(steps), steps=(native.BStep * native.BTABLE_STEPS)(*steps))
    return int(lib.kvd_btable_lookup(byref(c_table), 0, percent))


def bicache_percent(prefix: int, tokens: int) -> int:
    """Return r, the prefix's share of the tokens in percent, rounded to nearest, ties to even.

        from kvd import ops
        assert ops.bicache_percent(625, 1000) == 62
    """
    _need(0 <= prefix <= tokens and tokens > 0, f"a prefix of {prefix} of {tokens} tokens")
    return int(lib.kvd_ratio_percent(prefix, tokens))


def bicache_refreshes(steps: int, delta: int = 16) -> list[int]:
    """Return the denoising steps, counted from 1, at which the deep layers are recomputed: every delta steps."""
    _need(delta > 0, "delta must be 1 or more")
    return [t for t in range(1, steps + 1) if lib.kvd_refresh_due(t, delta)]


# ---- attention -------------------------------------------------------------------------------------------------------


def _table_of(pool: Tensor, table: Array) -> Any:
    """Return the addresses of blocks (None if not resident), and their number."""
    block = math.prod(pool.shape[1:-1]) * pool.row
    ids = np.asarray(table)
    _need(ids.ndim == 1 and bool((ids >= -1).all() and (ids < pool.shape[0]).all()),
          f"blocks must be below {pool.shape[0]}, or -1")
    return pointers([pool.pointer + int(i) * block if i >= 0 else None for i in ids]), ids.size


def _chosen(chosen: Array | None, heads: int, slots: int) -> Any:
    if chosen is None:
        return None
    c = np.ascontiguousarray(chosen, np.uint32)
    _need(c.ndim == 2 and c.shape[0] == heads, "chosen must be [heads, positions]")
    _need(bool((c < slots).all() and (np.diff(c.astype(np.int64)) > 0).all()),
          "chosen positions must ascend and be in the table")
    return c


def attention(q: Array, pool: Array, table: Array, *, tokens: int | None = None, causal: bool = True,
              chosen: Array | None = None, deltas: Array | None = None, theta: float = 1e4,
              scale: float | None = None, window: int = 0, cap: float = 0.0,
              sinks: Array | None = None) -> tuple[Array, Array, Array]:
    """Compute attention over blocks in place, and the attention that each block and token receives.

    q: float32 [queries, query heads, dim], query heads in groups, one group per head. pool: [blocks, 2, heads, block
    tokens, dim], one layer's keys and values. table: integers [n], the sequence's blocks in order; -1: not resident,
    and skipped. tokens: number of slots in use (None: all). causal: the queries are the last of the tokens, and see
    tokens up to their own. chosen: integers [heads, m], ascending: only these positions are seen. deltas: integers [n]:
    how far each block is from the positions that its keys were computed for; queries are rotated by -delta for it,
    pairs (i, i + dim / 2) by theta^(-2 i / dim) radians per position. scale: factor of q . k (None: 1 / sqrt(dim)).
    window: causal queries see only the last window positions up to their own (0: all). cap: scores are cap * tanh(scale *
    q . k / cap) (0: they are not). sinks: float32 [query heads], scores that take weight and have no value.

    Returns float32 [queries, query heads, dim], zeros for a query that sees nothing; and the attention of blocks
    [heads, n] and of positions [heads, n * block tokens], summed over queries and the query heads of a group.

        import numpy as np
        from kvd import ops
        pool, q = np.ones((3, 2, 1, 16, 64), np.float32), np.ones((1, 1, 64), np.float32)
        out, of_block, of_token = ops.attention(q, pool, [2, 0])
        assert np.allclose(out, 1) and np.allclose(of_block, 0.5)
    """
    x = take("q", q, "queries query_heads dim", ["float32"])
    p = take("pool", pool, "blocks planes heads tokens dim", list(NUMBERS))
    (queries, query_heads, dim), (_, planes, heads, size, _) = x.shape, p.shape
    _need(planes == 2 and p.shape.count(0) == 0 and x.shape.count(0) == 0,
          "a block must have 2 planes, keys and values, and no tensor may be empty")
    _need(p.shape[4] == dim and query_heads % heads == 0,
          f"q must have heads of {p.shape[4]} dimensions, and a multiple of {heads} heads")
    (blocks, n), group = _table_of(p, table), query_heads // heads
    n_keys = n * size if tokens is None else tokens
    _need(0 < n_keys <= n * size and (not causal or queries <= n_keys), f"the table has room for {n * size} tokens")
    _need(window >= 0 and cap >= 0, "window and cap must be 0 or more")
    positions, sink = _chosen(chosen, heads, n * size), np.ascontiguousarray([] if sinks is None else sinks, np.float32)
    _need(sinks is None or sink.shape == (query_heads,), f"there must be {query_heads} sinks, one per query head")
    out, mass, of_token = (np.zeros(it, np.float32) for it in (x.shape, (heads, n), (heads, n * size)))
    a = native.Attention(ops=pick(_variant).address, blocks=blocks, stride=p.row, type=p.number, block_tokens=size,
                         dim=dim, first=n_keys - queries if causal else 0, n_keys=0 if causal else n_keys, n=queries,
                         group=group, scale=scale or dim ** -0.5, window=window, cap=cap, ldq=query_heads * dim,
                         ldo=query_heads * dim)
    rotation, rotations = np.zeros(n, np.uint32), np.zeros((n, dim), np.float32)
    if deltas is not None:
        moved, w = np.ascontiguousarray(deltas, np.int32), np.float32(theta ** (-2 * np.arange(dim // 2) / dim))
        _need(moved.shape == (n,) and dim % 2 == 0, "deltas must be [n], like the table, and dim must be even")
        lib.kvd_rotations(at(moved), n, at(w), dim // 2, at(rotation), at(rotations), n)
        a.rotation, a.rotations = at(rotation), at(rotations)
    a.n_chosen = 0 if positions is None else positions.shape[1]
    a.chosen = None if positions is None else at(positions)
    scratch = np.empty(lib.kvd_attend_scratch(byref(a)), np.float32)
    plane, a.scratch = size * p.row, at(scratch)
    for h in range(heads):
        a.k_offset, a.v_offset = h * plane, (heads + h) * plane
        a.q, a.out = x.pointer + 4 * h * group * dim, at(out) + 4 * h * group * dim
        a.chosen = None if positions is None else at(positions[h])
        a.block_mass, a.token_mass = at(mass[h]), at(of_token[h])
        a.sinks = None if sinks is None else at(sink[h * group:])
        lib.kvd_attend(byref(a))
    return given(out, q), given(mass, q), given(of_token, q)
