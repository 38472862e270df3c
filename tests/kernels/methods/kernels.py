# SPDX-License-Identifier: Apache-2.0
"""Helpers shared by the tests of kvd.ops.

bf16(x) converts an array to bfloat16, which numpy lacks: as "V2", which kvd.ops accepts. wide(x) converts it back.
If a test returns a text, it is printed.
"""
import numpy as np
from kvd import ops


def variants():
    """Every variant that this processor runs; each is in use until the next one."""
    for name in ops.variants():
        ops.use(name)
        yield name
    ops.use(None)


def refused(function, *arrays, **rest):
    """The message with which an operation refuses these arguments; it must be one line."""
    try:
        function(*arrays, **rest)
    except (TypeError, ValueError) as why:
        assert "\n" not in str(why)
        return str(why)
    raise AssertionError(f"{function.__name__} takes what it should refuse")


def bf16(x):
    """Rounds to nearest, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), (bits >> 16) | 0x40, rounded).astype(np.uint16).view("V2")


def wide(x):
    """Converts bfloat16, float16 or float32 to float32."""
    return (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32) if x.dtype.kind == "V" else x.astype(np.float32)


def same(a, b):
    """Equal bytes, where any NaN equals any other."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype.kind == "f":
        signs = np.array_equal(np.signbit(a)[a == 0], np.signbit(b)[b == 0])
        return bool(np.array_equal(a, b, equal_nan=True) and signs)
    return bool(np.array_equal(a, b))
