# SPDX-License-Identifier: Apache-2.0
"""kvd.Batch: attention of several requests on a GPU, against its definition. tests/client/gpu/test-batch.c has the methods."""

from __future__ import annotations

import ctypes
import sys

from common import DIM, HEADS, LAYERS, TOKENS, kvd, main, np, raises
from test_attend import QUERIES, SCALE, expected

WIDTH = QUERIES * DIM


def filled(space: kvd.Space, planes: np.ndarray) -> kvd.Block:
    """A block with these planes, [layers, 2 (K, V), heads, tokens, dim]. Memory of the stand-in driver is host memory."""
    (block,) = space.alloc(1)
    ctypes.memmove(block.data, planes.ctypes.data, planes.nbytes)
    return block


def rows_of(planes: np.ndarray, layer: int, plane: int) -> np.ndarray:
    """[tokens, heads, dim] of blocks one behind the other: [blocks, layers, 2, heads, tokens, dim]"""
    return planes[:, layer, plane].transpose(0, 2, 1, 3).reshape(-1, HEADS, DIM)


def test_requests_with_a_sequence_and_without(space):
    if not np or space.device[0] == 1:
        return
    random = np.random.default_rng(1)
    planes = random.standard_normal((4, LAYERS, 2, HEADS, TOKENS, DIM), dtype="f4")
    first, second, third, fourth = (filled(space, it) for it in planes)
    alone, behind = kvd.Table(space), kvd.Table(space)
    assert alone.extend(first, [first.id, second.id]) and behind.extend(fourth, [fourth.id])
    with space.sequence(4) as sequence, space.sequence(4) as empty:
        sequence.append([third], list(range(1, TOKENS + 1)))
        reader = kvd.Reader(sequence, QUERIES, SCALE)
        batch = kvd.Batch(space, QUERIES, SCALE)
        for after in (sequence, reader):
            reader.begin(8, 3)
            batch.begin([kvd.Request(alone, 20, 1), kvd.Request(alone, 4, 1, empty), kvd.Request(behind, 5, 3, after)])
            for layer in range(LAYERS):
                q, out = random.standard_normal((5, QUERIES, DIM), dtype="f4"), np.full((5, QUERIES, DIM), np.nan, "f4")
                batch.attend(layer, q.ctypes.data, WIDTH, out.ctypes.data, WIDTH)
                finish(space)
                k, v = (rows_of(planes[:2], layer, plane) for plane in (0, 1))
                assert np.allclose(out[:1], expected(q[:1], k, v, 20), atol=1e-5)
                assert np.allclose(out[1:2], expected(q[1:2], k, v, 4), atol=1e-5)
                k, v = (rows_of(planes[2:], layer, plane) for plane in (0, 1))
                assert np.allclose(out[2:], expected(q[2:], k, v, TOKENS + 5), atol=1e-5)
            batch.end()
            reader.end()
        reader.close()
        batch.close()


def finish(space: kvd.Space) -> None:
    """Wait for the legacy default stream."""
    driver, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    assert not driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), space.device[1])
    assert not driver.cuCtxPushCurrent_v2(context) and not driver.cuCtxSynchronize()
    assert not driver.cuCtxPopCurrent_v2(ctypes.byref(context)) and not driver.cuDevicePrimaryCtxRelease_v2(space.device[1])


def test_what_is_no_batch(space):
    if space.device[0] == 1:
        with raises(kvd.Invalid, "not on a GPU"):
            kvd.Batch(space, QUERIES, SCALE)
        return
    with raises(ValueError, "dtype"):
        kvd.Batch(space, QUERIES, SCALE, dtype="f64")
    with raises(kvd.Invalid, "f32, f16 or bf16"):
        kvd.Batch(space, QUERIES, SCALE, dtype="e4m3")
    batch = kvd.Batch(space, QUERIES, SCALE)
    with raises(kvd.Invalid, "no requests"):
        batch.begin([])
    with raises(kvd.Invalid, "no step"):
        batch.attend(0, 0, WIDTH, 0, WIDTH)
    with raises(ValueError, "does not fit"):
        batch.attend(0, 0, WIDTH - 1, 0, WIDTH)
    batch.close()
    batch.close()
    with raises(kvd.Closed, "this batch"):
        batch.end()


if __name__ == "__main__":
    sys.exit(main(globals()))
