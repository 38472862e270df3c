# SPDX-License-Identifier: Apache-2.0
"""In every call, an impossible number must give an error. It must not use memory, or be taken for another number."""

from __future__ import annotations

import sys

from common import TOKENS, chain, child, geometry, kvd, main, raises, seal

PROGRAM = """
import resource, sys, kvd
daemon = kvd.connect(sys.argv[1])
space = daemon.space("tensors", kvd.Geometry(layers=2, kv_heads=3, head_dim=8, vocab=50000, dtype="f32"))
keyed = daemon.space("keys", kvd.Geometry.opaque(4096, "objects-1", block_tokens=8))
pages = int(open("/proc/self/statm").read().split()[0]) + (256 << 20) // resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(),) * 2)
def refused(what, *errors):
    try:
        print("not refused:", what())
    except errors:
        pass
    except MemoryError:
        print("takes all memory")
for n in (10**6, 10**9, 2**32 - 1):
    refused(lambda: space.alloc(n), kvd.PoolFull, kvd.QuotaExceeded)
    refused(lambda: keyed.lookup_keys(bytes(32), n), kvd.Invalid)
assert not any(keyed.lookup_keys(bytes(32 * 100000), 1000))
for n in (-1, 2**32, 10**12, 2**70):
    refused(lambda: space.alloc(n), ValueError)
    refused(lambda: keyed.lookup_keys(bytes(32), n), ValueError)
for tokens in (range(10**10), range(2**32 + 16), range(2**70)):
    for what in (space.lookup, space.match, space.fetch, space.find, space.lease):
        refused(lambda: what(tokens), ValueError)
space.reserve(2**32 - 1)
space.reserve(0)
refused(lambda: kvd.Geometry(layers=2**31, kv_heads=2**31, head_dim=2**31, vocab=1).block_bytes, kvd.Invalid)
print("end")
"""


def test_no_number_takes_all_memory(space):
    done = child(PROGRAM, space.daemon.path)
    assert done.stdout == "end\n" and not done.returncode, done


def test_all_or_none_of_many(space):
    """More blocks than one request returns, and more than there are: on failure nothing is kept."""
    with space.daemon.space("tiny", kvd.Geometry.opaque(64, "tiny", block_tokens=16)) as tiny:
        n = tiny.available()
        with raises(OSError):
            tiny.alloc(2 * n)
        assert len({block.id for block in tiny.alloc(5000)}) == 5000
        assert len(tiny.alloc(n // 2)) == n // 2


def test_a_number_is_not_cut_off(space):
    """ctypes would take 2**32 + 1 for 1, and -1 for the largest number."""
    tokens = chain(1, 2)
    seal(space, 1, 2)
    seal(space, 1, 2, salt=1)
    large = 2**64 + 1
    calls = {
        "salt": [lambda: space.lookup(tokens, salt=large), lambda: space.match(tokens, salt=large),
                 lambda: space.fetch(tokens, salt=-1), lambda: space.find(tokens, salt=large),
                 lambda: kvd.Pin(space, salt=-1)],
        "group": [lambda: space.lookup(tokens, 2**32), lambda: space.match(tokens, -1),
                  lambda: space.fetch(tokens, 2**32), lambda: kvd.Pin(space, 2**32)],
        "layer": [lambda: space.layer(2**32).__dlpack__()],
        "max_blocks": [lambda: space.daemon.space("other", geometry(), max_blocks=large),
                       lambda: space.sequence(2**32 + 1)],
        "n must be": [lambda: space.reserve(-1), lambda: space.alloc(2**32)],
        "step": [lambda: space.prefix_refresh(2**32 + 1)],
        "prefix": [lambda: space.prefix_depth(2**32, 1, 1)],
    }
    with space.sequence(4) as sequence:
        calls["first"] = [lambda: sequence.step(2**32, 1), lambda: sequence.compact(-1, 1, 1)]
        calls["slot"] = [lambda: sequence.labels(2**32), lambda: sequence.use(-1, 1, 1)]
        for name, those in calls.items():
            for call in those:
                with raises(ValueError, name):
                    call()
    with space.lookup(tokens) as pin, raises(ValueError, "block"):
        pin.view(2**32 + pin.blocks[0]).__dlpack__()


def test_names_contain_no_nul(space):
    with raises(ValueError, "NUL"):
        space.daemon.space("tensors\0other", geometry())
    with raises(ValueError, "NUL"):
        space.setting("keydiff\0")
    with raises(ValueError, "NUL"):
        space.set("keydiff\0more", 1)
    with raises(ValueError, "NUL"):
        kvd.connect(space.daemon.path + "\0more")
    with raises(ValueError, "NUL"):
        kvd.connect(space.daemon.path, server_user="root\0")
    for layout in ("a\0b", "x" * 32):
        with raises(ValueError, "layout"):
            space.daemon.space("other", kvd.Geometry.opaque(64, layout))


def test_any_time_limit(space):
    """Infinity and negative numbers, too."""
    tokens = chain(2, 1)
    for seconds in (float("inf"), 1e300, -1.0, 0):
        assert not space.find(tokens, wait=seconds)
        with space.sequence(4) as sequence:
            assert sequence.wait(seconds) == 0
        with space.daemon.space("whole", geometry(), kind="bidirectional") as other, other.lease(tokens, seconds) as it:
            assert it


def test_rows_of_a_table(space):
    """A row has the geometry's length, and is in the table."""
    blocks = space.alloc(2)
    table = kvd.Table(space)
    assert table.extend(blocks[0], [block.id for block in blocks])
    import ctypes
    numbers = (ctypes.c_float * (2 * TOKENS * 24))()
    at = ctypes.addressof(numbers)
    table.write(0, 0, 2 * TOKENS, at, at, 24)
    table.attend(0, 0, 2 * TOKENS, 3, 1.0, at, 24, at, 24)
    for call in (lambda: table.write(0, 0, 2, at, at, 23), lambda: table.write(0, 2**32, 1, at, at, 24),
                 lambda: table.write(0, 0, 1, at, at, -24), lambda: table.write(2**32, 0, 1, at, at, 24),
                 lambda: table.attend(0, 0, 2, 3, 1.0, at, 23, at, 24),
                 lambda: table.attend(0, 0, 2, 3, 1.0, at, 24, at, 0),
                 lambda: table.attend(0, 0, 2, 2**32 + 3, 1.0, at, 24, at, 24), lambda: table.replace(1, [0, 0]),
                 lambda: table.replace(-1, [0]), lambda: table.extend(blocks[0], [2**32])):
        with raises(ValueError):
            call()
    space.free(blocks)


if __name__ == "__main__":
    sys.exit(main(globals()))
