# SPDX-License-Identifier: Apache-2.0
"""Attention over blocks against numpy: causal or not, over chosen positions, over tables with holes, with blocks made
at other positions, in windows, with soft caps and sinks, with the mass per block and token."""
import itertools

import numpy as np

from kernels import bf16, ops, variants, wide
from toy import rope


def oracle(q, k, v, seen, cap=0.0, sink=-np.inf):
    """Of one query head: results, and the weights of the positions. seen: [query, position]."""
    s = q @ k.T / np.sqrt(q.shape[1])
    s = np.where(seen, cap * np.tanh(s / cap) if cap else s, -np.inf)
    most = np.maximum(np.where(seen, s, -1e9).max(1, keepdims=True), sink)
    e = np.exp(s - most) * seen
    p = e / np.maximum(e.sum(1, keepdims=True) + np.exp(sink - most), 1e-300)
    return p @ v, p


def any_pool(rng, kind, heads, n_blocks, size, dim):
    pool = rng.standard_normal((n_blocks + 3, 2, heads, size, dim)).astype(np.float32)
    return [pool, pool.astype(np.float16), bf16(pool)][kind]


def plane(pool, table, which):
    """Keys or values [head, position, dim] of the blocks of a table, in fp64."""
    x = wide(pool).astype(np.float64)[table, which]
    return x.transpose(1, 0, 2, 3).reshape(x.shape[1], -1, x.shape[3])


def check(rng, causal, sparse, holes, moved):
    heads, group, size = int(rng.integers(1, 3)), int(rng.integers(1, 6)), int(rng.choice([1, 5, 16, 24]))
    dim, n, tokens = int(rng.choice([2, 18, 32, 64, 80, 128])), int(rng.integers(1, 20)), int(rng.integers(20, 150))
    n_blocks, n = -(-tokens // size), n if rng.random() < 0.6 else 1
    pool, table = any_pool(rng, rng.integers(3), heads, n_blocks, size, dim), rng.permutation(n_blocks + 3)[:n_blocks]
    q = rng.standard_normal((n, heads * group, dim)).astype(np.float32) * 4
    at = np.arange(n_blocks * size)
    seen = np.tile(at < tokens, (heads, n, 1))
    how = dict(tokens=tokens, causal=causal, window=int(rng.integers(0, 2) * rng.integers(1, tokens + 9)),
               cap=float(rng.integers(0, 2) * 3), sinks=[None, rng.normal(0, 3, heads * group)][rng.integers(2)])
    sinks = np.full(heads * group, -np.inf) if how["sinks"] is None else how["sinks"].astype(np.float32)
    if causal:
        own = tokens - n + np.arange(n)[:, None]
        seen &= (at <= own) & (at > own - (how["window"] or tokens))
    if sparse:
        how["chosen"] = np.array([np.sort(rng.choice(tokens, tokens // 3, replace=False)) for _ in range(heads)])
        for h in range(heads):
            seen[h] &= np.isin(at, how["chosen"][h])
    k, v, given = plane(pool, table, 0), plane(pool, table, 1), table.copy()
    if holes:
        given[rng.random(n_blocks) < 0.4] = -1
        seen &= np.repeat(given >= 0, size)
    if moved:
        how["deltas"] = rng.integers(-2, 3, n_blocks) * 16
        k = np.stack([rope(head, np.repeat(how["deltas"], size)) for head in k])
    of_heads = [oracle(q[:, g].astype(np.float64), k[g // group], v[g // group], seen[g // group], how["cap"], sinks[g])
                for g in range(heads * group)]
    want = np.stack([out for out, _ in of_heads], 1)
    weights = np.array([p for _, p in of_heads]).reshape(heads, group * n, -1).sum(1)
    for _ in variants():
        got, of_block, of_token = ops.attention(q, pool, given, **how)
        assert np.abs(got - want).max() < (2e-5 if moved else 6e-6), (got.shape, how)
        assert np.abs(of_token - weights).max() < 1e-5 * n * group
        assert np.abs(of_block - weights.reshape(heads, n_blocks, size).sum(2)).max() < 1e-5 * n * group


def test_every_form_equals_numpy():
    rng = np.random.default_rng(1)
    for form in itertools.product([True, False], repeat=4):
        for _ in range(10):
            check(rng, *form)


def test_queries_that_see_nothing_get_zeros():
    q, pool = np.ones((8, 2, 32), np.float32), np.random.default_rng(2).random((3, 2, 1, 16, 32), np.float32)
    for _ in variants():
        assert not any(x.any() for x in ops.attention(q, pool, [-1, -1, -1]))
        out, of_block, of_token = ops.attention(q, pool, [0, 1, 2], chosen=[[47]])  # only the last query sees it
        assert not out[:7].any() and np.array_equal(out[7], pool[[2, 2], 1, 0, 15])
        assert of_token[0, 47] == 2 == of_token.sum() and of_block.tolist() == [[0, 0, 2]]
