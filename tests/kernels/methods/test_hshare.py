# SPDX-License-Identifier: Apache-2.0
"""HShare against numpy."""
import numpy as np

from kernels import bf16, ops, refused, variants, wide


def lower(s):
    return np.tril(s, -1).astype(np.float32)


def share(s, k, algo):
    return ops.hshare_plan(lower(s), k, algorithm=algo).tolist()


# ---- oracles ----


def greedy(s, k):
    """Algorithm 1 as printed, and the official code's procedure."""
    s, n = lower(s).copy(), len(s)
    raw, official = list(range(n)), list(range(n))
    for _ in range(min(k, n - 1)):
        i, j = divmod(int(s.argmax()), n)
        if s[i, j] <= 0:
            break
        raw[i] = official[i] = j
        s[i, :] = 0
        s[:, i] = 0
        for p in range(n):
            if official[p] == i:
                official[p] = j
    return raw, official


def compressed(source):
    source = list(source)
    for i in range(len(source)):
        while source[source[i]] != source[i]:
            source[i] = source[source[i]]
    return source


def shared_similarity(s, source):
    used = [s[i, j] for i, j in enumerate(source) if i != j]
    return float(np.mean(used)) if used else 0.0


def pseudo_quantise(x, bits=4):
    low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    span = np.where(high == low, 1, high - low)
    scale = (2**bits - 1) / span
    return np.clip(np.round((x - low) * scale), 0, 2**bits - 1) / scale + low


def decode(labels, channels):
    """Decodes labels, according to the layout in kernels/hshare.h."""
    codes = labels[:, : (channels + 1) // 2]
    values = np.stack([codes & 15, codes >> 4], -1).reshape(len(labels), -1)[:, :channels]
    ends = np.ascontiguousarray(labels[:, (channels + 1) // 2 :]).view(np.float16).astype(np.float64)
    return values, ends[:, :1], ends[:, 1:]


def bitsets(rows, n):
    """Sets of tokens [..., z] as rows of bits."""
    words = -(-n // 64)
    flags = np.zeros(rows.shape[:-1] + (words * 64,), np.uint8)
    np.put_along_axis(flags, rows.astype(np.int64), 1, -1)
    return np.packbits(flags, axis=-1, bitorder="little").view(np.uint64)


def softmax(s):
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def critical(scores, n, x, y, z):
    if n <= x + y + z:
        return np.arange(n)
    middle = scores[x : n - y]
    best = np.lexsort((np.arange(len(middle)), -middle))[:z] + x
    return np.concatenate([np.arange(x), np.sort(best), np.arange(n - y, n)])


# ---- sharing ----


def test_greedy_equals_the_oracle():
    s = np.zeros((3, 3), np.float32)
    s[2, 1], s[1, 0], s[2, 0] = 0.9, 0.8, 0.3
    assert share(s, 2, "greedy") == [0, 0, 1]
    assert share(s, 2, "greedy_root") == [0, 0, 0]
    rng = np.random.default_rng(1)
    for round in range(1200):  # compares the oracles with each other, and a sample of them with the kernel
        s, k = rng.random((32, 32)), int(rng.integers(0, 40))
        raw, official = greedy(s, k)
        assert compressed(raw) == official
        if round % 24 == 0:
            assert share(s, k, "greedy") == raw
            assert share(s, k, "greedy_root") == official


def test_every_source_is_its_own_source():
    rng = np.random.default_rng(2)
    for k in 0, 1, 8, 16, 24, 31, 100:
        for algo in "greedy_root", "star":
            s = lower(rng.random((32, 32)) + 0.01)
            empty = rng.choice(np.arange(1, 32), 5, replace=False) if k % 2 else []
            s[empty, :] = 0  # rows that resemble no earlier one
            source = share(s, k, algo)
            assert source[0] == 0 and all(j <= i for i, j in enumerate(source))
            assert all(source[j] == j for j in source)
            assert ops.hshare_check(source) == 32
            sharers = sum(i != j for i, j in enumerate(source))
            if algo == "greedy_root":
                assert sharers == min(k, 31 - len(empty))
            else:
                assert sharers <= min(k, 31) and (len(empty) > 0 or sharers == min(k, 31))
            assert all(s[i].any() for i, j in enumerate(source) if i != j)
    published = [0, 1, 2, 2, 2, 2, 6, 7, 8, 8, 8, 11, 8, 8, 14, 14, 14, 14, 14, 19, 20, 20, 22, 22, 24, 25, 24, 27, 27,
                 29, 27, 31]
    check = ops.hshare_check
    assert check(published) == 32 and len(set(published)) == 16
    assert check([0, 0, 1]) == 2 and check([0, 2, 2]) == 1 and check([1, 1]) == 0
    assert "below 2" in refused(check, [0, 7])
    assert share(np.zeros((4, 4)), 3, "greedy") == share(np.zeros((4, 4)), 3, "star") == [0, 1, 2, 3]


def test_H2_star_keeps_more_than_greedy():
    """Compressing chains reduces the similarity of the pairs that are used; a star does not."""
    rng, kept = np.random.default_rng(3), {"greedy_root": [], "star": []}
    for _ in range(6):
        s = lower(rng.random((32, 32)))
        for algo in kept:
            kept[algo].append(shared_similarity(s, share(s, 24, algo)))
    assert np.mean(kept["star"]) > np.mean(kept["greedy_root"]) + 0.05
    return f"k=24: star {np.mean(kept['star']):.3f}, greedy {np.mean(kept['greedy_root']):.3f}"


def test_similarity_is_of_sets_per_head():
    rng = np.random.default_rng(4)
    for n, z in (1, 1), (100, 7), (130, 9), (500, 88), (700, 80), (1100, 90), (2500, 99), (4096, 432):
        layers, heads, queries = 4, 3, 2
        rows = np.array([[rng.choice(n, z, replace=False) for _ in range(heads * queries)] for _ in range(layers)])
        rows[2] = rows[0]
        for _ in variants():
            got = ops.hshare_similarity(bitsets(rows, n))
            for i in range(layers):
                for j in range(i):
                    want = np.mean([len(set(a) & set(b)) / z for a, b in zip(rows[i], rows[j])])
                    assert abs(got[i, j] - want) < 1e-6
            assert got[2, 0] == 1 and not np.triu(got).any()
    uneven = np.zeros((2, 1, 130), np.uint8)  # |A| = 40, |B| = 100, 10 in common
    uneven[0, 0, :40] = uneven[1, 0, 30:130] = 1
    bits = np.packbits(np.pad(uneven, ((0, 0), (0, 0), (0, 62))), axis=-1, bitorder="little").view(np.uint64)
    assert abs(ops.hshare_similarity(bits)[1, 0] - 0.1) < 1e-7


def test_H3_union_saturates():
    """As printed, similarity compares unions over heads: it cannot distinguish layers that agree from others."""
    rng = np.random.default_rng(5)
    for n, z, want in (500, 88, 0.1768), (4096, 432, 0.2807):
        heads = 32
        a, b = (np.array([rng.choice(n, z, replace=False) for _ in range(heads)]) for _ in range(2))
        union = lambda x, y: len(set(x.ravel()) & set(y.ravel())) / x.size
        if n == 500:
            assert abs(union(a, b) - union(a, a)) < 0.01
        per_head = ops.hshare_similarity(bitsets(np.stack([a, a, b]), n))
        assert per_head[1, 0] == 1 and abs(per_head[2, 0] - z / n) < 0.01


# ---- labels and selection ----


def test_labels_are_quantised_to_4_bits():
    rng = np.random.default_rng(6)
    for channels, dim in (32, 128), (32, 32), (16, 64), (7, 80), (1, 3), (256, 256):
        k = rng.standard_normal((50, dim)).astype(np.float32) * rng.choice([0.01, 1, 30], (50, 1)).astype(np.float32)
        k[3] = 2.5
        k[4, -1] = np.nan
        chosen = np.sort(rng.choice(dim, channels, replace=False)).astype(np.uint16)
        chosen[-1] = dim - 1
        for _ in variants():
            labels = ops.hshare_labels(k, chosen)
            assert labels.shape == (50, (channels + 1) // 2 + 4)
            codes, least, step = decode(labels, channels)
            x = k[:, chosen].astype(np.float64)
            good = np.arange(50) != 4
            x, codes, least, step = x[good], codes[good], least[good], step[good]
            span = x.max(-1, keepdims=True) - x.min(-1, keepdims=True)
            assert np.array_equal(least, x.min(-1, keepdims=True).astype(np.float16))
            flat = span == 0
            assert np.all(step[flat] == 1) and np.all(codes[flat[:, 0]] == 0)
            assert np.allclose(step[~flat], span[~flat] / 15, rtol=2**-11, atol=0)
            want = np.clip(np.round((x - least) / step), 0, 15)
            assert np.mean(codes != want) < 1e-3 and np.max(np.abs(codes - want)) <= 1  # ties in single precision
            f16 = np.abs(least) * 2**-11 + span * 2**-11 + 1e-7  # of rounding least and step
            assert np.all(np.abs(least + codes * step - x) <= span / 30 * (1 + 2**-10) + f16)
            assert np.all(np.abs(least + codes * step - pseudo_quantise(x)) <= np.where(flat, 1, step) * 1.01 + f16)
        assert not decode(ops.hshare_labels(k, chosen), channels)[0][4].any()


def label_scores(q, k, chosen):
    return pseudo_quantise(k[:, chosen].astype(np.float64)) @ pseudo_quantise(q[chosen].astype(np.float64))


def test_label_scores():
    rng, close = np.random.default_rng(7), []
    for channels, dim, n in (32, 128, 144), (32, 64, 120), (8, 17, 55):
        k, q = (rng.standard_normal((it, dim)).astype(np.float32) for it in (n, 3))
        chosen = np.sort(rng.choice(dim, channels, replace=False))
        for stored in k, k.astype(np.float16), bf16(k):
            for _ in variants():
                labels = ops.hshare_labels(stored, chosen)
                got = ops.hshare_scores(labels, q, chosen)
                codes, least, step = decode(labels, channels)
                for g in range(3):
                    want = (least + codes * step) @ pseudo_quantise(q[g][chosen].astype(np.float64))
                    assert np.max(np.abs(got[g] - want)) < 1e-5 * channels
                    close.append(np.corrcoef(got[g], label_scores(q[g], wide(stored), chosen))[0, 1])
    assert min(close) > 0.999  # with labels whose least and step are not rounded to f16
    return f"correlation with unrounded labels at least {min(close):.5f}"


def test_heavy_channels_are_chosen():
    rng = np.random.default_rng(8)
    heavy = rng.choice(128, 32, replace=False)
    q, k = (rng.standard_normal(s).astype(np.float32) for s in ((200, 4, 128), (200, 128)))
    k[:, heavy] *= 3
    weights = ops.hshare_weights(q, k)
    channels = ops.hshare_channels(weights)
    assert np.array_equal(channels, np.sort(heavy))
    assert np.allclose(weights, np.abs(q * k[:, None]).sum((0, 1)), rtol=1e-5)


def test_selection_equals_the_oracle():
    rng = np.random.default_rng(9)
    for n, x, y, z in ((1000, 8, 32, 88), (600, 16, 64, 432), (513, 16, 64, 432), (512, 16, 64, 432), (100, 8, 32, 88),
                       (200, 0, 1, 5), (200, 5, 0, 5), (300, 0, 0, 1), (50, 8, 60, 4), (20000, 16, 64, 432)):
        for scores in rng.standard_normal(n), rng.integers(-3, 4, n), np.zeros(n):
            scores = scores.astype(np.float32)
            want = critical(scores, n, x, y, z)
            for _ in variants():
                got = ops.hshare_select(scores, sinks=x, recent=y, middle=z)
                assert np.array_equal(got, want), (n, x, y, z, variant)
                assert len(set(got.tolist())) == len(got) == min(n, max(x + y + z, 0))
    scores = rng.standard_normal(300).astype(np.float32)
    scores[50:250] = -np.inf  # not in the pool, so not to be selected
    got = ops.hshare_select(scores, sinks=8, recent=32, middle=88)
    assert not np.isin(got, np.arange(50, 250)).any() and len(got) == 100


def test_the_best_are_found_whatever_the_scores_are():
    """A sample of the scores suggests a bound, which may be too high or too low."""
    rng = np.random.default_rng(10)
    for n in 17, 100, 777, 8192, 8199, 20000:
        i, x = np.arange(n), rng.uniform(-1, 1, n)
        for scores in (np.where(i % 11 == 3, -np.inf, np.where(i % 13 == 5, np.nan, np.trunc(x * 4) / 2)),
                       x + 3 * (i % 8 == 0), x - 3 * (i % 8 == 0), np.where(i % 8 == 0, np.nan, -i),
                       x + 9 * (i % 512 < 32), x - 9 * (i % 512 < 32), i // 600):
            scores = scores.astype(np.float32)
            order = np.lexsort((i, -scores))
            order = order[scores[order] > -np.inf]
            for z in (3**k // 2 for k in range(1, 10) if 3**k // 2 < n):
                for _ in variants():
                    got = ops.hshare_select(scores, sinks=0, recent=0, middle=z)
                    assert np.array_equal(got, np.sort(order[:z])), (n, z)


def test_the_window_reaches_the_newest_token():
    rng = np.random.default_rng(14)
    a, y, n0 = 4, 32, 1000
    scores = rng.standard_normal(n0).astype(np.float32)
    base = ops.hshare_select(scores, sinks=8, recent=y, middle=88)
    for s in range(a + 1):
        got = ops.hshare_select(scores, sinks=8, recent=y, middle=88, now=n0 + s)
        assert got[-1] == n0 + s - 1  # the newest token is always there
        assert np.array_equal(got, np.concatenate([base, np.arange(n0, n0 + s)]))
        assert np.array_equal(got[8 + 88 :], np.arange(n0 - y, n0 + s))
        stale = base  # the speed path of the official code keeps the window of the selection
        assert (stale[-1] == n0 + s - 1) == (s == 0)
    assert "at least the number of scores" in refused(ops.hshare_select, scores, now=n0 - 1)


# ---- heads and queries ----


def test_scores_of_grouped_queries_are_folded():
    rng = np.random.default_rng(15)
    n = 700
    for _ in variants():
        one = rng.standard_normal((1, n)).astype(np.float32) * 300  # a softmax of these would underflow
        got = ops.hshare_aggregate(one, scale=0.3)
        assert np.array_equal(got, one[0])
        four = rng.standard_normal((4, n)).astype(np.float32) * 20
        for how, fold in ("sum", np.sum), ("max", np.max):
            score = ops.hshare_aggregate(four, scale=0.125, how=how)
            want = fold(softmax(four.astype(np.float64) * 0.125), 0)
            assert np.max(np.abs(score - want) / want) < 1e-5
            got = ops.hshare_select(score, sinks=8, recent=32, middle=88)
            assert np.array_equal(got, critical(want, n, 8, 32, 88)), how


def test_ratios_say_how_many_choose():
    rng = np.random.default_rng(16)
    for n_l, n_h, a, layer_ratio, head_ratio in (32, 32, 2, 0.75, 0.75), (32, 8, 2, 0.5, 0.5), (6, 4, 4, 0.5, 1.0), (
            12, 5, 3, 0.3, 0.5):
        k_l, k_h = (min(int(np.rint((1 - r) * n)), n - 1) for r, n in ((layer_ratio, n_l), (head_ratio, n_h)))
        plan = lambda n, ratio: ops.hshare_plan(lower(rng.random((n, n)) + 0.01), ratio=ratio) == np.arange(n)
        layers, heads = plan(n_l, layer_ratio), np.array([plan(n_h, head_ratio) for _ in range(n_l)])
        queries = np.arange(1024 * a, 1024 * a + 64) % a == 0
        chooses = queries[:, None, None] & layers[:, None] & heads
        assert chooses.sum() == (n_l - k_l) * (n_h - k_h) * -(-64 // a)
        if 64 % a == 0 and layer_ratio * n_l % 1 == head_ratio * n_h % 1 == 0:
            assert abs(chooses.mean() - layer_ratio * head_ratio / a) < 1e-12
