# SPDX-License-Identifier: Apache-2.0
"""BiCache against numpy: similarity, table, ratios, refreshes, and the observations that they rely on."""
import numpy as np

from kernels import bf16, ops, refused, variants, wide
from toy import rope, toy_encoder


def tokens_of(x):
    """[head, token, dim] as [token, head * dim]."""
    return x.transpose(1, 0, 2).reshape(x.shape[1], -1)


def sim_token_mean(k1, k2):
    return ((k1 * k2).sum(1) / np.linalg.norm(k1, axis=1) / np.linalg.norm(k2, axis=1)).mean()


def sim_flat(k1, v1, k2, v2):
    a, b = np.concatenate([k1, v1], 1).ravel(), np.concatenate([k2, v2], 1).ravel()
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


def btable(sim, tau):
    """The table as the official code makes it, from averaged similarities [r][layer]."""
    out, before = [], 0
    for r, s in enumerate(sim):
        n = next((i for i, x in enumerate(s) if not x > tau), len(s))
        if n > before:
            out.append([r, n])
            before = n
    return out


def table(percent, similarity, **params):
    return [list(it) for it in ops.bicache_table(percent, np.array(similarity, np.float32), **params)]


def percents(prefix, whole):
    return [ops.bicache_percent(*it) for it in zip(prefix, whole)]


def similarity(k, v, k_ref, v_ref, **rest):
    return ops.bicache_similarity(*(x.astype(np.float32) for x in (k, v, k_ref, v_ref)), **rest)


def test_refreshes_come_every_delta_steps():
    due = ops.bicache_refreshes
    assert due(128, 16) == list(range(1, 129, 16)) and len(due(128, 16)) == 8
    assert due(10, 16) == [1] and due(5, 1) == [1, 2, 3, 4, 5] and due(0, 16) == []
    for s, delta in (128, 16), (100, 7), (33, 32), (32, 32):
        assert due(s, delta) == [i + 1 for i in range(s) if i % delta == 0]  # the code counts from 0
    assert "delta" in refused(due, 5, 0)


def test_table_from_similarities():
    rows = [[1, 0.99, 0.98, 0.90, 0.99], [1, 0.99, 0.96, 0.99, 0.99], [1, 0.99, 0.98, 0.971, 0.99],
            [1, 0.97, 0.99, 0.99, 0.99], [0.5, 1, 1, 1, 1]]
    assert table([10, 20, 30, 40, 50], rows) == [[10, 3], [30, 5]]  # the first failure ends it; a decrease is noise
    exact = np.full((1, 4), 0.97, np.float32)
    assert table([10], exact) == []                                 # the code: strictly above tau
    assert table([10], exact, estimator="mean_b") == [[10, 4]]      # the paper: at least tau
    assert table([60], [[0.2, 1, 1]]) == [] and table([60], [[0.2, 1, 1]], estimator="mean_b") == [[60, 1]]
    rng = np.random.default_rng(1)
    for _ in range(10):
        average = np.sort(rng.random((101, 12)).astype(np.float32) * 0.1 + 0.9, axis=1)[:, ::-1]
        assert table(np.arange(101), average) == btable(average, np.float32(0.97))
    assert "finite" in refused(ops.bicache_table, [3], np.array([[np.nan]], np.float32))
    assert "request 1" in refused(ops.bicache_table, [3, 101], np.ones((2, 1), np.float32))


def test_B4_estimators_differ():
    """Mean of b, or mean of similarities: with half of the requests at 8 layers and half at 2, the paper gives 5."""
    deep, flat = [0.99] * 8 + [0.5], [0.98] * 2 + [0.90] * 7
    many = [deep, flat]
    assert table([70, 70], many, estimator="mean_b") == [[70, 5]]
    assert table([70, 70], many, estimator="mean_first") == [[70, 2]]
    assert table([70] * 3, [deep, deep, flat], estimator="mean_b") == [[70, 6]]
    assert table([70] * 3, [deep, flat, flat], estimator="mean_b") == [[70, 4]]
    assert table([70] * 3, [[0.99] * 5, [0.99] * 5, [0.99] * 4 + [0]], estimator="mean_b") == [[70, 4]]  # 4.67


def test_table_lookup():
    steps = [(10, 3), (30, 5), (95, 12)]
    for r in range(101):
        assert ops.bicache_layers(steps, r) == max([b for at, b in steps if at <= r], default=1)
        assert ops.bicache_layers([], r) == 1


def test_percents_round_half_to_even():
    assert percents([625, 635, 5, 15, 1, 0, 7], [1000, 1000, 1000, 1000, 1, 9, 7]) == [62, 64, 0, 2, 100, 0, 100]
    m, n = np.meshgrid(np.arange(0, 400, 3), [200, 400, 1000, 2048, 333])
    m, n = m[m <= n], n[m <= n]
    pairs = list(zip(m.tolist(), n.tolist()))
    assert percents(*zip(*pairs)) == [round(a / b * 100) if (200 * a) % b else round(a * 100 / b) for a, b in pairs]
    assert "prefix" in refused(ops.bicache_percent, 3, 2)
    assert "prefix" in refused(ops.bicache_percent, 0, 0)


def test_similarity_equals_numpy():
    rng, worst = np.random.default_rng(2), 0
    for heads, tokens, dim in (4, 50, 32), (1, 1, 1), (3, 7, 17), (8, 20, 128), (2, 5, 9000), (2, 3, 127):
        k, v, a, b = (rng.standard_normal((heads, tokens, dim)).astype(np.float32) for _ in range(4))
        a, b = k + 0.3 * a, v + 0.6 * b
        for to in np.float32, np.float16, bf16:
            arrays = [to(x) for x in (k, v, a, b)]
            seen = [tokens_of(wide(x).astype(np.float64)) for x in arrays]
            for _ in variants():
                flat, mean = (ops.bicache_similarity(*arrays, kind=kind) for kind in ("flat", "token_mean"))
                want = (sim_token_mean(seen[0], seen[2]) + sim_token_mean(seen[1], seen[3])) / 2
                worst = max(worst, abs(flat - sim_flat(*seen)), abs(mean - want))
    assert worst < 1e-6
    zero = np.zeros((2, 4, 8))
    assert similarity(zero, zero, zero, zero) == similarity(zero, zero, zero, zero, kind="flat") == 0
    return f"max error {worst:.1e}"


def test_rotation_changes_no_similarity():
    rng = np.random.default_rng(3)
    k, v, k_ref, v_ref = (rng.standard_normal((4, 60, 64)) for _ in range(4))
    k_ref = k + 0.5 * k_ref
    at = rng.integers(0, 4000, 60)
    for kind in "flat", "token_mean":
        before = similarity(k, v, k_ref, v_ref, kind=kind)
        assert abs(before - similarity(rope(k, at), v, rope(k_ref, at), v_ref, kind=kind)) < 1e-6
        assert abs(before - similarity(rope(k, at), v, rope(k_ref, at + 7), v_ref, kind=kind)) > 1e-3


def profile(seeds, n, percents_):
    """Mean similarity [r][layer], as defined by the official code."""
    out = []
    for rng in map(np.random.default_rng, seeds):
        toy, ids = toy_encoder(rng), rng.integers(0, 1000, n)
        (k_all, v_all), sims = toy.forward(ids), []
        for m in (percent * n // 100 for percent in percents_):
            k, v = toy.forward(ids[:m])
            sims.append([similarity(k[l], v[l], k_all[l][:, :m], v_all[l][:, :m]) for l in range(len(k))])
        out.append(sims)
    return np.mean(out, 0)


def test_B7_depth():
    """Layer 1 sees no other token, and deeper layers are less similar: the method relies on that."""
    published = [1, .983, .962, .939, .917, .911, .897, .880, .886, .872, .879, .856]
    sims = profile(range(3), 200, (30, 60, 90))
    assert np.abs(sims[:, 0] - 1).max() < 1e-6
    assert np.all(sims[:, 1:6].mean(1) > sims[:, 6:].mean(1))
    assert np.all(np.diff(sims.mean(1)) > 0)  # similarity grows with the prefix's share of the input
    assert np.abs(sims[-1] - published).max() < 0.02, sims[-1].round(3)
    steps = table([30, 60, 90], sims, tau=0.9)
    assert steps == [[(30, 60, 90)[r], n] for r, n in btable(sims.astype(np.float32), np.float32(0.9))]
    assert steps[-1][1] > steps[0][1]
    return f"r=.9: {' '.join(f'{s:.3f}' for s in sims[-1])}"
