# SPDX-License-Identifier: Apache-2.0
"""Eviction under a budget of tokens per layer and KV head, after every chunk of the prompt and every decoded token.

All policies see the same chunks, so that all evict before they know the question (but see SnapKVWhole). Parameters are
named as in the papers; details that a paper leaves open are as in its public code.
"""

from __future__ import annotations

import numpy as np

from .llama import Layer, Llama, Policy


def top(scores: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` highest scores of each row, in ascending order; of equal scores, the earlier ones."""
    width = scores.shape[-1]
    order = np.argsort(scores[..., ::-1], -1, kind="stable")[..., ::-1][..., :count]
    return np.sort(width - 1 - order, -1)


class Evict(Policy):
    """Keeps the tokens with the highest scores, which subclasses compute."""

    def __init__(self, budget: int) -> None:
        self.budget = budget

    def after(self, index: int, layer: Layer, weights: np.ndarray | None, new: int) -> None:
        self.observe(index, layer, weights, new)
        if len(layer) > self.budget:
            self.keep(index, layer, top(self.scores(index, layer), self.budget))

    def observe(self, index: int, layer: Layer, weights: np.ndarray | None, new: int) -> None:
        """Called before each decision, even if nothing has to be evicted."""

    def scores(self, index: int, layer: Layer) -> np.ndarray:
        """[KV heads, tokens]"""
        raise NotImplementedError

    def keep(self, index: int, layer: Layer, kept: np.ndarray) -> None:
        layer.keep(kept)


class Window(Evict):
    """Keeps the newest tokens."""

    def scores(self, index: int, layer: Layer) -> np.ndarray:
        return layer.positions


class Random(Evict):
    """Keeps random tokens: each token's score is drawn once."""

    def begin(self, model: Llama, prompt_tokens: int) -> None:
        self.draws = np.random.default_rng(prompt_tokens).random((model.layers, model.kv_heads, prompt_tokens + 64))

    def scores(self, index: int, layer: Layer) -> np.ndarray:
        return np.take_along_axis(self.draws[index], layer.positions, 1)


class StreamingLLM(Window):
    """Keeps four sinks and the newest; keys are rotated for their place in the cache (Xiao et al., 2309.17453)."""

    SINKS = 4

    def begin(self, model: Llama, prompt_tokens: int) -> None:
        self.model = model

    def scores(self, index: int, layer: Layer) -> np.ndarray:
        return np.where(layer.positions < self.SINKS, 1 << 40, layer.positions)

    def attend(self, index: int, layer: Layer, q: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """All heads keep the same tokens, so one rotation per token serves all."""
        from .llama import causal_weights

        places = np.arange(len(layer))
        keys = self.model.rotate(layer.k, places - layer.positions[0])
        turned = self.model.rotate(q, places[-len(positions):] - positions)
        heads, new = self.model.heads, len(positions)
        weights = causal_weights(turned.reshape(self.model.kv_heads, self.model.group, new, -1), keys)
        return (weights.reshape(self.model.kv_heads, -1, len(layer)) @ layer.v).reshape(heads, new, -1)


class Watching(Evict):
    """Scores from attention's weights; `old` has one number per cached token and head."""

    watches = True

    def begin(self, model: Llama, prompt_tokens: int) -> None:
        self.old = [np.zeros((model.kv_heads, 0), np.float32) for _ in range(model.layers)]

    def scores(self, index: int, layer: Layer) -> np.ndarray:
        return self.old[index]

    def keep(self, index: int, layer: Layer, kept: np.ndarray) -> None:
        layer.keep(kept)
        self.old[index] = np.take_along_axis(self.old[index], kept, 1)


class H2O(Watching):
    """Half of the budget by accumulated attention, half for the newest tokens (Zhang et al., 2306.14048)."""

    def observe(self, index: int, layer: Layer, weights: np.ndarray, new: int) -> None:
        total = weights.sum((1, 2))
        total[:, :-new] += self.old[index]
        self.old[index] = total

    def scores(self, index: int, layer: Layer) -> np.ndarray:
        recent = np.arange(len(layer)) >= len(layer) - self.budget // 2
        return np.where(recent, np.inf, self.old[index])


class TOVA(Watching):
    """Keeps what the newest token attends to, the same in all heads (Oren et al., 2401.06104)."""

    def observe(self, index: int, layer: Layer, weights: np.ndarray, new: int) -> None:
        last = weights[:, :, -1].mean((0, 1))
        self.old[index] = np.broadcast_to(last, (len(weights), len(last)))


class SnapKV(Watching):
    """Keeps what the newest 32 tokens attend to, smoothed over 5 places, and these 32 (Li et al., 2404.14469)."""

    WINDOW, KERNEL = 32, 5

    def observe(self, index: int, layer: Layer, weights: np.ndarray, new: int) -> None:
        seen = weights[:, :, -self.WINDOW:].sum(2).mean(1)
        smooth = np.stack([np.convolve(row, np.full(self.KERNEL, 1 / self.KERNEL), "same") for row in seen])
        smooth[:, -min(self.WINDOW, len(layer)):] = np.inf
        self.old[index] = smooth


class SnapKVWhole(SnapKV):
    """As published: evicts once, after the whole prompt, whose end is the question; until then it needs all memory."""

    def begin(self, model: Llama, prompt_tokens: int) -> None:
        super().begin(model, prompt_tokens)
        self.prompt_tokens = prompt_tokens

    def after(self, index: int, layer: Layer, weights: np.ndarray | None, new: int) -> None:
        if layer.positions[0, -1] == self.prompt_tokens - 1:
            super().after(index, layer, weights, new)


def distinctive(k: np.ndarray) -> np.ndarray:
    """KeyDiff's score of keys [heads, tokens, width]: minus the cosine to the mean of the normalised keys."""
    norms = np.maximum(np.linalg.norm(k, axis=-1), 1e-12)
    anchor = (k / norms[..., None]).mean(1, keepdims=True)
    return -(k * anchor).sum(-1) / np.maximum(norms * np.linalg.norm(anchor, axis=-1), 1e-8)


class KeyDiff(Evict):
    """As published: keys alone decide (Park et al., 2504.15364)."""

    def scores(self, index: int, layer: Layer) -> np.ndarray:
        return distinctive(layer.k)


class KeyDiffServe(KeyDiff):
    """Also keeps the first block, and the newest tokens in a tenth of the budget, as in the pool's `serve` profile."""

    SINKS, RECENT = 16, 0.1

    def scores(self, index: int, layer: Layer) -> np.ndarray:
        scores = distinctive(layer.k)
        scores[layer.positions < self.SINKS] = np.inf
        scores[:, len(layer) - int(self.RECENT * self.budget):] = np.inf
        return scores


def packed(x: np.ndarray, bits: int = 4) -> np.ndarray:
    """Vectors after quantisation to `bits` per number, with minimum and step in half precision."""
    low = x.min(-1, keepdims=True).astype(np.float16).astype(np.float32)
    step = ((x.max(-1, keepdims=True) - low) / (2 ** bits - 1)).astype(np.float16).astype(np.float32)
    step[step <= 0] = 1
    return np.clip(np.rint((x - low) / step), 0, 2 ** bits - 1) * step + low


class Int4(Window):
    """Four bits per number for all but the newest 32 tokens; if that is still too much, the newest that fit."""

    EXACT = 32

    def __init__(self, budget: int, width: int = 32) -> None:
        bits = 4 + 32 / width                       # including each vector's minimum and step
        exact = min(self.EXACT, budget)
        super().__init__(exact + int((budget - exact) * 32 / bits))
        self.packed: dict[int, int] = {}

    def begin(self, model: Llama, prompt_tokens: int) -> None:
        self.packed = dict.fromkeys(range(model.layers), -1)    # the last packed position

    def after(self, index: int, layer: Layer, weights: np.ndarray | None, new: int) -> None:
        due = (layer.positions[0] > self.packed[index]) & (np.arange(len(layer)) < len(layer) - self.EXACT)
        if due.any():
            layer.k[:, due], layer.v[:, due] = packed(layer.k[:, due]), packed(layer.v[:, due])
            self.packed[index] = layer.positions[0][due].max()
        super().after(index, layer, weights, new)
