# SPDX-License-Identifier: Apache-2.0
"""MemShare's similarities. Seeds are fixed, and each test prints its measured values."""
import collections
import itertools

import numpy as np

from kernels import bf16, ops, refused, variants, wide
from toy import rope, toy_lm

METRICS = "fro_norm", "mean_l2", "relative"


bag, cosine, distance = ops.bag_of_words, ops.bag_cosine, ops.memshare_distance


def norm(x, **how):
    return np.sqrt((x * x).sum(**how))


def oracle(a, b, metric):
    layers, _, heads, tokens, _ = a.shape
    total = 0.0
    for i in range(layers):
        for x, y in zip(a[i], b[i]):
            if metric == "fro_norm":
                total += norm(x - y) / (2 * tokens * heads)
            elif metric == "mean_l2":
                total += norm(x - y, axis=-1).sum() / (2 * tokens * heads)
            else:
                total += 0.5 * norm(x - y) / np.sqrt(norm(x) * norm(y))
    return total / layers


def turned(block, delta):
    """A block with its keys rotated by delta positions, in fp64; values are unchanged."""
    out = block.astype(np.float64)
    out[:, 0] = rope(out[:, 0], np.full(out.shape[3], delta))
    return out


# ---- stage 1 -------------------------------------------------------------------------------------------------------


def test_bag_of_words():
    ids, counts = bag([3, 1, 1, 2])
    assert ids.tolist() == [1, 2, 3] and counts.tolist() == [2, 1, 1]
    assert abs(cosine([1, 1, 2, 3], [1, 2, 2, 4]) - 4 / 6) < 1e-7


def test_cosine_of_bags():
    rng = np.random.default_rng(2)
    for n in 1, 2, 7, 50, 400:
        a, b = rng.integers(0, 30, n), rng.integers(0, 30, n + 3)
        assert cosine(a, a) == 1 and cosine(a, rng.permutation(a)) == 1
        assert cosine(a, b) == cosine(b, a)
        assert cosine(a, b + 100) == 0
        A, B = collections.Counter(a.tolist()), collections.Counter(b.tolist())
        want = sum(A[k] * B[k] for k in A) / (sum(v * v for v in A.values()) * sum(v * v for v in B.values())) ** 0.5
        assert abs(cosine(a, b) - want) < 1e-7
    assert cosine([], [1]) == cosine([], []) == 0
    ids, counts = bag(np.full(70000, 5))
    assert ids.tolist() == [5] and counts.tolist() == [65535]


# ---- stage 2 -------------------------------------------------------------------------------------------------------


def test_distances_equal_numpy():
    rng = np.random.default_rng(3)
    worst = 0.0
    for layers, heads, tokens, dim in (3, 2, 4, 8), (1, 1, 1, 1), (2, 3, 16, 80), (2, 1, 7, 127), (1, 8, 16, 128):
        shape = layers, 2, heads, tokens, dim
        for kind in range(3):
            blocks = rng.standard_normal((2, *shape)) + 0.5
            blocks = [blocks.astype(np.float32), blocks.astype(np.float16), bf16(blocks)][kind]
            a, b = (wide(it).astype(np.float64) for it in blocks)
            for metric in METRICS:
                want, found = oracle(a, b, metric), set()
                for _ in variants():
                    found.add(distance(*blocks, metric=metric))
                assert len(found) == 1
                worst = max(worst, abs(found.pop() / want - 1))
    assert worst < 1e-6
    return f"seed 3: at most {worst:.1e} off"


def test_norms_equal_numpy():
    block = np.random.default_rng(33).standard_normal((3, 2, 4, 16, 80)).astype(np.float32)
    for _ in variants():
        assert np.allclose(ops.memshare_norms(block), norm(block.astype(np.float64), axis=(2, 3, 4)), rtol=1e-6)


def test_M3_early_abandon():
    """A limit never changes distances below it."""
    rng = np.random.default_rng(34)
    a = rng.standard_normal((6, 2, 2, 16, 32)).astype(np.float32)
    b = a + (0.02 * rng.standard_normal(a.shape)).astype(np.float32)
    b[4] += rng.standard_normal(a[4].shape).astype(np.float32)  # almost all of the difference is in one layer
    for _, metric in itertools.product(variants(), METRICS):
        whole = distance(a, b, metric=metric)
        assert distance(a, b, metric=metric, limit=whole * (1 + 1e-9)) == whole
        assert np.isinf(distance(a, b, metric=metric, limit=whole * 0.999))
        assert np.isinf(distance(a, b, metric=metric, limit=whole / 50))
    assert np.isinf(distance(a, 3 * a, limit=0.3))  # rejected by norms, without reading


def test_equal_blocks_are_at_zero_and_nan_is_far():
    a = np.random.default_rng(35).standard_normal((3, 2, 2, 4, 20)).astype(np.float32)
    broken, zeros = a.copy(), np.zeros_like(a)
    broken[1, 0, 0, 2, 5] = np.nan
    for _, metric, to in itertools.product(variants(), METRICS, (np.float32, np.float16, bf16)):
        assert distance(to(a), to(a), metric=metric, limit=0) == distance(to(zeros), to(zeros), metric=metric) == 0
        assert np.isinf(distance(to(a), to(broken), metric=metric))
        assert np.isinf(distance(to(a), to(zeros), metric=metric)) == (metric == "relative")


def test_sums_of_large_planes_are_accurate():
    """A million equal squares: one fp32 sum of them all would be off in the fourth digit."""
    full = np.full((1, 2, 32, 256, 128), 1.1, np.float32)
    want = float(full[0, 0, 0, 0, 0]) * (full.size // 2) ** 0.5
    for _ in variants():
        assert np.allclose(ops.memshare_norms(full), want, rtol=1e-6)
        assert abs(distance(full, np.zeros_like(full), metric="fro_norm") * 32 * 256 / want - 1) < 1e-6


def test_two_readings_of_the_metric():
    rng, ratios, values = np.random.default_rng(4), [], []
    for sigma in 0.1, 0.8, 3.0:
        a = rng.standard_normal((4, 2, 8, 16, 128)).astype(np.float32)
        b = a + (sigma * rng.standard_normal(a.shape)).astype(np.float32)
        fro, mean = (distance(a, b, metric=metric) for metric in METRICS[:2])
        assert abs(fro / sigma - 1) < 0.01 and abs(mean / fro / 128**0.5 - 1) < 0.01
        ratios.append(mean / fro), values.append(fro)
    return f"seed 4: {np.round(values, 3)} for .1, .8, 3; B / A {np.mean(ratios):.2f}"


# ---- positions -----------------------------------------------------------------------------------------------------


def test_aligned_blocks_are_equal():
    rng, worst = np.random.default_rng(7), {"fp32": 0.0, "bf16": 0.0}
    for dim in 2, 16, 34, 64, 80, 128:
        k = rng.standard_normal((2, 2, 3, 16, dim))
        for position, delta in (0, 96), (500, -17), (7, 4000), (3, 0), (100, -100):
            positions = position + np.arange(16)
            old, new = k.copy(), k.copy()
            old[:, 0], new[:, 0] = rope(k[:, 0], positions), rope(k[:, 0], positions + delta)
            size = norm(k[:, 0], axis=(1, 2, 3)).mean()
            for _ in variants():
                apart = distance(new.astype(np.float32), old.astype(np.float32), delta=delta, metric="mean_l2")
                worst["fp32"] = max(worst["fp32"], apart / (norm(k) / k[..., 0].size))
            apart = distance(bf16(new), bf16(old), delta=delta)
            worst["bf16"] = max(worst["bf16"], apart)
            if delta and dim > 2:
                assert distance(new.astype(np.float32), old.astype(np.float32)) > 0.1  # without alignment it is far
    assert worst["fp32"] < 1e-6 and worst["bf16"] < 1e-2, worst
    return f"seed 7: {worst['fp32']:.1e} in fp32, {worst['bf16']:.1e} with bf16 keys"


def test_partial_rotation_and_other_frequencies():
    rng = np.random.default_rng(77)
    for half in 0, 1, 16, 33, 40:
        x, frequencies = rng.standard_normal((1, 2, 1, 9, 80)), np.sort(rng.random(half))[::-1]
        for delta in -300, 5:
            angle, want = frequencies * delta, x.copy()
            low, high = x[:, 0, ..., :half], x[:, 0, ..., half : 2 * half]
            want[:, 0, ..., :half] = low * np.cos(angle) - high * np.sin(angle)
            want[:, 0, ..., half : 2 * half] = high * np.cos(angle) + low * np.sin(angle)
            for _ in variants():
                assert distance(np.float32(want), np.float32(x), delta=delta, frequencies=frequencies) < 1e-6


# ---- a model with random weights -----------------------------------------------------------------------------------


def blocks_of(k, v):
    """Blocks of 16 tokens: [block][layer, K and V, head, token, dim]"""
    both = np.stack([k, v], 1)
    return [np.ascontiguousarray(both[:, :, :, i : i + 16], np.float32) for i in range(0, both.shape[3] - 15, 16)]


def pairs_of_a_model(rng):
    """Pairs of blocks 96 tokens apart: of a repeated step, of one shifted by 4 tokens, and unrelated ones."""
    model, vocab = toy_lm(rng), 1000
    text = rng.integers(0, vocab, 256)
    text[160:208] = text[64:112]
    shifted = np.concatenate([text[:160], rng.integers(0, vocab, 4), text[64:112], rng.integers(0, vocab, 44)])
    repeated, off = (blocks_of(*model.forward(ids)) for ids in (text, shifted))
    return ([(repeated[i + 6], repeated[i]) for i in (4, 5, 6)], [(off[i + 6], off[i]) for i in (5, 6)],
            [(repeated[i + 6], repeated[i]) for i in (0, 1, 2, 3, 7, 8)])


def test_distances_in_a_toy_language_model():
    aligned = dict(delta=96)
    want = {"matched": (0.13, 0.18), "not turned back": (0.43, 0.61), "shifted": (0.80, 1.13), "random": (0.81, 1.14)}
    found = collections.defaultdict(list)
    for seed in range(4):
        matched, shifted, others = pairs_of_a_model(np.random.default_rng(900 + seed))
        for name, pairs, how in (("matched", matched, aligned), ("not turned back", matched, {}),
                                 ("shifted", shifted, aligned), ("random", others, aligned)):
            for a, b in pairs:
                found[name].append([distance(a, b, metric=m, **how) for m in ("fro_norm", "relative")])
    for name, pair in want.items():
        assert np.allclose(np.mean(found[name], 0), pair, rtol=0.15), (name, np.mean(found[name], 0), pair)
    relative = {name: np.array(values)[:, 1] for name, values in found.items()}
    assert (relative["matched"] <= 0.35).all()  # recall 1, no false ones
    assert min(relative["shifted"].min(), relative["random"].min()) > 0.35
    return "seeds 900 to 903: " + ", ".join(f"{n} {np.round(np.mean(v, 0), 2)}" for n, v in found.items())


# ---- mistakes ------------------------------------------------------------------------------------------------------


def test_mistakes_are_refused():
    a = np.zeros((2, 2, 1, 4, 8), np.float32)
    for words, b, how in (("2 planes", np.zeros((2, 3, 1, 4, 8), np.float32), {}), ("differ in shape", a[..., :4], {}),
                          ("differ in dtype", a.astype(np.float16), {}),
                          ("5 frequencies", a, dict(frequencies=np.ones(5))),
                          ("metric must be one of", a, dict(metric="cosine"))):
        assert words in refused(distance, b if words == "2 planes" else a, b, **how)
