# SPDX-License-Identifier: Apache-2.0
"""Calls that move no tensors: salts, keys, copies, leases, settings, counters, fingerprints."""

from __future__ import annotations

import signal
import sys
import tempfile
import threading
from array import array
from pathlib import Path
from unittest import mock

from common import (HEADS, LAYERS, TOKENS, VOCAB, chain, child, geometry, gone, kvd, main, np, raises, seal, start, torch,
                    until)


def test_salts_separate_chains(space):
    plain, salted = seal(space, 1, 2), seal(space, 1, 2, salt=7)
    assert not set(plain) & set(salted)
    for salt, ids in ((0, plain), (7, salted), (8, [])):
        assert space.match(chain(1, 2), salt=salt) == len(ids) * TOKENS
        with space.lookup(chain(1, 2), salt=salt) as pin:
            assert pin.blocks == ids
            more = space.alloc(1)
            pin.seal(more, chain(2, 1))     # continues its own chain
    assert space.match(chain(1, 2) + chain(2, 1), salt=7) == space.match(chain(1, 2) + chain(2, 1)) == 3 * TOKENS


def keyed(space) -> kvd.Space:
    return space.daemon.space("keyed", kvd.Geometry.opaque(4096, "objects-1", block_tokens=8))


def test_objects_by_their_keys(space):
    with keyed(space) as other:
        keys = [bytes([i]) * 32 for i in range(4)]
        for key in keys[:3:2]:
            blocks = other.alloc(3)
            other.write(blocks, key * 3 * 128)
            with other.seal_key(key, blocks) as pin:
                assert len(pin) == 3 and pin.blocks == [block.id for block in blocks]
        for given in (keys, b"".join(keys)):
            pins = other.lookup_keys(given, 3)
            assert [bool(pin) for pin in pins] == [True, False, True, False]
            out = bytearray(3 * 4096)
            other.read(pins[2], out)
            assert out == keys[2] * 3 * 128
        assert other.lookup_keys([]) == []
        for wrong in ([b"short"], b"short", [keys[0], b""]):
            with raises(ValueError, "has 32 bytes"):
                other.lookup_keys(wrong)
    with raises(kvd.Invalid):
        space.lookup_keys([bytes(32)])


def test_objects_beside_chains(space):
    wide = space.daemon.space("wide", kvd.Geometry.opaque(4096, "objects-1", block_tokens=32, vocab=1000))
    with wide:
        key = b"\xff" * 32                  # beyond the vocabulary
        with wide.seal_key(key, wide.alloc(2), salt=3) as pin:
            with raises(kvd.Invalid, "object"):
                pin.seal(wide.alloc(1), [1] * 32)
        posted = wide.alloc(2)
        wide.post_key(key, posted, salt=4)
        wide.flush()
        assert all(block.posted for block in posted)
        for salt in range(5):
            (found,) = wide.lookup_keys([key], 2, salt=salt)
            assert bool(found) == (salt in (3, 4)) and found.below == 0, salt
        assert not wide.fetch_key(key, 2, salt=3)   # there is no tier below
        assert wide.fetch_key(key, 2, salt=3).tokens == 2 and wide.fetch_key(key, 2).tokens == 0
        wide.free(posted)
        with raises(ValueError, "has 32 bytes"):
            wide.post_key(b"short", [])


def test_opaque_blocks(space):
    shape = keyed(space).geometry
    assert shape.is_opaque and shape.block_bytes == 4096 and shape.layout == "objects-1"
    with raises(kvd.Mismatch, "layout"):
        space.daemon.space("keyed", kvd.Geometry.opaque(4096, "objects-2", block_tokens=8))
    with raises(ValueError):
        kvd.Geometry.opaque(0, "none")
    assert repr(shape) == "kvd.Geometry(block_tokens=8, layout='objects-1', size=4096)", shape


def test_dtypes_by_any_name(space):
    names = {"f32": ["f32", "float32", "float"], "f16": ["float16", "half"], "bf16": ["bfloat16"], "i8": ["int8"]}
    if np:
        names["f16"] += [np.float16, np.dtype("float16")]
        names["i8"] += [np.int8]
    if torch:
        names["bf16"] += [torch.bfloat16]
        names["f32"] += [torch.float32]
    for name, same in names.items():
        assert {geometry(it).dtype for it in same} == {name}, same


def test_bulk_copies(space):
    size = space.block_bytes
    data = bytes(i % 251 for i in range(4 * size))
    blocks = space.alloc(4)
    space.write(blocks, data)
    with kvd.Pin(space) as pin:
        pin.seal(blocks[::-1], chain(10, 4))
        parts = [data[i * size:(i + 1) * size] for i in (3, 2, 1, 0)]
        outs = [bytearray(4 * size), array("B", bytes(4 * size))]
        outs += [np.zeros(4 * size // 4, dtype="float32")] if np else []
        for out in outs:
            space.read(pin, out)
            assert bytes(memoryview(out).cast("B")) == b"".join(parts)
        if torch:
            out = torch.zeros(4 * size, dtype=torch.uint8)
            space.read(pin, out)
            assert bytes(out.tolist()) == b"".join(parts)
            values = torch.zeros(size // 2, dtype=torch.complex64)
            for view in (values.conj(), values.conj().imag, torch.zeros(2, size // 2, dtype=torch.complex64).T):
                with raises(BufferError):
                    space.write(blocks, view)
                with raises(BufferError):
                    kvd.fingerprint(view)
        with raises(ValueError, f"these blocks have {4 * size} bytes, and the array {size}"):
            space.read(pin, bytearray(size))
        with raises(BufferError):
            space.read(pin, data)       # bytes are not writable
        with raises(kvd.Closed):
            space.write(blocks, data)   # nor are sealed blocks


def test_buffers_of_blocks(space):
    (block,) = space.alloc(1)
    view = block.memoryview()
    assert len(view) == space.block_bytes and not view.readonly
    view[:8] = b"12345678"
    if sys.version_info >= (3, 12):
        assert bytes(memoryview(block)[:8]) == b"12345678"
    with kvd.Pin(space) as pin:
        (id_,) = pin.seal([block], chain(11, 1))
        stored = pin.memoryview(id_)
    assert stored.readonly and bytes(stored[:8]) == b"12345678"
    with raises(kvd.Closed):
        block.memoryview()


def test_memory_is_where_blocks_are(space):
    memory = space.memory()
    blocks = space.alloc(20)
    ids = [block.id for block in blocks]
    assert ids == sorted(ids) and max(ids) < space.memory().mapped <= memory.blocks
    assert [block.data for block in blocks] == [memory.base + id_ * memory.block_bytes for id_ in ids]
    assert memory.block_bytes == space.block_bytes
    with kvd.Pin(space) as pin:
        (id_,) = pin.seal(blocks[:1], chain(15, 1))
        assert pin.address(id_) == memory.sealed + id_ * memory.block_bytes


def test_blocks_are_reserved(space):
    """available() is an estimate, and may be as old as the daemon's last update."""
    def are_taken() -> bool:
        before = space.available()
        assert space.reserve(50) >= 50
        blocks = space.alloc(50)
        left = space.available()
        space.free(blocks)
        assert left > 0 and space.reserve(0) >= 0
        return left <= before - 50
    until(are_taken)


def test_alloc_waits_once_for_a_stopped_daemon(space):
    """It takes the library's stock, and requests the rest only once, which takes 5 s."""
    with tempfile.TemporaryDirectory(prefix="kvd-test-") as folder:
        process = start(folder)
        with kvd.connect(f"{folder}/kvd.sock") as daemon, daemon.space("tensors", geometry()) as other:
            other.free(other.alloc(1))
            process.send_signal(signal.SIGSTOP)
            real, asked = kvd._native.lib.kvd_alloc, []
            with mock.patch.object(kvd._block, "lib", mock.Mock(wraps=kvd._native.lib)) as lib:
                lib.kvd_alloc.side_effect = lambda *arguments: asked.append(0) or real(*arguments)
                with raises(kvd.TimedOut):
                    other.alloc(200)
            assert len(asked) == 1, asked
            stock = other.alloc(1)      # the stock is still there
            process.send_signal(signal.SIGCONT)
            assert len(other.alloc(200)) == 200 and stock
        process.terminate()
        process.wait(60)


TEAM = """
import os, sys, kvd
daemon = kvd.connect(sys.argv[1])
daemon.join(bytes.fromhex(sys.argv[2]))
space = daemon.space("tensors", kvd.Geometry(layers=2, kv_heads=3, head_dim=8, vocab=50000, dtype="f32"))
memory = space.memory()
import ctypes
ctypes.memset(memory.base + int(sys.argv[3]) * memory.block_bytes, 7, memory.block_bytes)
"""


def test_a_team_shares_its_blocks(space):
    """One process allocates and seals, and another one writes."""
    team = bytes(range(1, 17))
    with kvd.connect(space.daemon.path) as daemon:
        daemon.join(team)
        with daemon.space("tensors", geometry()) as other:
            (block,) = other.alloc(1)
            done = child(TEAM, daemon.path, team.hex(), str(block.id))
            assert not done.returncode, done
            with kvd.Pin(other) as pin:
                pin.seal([block], chain(16, 1))
                assert bytes(pin.memoryview(block.id)) == b"\7" * other.block_bytes
        with raises(ValueError, "16 bytes"):
            daemon.join(b"short")
        with raises(kvd.Invalid):
            daemon.join(bytes(16))
        with raises(kvd.Busy):
            daemon.join(team[::-1])


def test_leases(space):
    with space.daemon.space("whole", geometry(), kind="bidirectional") as other:
        tokens = chain(12, 1)
        with other.lease(tokens) as lease:
            assert lease and "ours" in repr(lease)
            with kvd.connect(space.daemon.path) as another, \
                    another.space("whole", geometry(), kind="bidirectional") as theirs:
                with raises(kvd.Busy):
                    theirs.lease(tokens, timeout=0.01)
                told = []
                waiter = threading.Thread(target=lambda: told.append(theirs.lease(tokens, timeout=60)))
                waiter.start()
                with kvd.Pin(other) as pin:
                    pin.seal(other.alloc(1), tokens)
                lease.end()
                waiter.join()
                assert not told[0]
                assert theirs.match(tokens) == TOKENS
        lease.end()
        with raises(kvd.Invalid):
            space.lease(tokens)


def test_sessions(space):
    """What a session pins stays when the pool is filled; the pins that named it are released."""
    pinned, other = chain(713, 4), chain(714, 4)
    seal(space, 713, 4)
    seal(space, 714, 4)
    assert not space.session("agent", chain(715, 1))
    assert space.session("agent", pinned, keep="pinned", ttl=3600)
    pin = space.lookup(other)
    assert space.session("second", [pin, kvd.Pin(space)], keep="high") and not pin and not pin.blocks
    space.end_session("second")
    assert gone(space, other) and space.match(pinned) == len(pinned)
    with raises(kvd.Invalid, "1 to 604800"):
        space.session("agent", pinned, ttl=0)
    with raises(ValueError, "high, pinned"):
        space.session("agent", pinned, keep="always")
    with space.lookup(pinned) as pin, raises(kvd.Invalid):
        space.session("two words", pin)
    space.end_session("agent")
    with raises(kvd.NotFound):
        space.end_session("agent")
    assert gone(space, pinned)


def test_a_pin_that_a_session_names_twice(space):
    """It was released twice, which ended the pin of another lookup."""
    tokens = chain(716, 4)
    seal(space, 716, 4)
    with space.lookup(tokens) as other:
        pin = space.lookup(tokens)
        assert space.session("twice", [pin, pin]) and not pin
        space.end_session("twice")
        assert not gone(space, tokens) and len(other) == 4
    assert gone(space, tokens)


def test_settings(space):
    assert space.setting("keydiff") == 0
    space.set("keydiff", 1)
    assert space.setting("keydiff") == 1
    space.set("keydiff", 0)
    with raises(kvd.Invalid):
        space.setting("keydif")


def test_counters(space):
    before = space.counters()
    seal(space, 13, 2)
    space.lookup(chain(13, 2))
    space.lookup(chain(14, 2))
    after = space.counters()
    assert after.lookups - before.lookups == 2 and after.lookup_hits - before.lookup_hits == 1
    assert after.tokens_asked - before.tokens_asked == 4 * TOKENS
    assert after.tokens_found - before.tokens_found == 2 * TOKENS
    assert after.blocks_sealed - before.blocks_sealed == 2 and after.blocks_duplicate == 0


def heard(follow: kvd.Follow, known: dict) -> dict:
    """Applies what a follower reports to what is known: tokens of each chain's blocks, by salt and number."""
    for it in follow.step():
        if isinstance(it, kvd.Stored):
            assert it.parent in known or not it.parent and it.depth == 0
            known[it.hash] = (it.salt, it.depth, it.tokens)
        elif isinstance(it, kvd.Removed):
            del known[it.hash]
        else:
            known.clear()
    return known


def test_a_follower_knows_what_is_in_the_space(_):
    def told(number: int, n: int, salt: int = 0) -> list:
        return [(salt, i, chain(number, n)[i * TOKENS:][:TOKENS]) for i in range(n)]

    with tempfile.TemporaryDirectory() as folder:
        server = start(folder)
        with kvd.connect(f"{folder}/kvd.sock") as daemon, daemon.space("f", geometry(), max_blocks=64) as space, \
                kvd.connect(f"{folder}/kvd.sock") as another, another.space("f", geometry(), max_blocks=64) as other:
            seal(space, 1, 3)
            follow, known = space.follow(), {}
            assert sorted(heard(follow, known).values()) == told(1, 3)
            seal(other, 1, 5)
            seal(other, 2, 2, salt=9)
            assert sorted(heard(follow, known).values()) == told(1, 5) + told(2, 2, salt=9)
            assert not follow.step()
            while other.match(chain(1, 5)):         # until the first chain was evicted
                seal(other, len(known) + 100, 8)
                heard(follow, known)
            there = {(salt, tokens[0]) for salt, depth, tokens in known.values() if depth == 0}
            assert (0, 1) not in there and len(known) <= 64
            assert all(other.match(chain(number, 8), salt=salt) for salt, number in there)
            server.kill()
            server.wait()
            assert not follow.step() and "ended" not in repr(follow)
            server = start(folder)
            until(lambda: not heard(follow, known) and other.catch_up())
            seal(other, 1, 2)
            assert sorted(heard(follow, known).values()) == told(1, 2)
            follow.end()
            follow.end()
            with raises(kvd.Closed):
                follow.step()
        server.kill()
        server.wait()


def test_blocks_of_a_call_are_of_one_daemon(_):
    """libkvd has blocks of the old daemon in stock: fewer than it takes at a time, or as many. An id names other memory in
    the next one's pool."""
    for stock, n in ((16, 40), (256, 600)):
        with tempfile.TemporaryDirectory() as folder:
            server = start(folder)
            with kvd.connect(f"{folder}/kvd.sock") as daemon, daemon.space("a", geometry()) as space:
                assert space.reserve(stock) >= stock
                server.kill()
                server.wait()
                server = start(folder)
                blocks = space.alloc(n)
                assert len(blocks) == n and len({it._struct.view for it in blocks}) == 1
                with kvd.Pin(space) as pin:
                    assert len(pin.seal(blocks, chain(16, n))) == n
                assert space.match(chain(16, n)) == n * TOKENS
            server.kill()
            server.wait()


def test_blocks_stay_if_an_append_was_not_sent(_):
    """The sequence's daemon is gone, and the blocks are still the caller's."""
    with tempfile.TemporaryDirectory() as folder:
        server = start(folder)
        with kvd.connect(f"{folder}/kvd.sock") as daemon, daemon.space("a", geometry()) as space:
            with space.sequence(8) as sequence:
                first, *blocks = space.alloc(3)
                sequence.append([first], chain(17, 1))
                server.kill()
                server.wait()
                server = start(folder)
                with raises(kvd.ConnectionLost):
                    sequence.cool([0], "drop")
                for _ in range(2):
                    with raises(kvd.Stale):
                        sequence.append(blocks, chain(17, 2))
                    assert all(it.data and not it.sealed for it in blocks)
                space.free(blocks)
        server.kill()
        server.wait()


def test_posted_blocks_are_found(space):
    tokens = chain(15, 5)
    with kvd.Pin(space) as pin:
        blocks = space.alloc(4)
        for i, block in enumerate(blocks[:3]):
            pin.post([block], tokens[i * TOKENS:(i + 1) * TOKENS])
            assert block.posted and not block.sealed and block.data
        space.flush()
        assert space.match(tokens) == 3 * TOKENS and pin.blocks == []
        assert pin.seal(blocks[3:], tokens[3 * TOKENS:4 * TOKENS]) == [blocks[3].id]
        assert pin.tokens == 4 * TOKENS
        bad = space.alloc(1)
        pin.post(bad, [VOCAB] * TOKENS)
        with raises(kvd.Refused, "1 posted block"):
            space.flush()
        space.flush()
        with raises(kvd.Invalid):
            pin.post(space.alloc(1), tokens[:1])
        space.free([*blocks, *bad])
        assert all(not block.data for block in (*blocks, *bad))
    assert space.match(tokens) == 4 * TOKENS


def test_fingerprints(space):
    with tempfile.TemporaryDirectory() as folder:
        weights, empty = Path(folder, "weights"), Path(folder, "empty")
        weights.write_bytes(b"abc")
        empty.touch()
        parts = [(), ("",), ("ab",), ("a", "b"), (["a", "b"],), (["a"], "b"), (b"ab",), (1,), ("1",), (True,), (1.0,),
                 (None,), ({"a": 1, "b": 2},), ({"a": 2, "b": 1},), (weights,), (empty,), (Path(folder),), (-0.0,),
                 (array("i", [1]),), (array("i", [1, 0]),), (2 ** 100,), (-1,)]
        parts += [(np.zeros(4, dtype="f4"),), (np.zeros((2, 2), dtype="f4"),), (np.zeros(4, dtype="i4"),),
                  (np.float32,)] if np else []
        parts += [(torch.zeros(4, dtype=torch.bfloat16),), (torch.bfloat16,)] if torch else []
        values = [kvd.fingerprint(*it) for it in parts]
        assert len(set(values)) == len(values) and values == [kvd.fingerprint(*it) for it in parts]
        assert kvd.fingerprint({"b": 2, "a": 1}) == kvd.fingerprint({"a": 1, "b": 2})
        done = child("import kvd, sys, pathlib as p; print(kvd.fingerprint('a', 1, p.Path(sys.argv[1])))", str(weights))
        assert done.stdout == f"{kvd.fingerprint('a', 1, weights)}\n", done
        weights.write_bytes(b"abd")
        assert kvd.fingerprint(weights) != values[14]
    with raises(TypeError):
        kvd.fingerprint(object())
    geometry(fingerprint=kvd.fingerprint("model"))


def test_every_object_says_what_it_is(space):
    assert repr(space) == "<kvd.Space 'tensors'>" and repr(space.layer(1)) == "<kvd.View of keys of layer 1>"
    assert repr(geometry()) == (f"kvd.Geometry(layers={LAYERS}, kv_heads={HEADS}, head_dim=8, vocab={VOCAB}, "
                                "dtype='f32')"), geometry()
    assert all(getattr(kvd, name).__module__ in ("kvd", "typing") for name in kvd.__all__
               if isinstance(getattr(kvd, name), type)), kvd.__all__
    assert kvd.__version__ == kvd._native.lib.kvd_version().decode()


if __name__ == "__main__":
    sys.exit(main(globals(), {test_salts_separate_chains, test_settings, test_counters, test_blocks_are_reserved,
                              test_memory_is_where_blocks_are}))
