# SPDX-License-Identifier: Apache-2.0
"""The k best, against sorting."""
import numpy as np

from kernels import ops, refused, variants


def topk_oracle(scores, k, larger):
    out = []
    for row in scores:
        order = sorted(range(len(row)), key=lambda i: (-np.inf if np.isnan(row[i]) else row[i],
                                                       not np.isnan(row[i]), i if larger else -i), reverse=True)
        out.append(sorted(order[:k]))
    return np.array(out, np.uint32).reshape(len(scores), min(k, scores.shape[1]))


def test_topk_equals_sorting():
    rng = np.random.default_rng(1)
    for n in 1, 2, 15, 16, 17, 100, 1000:
        for k in 1, 2, n // 3, n - 1, n, n + 5:
            scores = rng.standard_normal((3, n)).astype(np.float32)
            for variant in variants():
                got = ops.topk(scores, k)
                assert np.array_equal(got, topk_oracle(scores, k, False)), (n, k, variant)


def test_topk_ties_are_defined():
    rng = np.random.default_rng(2)
    for n, k in (16, 5), (100, 33), (257, 128):
        for scores in (rng.integers(-2, 3, (4, n)), np.zeros((2, n)), np.where(rng.random((2, n)) < 0.5, 0.0, -0.0)):
            scores = scores.astype(np.float32)
            for variant in variants():
                for tie in "lower", "larger":
                    got = ops.topk(scores, k, later=tie == "larger")
                    assert np.array_equal(got, topk_oracle(scores, k, tie == "larger")), (n, k, tie, variant)


def test_topk_takes_no_nan_before_a_number():
    scores = np.array([[np.nan, -np.inf, 1, np.nan, np.inf, -3e38, -np.nan]], np.float32)
    for k, want in (1, [4]), (2, [2, 4]), (3, [2, 4, 5]), (4, [1, 2, 4, 5]), (5, [0, 1, 2, 4, 5]):
        assert ops.topk(scores, k).tolist() == [want]
    assert ops.topk(scores, 5, later=True).tolist() == [[1, 2, 4, 5, 6]]


def test_mistakes_are_refused():
    scores = np.zeros((2, 5), np.float32)
    assert "k must be 0 or more" in refused(ops.topk, scores, -1)
    assert "[rows, n]" in refused(ops.topk, scores[0], 1)
    assert "not float64" in refused(ops.topk, scores.astype(np.float64), 1)
    assert "wrong byte order" in refused(ops.topk, scores.astype(">f4"), 1)
    assert ops.topk(np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)), 1).tolist() == [[2], [2]]
