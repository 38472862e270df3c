# SPDX-License-Identifier: Apache-2.0
"""What all methods do with blocks, against numpy."""
import numpy as np

from kernels import bf16, compute, refused, variants, wide


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
                got = compute("block.topk", scores, k=k, variant=variant)
                assert np.array_equal(got, topk_oracle(scores, k, False)), (n, k, variant)


def test_topk_ties_are_defined():
    rng = np.random.default_rng(2)
    for n, k in (16, 5), (100, 33), (257, 128):
        for scores in (rng.integers(-2, 3, (4, n)), np.zeros((2, n)), np.where(rng.random((2, n)) < 0.5, 0.0, -0.0)):
            scores = scores.astype(np.float32)
            for variant in variants():
                for tie in "lower", "larger":
                    got = compute("block.topk", scores, k=k, tie=tie, variant=variant)
                    assert np.array_equal(got, topk_oracle(scores, k, tie == "larger")), (n, k, tie, variant)


def test_topk_takes_no_nan_before_a_number():
    scores = np.array([[np.nan, -np.inf, 1, np.nan, np.inf, -3e38, -np.nan]], np.float32)
    for k, want in (1, [4]), (2, [2, 4]), (3, [2, 4, 5]), (4, [1, 2, 4, 5]), (5, [0, 1, 2, 4, 5]):
        assert compute("block.topk", scores, k=k).tolist() == [want]
    assert compute("block.topk", scores, k=5, tie="larger").tolist() == [[1, 2, 4, 5, 6]]


def test_gather_and_scatter_are_each_others_inverse():
    rng = np.random.default_rng(3)
    for width, dtype in (1, np.uint8), (63, np.uint8), (64, np.float32), (80 * 17, np.float16), (3, np.int64):
        pool = rng.integers(0, 100, (20, width)).astype(dtype)
        table = rng.permutation(20)[:13].astype(np.int32)
        table[5] = -1
        for variant in variants():
            rows = compute("block.gather", pool, table, variant=variant)
            assert np.array_equal(rows, np.where((table < 0)[:, None], 0, pool[table]))
            empty = np.zeros_like(pool)
            back = compute("block.scatter", empty, table, rows, variant=variant)
            kept = table[table >= 0]
            empty[kept] = pool[kept]
            assert np.array_equal(back, empty)
    large = rng.integers(0, 1 << 30, (40, 40000)).astype(np.int32)  # 6.4 MB: past the caches
    table = rng.permutation(40).astype(np.int32)
    for variant in variants():
        assert np.array_equal(compute("block.gather", large, table, variant=variant), large[table])


def test_compaction_keeps_each_heads_tokens():
    rng = np.random.default_rng(4)
    for dim in 1, 3, 17, 80, 127, 128:
        pool = rng.standard_normal((6, 3, 4, dim)).astype(np.float16)
        table = np.array([4, 0, 5], np.int32)
        sequence = pool[table].transpose(1, 0, 2, 3).reshape(3, 12, dim)
        for kept in 0, 1, 5, 12:
            index = np.array([np.sort(rng.permutation(12)[:kept]) for _ in range(3)], np.uint32).reshape(3, kept)
            want = np.array([sequence[h][index[h]] for h in range(3)]).reshape(3, kept, dim)
            for variant in variants():
                assert np.array_equal(compute("block.compact", pool, table, index, variant=variant), want)


def pack_oracle(rows, group):
    """Codes [n, dim], least and step [n, groups] as numbers."""
    n, dim = rows.shape
    group = group or dim
    codes, least, step = np.zeros((n, dim)), [], []
    for at in range(0, dim, group):
        part = rows[:, at : at + group].astype(np.float32)
        low = part.min(1).astype(np.float16).astype(np.float32)
        width = ((part.max(1) - low) * np.float32(1 / 15)).astype(np.float16).astype(np.float32)
        inverse = np.where(width > 0, 1 / np.where(width > 0, width, 1), 0).astype(np.float32)
        codes[:, at : at + group] = np.clip(np.rint((part - low[:, None]) * inverse[:, None]), 0, 15)
        least.append(low)
        step.append(width)
    return codes, np.array(least).T, np.array(step).T


def test_four_bits_equal_the_definition():
    rng = np.random.default_rng(6)
    for dim, group in (1, 0), (2, 32), (3, 2), (17, 16), (80, 32), (80, 0), (127, 32), (128, 32), (128, 16), (256, 64):
        rows = (rng.standard_normal((37, dim)) * np.exp(rng.standard_normal((37, 1)))).astype(np.float32)
        rows[5] = 3.25
        for cast, narrow in (np.float32, False), (np.float16, False), (bf16, True):
            given = cast(rows)
            seen = wide(given) if narrow else given.astype(np.float32)
            codes, least, step = pack_oracle(seen, group)
            want = least.repeat(group or dim, 1)[:, :dim] + codes * step.repeat(group or dim, 1)[:, :dim]
            for variant in variants():
                packed = compute("block.pack_4", given, group=group, bf16=narrow, variant=variant)
                assert packed.shape == (37, (dim + 1) // 2 + 4 * least.shape[1])
                pairs = np.stack([packed[:, : (dim + 1) // 2] & 15, packed[:, : (dim + 1) // 2] >> 4], 2)
                assert np.array_equal(pairs.reshape(37, -1)[:, :dim], codes)
                back = compute("block.unpack_4", packed, dim=dim, group=group, variant=variant)
                assert np.allclose(back, want, rtol=1e-6, atol=1e-6)
                half = 0.5 * step.repeat(group or dim, 1)[:, :dim] + np.abs(seen) * 2e-3 + 1e-6
                assert np.all(np.abs(back - seen) <= half)


def test_four_bits_survive_what_is_not_a_number():
    rows = np.linspace(-1, 1, 64, dtype=np.float32)[None].repeat(5, 0)
    rows[0, 3], rows[1, 40], rows[2, 5], rows[3], rows[4] = np.nan, np.inf, -np.inf, np.nan, 1e30
    for variant in variants():
        back = compute("block.unpack_4", compute("block.pack_4", rows, variant=variant), dim=64, variant=variant)
        assert np.all(np.isfinite(back)) and np.all(np.abs(back) <= 65505)
        assert np.abs(np.delete(back[0] - rows[0], 3)).max() < 0.04 and back[0, 3] == -1.0
        assert back[1, 40] > 65000 and back[2, 5] == -65504 and np.all(back[3] == 0) and np.all(back[4] == 65504)


def test_mistakes_are_refused_in_one_line():
    scores = np.zeros((2, 5), np.float32)
    pool = np.zeros((4, 3), np.float32)
    assert "wants --param k=" in refused("block.topk", scores)
    assert "whole number" in refused("block.topk", scores, k=-1)
    assert "lower|larger" in refused("block.topk", scores, k=1, tie="any")
    assert "no parameter" in refused("block.topk", scores, k=1, x=2)
    assert "shape" in refused("block.topk", scores[0], k=1)
    assert "cannot be float64" in refused("block.topk", scores.astype(np.float64), k=1)
    assert "did you mean" in refused("block.topj", scores, k=1)
    assert "1 to 1 arrays" in refused("block.topk", scores, scores, k=1)
    assert "not in the pool" in refused("block.gather", pool, np.array([4], np.int32))
    assert '"width" is 3' in refused("block.scatter", pool, np.array([1], np.int32), np.zeros((1, 4), np.float32))
    assert "even" in refused("block.pack_4", scores, group=3)
    assert "bytes" in refused("block.unpack_4", np.zeros((2, 9), np.uint8), dim=8)
    assert "Fortran" in fortran_refused()


def fortran_refused():
    import kernels
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        np.save(f"{folder}/a.npy", np.asfortranarray(np.zeros((3, 4), np.float32)))
        return kernels.run(["compute", "block.topk", f"{folder}/a.npy", "--param", "k=1"]).stderr
