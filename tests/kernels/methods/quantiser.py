# SPDX-License-Identifier: Apache-2.0
"""A quantiser in numpy, independent of kvd's kernels: the rows of blocks of dtype q8, q4, e4m3 and e5m2."""
import numpy as np

GROUP = 64
FLOATS = "e4m3", "e5m2"        # numbers of 8 bits, without scales and transform
SIGNS = np.array([-1 if 0x243f6a8885a308d3 >> i & 1 else 1 for i in range(GROUP)], np.float32)


def turned(x):
    """Return the orthonormal Walsh-Hadamard transform, with signs before and after it, of each group of x [rows, dim]. A last
    group that is smaller is split into powers of two."""
    parts, at = [], 0
    while at < x.shape[1]:
        n = min(GROUP, x.shape[1] - at)
        n = 1 << n.bit_length() - 1
        g = x[:, at:at + n].astype(np.float32) * SIGNS[:n]
        for _ in range(n.bit_length() - 1):
            g = np.concatenate([g[:, ::2] + g[:, 1::2], g[:, ::2] - g[:, 1::2]], 1)
        parts.append(g * (np.float32(1) / np.sqrt(np.float32(n))) * SIGNS[:n])
        at += n
    return np.concatenate(parts, 1)


def quantised(x, bits):
    """Codes [rows, dim], scales and leasts [rows, groups] of x [rows, dim]."""
    codes, scales, leasts = [], [], []
    for at in range(0, x.shape[1], GROUP):
        g, most = x[:, at:at + GROUP], np.float32(2 ** bits - 1)
        fine = np.isfinite(g).all(1, keepdims=True)
        g = np.where(fine, g, np.float32(0))
        least = (np.clip(g.min(1, keepdims=True), -65504, 65504) + np.float32(0)).astype(np.float16)
        low = least.astype(np.float32)
        scale = np.clip((g.max(1, keepdims=True) - low) / most, np.float32(2 ** -14), 65504).astype(np.float16)
        codes.append(np.where(fine, np.clip(np.rint((g - low) / scale.astype(np.float32)), 0, most), 0))
        scales.append(np.where(fine, scale, np.float16(0)))
        leasts.append(np.where(fine, least, np.float16(np.nan)))
    return np.concatenate(codes, 1).astype(np.uint8), np.concatenate(scales, 1), np.concatenate(leasts, 1)


def numbers_of_bytes(dtype):
    """The numbers [256] of OFP8: sign, exponent, fraction."""
    exponent, fraction, bias = {"e4m3": (4, 3, 7), "e5m2": (5, 2, 15)}[dtype]
    found = []
    for i in range(128):
        e, f = i >> fraction, i % (1 << fraction)
        found.append(2.0 ** (max(e, 1) - bias) * ((e > 0) + f / (1 << fraction)))
        if dtype == "e4m3" and i == 127:
            found[i] = np.nan
        if dtype == "e5m2" and e == 31:
            found[i] = np.nan if f else np.inf
    return np.array(found + [-it for it in found], np.float32)


def bytes_of(x, dtype):
    """The nearest finite number, or that with an even byte on a tie; 127 for NaN."""
    table = numbers_of_bytes(dtype)[:128].astype(np.float64)
    n = int(np.isfinite(table).sum())
    table, size = table[:n], np.abs(x.astype(np.float64))
    high = np.clip(np.searchsorted(table, size), 1, n - 1)
    below, above = size - table[high - 1], table[high] - size
    byte = np.where((below < above) | (below == above) & (high % 2 == 1), high - 1, high)
    return (np.where(np.isnan(x), 127, byte) | np.where(np.signbit(x), 128, 0)).astype(np.uint8)


def packed(x, dtype):
    """Rows of bytes."""
    if dtype in FLOATS:
        return bytes_of(x, dtype)
    codes, scales, leasts = quantised(x, {"q8": 8, "q4": 4}[dtype])
    if dtype == "q4":
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    ends = np.stack([scales.view(np.uint16), leasts.view(np.uint16)], 2).reshape(len(x), -1)
    return np.concatenate([codes, ends.view(np.uint8)], 1)


def expanded(x, dtype):
    """The numbers again, float32; the product and the sum are rounded once, as float64 does here."""
    if dtype in FLOATS:
        return numbers_of_bytes(dtype)[packed(x, dtype)]
    codes, scales, leasts = quantised(x, {"q8": 8, "q4": 4}[dtype])
    of = np.arange(x.shape[1]) // GROUP
    return (codes * scales[:, of].astype(np.float64) + leasts[:, of].astype(np.float64)).astype(np.float32)


def packed_keys(x, dtype):
    return packed(x if dtype in FLOATS else turned(x), dtype)


def expanded_keys(x, dtype):
    return expanded(x, dtype) if dtype in FLOATS else turned(expanded(turned(x), dtype))
