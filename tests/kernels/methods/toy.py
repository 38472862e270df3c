# SPDX-License-Identifier: Apache-2.0
"""A transformer with random weights, for properties that need no training: causal (toy_lm) or not (toy_encoder).

Pre-LN, RoPE (half-split), ReLU feed-forward of twice the width; weights N(0, 1/fan_in), embeddings N(0, 1); in fp64.
K and V are [layer, head, token, dim], with keys after RoPE.
"""
import numpy as np


def rope(x, positions, theta=1e4):
    """Rotates x [..., token, dim] to its positions; rope(x, -delta) undoes a rotation by delta."""
    half = x.shape[-1] // 2
    angles = np.outer(positions, theta ** (-np.arange(half) / half))
    c, s, u, v = np.cos(angles), np.sin(angles), x[..., :half], x[..., half:]
    return np.concatenate([u * c - v * s, v * c + u * s], -1)


def normalise(x, eps=1e-5):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def softmax(s):
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


class Toy:
    def __init__(self, rng, layers, width, heads, vocab, causal, qk_scale):
        def weights(n_in, n_out, scale=1.0):
            return rng.standard_normal((n_in, n_out)) * scale / np.sqrt(n_in)

        self.layers, self.width, self.heads, self.causal = layers, width, heads, causal
        self.embedding = rng.standard_normal((vocab, width))
        self.weights = [
            dict(q=weights(width, width, qk_scale), k=weights(width, width, qk_scale), v=weights(width, width),
                 o=weights(width, width), up=weights(width, 2 * width), down=weights(2 * width, width))
            for _ in range(layers)
        ]

    def split(self, x):
        return x.reshape(len(x), self.heads, self.width // self.heads).transpose(1, 0, 2)

    def layer(self, layer, x, positions):
        """Runs one layer: returns x, keys (after RoPE), values."""
        w, y = self.weights[layer], normalise(x)
        q, k = (rope(self.split(y @ w[name]), positions) for name in "qk")
        v = self.split(y @ w['v'])
        scores = q @ k.transpose(0, 2, 1) / np.sqrt(k.shape[-1])
        if self.causal:
            scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
        x = x + (softmax(scores) @ v).transpose(1, 0, 2).reshape(len(x), self.width) @ w['o']
        x = x + np.maximum(normalise(x) @ w['up'], 0) @ w['down']
        return x, k, v

    def forward(self, ids):
        """Runs all tokens, from position 0, through all layers. Returns K, V."""
        x, positions, k, v = self.embedding[ids], np.arange(len(ids)), [], []
        for layer in range(self.layers):
            x, key, value = self.layer(layer, x, positions)
            k.append(key), v.append(value)
        return np.array(k), np.array(v)


def toy_lm(rng, layers=8, width=128, heads=4, vocab=1000):
    return Toy(rng, layers, width, heads, vocab, causal=True, qk_scale=1.0)


def toy_encoder(rng, layers=12, width=128, heads=4, vocab=1000):
    return Toy(rng, layers, width, heads, vocab, causal=False, qk_scale=2.0)
