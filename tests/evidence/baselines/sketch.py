# SPDX-License-Identifier: Apache-2.0
"""KVReviver as printed (Liu et al., 2512.17917, Algorithms 1 to 4): evicted tokens go into a count sketch, from which
they are estimated.

Keys are added unsigned, values signed; columns are drawn uniformly. A token that is swapped back is the sketch's own
estimate, which is then subtracted. All layers have the same budget. All heads of a layer hold equally many tokens of
each kind.
"""

from __future__ import annotations

import numpy as np

from .eviction import top
from .llama import Layer, Llama, Policy, causal_weights

ROWS, REPLACE_RATE = 3, 1.1
RECENT, CANDIDATE, VAGUE = 0.45, 0.45, 0.1


def median(rows: np.ndarray) -> np.ndarray:
    """Median of three: rows are [heads, 3, tokens, width]."""
    a, b, c = rows[:, 0], rows[:, 1], rows[:, 2]
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


class Sketch:
    """Sums of one layer's vectors: [KV heads, rows, columns, width]."""

    def __init__(self, heads: int, columns: int, width: int, tokens: int, rng: np.random.Generator) -> None:
        self.sums = np.zeros((heads, ROWS, columns, width), np.float32)
        self.columns = rng.integers(0, columns, (ROWS, tokens))
        self.signs = np.ones((ROWS, tokens), np.float32)

    def add(self, head: int, token: int, vector: np.ndarray) -> None:
        for row in range(ROWS):
            self.sums[head, row, self.columns[row, token]] += self.signs[row, token] * vector

    def query(self, tokens: np.ndarray) -> np.ndarray:
        """Estimates of tokens [KV heads, n]: [KV heads, n, width]"""
        heads, rows = np.arange(len(tokens))[:, None, None], np.arange(ROWS)[None, :, None]
        columns, signs = (np.moveaxis(x[:, tokens], 0, 1) for x in (self.columns, self.signs))
        return median(self.sums[heads, rows, columns] * signs[..., None])


class Reviver(Policy):
    """A budget of tokens for all three parts; `vague` is the sketch's share of it, in vectors."""

    def __init__(self, budget: int, vague: float = VAGUE) -> None:
        scale = (1 - vague) / (1 - VAGUE)
        self.recent, self.candidates = int(RECENT * scale * budget), int(CANDIDATE * scale * budget)
        self.columns = max(1, int(vague * budget) // ROWS)

    def begin(self, model: Llama, prompt_tokens: int) -> None:
        rng = np.random.default_rng(prompt_tokens)
        size = (model.kv_heads, self.columns, model.width, prompt_tokens + 64)
        self.keys = [Sketch(*size, rng) for _ in range(model.layers)]
        self.values = [Sketch(*size, rng) for _ in range(model.layers)]
        for keys, values in zip(self.keys, self.values):
            values.columns = keys.columns
            values.signs = rng.choice(np.array([-1, 1], np.float32), values.signs.shape)
        self.vague = [np.zeros((model.kv_heads, 0), np.int64) for _ in range(model.layers)]
        self.scores = [np.zeros((model.kv_heads, 0), np.float32) for _ in range(model.layers)]  # vague, then exact

    def attend(self, index: int, layer: Layer, q: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Attends to all tokens: estimates of vague ones, then the exact ones."""
        vague, heads = self.vague[index], len(layer.k)
        keys = np.concatenate((self.keys[index].query(vague), layer.k), 1)
        values = np.concatenate((self.values[index].query(vague), layer.v), 1)
        weights = causal_weights(q.reshape(heads, -1, *q.shape[1:]), keys)
        total = weights.sum((1, 2))
        total[:, :self.scores[index].shape[1]] += self.scores[index]
        self.scores[index] = total
        return (weights.reshape(heads, -1, keys.shape[1]) @ values).reshape(q.shape)

    def after(self, index: int, layer: Layer, weights: np.ndarray | None, new: int) -> None:
        excess = len(layer) - self.recent - self.candidates
        if excess > 0:
            self.leave(index, layer, excess)
        if self.vague[index].shape[1]:
            for head in range(len(layer.k)):
                self.swap(index, layer, head)

    def leave(self, index: int, layer: Layer, excess: int) -> None:
        """Moves the tokens with the lowest scores, of those that are no longer recent, into the sketch."""
        vague = self.vague[index].shape[1]
        exact = self.scores[index][:, vague:].copy()
        exact[:, -self.recent:] = np.inf
        kept = top(exact, len(layer) - excess)
        gone = np.stack([np.setdiff1d(np.arange(len(layer)), row) for row in kept])
        for head, places in enumerate(gone):
            for place in places:
                self.insert(index, head, layer.positions[head, place], layer.k[head, place], layer.v[head, place])
        scores = self.scores[index]
        self.vague[index] = np.concatenate((self.vague[index], np.take_along_axis(layer.positions, gone, 1)), 1)
        self.scores[index] = np.concatenate((scores[:, :vague], np.take_along_axis(scores, vague + gone, 1),
                                             np.take_along_axis(scores, vague + kept, 1)), 1)
        layer.keep(kept)

    def insert(self, index: int, head: int, token: int, k: np.ndarray, v: np.ndarray) -> None:
        self.keys[index].add(head, token, k)
        self.values[index].add(head, token, v)

    def swap(self, index: int, layer: Layer, head: int) -> None:
        """Swaps the highest vague token with the lowest candidate, as long as it is clearly higher."""
        vague, scores = self.vague[index], self.scores[index][head]
        n, candidates = vague.shape[1], len(layer) - self.recent
        for _ in range(max(candidates, 0)):
            high, low = int(scores[:n].argmax()), int(scores[n:n + candidates].argmin())
            if scores[n + low] * REPLACE_RATE >= scores[high]:
                return
            token, leaving = vague[head, high], layer.positions[head, low]
            k = self.keys[index].query(vague[:, high:high + 1])[head, 0]
            v = self.values[index].query(vague[:, high:high + 1])[head, 0]
            self.insert(index, head, token, -k, -v)
            self.insert(index, head, leaving, layer.k[head, low], layer.v[head, low])
            layer.k[head, low], layer.v[head, low], layer.positions[head, low] = k, v, token
            vague[head, high] = leaving
            scores[high], scores[n + low] = scores[n + low], scores[high]
