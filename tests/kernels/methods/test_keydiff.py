# SPDX-License-Identifier: Apache-2.0
"""KeyDiff against fp64."""
import itertools

import numpy as np
from numpy.linalg import norm

from kernels import bf16, ops, refused, same, variants, wide


def directions(keys):
    return keys / np.maximum(norm(keys, axis=-1, keepdims=True), 1e-12)


def keydiff(keys):
    """Scores of one head, [n, d], in fp64."""
    keys = keys.astype(np.float64)
    anchor = directions(keys).mean(0)
    return -(keys @ anchor) / np.maximum(norm(anchor) * norm(keys, axis=1), 1e-8)


def random_keys(rng, *shape, mean=0.7):
    """Keys around a common direction, like those of real heads."""
    centre = rng.standard_normal(shape[-1])
    return (mean * centre / norm(centre) * np.sqrt(shape[-1]) + rng.standard_normal(shape)).astype(np.float32)


def score(keys, anchor=None):
    """Scores against the keys' own anchor, or the given one."""
    return ops.keydiff_scores(keys, ops.keydiff_anchor(keys)[0] if anchor is None else anchor)


def keep(keys, n):
    return ops.topk(score(keys), n, later=True)


def consistent(order, scores, tolerance):
    """Whether scores in this order do not increase by more than the tolerance."""
    return bool(np.all(np.diff(scores[order]) <= tolerance))


def test_scores_rank_as_pairwise_similarities():
    rng = np.random.default_rng(1)
    for _ in range(5):
        keys = random_keys(rng, 500, 128)
        unit = directions(keys.astype(np.float64))
        pairwise = -(unit @ unit.T).sum(1)
        assert np.array_equal(np.argsort(pairwise, kind="stable"), np.argsort(keydiff(keys), kind="stable"))
        for _ in variants():
            assert consistent(np.argsort(-pairwise), score(keys[None])[0], 1e-5)


def test_scores_equal_kvpress():
    rng = np.random.default_rng(2)
    worst = 0.0
    for heads, n, d in (1, 1, 1), (2, 7, 3), (4, 100, 17), (2, 333, 80), (3, 500, 128), (1, 1000, 127), (2, 64, 256):
        keys = random_keys(rng, heads, n, d)
        want = np.array([keydiff(head) for head in keys])
        for _ in variants():
            got = score(keys)
            worst = max(worst, np.abs(got - want).max())
            assert np.abs(got - want).max() < 1e-6, (heads, n, d, variant)
            for kept_n in 1, n // 4, n // 2, n, n + 3:
                kept = keep(keys, kept_n)
                for h in range(heads):
                    cut = np.sort(want[h])[::-1][min(kept_n, n) - 1] if kept_n else np.inf
                    dropped = np.setdiff1d(np.arange(n), kept[h])
                    assert len(kept[h]) == min(kept_n, n) and np.all(np.diff(kept[h].astype(int)) > 0)
                    assert np.all(want[h][kept[h]] >= cut - 2e-6) and np.all(want[h][dropped] <= cut + 2e-6)
    return f"largest difference {worst:.1e}"


def test_the_anchor_is_a_sum_over_blocks():
    rng = np.random.default_rng(3)
    for order, dtype in itertools.product(("hnd", "nhd"), (np.float32, np.float16)):
        pool = random_keys(rng, 40, 16, 2, 64).astype(dtype)  # nhd
        blocks = pool.swapaxes(1, 2)  # read in place, in strides
        blocks = np.ascontiguousarray(blocks) if order == "hnd" else blocks
        sums, counts = zip(*map(ops.keydiff_anchor, blocks))
        table, held = [], np.zeros((2, 64))
        for _ in range(300):  # append, evict, share: the sequence's anchor is updated by adding and subtracting
            if table and rng.random() < 0.4:
                held -= sums[table.pop(rng.integers(len(table)))]
            else:
                table.append(int(rng.integers(40)))
                held += sums[table[-1]]
        table = table or [3]
        keys = pool[table].astype(np.float64).reshape(-1, 2, 64).transpose(1, 0, 2)
        want = directions(keys).sum(1)
        assert np.abs(held - want).max() <= 1e-5 * np.abs(want).max(), (order, dtype)
        assert np.all(np.array(counts) == 16)
        paged = np.concatenate([score(blocks[i], held.astype(np.float32)) for i in table], 1)
        assert np.abs(paged - np.array([keydiff(head) for head in keys])).max() < 1e-5


def test_broken_keys_are_left_out():
    rng = np.random.default_rng(8)
    for bad in 0.0, np.nan, np.inf, -np.inf:
        keys = random_keys(rng, 2, 60, 33)
        broken = rng.permutation(60)[:25]
        keys[:, broken[:12]] = bad
        keys[:, broken[12:], 7] = bad
        zeroed = broken[:12] if bad == 0.0 else broken
        valid = np.setdiff1d(np.arange(60), zeroed)
        for _ in variants():
            scores = score(keys)
            assert np.all(np.isneginf(scores[:, zeroed])) and np.all(np.isfinite(scores[:, valid]))
            want = np.array([keydiff(head[valid]) for head in keys])
            assert np.abs(scores[:, valid] - want).max() < 1e-6  # the anchor does not include them
            for n in 1, len(valid) - 1, len(valid):
                kept = keep(keys, n)
                assert not np.isin(kept, zeroed).any()


def test_bf16_keys_keep_the_ranking():
    rng = np.random.default_rng(9)
    worst, wide_gaps = 0.0, 0
    for _ in range(20):
        keys = random_keys(rng, 1, 500, 128)
        want = keydiff(keys[0])
        for _ in variants():
            got = score(bf16(keys))[0]
            worst = max(worst, np.abs(got - want).max())
            assert np.abs(got - keydiff(wide(bf16(keys))[0])).max() < 1e-6
        for n, budget in (500, 200), (40, 15):
            some, ranked = keys[:, :n], keydiff(keys[0, :n])
            kept = set(keep(bf16(some), budget)[0].tolist())
            above, cut, below = np.argsort(-ranked)[:budget], *np.sort(ranked)[::-1][budget - 1 : budget + 1]
            assert set(np.flatnonzero(ranked > cut + 2e-3).tolist()) <= kept
            if cut - below > 2e-3:
                wide_gaps += 1
                assert set(above.tolist()) == kept
    assert worst <= 1e-3 and wide_gaps > 0
    return f"largest difference {worst:.1e}; {wide_gaps} gaps at the cut"


def test_blocks_and_priorities():
    rng = np.random.default_rng(13)
    scores = np.where(rng.random((3, 53)) < 0.2, -np.inf, rng.uniform(-1, 1, (3, 53))).astype(np.float32)
    scores[:, 32:48] = -np.inf
    scores[1, :16] = -np.inf
    padded = np.concatenate([scores, np.full((3, 11), -np.inf, np.float32)], 1).reshape(3, 4, 16).max(2)
    for _ in variants():
        mean, best = ops.keydiff_blocks(scores, 16)
        assert same(best, padded)
        valid = np.isfinite(padded)
        with np.errstate(invalid="ignore", divide="ignore"):
            want = np.where(valid, padded, 0).sum(0) / valid.sum(0)
        assert np.allclose(mean[valid.any(0)], want[valid.any(0)], atol=1e-6) and np.isneginf(mean[2])
        p = ops.keydiff_priority(scores.ravel()).reshape(scores.shape)
        assert np.allclose(p, np.where(np.isfinite(scores), (1 + scores) / 2, 0), atol=1e-7)
        assert p.min() >= 0 and p.max() <= 1
        assert ops.keydiff_priority(np.array([np.nan, 1.5, -1.5], np.float32)).tolist() == [0, 1, 0]


def test_mistakes_are_refused():
    keys = np.zeros((2, 3, 4), np.float32)
    assert "uint16" in refused(ops.keydiff_anchor, np.zeros((2, 3, 4), np.uint16))
    assert "[2, 4] for these keys" in refused(ops.keydiff_scores, keys, np.zeros((2, 5), np.float32))
    assert "no keys" in refused(ops.keydiff_anchor, np.zeros((2, 0, 4), np.float32))
    assert "[heads, tokens, dim]" in refused(ops.keydiff_anchor, keys[0])
