# SPDX-License-Identifier: Apache-2.0
"""The committed Llama in numpy: prompts in chunks, then token by token, with a cache that a policy may change.

A policy is called for every chunk (or token) in every layer, and may drop or change what the layer keeps. It may also
replace attention altogether. So every baseline is the same model with another policy class.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

CHUNK = 128     # prompt tokens at once, as in KeyDiff's paper


def tensors(path: Path) -> dict[str, np.ndarray]:
    """Reads a safetensors file of float32."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8:8 + size]), raw[8 + size:]
    return {name: np.frombuffer(data[slice(*entry["data_offsets"])], "<f4").reshape(entry["shape"])
            for name, entry in header.items() if name != "__metadata__"}


class Layer:
    """Keys (rotated), values and positions of one layer's cache, [KV heads, tokens, ...]."""

    def __init__(self, heads: int, width: int) -> None:
        self.k = np.empty((heads, 0, width), np.float32)
        self.v = np.empty((heads, 0, width), np.float32)
        self.positions = np.empty((heads, 0), np.int64)

    def __len__(self) -> int:
        return self.k.shape[1]

    def append(self, k: np.ndarray, v: np.ndarray, positions: np.ndarray) -> None:
        self.k, self.v = np.concatenate((self.k, k), 1), np.concatenate((self.v, v), 1)
        self.positions = np.concatenate((self.positions, np.broadcast_to(positions, (len(k), len(positions)))), 1)

    def keep(self, indices: np.ndarray) -> None:
        """Drops all tokens of each head but these: [KV heads, kept]."""
        self.k = np.take_along_axis(self.k, indices[:, :, None], 1)
        self.v = np.take_along_axis(self.v, indices[:, :, None], 1)
        self.positions = np.take_along_axis(self.positions, indices, 1)


class Policy:
    """Decides what happens to the cache. This one keeps all."""

    watches = False     # needs attention's weights

    def begin(self, model: "Llama", prompt_tokens: int) -> None:
        """Called before a prompt."""

    def attend(self, index: int, layer: Layer, q: np.ndarray, positions: np.ndarray) -> np.ndarray | None:
        """Replaces full attention; q is [query heads, tokens, width]. None: use full attention."""
        return None

    def after(self, index: int, layer: Layer, weights: np.ndarray | None, new: int) -> None:
        """Called after `new` tokens; weights are [KV heads, query heads of each, new, tokens]."""


class Llama:
    """Weights, and one forward pass for any number of new tokens."""

    def __init__(self, folder: Path) -> None:
        config, t = json.loads((folder / "config.json").read_text()), tensors(folder / "model.safetensors")
        self.layers, self.heads = config["num_hidden_layers"], config["num_attention_heads"]
        self.kv_heads, self.width = config["num_key_value_heads"], config["head_dim"]
        self.group, self.epsilon = self.heads // self.kv_heads, config["rms_norm_eps"]
        self.frequencies = config["rope_theta"] ** (-np.arange(0, self.width, 2) / self.width)
        self.embedding = t["model.embed_tokens.weight"]
        self.blocks = []
        for i in range(self.layers):
            part = {n: t[f"model.layers.{i}.{n}.weight"] for n in (
                "input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj",
                "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")}
            qkv = np.concatenate([part[f"self_attn.{n}_proj"] for n in "qkv"]) * part["input_layernorm"]
            up = np.concatenate([part[f"mlp.{n}_proj"] for n in ("gate", "up")]) * part["post_attention_layernorm"]
            self.blocks.append([np.ascontiguousarray(w.T) for w in (
                qkv, part["self_attn.o_proj"], up, part["mlp.down_proj"])])
        self.output = np.ascontiguousarray((self.embedding * t["model.norm.weight"]).T)

    def token_bytes(self) -> int:
        """Bytes of a token's keys and values, in float32 as the cache stores them."""
        return self.layers * self.kv_heads * self.width * 2 * 4

    def empty(self) -> list[Layer]:
        return [Layer(self.kv_heads, self.width) for _ in range(self.layers)]

    def rotate(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Rotary embedding (halves) of [..., tokens, width] at positions [..., tokens]."""
        angles = positions[..., None] * self.frequencies
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        low, high = np.split(x, 2, -1)
        return np.concatenate((low * cos - high * sin, high * cos + low * sin), -1)

    def normed(self, x: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + self.epsilon)

    def forward(self, ids: list[int], first: int, cache: list[Layer], policy: Policy) -> np.ndarray:
        """Logits [tokens, vocabulary] of new tokens at positions from `first` on."""
        positions = np.arange(first, first + len(ids))
        x = self.embedding[ids]
        for index, (qkv, out, up, down) in enumerate(self.blocks):
            x = x + self.attention(index, self.normed(x) @ qkv, positions, cache[index], policy) @ out
            gate, value = np.split(self.normed(x) @ up, 2, -1)
            x = x + (gate / (1 + np.exp(-gate)) * value) @ down
        return self.normed(x) @ self.output

    def attention(self, index: int, qkv: np.ndarray, positions: np.ndarray, layer: Layer, policy: Policy) -> np.ndarray:
        n = len(qkv)
        heads = qkv.reshape(n, self.heads + 2 * self.kv_heads, self.width).swapaxes(0, 1)
        q = self.rotate(heads[:self.heads], positions)
        k = self.rotate(heads[self.heads:self.heads + self.kv_heads], positions)
        layer.append(k, heads[self.heads + self.kv_heads:], positions)
        mixed, weights = policy.attend(index, layer, q, positions), None
        if mixed is None:
            weights = causal_weights(q.reshape(self.kv_heads, self.group, n, self.width), layer.k)
            mixed = (weights.reshape(self.kv_heads, self.group * n, -1) @ layer.v).reshape(self.heads, n, self.width)
        policy.after(index, layer, weights if policy.watches else None, n)
        return mixed.swapaxes(0, 1).reshape(n, -1)

    def fill(self, ids: list[int], cache: list[Layer], policy: Policy, first: int = 0,
             chunk: int = CHUNK) -> np.ndarray:
        """Processes a prompt. Returns the last token's logits."""
        for start in range(0, len(ids), chunk):
            logits = self.forward(ids[start:start + chunk], first + start, cache, policy)
        return logits[-1]

    def answer(self, prompt: list[int], tokens: int, policy: Policy, tail: int = 0, chunk: int = CHUNK,
               stop: int | None = None) -> list[int]:
        """Decodes greedily; the prompt's last `tail` tokens are processed one by one, like generated ones."""
        cache, body = self.empty(), len(prompt) - tail
        policy.begin(self, len(prompt))
        logits = self.fill(prompt[:body], cache, policy, chunk=chunk)
        return self.go_on(prompt[body:], body, cache, policy, logits, tokens, stop)

    def go_on(self, tail: list[int], first: int, cache: list[Layer], policy: Policy, logits: np.ndarray, tokens: int,
              stop: int | None = None) -> list[int]:
        """Continues token by token after the contents of the cache."""
        for i, token in enumerate(tail):
            logits = self.forward([token], first + i, cache, policy)[-1]
        answer: list[int] = []
        while len(answer) < tokens:
            answer.append(int(logits.argmax()))
            if answer[-1] == stop or len(answer) == tokens:
                break
            logits = self.forward(answer[-1:], first + len(tail) + len(answer) - 1, cache, policy)[-1]
        return answer


def causal_weights(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Softmax of q [KV heads, group, new, width] over k [KV heads, tokens, width]; new tokens see only earlier ones."""
    heads, group, new, width = q.shape
    scores = q.reshape(heads, group * new, width) @ k.swapaxes(1, 2)
    scores = scores.reshape(heads, group, new, -1) * np.float32(1 / np.sqrt(width))
    if new > 1:
        scores[..., -new:] += np.triu(np.full((new, new), -np.inf, np.float32), 1)
    return softmax(scores)


def softmax(scores: np.ndarray) -> np.ndarray:
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    return scores / scores.sum(-1, keepdims=True)
