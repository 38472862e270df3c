# SPDX-License-Identifier: Apache-2.0
"""Evicted blocks are in the daemon's file: fetch() brings them back, and find() waits for them."""

from __future__ import annotations

import asyncio
import select
import sys
import tempfile
import textwrap
from pathlib import Path

from common import TOKENS, chain, geometry, instance, kvd, raises, seal, until

BLOCKS = 8
WHOLE = BLOCKS * TOKENS


def tier(it: instance.Instance) -> dict:
    (row,) = it.stat("tiers")["tiers"]
    return row


def values(space: kvd.Space, pin: kvd.Pin) -> list[float]:
    """The number with which each block is filled."""
    out = bytearray(len(pin) * space.block_bytes)
    space.read(pin, out)
    numbers = memoryview(out).cast("f")
    each = space.block_bytes // 4
    return [numbers[i * each] for i in range(len(pin)) if len(set(numbers[i * each:(i + 1) * each])) == 1]


def store(it: instance.Instance, space: kvd.Space, number: int) -> list[int]:
    """Stores a chain in the file, but not in the pool. Returns its tokens."""
    before = tier(it)["written_bytes"]
    seal(space, number, BLOCKS, value=number * 100)
    until(lambda: tier(it)["written_bytes"] >= before + BLOCKS * space.block_bytes)
    it.kvctl("evict", "s", "--all")
    assert space.lookup(chain(number, BLOCKS)).tokens == 0
    return chain(number, BLOCKS)


def test_evicted_blocks_are_fetched(it: instance.Instance, space: kvd.Space) -> None:
    tokens = store(it, space, 1)
    with space.fetch(tokens) as fetch:
        assert fetch and fetch.tokens == WHOLE, fetch
        assert select.select([fetch], [], [], instance.PATIENCE)[0]
        assert fetch.wait(0) and not fetch and fetch.wait()
        with raises(ValueError, "has ended"):
            fetch.fileno()
    with space.lookup(tokens) as pin:
        assert pin.tokens == WHOLE
        assert values(space, pin) == [100 + i for i in range(BLOCKS)]


def test_fetches_are_awaited(it: instance.Instance, space: kvd.Space) -> None:
    """Several in one thread, with the example in kvd.Fetch."""
    rows = [store(it, space, number) for number in (21, 22, 23)]
    text = kvd.Fetch.__doc__.partition("async def ended")[2].partition("async def main")[0]
    names = {"asyncio": asyncio}
    exec(textwrap.dedent("        async def ended" + text), names)

    async def all_of_them() -> None:
        await asyncio.gather(*(names["ended"](space.fetch(row)) for row in rows))

    asyncio.run(all_of_them())
    for row in rows:
        with space.lookup(row) as pin:
            assert pin.tokens == WHOLE


def test_find_fetches_only_what_is_below(it: instance.Instance, space: kvd.Space) -> None:
    tokens = store(it, space, 7)
    assert space.lookup(tokens).below == WHOLE and space.lookup(chain(8, BLOCKS)).below == 0
    fetch = kvd.Space.fetch
    kvd.Space.fetch = None
    try:
        assert space.find(chain(8, BLOCKS), wait=instance.PATIENCE).tokens == 0
    finally:
        kvd.Space.fetch = fetch
    with space.find(tokens, wait=instance.PATIENCE) as pin:
        assert pin.tokens == WHOLE and pin.below == 0


def test_find_waits_for_it(it: instance.Instance, space: kvd.Space) -> None:
    tokens = store(it, space, 2)
    assert space.find(tokens, wait=0).tokens == 0
    with space.find(tokens + chain(3, 1), wait=instance.PATIENCE) as pin:
        assert pin.tokens == WHOLE
        assert values(space, pin) == [200 + i for i in range(BLOCKS)]


def test_a_fetch_completes_without_waiting(it: instance.Instance, space: kvd.Space) -> None:
    tokens = store(it, space, 4)
    space.fetch(tokens).close()
    until(lambda: space.lookup(tokens).tokens == WHOLE)


def test_there_is_nothing_below(it: instance.Instance, space: kvd.Space) -> None:
    fetch = space.fetch(chain(5, BLOCKS))
    assert not fetch and fetch.tokens == 0 and fetch.wait()
    assert space.find(chain(5, BLOCKS), wait=instance.PATIENCE).tokens == 0
    with raises(kvd.Invalid):
        space.fetch(chain(5, BLOCKS), group=9)


def test_the_next_daemon_has_it(it: instance.Instance, space: kvd.Space) -> None:
    tokens = store(it, space, 6)
    it.kill()
    it.start()
    until(lambda: tier(it)["state"] == "on")
    with space.find(tokens, wait=instance.PATIENCE) as pin:
        assert values(space, pin) == [600 + i for i in range(BLOCKS)]


def main() -> int:
    failed = 0
    for name, test in [(name, test) for name, test in globals().items() if name.startswith("test_")]:
        with tempfile.TemporaryDirectory(prefix="kvd-test-", dir="/var/tmp") as folder:
            with instance.Instance("--pool", "8M", "--backend", "host", "--set", "daemon.segment=2M", "--set",
                                   f"daemon.file={Path(folder, 'file')}", "--set", "daemon.file_size=16M", "--set",
                                   "daemon.file_depth=0") as it:
                until(lambda: tier(it)["state"] == "on")
                try:
                    with kvd.connect(it.socket) as daemon, daemon.space("s", geometry()) as space:
                        test(it, space)
                    it.check()
                    print(f"ok    {name}")
                except Exception as error:
                    failed += 1
                    print(f"FAIL  {name}: {type(error).__name__}: {error}")
                    raise
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
