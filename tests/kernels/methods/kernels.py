# SPDX-License-Identifier: Apache-2.0
"""What the tests of kvd.ops share.

bf16(x) makes bfloat16 of an array, which numpy has not: "V2", as kvd.ops takes them; wide(x) reads them.
A test that returns a text has it printed.
"""
import numpy as np
from kvd import ops


def variants():
    """Each that this processor runs, in use until the next."""
    for name in ops.variants():
        ops.use(name)
        yield name
    ops.use(None)


def refused(function, *arrays, **rest):
    """Why an operation does not take these arguments, in one line."""
    try:
        function(*arrays, **rest)
    except (TypeError, ValueError) as why:
        assert "\n" not in str(why)
        return str(why)
    raise AssertionError(f"{function.__name__} takes what it should refuse")


def bf16(x):
    """To nearest, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), (bits >> 16) | 0x40, rounded).astype(np.uint16).view("V2")


def wide(x):
    """Back to float32; float32 and float16 as they are."""
    return (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32) if x.dtype.kind == "V" else x.astype(np.float32)


def same(a, b):
    """Equal bytes, where any NaN equals any other."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype.kind == "f":
        signs = np.array_equal(np.signbit(a)[a == 0], np.signbit(b)[b == 0])
        return bool(np.array_equal(a, b, equal_nan=True) and signs)
    return bool(np.array_equal(a, b))
