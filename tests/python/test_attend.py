# SPDX-License-Identifier: Apache-2.0
"""kvd.Table: attention over a pinned prefix and blocks that are being filled, against its definition."""

from __future__ import annotations

import sys

from common import DIM, HEADS, LAYERS, TOKENS, chain, kvd, main, np, raises

QUERIES = 2 * HEADS
SCALE = 0.3


def expected(q, k, v, first, window=1000, cap=0, sinks=(-np.inf,) * QUERIES if np else None):
    """[n, queries, dim]"""
    out = np.empty_like(q)
    for i, rows in enumerate(q):
        for head, row in enumerate(rows):
            end = first + i + 1
            keys, values = (it[max(0, end - window):end, head // 2].astype("f8") for it in (k, v))
            scores = SCALE * keys @ row
            weights = np.exp(cap * np.tanh(scores / cap) if cap else scores)
            out[i, head] = weights @ values / (weights.sum() + np.exp(sinks[head]))
    return out


def attend(table, layer, q, first, **form):
    out = np.full_like(q, np.nan)
    table.attend(layer, first, len(q), QUERIES, SCALE, q.ctypes.data, QUERIES * DIM, out.ctypes.data, QUERIES * DIM,
                 **form)
    return out


def test_prefix_and_new_blocks(space):
    if not np:
        return
    n = 3 * TOKENS - 5
    r = np.random.default_rng(1)
    k, v = r.standard_normal((2, LAYERS, n, HEADS, DIM), dtype="f4")
    q = r.standard_normal((n, QUERIES, DIM), dtype="f4")
    pin, first = kvd.Pin(space), space.alloc(2)
    table = kvd.Table(space)
    assert len(table) == 0 and table.extend(first[0], [block.id for block in first])
    for layer in range(LAYERS):
        table.write(layer, 0, 2 * TOKENS, k[layer].ctypes.data, v[layer].ctypes.data, HEADS * DIM)
        assert np.allclose(attend(table, layer, q[:7], 0), expected(q[:7], k[layer], v[layer], 0), atol=1e-5)
    table.replace(0, pin.seal(first, chain(400, 2)))
    more = space.alloc(1)
    table = kvd.Table(space)
    assert table.extend(pin, pin.blocks) and table.extend(more[0], [more[0].id])
    assert table.blocks == [*pin.blocks, more[0].id] and len(table) == 3
    for layer in range(LAYERS):
        at = 2 * TOKENS
        table.write(layer, at, n - at, k[layer, at:].ctypes.data, v[layer, at:].ctypes.data, HEADS * DIM)
        assert np.allclose(attend(table, layer, q[at:], at), expected(q[at:], k[layer], v[layer], at), atol=1e-5)
        sinks = r.standard_normal(QUERIES, dtype="f4")
        got = attend(table, layer, q[at:], at, window=9, cap=2.0, sinks=sinks.ctypes.data)
        assert np.allclose(got, expected(q[at:], k[layer], v[layer], at, 9, 2.0, sinks), atol=1e-5)
        with raises(kvd.Invalid, "not being filled"):
            table.write(layer, 0, 1, k.ctypes.data, v.ctypes.data, HEADS * DIM)
    with raises(kvd.Invalid, "soft cap"):
        attend(table, 0, q[:1], 0, cap=-1.0)
    with raises(kvd.Invalid, "table of 3 blocks"):
        attend(table, 0, q, 2 * TOKENS)
    space.free(more)
    pin.release()


def test_a_table_grows(space):
    blocks = space.alloc(100)
    table = kvd.Table(space)
    for block in blocks:
        assert table.extend(block, [block.id])
    assert table.blocks == [block.id for block in blocks]
    assert table.base == blocks[0].data - blocks[0].id * space.block_bytes
    space.free(blocks)


if __name__ == "__main__":
    sys.exit(main(globals()))
