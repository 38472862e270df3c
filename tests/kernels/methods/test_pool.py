# SPDX-License-Identifier: Apache-2.0
"""BiCache's store with a daemon: eviction, single flight, and no sharing between kinds of spaces."""
import os
import pathlib
import subprocess
import sys
import time

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "python"))
from common import PACKAGE, daemon, kvd, raises

GEOMETRY = kvd.Geometry(layers=1, kv_heads=1, head_dim=8, vocab=50000)
WHOLE = dict(kind="bidirectional", max_blocks=312)  # 4,992 tokens

WAITER = """
import sys, kvd
from {module} import GEOMETRY, WHOLE, prefix, put
with kvd.connect(sys.argv[1]) as daemon, daemon.space("single-flight", GEOMETRY, **WHOLE) as space:
    print("asks", space.match(prefix(1, 160)), flush=True)
    with space.lease(prefix(1, 160), timeout=600) as mine:
        print("computes" if mine else "waited", space.match(prefix(1, 160)), flush=True)
        if mine and sys.argv[2] == "hang":
            sys.stdin.read()  # until it is killed
        if mine:
            put(space, prefix(1, 160))
"""


def prefix(number, tokens=2000):
    return [(number * 7919 + i) % 50000 for i in range(tokens)]


def put(space, tokens):
    with space.lookup(tokens) as pin:
        pin.seal(space.alloc(len(tokens) // 16 - len(pin)), tokens)


def held(space):
    return [space.match(prefix(i)) for i in (1, 2, 3)]


def test_B12_eviction():
    """5,000 tokens hold two prefixes of 2,000: a third one evicts one of them, according to the policy."""
    with daemon(pool="32M") as path, kvd.connect(path) as connection:
        for name, policy, touch, want in (("a", "fifo", None, [0, 2000, 2000]), ("b", "lru", 1, [2000, 0, 2000]),
                                          ("c", "fifo", 1, [0, 2000, 2000])):
            with connection.space(name, GEOMETRY, policy=policy, **WHOLE) as space:
                for i in 1, 2:
                    put(space, prefix(i))
                put(space, prefix(9, 16))  # seals advance the clock of uses
                if touch:
                    space.lookup(prefix(touch)).release()
                put(space, prefix(3))
                assert held(space) == want, (policy, touch, held(space))
        with connection.space("pinned", GEOMETRY, policy="fifo", **WHOLE) as space:
            put(space, prefix(1)), put(space, prefix(2))
            with space.lookup(prefix(1)):
                put(space, prefix(3))
                assert held(space) == [2000, 0, 2000]
            with raises(kvd.Error):  # larger than the space: not stored
                put(space, prefix(4, 6000))


def waiter(path, how):
    program = WAITER.format(module=pathlib.Path(__file__).stem)
    folders = os.pathsep.join([str(PACKAGE), str(pathlib.Path(__file__).parent)])
    return subprocess.Popen([sys.executable, "-c", program, path, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                            text=True, env={**os.environ, "PYTHONPATH": folders})


def test_one_client_computes_while_the_others_wait():
    with daemon() as path:
        holder = waiter(path, "hang")
        assert [holder.stdout.readline() for _ in range(2)] == ["asks 0\n", "computes 0\n"]
        others = [waiter(path, "compute") for _ in range(7)]
        assert all(it.stdout.readline() == "asks 0\n" for it in others)
        time.sleep(0.2)  # none continues while another one computes
        assert all(it.poll() is None for it in others)
        holder.kill()
        before = time.monotonic()
        said = sorted(it.communicate(timeout=600)[0] for it in others)
        took = time.monotonic() - before
        holder.communicate()
    assert said == ["computes 0\n"] + ["waited 160\n"] * 6, said
    return f"after a kill another one computes, and six wait: {took:.1f} s"


def test_kinds_of_spaces_share_nothing():
    with daemon() as path, kvd.connect(path) as connection:
        spaces = [connection.space(kind, GEOMETRY, kind=kind) for kind in ("causal", "bidirectional")]
        tokens = prefix(1, 160)
        for mine, other in spaces, spaces[::-1]:
            put(mine, tokens)
            assert mine.match(tokens) == 160
            assert mine is spaces[1] or other.match(tokens) == 0
            assert mine.match(tokens[:80]) == (80 if mine is spaces[0] else 0)
