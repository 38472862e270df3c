# SPDX-License-Identifier: Apache-2.0
"""Blocks of reasoning that replace others: MemShare as printed (Chen et al., 2507.21433), and random sharing.

A step ends at an empty line. When it ends, rules look at its blocks. From then on, a shared block has another block's
keys and values, in all layers.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from .llama import Layer, Llama, Policy

BLOCK = 16


class Told:
    """The cache of one sequence, and its shared blocks."""

    def __init__(self, model: Llama) -> None:
        self.model, self.cache = model, model.empty()
        self.shared: dict[int, int] = {}        # {block: its source}

    def block(self, i: int) -> np.ndarray:
        """Keys and values: [2, layers, KV heads, 16, width]"""
        span = slice(i * BLOCK, (i + 1) * BLOCK)
        return np.stack([[layer.k[:, span] for layer in self.cache], [layer.v[:, span] for layer in self.cache]])

    def aligned(self, source: int, target: int) -> np.ndarray:
        """The source's block with its keys rotated to the target's place."""
        block = self.block(source)
        block[0] = self.model.rotate(block[0], np.full(BLOCK, (target - source) * BLOCK))
        return block

    def share(self, target: int, source: int, align: bool) -> None:
        block = self.aligned(source, target) if align else self.block(source)
        span = slice(target * BLOCK, (target + 1) * BLOCK)
        for layer, k, v in zip(self.cache, *block):
            layer.k[:, span], layer.v[:, span] = k, v
        self.shared[target] = source


class Rule:
    """Decides what to share at the end of each step [begin, end)."""

    def step(self, told: Told, ids: list[int], begin: int, end: int) -> None:
        raise NotImplementedError


class AtRandom(Rule):
    """Shares a number of blocks, drawn from all but the first and the last two; each is replaced by a random older one,
    rotated to its place."""

    def __init__(self, count: int, tokens: int, seed: int) -> None:
        self.rng, blocks = np.random.default_rng(seed), tokens // BLOCK
        eligible = np.arange(1, max(blocks - 2, 1))
        self.targets = set(self.rng.choice(eligible, min(count, len(eligible)), replace=False).tolist())

    def step(self, told: Told, ids: list[int], begin: int, end: int) -> None:
        for block in range(begin // BLOCK, end // BLOCK):
            sources = [i for i in range(block) if i not in told.shared]
            if block in self.targets and block not in told.shared and sources:
                told.share(block, int(self.rng.choice(sources)), align=True)


def bag_cosine(a: list[int], b: list[int]) -> float:
    one, other = Counter(a), Counter(b)
    lengths = [sum(n * n for n in bag.values()) ** 0.5 for bag in (one, other)]
    return sum(one[t] * other[t] for t in one) / (lengths[0] * lengths[1])


def mean_difference(a: np.ndarray, b: np.ndarray) -> float:
    """The paper's distance: Frobenius norms of the differences of keys and of values, over 2 x tokens x heads; the mean of
    the layers."""
    norms = np.sqrt(((a - b) ** 2).sum((-3, -2, -1)))
    return float(norms.sum(0).mean() / (2 * a.shape[-2] * a.shape[-3]))


def relative(a: np.ndarray, b: np.ndarray) -> float:
    """As in the pool's `serve` profile: each layer's differences relative to its own norms."""
    norm = [np.sqrt((x ** 2).sum((-3, -2, -1))) for x in (a - b, a, b)]
    return float((norm[0] / np.sqrt(norm[1] * norm[2])).mean())


class Similar(Rule):
    """Two stages: similar steps by their words, similar blocks by the metric. `align` is not in the paper."""

    def __init__(self, tau_step: float = 0.9, tau_block: float = 0.8, metric=mean_difference,
                 align: bool = False) -> None:
        self.tau_step, self.tau_block, self.metric, self.align = tau_step, tau_block, metric, align
        self.steps: list[tuple[int, int]] = []

    def step(self, told: Told, ids: list[int], begin: int, end: int) -> None:
        like = [s for s in self.steps if bag_cosine(ids[begin:end], ids[slice(*s)]) > self.tau_step]
        sources = [i for s in like for i in whole_blocks(*s) if i not in told.shared]
        for block in whole_blocks(begin, end):
            own = told.block(block)
            pairs = [(self.metric(own, told.aligned(i, block) if self.align else told.block(i)), i) for i in sources]
            if pairs and min(pairs)[0] <= self.tau_block:
                told.share(block, min(pairs)[1], self.align)
        self.steps.append((begin, end))


def whole_blocks(begin: int, end: int) -> range:
    return range(-(-begin // BLOCK), end // BLOCK)


def tell(model: Llama, ids: list[int], blank: int, rule: Rule | None) -> tuple[Told, np.ndarray]:
    """Reads a prompt step by step. Returns its cache and the last token's logits."""
    told, begin, policy = Told(model), 0, Policy()
    ends = [i + 1 for i, token in enumerate(ids) if token == blank] + [len(ids)]
    for end in ends:
        logits = model.fill(ids[begin:end], told.cache, policy, first=begin, chunk=1024)
        if rule and end < len(ids):
            rule.step(told, ids, begin, end)
        begin = end
    return told, logits


def random_pairs(model: Llama, ids: list[int], count: int, metric, seed: int = 1) -> list[float]:
    """The metric of random pairs of blocks, which a threshold must lie below."""
    told, rng = Told(model), np.random.default_rng(seed)
    model.fill(ids, told.cache, Policy())
    pairs = [rng.choice(len(ids) // BLOCK, 2, replace=False) for _ in range(count)]
    return [metric(told.block(int(a)), told.block(int(b))) for a, b in pairs]
