# SPDX-License-Identifier: Apache-2.0
"""Spaces of q8, q4, e4m3 and e5m2 with a daemon: what is written is what numpy quantises, block by block and token by token;
attention and the methods read it; processes share it.

tests/kernels/methods/test_quantised.py compares kvd.ops with numpy, bit for bit.
"""

from __future__ import annotations

import ctypes
import sys
import tempfile

from common import HEADS, LAYERS, ROOT, TOKENS, chain, child, daemon, instance, kvd, main, np, options, raises, torch, until

if not np:
    print("skipped: numpy is not installed")
    sys.exit(77)

sys.path.insert(0, str(ROOT / "tests/kernels/methods"))
from kvd import ops     # noqa: E402  (needs numpy)
from quantiser import expanded, expanded_keys, packed, packed_keys     # noqa: E402  (needs the path above)

DIM, QUERIES = 80, 2 * HEADS


def geometry(dtype, order="hnd", **more):
    return kvd.Geometry(**dict(layers=LAYERS, kv_heads=HEADS, head_dim=DIM, vocab=50000, dtype=dtype, order=order) | more)


def spaces():
    """One of each kind, in daemons of their own."""
    for dtype in "q8", "q4", "e4m3", "e5m2":
        for order in "hnd", "nhd":
            with daemon() as path, kvd.connect(path) as there, there.space("quantised", geometry(dtype, order)) as it:
                yield it


def tokens_of(n, seed=1):
    """Keys and values [layers, 2, tokens, heads, dim]."""
    return np.random.default_rng(seed).standard_normal((LAYERS, 2, n, HEADS, DIM)).astype(np.float32)


def rows_of(x, dtype):
    """Rows of keys and values [layers, 2, ...]."""
    rows = packed(x.reshape(-1, DIM), dtype).reshape(*x.shape[:-1], -1)
    rows[:, 0] = packed_keys(x[:, 0].reshape(-1, DIM), dtype).reshape(rows[:, 0].shape)
    return rows


def numbers_of(x, dtype):
    """What those stand for."""
    numbers = expanded(x.reshape(-1, DIM), dtype).reshape(x.shape)
    numbers[:, 0] = expanded_keys(x[:, 0].reshape(-1, DIM), dtype).reshape(numbers[:, 0].shape)
    return numbers


def write(table, x, first, n):
    for layer in range(LAYERS):
        k, v = (np.ascontiguousarray(it[first:first + n]) for it in x[layer])
        table.write(layer, first, n, k.ctypes.data, v.ctypes.data, HEADS * DIM)


def stored(block, it):
    """[layers, 2, tokens, heads, bytes of a row] of a block."""
    g, data = it.geometry, np.frombuffer(block.memoryview(), np.uint8)
    planes = data[:row_of(g.dtype) * LAYERS * 2 * HEADS * TOKENS]
    if g.dtype in ("q8", "q4"):
        assert np.array_equal(np.from_dlpack(block).ravel(), planes)
    if g.order == "nhd":
        return planes.reshape(LAYERS, 2, TOKENS, HEADS, -1)
    return planes.reshape(LAYERS, 2, HEADS, TOKENS, -1).swapaxes(2, 3)


def row_of(dtype):
    return ops.quantise(np.zeros((1, DIM), np.float32), dtype).rows.size


def new_table(it, n):
    blocks, table = it.alloc(n), kvd.Table(it)
    assert table.extend(blocks[0], [block.id for block in blocks])
    return blocks, table


def test_sizes(_space):
    for dim in 64, 128:
        assert geometry("f16", head_dim=dim).block_bytes == 2 * geometry("e4m3", head_dim=dim).block_bytes
        for dtype, bits in ("q8", 8), ("q4", 4):
            sixteen, few = (geometry(it, head_dim=dim).block_bytes for it in ("f16", dtype))
            assert few == LAYERS * 2 * HEADS * TOKENS * (dim * bits // 8 + dim // 64 * 4)
            assert sixteen / few > {8: 1.88, 4: 3.55}[bits]
    for name, dtype in ("int4", "q4"), ("fp8", "e4m3"), ("float8_e4m3fn", "e4m3"), ("fp8_e5m2", "e5m2"):
        assert geometry(name).dtype == dtype
    if torch:
        assert geometry(torch.float8_e4m3fn).dtype == "e4m3" and geometry(torch.float8_e5m2).dtype == "e5m2"
    with daemon() as path, kvd.connect(path) as there:
        for bad in dict(head_dim=63), dict(state_width=4):
            with raises(kvd.Invalid, next(iter(bad))):
                there.space("bad", geometry("q4", **bad))


def test_blocks_that_fill_token_by_token_are_those_written_at_once(_space):
    x = tokens_of(2 * TOKENS)
    for it in spaces():
        want = rows_of(x, it.geometry.dtype)
        (a, b), table = new_table(it, 2)
        write(table, x, 0, TOKENS)
        for at in range(TOKENS, 2 * TOKENS):
            write(table, x, at, 1)
            assert np.array_equal(stored(b, it)[:, :, :at + 1 - TOKENS], want[:, :, TOKENS:at + 1])
        assert np.array_equal(stored(a, it), want[:, :, :TOKENS])
        it.free([a, b])


def test_attention(_space):
    n = 2 * TOKENS + 3
    x = tokens_of(n)
    q = np.random.default_rng(2).standard_normal((n, QUERIES, DIM)).astype(np.float32)
    for it in spaces():
        blocks, table = new_table(it, 3)
        write(table, x, 0, n)
        seen = numbers_of(x, it.geometry.dtype).astype(np.float64)
        out = np.full_like(q, np.nan)
        for layer, (k, v) in enumerate(seen):
            table.attend(layer, 0, n, QUERIES, 0.1, q.ctypes.data, QUERIES * DIM, out.ctypes.data, QUERIES * DIM)
            for i in range(n):
                for head in range(QUERIES):
                    weights = np.exp(0.1 * k[:i + 1, head // 2] @ q[i, head])
                    assert np.abs(out[i, head] - weights @ v[:i + 1, head // 2] / weights.sum()).max() < 1e-5
        it.free(blocks)


def entry_rows(it, sequence, i):
    """As stored(), of an entry of a sequence."""
    data = (ctypes.c_uint8 * it.block_bytes).from_address(sequence.entries()[i].data)
    row = row_of(it.geometry.dtype)
    planes = np.frombuffer(data, np.uint8)[:LAYERS * 2 * TOKENS * HEADS * row]
    if it.geometry.order == "nhd":
        return planes.reshape(LAYERS, 2, TOKENS, HEADS, row)
    return planes.reshape(LAYERS, 2, HEADS, TOKENS, row).swapaxes(2, 3)


def sequence_of(it, x, n):
    blocks, table = new_table(it, n)
    write(table, x, 0, n * TOKENS)
    sequence = it.sequence(n + 4)
    assert sequence.append(blocks, chain(1, n)) == n
    return sequence


def test_compaction_moves_rows_as_they_are(_space):
    """By scores of the client, and by KeyDiff's, which kvd.ops finds from the same rows."""
    x, keep = tokens_of(3 * TOKENS), TOKENS + 5
    for it in spaces():
        want = rows_of(x, it.geometry.dtype)
        for given in True, False:
            it.set("keydiff", int(not given))
            sequence = sequence_of(it, x, 3)
            scores = np.random.default_rng(3).standard_normal((LAYERS, HEADS, 3 * TOKENS)).astype(np.float32)
            assert (sequence.compact(0, 3, keep, scores) if given else sequence.compact(0, 3, keep)) == 3
            assert sequence.wait(60) > 0
            for layer in range(LAYERS):
                for head in range(HEADS):
                    if not given:
                        keys = ops.Quantised(want[layer, 0, :, head][None], it.geometry.dtype, DIM)
                        scores[layer, head] = ops.keydiff_scores(keys, ops.keydiff_anchor(keys)[0])[0]
                    kept = np.sort(np.argsort(-scores[layer, head], kind="stable")[:keep])
                    got = np.concatenate([entry_rows(it, sequence, i)[layer, :, :, head] for i in range(2)], 1)[:, :keep]
                    assert np.array_equal(got, want[layer][:, kept, head]), (it.geometry.dtype, given)
            sequence.close()


def test_bounds_are_those_of_the_stored_keys(_space):
    """A query of one dimension needs the block with the largest number there."""
    x = tokens_of(4 * TOKENS)
    for it in spaces():
        with sequence_of(it, x, 4) as sequence:
            reader = kvd.Reader(sequence, QUERIES, 1.0)
            keys = numbers_of(x, it.geometry.dtype)[:, 0].reshape(LAYERS, 4, TOKENS, HEADS, DIM)
            reader.begin(1, 1)
            for d in range(DIM):
                for sign in 1, -1:
                    q = np.zeros((QUERIES, DIM), np.float32)
                    q[:, d] = sign
                    for layer in range(LAYERS):
                        want = (sign * keys[layer, ..., d]).max(1).argmax(0)
                        assert [list(got) for got in reader.select(layer, q.ctypes.data, 1, "bounds")] == want[:, None].tolist()
            reader.close()


def test_torch_reads_numbers_of_8_bits(_space):
    if not torch:
        return
    x = tokens_of(TOKENS)
    for it in spaces():
        name = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}.get(it.geometry.dtype)
        if name:
            with kvd.Pin(it) as pin:
                blocks, table = new_table(it, 1)
                write(table, x, 0, TOKENS)
                planes = torch.from_dlpack(blocks[0])
                assert planes.dtype == name
                want = torch.from_numpy(numbers_of(x, it.geometry.dtype))
                planes = planes.to(torch.float32)
                assert torch.equal(planes.swapaxes(2, 3) if it.geometry.order == "hnd" else planes, want)
                pin.seal(blocks, chain(9, 1))
                assert torch.from_dlpack(pin.view(pin.blocks[0])).dtype == name


SHARE = """
import sys, kvd
sys.path.insert(0, sys.argv[2])
from test_quantised import geometry
from common import chain
import numpy as np
with kvd.connect(sys.argv[1]) as connection, connection.space("shared", geometry("q4")) as it:
    with it.lookup(chain(7, 2)) as pin:
        sys.stdout.write(b"".join(np.asarray(pin.view(i)).tobytes() for i in range(2)).hex())
"""


def test_processes_share_the_bytes(_space):
    x = tokens_of(2 * TOKENS)
    with daemon() as path, kvd.connect(path) as there, there.space("shared", geometry("q4")) as it, kvd.Pin(it) as pin:
        blocks, table = new_table(it, 2)
        write(table, x, 0, 2 * TOKENS)
        pin.seal(blocks, chain(7, 2))
        seen = child(SHARE, path, str(ROOT / "tests/python"))
        assert seen.stdout, seen.stderr
        rows = rows_of(x, "q4").swapaxes(2, 3)      # [layers, 2, heads, tokens, bytes]
        want = b"".join(np.ascontiguousarray(rows[:, :, :, i * TOKENS:(i + 1) * TOKENS]).tobytes() for i in range(2))
        assert bytes.fromhex(seen.stdout) == want
        for other in "q8", "f16", "e4m3":
            with raises(kvd.Error, "dtype"):
                there.space("shared", geometry(other))


def test_results_are_tensors_of_the_caller(_space):
    if not torch:
        return
    with raises(TypeError, "kind 11"):
        ops.keydiff_anchor(torch.zeros(1, 2, DIM).to(torch.float8_e4m3fnuz))
    with raises(TypeError, "kvd.ops.Quantised"):
        ops.keydiff_anchor(np.zeros((1, 2, DIM), "V1"))
    x = torch.randn(2, 9, DIM)
    for dtype, name in (torch.float8_e4m3fn, "e4m3"), (torch.float8_e5m2, "e5m2"):
        short = x.to(dtype)
        bytes_of = ops.quantise(x.view(18, DIM), name).rows.view(2, 9, DIM)
        assert torch.equal(bytes_of, short.view(torch.uint8))
        anchors = [ops.keydiff_anchor(it)[0] for it in (short, ops.Quantised(bytes_of, name, DIM), short.float())]
        assert torch.equal(anchors[0], anchors[1]) and torch.allclose(anchors[1], anchors[2], atol=1e-5)
    rows = ops.quantise(torch.randn(9, DIM), "q4")
    (anchor, *_), plain = ops.keydiff_anchor(ops.Quantised(rows.rows[None], "q4", DIM)), ops.expand(rows)
    assert isinstance(plain, torch.Tensor) and isinstance(anchor, torch.Tensor)


def test_rows_come_back_from_the_file_of_a_killed_daemon(_space):
    def is_on():
        return server.stat("tiers")["tiers"][0]["state"] == "on"

    x, n = tokens_of(4 * TOKENS), 4
    with tempfile.TemporaryDirectory() as folder, instance.Instance(
            *options(), "--set", f"daemon.file={folder}/cache", "--set", "daemon.file_size=16M") as server:
        with kvd.connect(server.socket) as there, there.space("kept", geometry("q4")) as it, kvd.Pin(it) as pin:
            blocks, table = new_table(it, n)
            write(table, x, 0, n * TOKENS)
            pin.seal(blocks, chain(8, n))
            pin.release()
            until(is_on)
            server.kvctl("evict", "kept", "--all", "--to", "file")
            assert it.lookup(chain(8, n)).tokens == 0
        server.kill()
        server.start()
        until(is_on)
        with kvd.connect(server.socket) as there, there.space("kept", geometry("q4")) as it:
            want = rows_of(x, "q4").swapaxes(2, 3)
            with it.find(chain(8, n)) as pin:       # fetches
                assert pin.tokens == n * TOKENS
                for i in range(n):
                    rows = np.ascontiguousarray(want[:, :, :, i * TOKENS:(i + 1) * TOKENS])
                    assert np.asarray(pin.view(i)).tobytes() == rows.tobytes()
        server.check()


if __name__ == "__main__":
    sys.exit(main(globals()))
