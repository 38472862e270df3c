# SPDX-License-Identifier: Apache-2.0
"""Quantised rows against a quantiser in numpy, bit for bit; and each kernel that reads them against the same kernel on
the numbers that they stand for."""
import numpy as np

from kernels import ops, refused, same, variants
from quantiser import FLOATS, expanded, expanded_keys, numbers_of_bytes, packed, packed_keys, turned

DIMS = [2, 6, 14, 16, 18, 32, 40, 64, 66, 80, 96, 98, 128, 130, 192, 256]


def special(rng, dim):
    """Rows with what a quantiser may trip over."""
    x = rng.standard_normal((40, dim)).astype(np.float32)
    x[0], x[1], x[2], x[3] = 0, -0.0, 0.1, -7e-6
    x[4], x[5, 0], x[6, -1], x[7, dim // 2] = 1e6, 1e6, -1e6, 3e38
    x[8, 0], x[9, -1], x[10, 0], x[11] = np.nan, np.inf, -np.inf, np.nan
    x[12], x[13] = np.arange(dim) % 2 * -0.0, 1e-40
    x[14] = np.arange(dim) / 8         # ties between codes
    x[15], x[16] = 65504, np.arange(dim) * -1e5
    x[17:30] *= 10.0 ** rng.integers(-6, 6, (13, 1))
    return x


def forms(dtypes=("q8", "q4", "e4m3", "e5m2")):
    rng = np.random.default_rng(1)
    for dtype in dtypes:
        for dim in DIMS:
            yield rng, dtype, dim


def scaled_forms():
    return forms(("q8", "q4"))


def test_rows_equal_numpy_bit_for_bit():
    for rng, dtype, dim in forms():
        x = special(rng, dim)
        for keys, pack, expand in (False, packed, expanded), (True, packed_keys, expanded_keys):
            rows, numbers = pack(x, dtype), expand(x, dtype)
            for _ in variants():
                got = ops.quantise(x, dtype, keys=keys)
                assert np.array_equal(got.rows, rows), (dtype, dim, keys, np.argwhere(got.rows != rows)[:4])
                assert same(ops.expand(got, keys=keys), numbers), (dtype, dim, keys)


def test_bytes_are_those_of_ofp8():
    """Each byte as a number and back; and halfway between two, and just beside."""
    for dtype, largest, smallest in ("e4m3", 448, 2 ** -9), ("e5m2", 57344, 2 ** -16):
        table = numbers_of_bytes(dtype)
        finite = np.sort(np.abs(table[np.isfinite(table)]))[::2]
        assert finite[-1] == largest and finite[1] == smallest
        halves = ((finite[1:] + finite[:-1]) / 2).astype(np.float32)
        x = np.concatenate([table, finite, halves, np.nextafter(halves, 0), np.nextafter(halves, np.float32(1e9)),
                            np.float32([464, 465, 61440, 61441, 1e38, np.inf, 2e-45, 1e-40])])
        x = np.concatenate([x, -x])
        for _ in variants():
            got = ops.quantise(x[:, None].repeat(16, 1), dtype)
            assert np.array_equal(got.rows, packed(x, dtype)[:, None].repeat(16, 1)), dtype
            every = ops.Quantised(np.arange(256, dtype=np.uint8).reshape(16, 16), dtype, 16)
            assert same(ops.expand(every).ravel(), table)


def test_the_error_is_half_a_code():
    for rng, dtype, dim in scaled_forms():
        x = rng.standard_normal((50, dim)).astype(np.float32)
        spread = np.ptp(x, 1).max() / (255 if dtype == "q8" else 15)
        assert np.abs(ops.expand(ops.quantise(x, dtype)) - x).max() < spread * 0.51 + 3e-3


def test_a_large_channel_leaves_codes_to_the_others():
    for rng, dtype, dim in scaled_forms():
        if dim % 32 or dim < 64:
            continue
        x = rng.standard_normal((50, dim)).astype(np.float32)
        x[:, ::64] += 60
        errors = [np.delete(ops.expand(ops.quantise(x, dtype, keys=keys), keys=keys) - x, np.s_[::64], 1).std() for keys in (True, False)]
        assert errors[0] < errors[1] / 2, (dtype, dim, errors)


def test_an_offset_of_all_channels_does_not_take_the_codes():
    for rng, dtype, dim in scaled_forms():
        if dim % 64 == 0:
            x = rng.standard_normal((50, dim)).astype(np.float32)
            near, far = ((ops.expand(ops.quantise(it, dtype, keys=True), keys=True) - it).std() for it in (x, x + 4))
            assert far < near * 6, (dtype, dim, near, far)


def test_zero_bytes_are_zeros():
    for _, dtype, dim in forms():
        for keys in False, True:
            rows = ops.quantise(np.ones((3, dim), np.float32), dtype)
            rows.rows[:] = 0
            assert not ops.expand(rows, keys=keys).any()


def test_sizes():
    for dtype, dim, row in ("q8", 64, 68), ("q8", 128, 136), ("q4", 64, 36), ("q4", 128, 72), ("q8", 80, 88), \
            ("q4", 80, 48), ("q4", 2, 5), ("e4m3", 80, 80), ("e5m2", 7, 7):
        assert ops.quantise(np.ones((1, dim), np.float32), dtype).rows.shape == (1, row)


def test_refusals():
    x = np.ones((2, 64), np.float32)
    assert "even" in refused(ops.Quantised, x, "q8", 65)
    assert "q8, q4, e4m3, e5m2" in refused(ops.Quantised, x, "f16", 64)
    assert "rows of 68 bytes" in refused(ops.expand, ops.Quantised(np.zeros((2, 64), np.uint8), "q8", 64))
    assert "rows of 36 bytes" in refused(ops.expand, ops.Quantised(x, "q4", 64))
    assert "dtype must be one of" in refused(ops.quantise, x, "i8")


# ---- kernels ---------------------------------------------------------------------------------------------------------


POOL, ALL = np.s_[:, 0], np.s_[:]       # keys among rows [blocks or layers, 2 (K, V), ...], and all of them


def any_rows(rng, shape, dtype, keys=None):
    """Quantised rows, and the numbers that they stand for. keys: an index of those that are keys."""
    x = rng.standard_normal((int(np.prod(shape[:-1])), shape[-1])).astype(np.float32)
    rows, numbers = packed(x, dtype).reshape(*shape[:-1], -1), expanded(x, dtype).reshape(shape)
    if keys is not None:
        rows[keys] = packed_keys(x, dtype).reshape(rows.shape)[keys]
        numbers[keys] = expanded_keys(x, dtype).reshape(shape)[keys]
    return ops.Quantised(rows, dtype, shape[-1]), numbers


def of_each(rng, dtype, shape, call, near, keys=None):
    """call(rows) is near call(numbers), and has the same bits in all variants."""
    rows, numbers = any_rows(rng, shape, dtype, keys)
    first = None
    for _ in variants():
        got, want = (np.asarray(call(it), np.float64) for it in (rows, numbers))
        assert np.abs(got - want).max() <= near, (dtype, shape, np.abs(got - want).max())
        assert first is None or same(got, first), (dtype, shape)
        first = got


def test_attention():
    for rng, dtype, dim in forms():
        for queries, group in (1, 1), (1, 4), (5, 3), (70, 2):
            heads, size = int(rng.integers(1, 3)), int(rng.choice([1, 5, 16]))
            tokens = int(rng.integers(queries, queries + 90))
            table = rng.permutation(-(-tokens // size) + 2)[:-(-tokens // size)]
            q = rng.standard_normal((queries, heads * group, dim)).astype(np.float32)
            for part in range(3):
                of_each(rng, dtype, (len(table) + 2, 2, heads, size, dim),
                        lambda pool, p=part: ops.attention(q, pool, table, tokens=tokens)[p], 2e-5 * queries * group, POOL)


def test_nan_keys_and_values_do_not_spread():
    q, x = np.ones((1, 1, 64), np.float32), np.ones((4 * 16, 64), np.float32)
    x[3, 5] = np.nan        # the key of token 3 of block 0
    for dtype in "q8", "q4", "e4m3", "e5m2":
        rows = packed(x, dtype).reshape(2, 2, 1, 16, -1)
        rows[POOL] = packed_keys(x, dtype).reshape(rows.shape)[POOL]
        pool = ops.Quantised(rows, dtype, 64)
        for _ in variants():
            assert np.isnan(ops.attention(q, pool, [0])[0]).all()
            assert (ops.attention(q, pool, [1])[0] == 1).all()


def test_keydiff():
    for rng, dtype, dim in forms():
        anchor = rng.standard_normal((2, dim)).astype(np.float32)
        of_each(rng, dtype, (2, 45, dim), lambda k: ops.keydiff_anchor(k)[0], 3e-5, ALL)
        of_each(rng, dtype, (2, 45, dim), lambda k: ops.keydiff_scores(k, anchor), 3e-6, ALL)


def test_keydiff_ignores_keys_that_are_not_finite():
    for rng, dtype, dim in forms():
        x = special(rng, dim)
        for _ in variants():
            keys = ops.Quantised(packed_keys(x, dtype)[None], dtype, dim)
            found = ops.keydiff_scores(keys, np.ones((1, dim), np.float32))
            k = expanded_keys(x, dtype)
            squares = ((k if dtype in FLOATS else turned(k)) ** 2).sum(1)
            assert np.array_equal(np.isinf(found[0]), ~np.isfinite(squares) | (squares == 0))


def test_memshare():
    for rng, dtype, dim in forms():
        other = any_rows(rng, (2, 2, 2, 5, dim), dtype, POOL)
        for metric in "fro_norm", "mean_l2", "relative":
            for how in {}, {"delta": 9}, {"delta": 9, "frequencies": np.ones(max(dim // 5, 1))}:
                of_each(rng, dtype, (2, 2, 2, 5, dim), lambda a, m=metric, h=how: ops.memshare_distance(
                    a, other[isinstance(a, np.ndarray)], metric=m, **h), 3e-5, POOL)
        of_each(rng, dtype, (2, 2, 2, 5, dim), ops.memshare_norms, 2e-3, POOL)


def test_hshare():
    for rng, dtype, dim in forms():
        q = rng.standard_normal((33, 2, dim)).astype(np.float32)
        of_each(rng, dtype, (33, dim), lambda k: ops.hshare_weights(q, k), 2e-3, ALL)
        for n in {min(dim, 32), max(dim // 3, 1)}:
            channels = np.sort(rng.permutation(dim)[:n])
            of_each(rng, dtype, (50, dim), lambda k, c=channels: ops.hshare_labels(k, c), 0, ALL)


def test_bicache():
    for rng, dtype, dim in forms():
        for shape in (2, 7, dim), (1, 1, dim):
            others = [any_rows(rng, shape, dtype) for _ in range(3)]
            of_each(rng, dtype, shape, lambda k: ops.bicache_similarity(
                k, *(it[isinstance(k, np.ndarray)] for it in others)), 1e-6)


def test_sketch_of_quantised_vectors():
    for rng, dtype, dim in forms():
        places = ops.sketch_places(np.arange(20, dtype=np.uint64), 3, 8)

        def insert(x):
            cells = np.zeros((3, 8, x.shape[-1]), np.float32)
            ops.sketch_insert(cells, places, x)
            return cells
        of_each(rng, dtype, (20, dim), insert, 1e-5)


# ---- blocks ----------------------------------------------------------------------------------------------------------


def test_tokens_written_one_by_one_equal_those_written_at_once():
    for rng, dtype, dim in forms():
        x = rng.standard_normal((16, dim)).astype(np.float32)
        for keys in False, True:
            at_once = ops.quantise(x, dtype, keys=keys).rows
            for token in range(16):
                assert np.array_equal(ops.quantise(x[token:token + 1], dtype, keys=keys).rows[0], at_once[token])


def test_strided_rows_are_read_in_place():
    rng = np.random.default_rng(2)
    for dtype in "q8", "q4", "e4m3", "e5m2":
        rows, numbers = any_rows(rng, (4, 16, 3, 64), dtype, ALL)    # [blocks, tokens, heads, dim]
        view = ops.Quantised(rows.rows[2].swapaxes(0, 1), dtype, 64)
        assert np.abs(ops.keydiff_anchor(view)[0] - ops.keydiff_anchor(numbers[2].swapaxes(0, 1).copy())[0]).max() < 1e-5
        assert np.array_equal(ops.expand(view, keys=True), numbers[2].swapaxes(0, 1))
