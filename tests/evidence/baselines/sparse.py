# SPDX-License-Identifier: Apache-2.0
"""Attention over a part of the cache while decoding; nothing is evicted. Each query head reads `tokens` tokens."""

from __future__ import annotations

import numpy as np

from .eviction import packed, top
from .llama import CHUNK, Layer, Llama, Policy, softmax

SHARED_CHANNELS = 4     # one channel in four is in a label: 32 of 128 in DoubleSparse and HShare


class Recorder(Policy):
    """Keeps each layer's newest queries of a prompt."""

    QUERIES = 32

    def __init__(self) -> None:
        self.queries: dict[int, np.ndarray] = {}

    def attend(self, index: int, layer: Layer, q: np.ndarray, positions: np.ndarray) -> None:
        old = self.queries.get(index, q[:, :0])
        self.queries[index] = np.concatenate((old, q), 1)[:, -self.QUERIES:]


def calibrate(model: Llama, documents: list[list[int]]) -> list[np.ndarray]:
    """Channels by mean |q k|, for each layer [KV heads, channels]: DoubleSparse's offline calibration."""
    sums = np.zeros((model.layers, model.kv_heads, model.width))
    for ids in documents:
        cache, recorder = model.empty(), Recorder()
        model.fill(ids, cache, recorder)
        for index, layer in enumerate(cache):
            q = np.abs(recorder.queries[index]).reshape(model.kv_heads, -1, model.width).mean(1)
            sums[index] += q * np.abs(layer.k).mean(1)
    return [top(row, model.width // SHARED_CHANNELS) for row in sums]


def partial(q: np.ndarray, k: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Scores of q [heads, width] for the rows of k [heads, n, width] that `chosen` [heads, tokens] names."""
    return np.einsum("hd,hmd->hm", q, np.take_along_axis(k, chosen[:, :, None], 1))


class Sparse(Policy):
    """Each query head reads the tokens that `choose` returns."""

    DENSE_LAYERS = 2

    def __init__(self, model: Llama, tokens: int) -> None:
        self.model, self.tokens = model, tokens

    def attend(self, index: int, layer: Layer, q: np.ndarray, positions: np.ndarray) -> np.ndarray | None:
        if q.shape[1] > 1 or index < self.DENSE_LAYERS or len(layer) <= self.tokens:
            return None
        q = q[:, 0]
        chosen = self.choose(index, layer, q)
        keys = np.repeat(layer.k, self.model.group, 0)
        values = np.repeat(layer.v, self.model.group, 0)
        weights = softmax(partial(q, keys, chosen) / np.sqrt(q.shape[-1]))
        return np.einsum("hm,hmd->hd", weights, np.take_along_axis(values, chosen[:, :, None], 1))[:, None]

    def choose(self, index: int, layer: Layer, q: np.ndarray) -> np.ndarray:
        """[query heads, tokens]"""
        raise NotImplementedError


class Newest(Sparse):
    """Sixteen sinks and the newest tokens: a window of the same size."""

    DENSE_LAYERS = 0

    def choose(self, index: int, layer: Layer, q: np.ndarray) -> np.ndarray:
        n = len(layer)
        places = np.concatenate((np.arange(16), np.arange(n - self.tokens + 16, n)))
        return np.broadcast_to(places, (len(q), self.tokens))


class Quest(Sparse):
    """Pages of 16 by a bound from their least and greatest keys; always the last page (Tang et al., 2406.10774)."""

    PAGE = 16

    def choose(self, index: int, layer: Layer, q: np.ndarray) -> np.ndarray:
        pages, n = (len(layer) - 1) // self.PAGE, len(layer)
        whole = layer.k[:, :pages * self.PAGE].reshape(len(layer.k), pages, self.PAGE, -1)
        low, high = (np.repeat(f(2), self.model.group, 0) for f in (whole.min, whole.max))
        bound = np.maximum(q[:, None] * low, q[:, None] * high).sum(-1)
        best = top(bound, min(self.tokens // self.PAGE - 1, pages))
        inside = (best[:, :, None] * self.PAGE + np.arange(self.PAGE)).reshape(len(q), -1)
        return np.concatenate((inside, np.broadcast_to(np.arange(pages * self.PAGE, n),
                                                       (len(q), n - pages * self.PAGE))), 1)


class DoubleSparse(Sparse):
    """Tokens by 4-bit labels of the channels that matter (Yang et al., 2408.07092)."""

    def __init__(self, model: Llama, tokens: int, channels: list[np.ndarray]) -> None:
        super().__init__(model, tokens)
        self.channels = channels
        self.labels: dict[int, np.ndarray] = {}     # by layer: [KV heads, tokens, channels], made once per token

    def estimates(self, index: int, layer: Layer, q: np.ndarray) -> np.ndarray:
        """Scores of q [query heads, ..., width] by labels: [query heads, ..., tokens]"""
        channels = self.channels[index]
        old = self.labels.get(index, np.empty((len(layer.k), 0, channels.shape[1]), np.float32))
        fresh = np.take_along_axis(layer.k[:, old.shape[1]:], channels[:, None], 2)
        labels = self.labels[index] = np.concatenate((old, packed(fresh)), 1) if fresh.shape[1] else old
        group = self.model.group
        picked = np.take_along_axis(q, np.repeat(channels, group, 0).reshape(len(q), *(1,) * (q.ndim - 2), -1), -1)
        return np.einsum("h...c,hnc->h...n", picked, np.repeat(labels, group, 0))

    def choose(self, index: int, layer: Layer, q: np.ndarray) -> np.ndarray:
        return top(self.estimates(index, layer, q), self.tokens)


def greedy_root(similarity: np.ndarray, shared: int) -> list[int]:
    """HShare's sharing: the most similar earlier one becomes the source; sources of sources are followed."""
    left, n = np.tril(similarity, -1), len(similarity)
    source = list(range(n))
    for _ in range(min(shared, n - 1)):
        row, column = divmod(int(left.argmax()), n)
        if left[row, column] <= 0:
            break
        source[row] = column
        left[row], left[:, row] = 0, 0
    for i in range(n):
        while source[source[i]] != source[i]:
            source[i] = source[source[i]]
    return source


class HShare(DoubleSparse):
    """As published: sinks, recent and selected tokens; layers, query heads and steps share selections (Wu et al., ICLR
    2025)."""

    DENSE_LAYERS, SINKS, RECENT = 0, 16, 32

    def __init__(self, model: Llama, tokens: int, channels: list[np.ndarray], queries: dict[int, np.ndarray],
                 cache: list[Layer], ratios: tuple[float, float, float]) -> None:
        super().__init__(model, tokens, channels)
        self.middle, self.every = tokens - self.SINKS - self.RECENT, max(1, round(1 / ratios[2]))
        self.kept: dict[int, tuple[int, np.ndarray]] = {}       # by layer: tokens at selection, middle [heads, z]
        sets = np.stack([self.marks(i, layer, queries[i]) for i, layer in enumerate(cache)])
        both = np.einsum("ahqn,bhqn->ab", sets, sets, optimize=True)
        self.layer_source = greedy_root(both, round((1 - ratios[0]) * model.layers))
        self.head_source = [greedy_root(np.einsum("aqn,bqn->ab", s, s, optimize=True),
                                        round((1 - ratios[1]) * model.heads)) for s in sets]

    def marks(self, index: int, layer: Layer, q: np.ndarray) -> np.ndarray:
        """Which middle tokens the newest queries select: [heads, queries, tokens] of 0 and 1."""
        n = len(layer)
        estimates = self.estimates(index, layer, q)[..., self.SINKS:n - self.RECENT]
        marks = np.zeros(estimates.shape, np.float32)
        np.put_along_axis(marks, top(estimates, self.middle), 1, -1)
        return marks

    def choose(self, index: int, layer: Layer, q: np.ndarray) -> np.ndarray:
        n, source = len(layer), self.layer_source[index]
        if source != index:
            self.kept[index] = self.kept[source]
        elif index not in self.kept or n % self.every == 0:
            middle = top(self.estimates(index, layer, q)[:, self.SINKS:n - self.RECENT], self.middle) + self.SINKS
            self.kept[index] = n, middle[self.head_source[index]]
        since, middle = self.kept[index]
        ends = np.concatenate((np.arange(self.SINKS), np.arange(since - self.RECENT, n)))
        return np.concatenate((middle, np.broadcast_to(ends, (len(q), len(ends)))), 1)


def copies(cache: list[Layer]) -> list[Layer]:
    """Layers with the same arrays. That is a copy, because arrays are replaced and never changed."""
    fresh = []
    for layer in cache:
        other = Layer(*layer.k.shape[::2])
        other.k, other.v, other.positions = layer.k, layer.v, layer.positions
        fresh.append(other)
    return fresh


def prefill(model: Llama, ids: list[int]) -> tuple[list[Layer], Recorder]:
    """A dense prefill, for all policies of this file."""
    cache, recorder = model.empty(), Recorder()
    model.fill(ids, cache, recorder, chunk=CHUNK)
    return cache, recorder
