# SPDX-License-Identifier: Apache-2.0
"""KeyDiff: the kernels against fp64, and the paper's claims about the score."""
import functools
import itertools
import operator

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


def test_D4_anchor_variants():
    """For keys around one direction, the kind of mean hardly matters."""
    rng = np.random.default_rng(4)
    overlap = {"plain": [], "median": []}
    for _ in range(10):
        keys = random_keys(rng, 500, 64, mean=1.0) * np.exp(0.2 * rng.standard_normal((500, 1))).astype(np.float32)
        kept = {}
        anchors = {"directions": directions(keys).mean(0), "plain": keys.mean(0), "median": np.median(keys, axis=0)}
        for name, anchor in anchors.items():
            scores = score(keys[None], anchor[None].astype(np.float32))
            kept[name] = set(ops.topk(scores, 200, later=True)[0].tolist())
        for name, list_ in overlap.items():
            list_.append(len(kept["directions"] & kept[name]) / 200)
    plain, median = np.mean(overlap["plain"]), np.mean(overlap["median"])
    assert plain >= 0.95 and median >= 0.95, (plain, median)
    return f"overlap: plain mean {plain:.3f}, median {median:.3f}"


def test_D5_optimality():
    """Equation 10 (similarity to the full anchor) is minimised exactly; equation 9 (among the kept keys) is not."""
    rng = np.random.default_rng(5)
    hits, gaps, trials = 0, [], 30
    subsets = np.array(list(itertools.combinations(range(14), 7)))
    for _ in range(trials):
        keys = random_keys(rng, 14, 8)
        unit = directions(keys.astype(np.float64))
        kept = keep(keys[None], 7)[0]
        to_anchor = unit @ unit.mean(0)
        assert to_anchor[kept].sum() <= to_anchor[subsets].sum(1).min() + 1e-6
        cosines = unit @ unit.T
        between = cosines[subsets[:, :, None], subsets[:, None, :]].sum((1, 2))
        gap = cosines[np.ix_(kept, kept)].sum() - between.min()
        gaps.append(gap)
        hits += gap < 1e-6
        assert gap >= -1e-6
    assert hits < trials / 2
    return f"equation 9 is minimal in {hits} of {trials}, mean gap {np.mean(gaps):.2f}"


class Counted(float):
    """A number that counts the operations on it as the paper does: a comparison counts as an addition."""

    done = {"add": 0, "mul": 0, "div": 0, "root": 0}

    def did(self, what, value):
        Counted.done[what] += 1
        return Counted(value)

    def __add__(self, other):
        return self.did("add", float(self) + other)

    def __mul__(self, other):
        return self.did("mul", float(self) * other)

    def __truediv__(self, other):
        return self.did("div", float(self) / other)

    def root(self):
        return self.did("root", float(self) ** 0.5)

    def at_least(self, other):
        return self.did("add", max(self, other))


def test_D7_flop_counter():
    """The paper's total, (6d + 18) n + d + 17, has one division more than its text and than is needed."""
    n, d = 1000, 128
    keys = random_keys(np.random.default_rng(7), n, d)
    rows = [[Counted(x) for x in key] for key in keys]
    dot = lambda a, b: functools.reduce(operator.add, map(operator.mul, a, b))
    share = Counted(1) / n  # the mean's 1 / n is part of the factor of each key
    norms = [dot(key, key).root() for key in rows]
    units = ([x * inverse for x in key] for key, inverse in zip(rows, [share / it for it in norms]))
    anchor = functools.reduce(lambda m, unit: list(map(operator.add, m, unit)), units)
    length = dot(anchor, anchor).root()
    scores = [-float(dot(anchor, key) / (length * norm_).at_least(1e-8)) for key, norm_ in zip(rows, norms)]
    assert np.abs(score(keys[None])[0] - scores).max() < 2e-6  # the counted computation equals the kernel's
    done = Counted.done
    assert done == {"add": 3 * n * d - n - 1, "mul": 3 * n * d + d + n, "div": 2 * n + 1, "root": n + 1}
    weighted = done["add"] + done["mul"] + 5 * done["div"] + 8 * done["root"]
    assert weighted == 786140 and weighted + 5 == (6 * d + 18) * n + d + 17


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


def test_theorem_c1_has_a_counterexample():
    """Theorem C.1 bounds cos(k*, q) from below by k*'s attention weight w. It needs cos >= 0, or equal norms."""
    query, limit = np.eye(4)[0], 16.0
    key, others = -0.01 * query, np.tile(-3.9 * query, (3, 1))
    assert norm(query) == 1 and key @ key < limit and np.all((others**2).sum(1) < limit)
    weight = np.exp(key @ query) / (np.exp(key @ query) + np.exp(others @ query).sum())
    bound = (np.log(3 / 4) - np.log(1 - weight)) / (2 * limit) - 1
    assert abs(bound + 0.920) < 5e-4 and weight > 0.9
    cosine = -score(key[None, None].astype(np.float32), query[None].astype(np.float32))[0, 0]
    assert cosine < bound  # the cosine is -1
    return f"cosine {cosine:.3f}, claimed at least {bound:.3f}"


def test_theorem_c3_holds():
    """Theorem C.3: with cos(k*, q) = b > 0 and cos(mean, q) = a < 0, cos(mean, k*) <= 1 + ab - (aa + bb) / 2."""
    rng = np.random.default_rng(12)
    cases = 0
    for d in 2, 3, 8, 64:
        query = rng.standard_normal(d)
        means = rng.standard_normal((40, d)) - 0.3 * query
        keys = rng.standard_normal((400, d)) + 0.3 * query
        a = directions(means) @ query / norm(query)
        b = directions(keys) @ query / norm(query)
        cosine = directions(means) @ directions(keys).T
        measured = -score(np.tile(keys, (40, 1, 1)).astype(np.float32), means.astype(np.float32))
        assert np.abs(measured - cosine).max() < 1e-6
        chosen = (a < 0)[:, None] & (b > 0)[None]
        cases += chosen.sum()
        printed = 1 + np.outer(a, b) - (a * a)[:, None] / 2 - (b * b)[None] / 2
        tight = np.outer(a, b) + np.sqrt(np.outer(1 - a * a, 1 - b * b))
        assert np.all(cosine[chosen] <= tight[chosen] + 1e-12) and np.all(tight <= printed + 1e-12)
        assert np.all(measured[chosen] <= printed[chosen] + 1e-6)
    assert cases >= 20000
    return f"{cases} cases"


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
