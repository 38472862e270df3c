# SPDX-License-Identifier: Apache-2.0
"""Held blocks stay, forgotten objects release theirs. Closing never fails, hides no exception, takes nothing away."""

from __future__ import annotations

import gc
import sys
import tempfile

from common import TOKENS, VOCAB, chain, child, geometry, gone, kvd, main, np, raises, seal, start, torch


def test_closing_takes_nothing_away(space):
    """A tensor, a pin and a block outlive their space and its connection, and release everything at the end."""
    with kvd.connect(space.daemon.path) as connection, connection.space("tensors", geometry()) as other:
        (id_,) = seal(other, 1, 1)
        pin = other.lookup(chain(1, 1))
        capsule = pin.view(id_).__dlpack__(max_version=(1, 0))
        (block,) = other.alloc(1)
    assert pin.blocks == [id_] and pin.address(id_) and block.data
    with raises(kvd.Closed, "space 'tensors' is closed"):
        other.lookup(chain(1, 1))
    with raises(kvd.Closed):
        connection.space("tensors", geometry())
    other.close()
    connection.close()
    pin.release()
    other.free([block])
    assert not gone(space, chain(1, 1))     # the tensor holds it
    del capsule
    assert gone(space, chain(1, 1))


def test_the_end_of_a_with_hides_no_exception(space):
    with raises(IndexError, "list index"):
        with kvd.connect(space.daemon.path) as connection, connection.space("tensors", geometry()) as other:
            with other.lookup(chain(9999, 1)) as pin:
                taken = [other.alloc(1)[0].__dlpack__()]
                pin.blocks[0]
    del taken


def test_the_last_use_closes(space):
    """Once nothing refers to a closed space, its attachment ends."""
    connection = kvd.connect(space.daemon.path)
    other = connection.space("tensors", geometry())
    closing = other._handle._finalizer
    pin, (block,) = other.lookup(chain(1, 1)), other.alloc(1)
    connection.close()
    assert closing.alive
    pin.release()
    del pin
    assert closing.alive
    other.free([block])
    assert not closing.alive


def test_forgotten_objects_are_released(space):
    seal(space, 50, 2)
    pin = space.lookup(chain(50, 2))
    blocks = space.alloc(3)
    assert not gone(space, chain(50, 2))
    del pin, blocks
    gc.collect()
    assert gone(space, chain(50, 2))


def test_a_pin_is_a_container(space):
    ids = seal(space, 51, 3)
    with space.lookup(chain(51, 3)) as pin:
        assert pin and len(pin) == 3 and list(pin) == ids == pin.blocks and pin.tokens == 3 * TOKENS
        assert "48 tokens in 3 blocks" in repr(pin)
    assert not pin and len(pin) == 0 and list(pin) == [] and pin.tokens == 0 and "released" in repr(pin)
    with raises(kvd.Closed):
        pin.wait()
    pin.release()
    with space.lookup(chain(9998, 1)) as pin:
        assert not pin and pin.blocks == [] and pin.tokens == 0


def test_blocks_say_what_they_are(space):
    mine, given = space.alloc(2)
    assert mine.data and not mine.sealed and "to fill" in repr(mine)
    with kvd.Pin(space) as pin:
        assert pin.seal([mine], chain(52, 1)) == [mine.id] == pin.blocks
    assert mine.sealed and not mine.data and "sealed" in repr(mine)
    space.free([mine, given])
    assert not given.sealed and not given.data and "given back" in repr(given)
    space.free([mine, given])
    for block in (mine, given):
        with raises(kvd.Closed, "is not being filled"):
            block.__dlpack__()


def test_the_same_content_is_sealed_once(space):
    ids = seal(space, 53, 2)
    blocks = space.alloc(2)
    with kvd.Pin(space) as pin:
        assert pin.seal(blocks, chain(53, 2)) == ids == pin.blocks == [block.id for block in blocks]
        assert pin.tokens == 2 * TOKENS
    assert all(block.sealed for block in blocks)


def test_duplicates_stay_the_callers(space):
    """keep: the chain contains the blocks that others sealed before, and the caller keeps its own block."""
    first = seal(space, 54, 1, 1)
    blocks = space.alloc(3)
    own = [block.id for block in blocks]
    with kvd.Pin(space) as pin:
        assert pin.seal(blocks, chain(54, 3), keep=True) == [first[0], own[1], own[2]] == pin.blocks
        assert [block.sealed for block in blocks] == [False, True, True]
        assert [block.id for block in blocks] == own and blocks[0].data and not blocks[1].data
    with kvd.Pin(space) as pin, raises(kvd.Invalid):
        pin.seal(blocks[:1], chain(54, 3), keep=True)
    assert blocks[0].data
    space.free(blocks)


def test_addresses_that_are_fixed(space):
    """A daemon dies. Once the client releases the old pool, the next daemon's pool has the same addresses."""
    with tempfile.TemporaryDirectory(prefix="kvd-test-") as folder:
        first = start(folder)
        with kvd.connect(f"{folder}/kvd.sock") as connection, connection.space("f", geometry(), fixed=True) as other:
            base = other.memory().base
            seal(other, 1, 1)
            pin = other.lookup(chain(1, 1))
            first.kill()
            first.wait()
            second = start(folder)
            try:
                with raises(kvd.Stale, "release them first"):
                    other.alloc(100)    # more than the library has in stock
                with other.lookup(chain(1, 1)) as nothing:
                    assert not nothing
                pin.release()
                seal(other, 2, 1)
                assert other.memory().base == base and other.match(chain(2, 1)) == TOKENS
            finally:
                second.terminate()
                second.wait(20)


AFTER_FORK = """
import os, sys, kvd
space = kvd.connect(sys.argv[1]).space("fork", kvd.Geometry(layers=2, kv_heads=3, head_dim=8, vocab=50000))
pin, blocks = kvd.Pin(space), space.alloc(2)
pid = os.fork()
if pid == 0:
    try:
        space.lookup([1, 2, 3])
    except kvd.Forked:
        del pin, blocks, space
        print("refused", flush=True)
        sys.exit()
os.waitpid(pid, 0)
print(len(pin.seal(blocks, range(32))))
"""


def test_a_forked_child_is_refused(space):
    done = child(AFTER_FORK, space.daemon.path)
    assert done.stdout == "refused\n2\n" and not done.returncode, done


AT_EXIT = f"""
import sys, kvd
daemon = kvd.connect(sys.argv[1])
space = daemon.space("exit", kvd.Geometry(layers=2, kv_heads=3, head_dim=8, vocab={VOCAB}, dtype="f32"))
pin = kvd.Pin(space)
blocks = space.alloc(2)
pin.seal(blocks, list(range(32)))
fresh = space.alloc(1)
taken = [pin.view(i).__dlpack__(max_version=(1, 0)) for i in pin.blocks]
taken += [fresh[0].__dlpack__(), space.layer(0).__dlpack__(), space.memory().__dlpack__(max_version=(1, 0))]
if sys.argv[2]:
    take = getattr(__import__(sys.argv[2]), "from_dlpack")
    taken += [take(pin.view(i)) for i in pin.blocks]
sys.modules["somewhere"] = taken   # found only when modules are torn down
if sys.argv[3]:
    taken.append(taken)
print("end")
"""


def test_the_interpreter_ends(space):
    for library in ("", "numpy" if np else None, "torch" if torch else None):
        for twice in ("", "twice"):
            if library is not None:
                done = child(AT_EXIT, space.daemon.path, library, twice)
                assert done.returncode == 0 and done.stdout == "end\n" and not done.stderr, done


if __name__ == "__main__":
    sys.exit(main(globals(), {test_closing_takes_nothing_away, test_the_last_use_closes,
                              test_forgotten_objects_are_released, test_the_end_of_a_with_hides_no_exception,
                              test_a_pin_is_a_container,
                              test_blocks_say_what_they_are, test_the_same_content_is_sealed_once,
                              test_duplicates_stay_the_callers}))
