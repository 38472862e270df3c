# SPDX-License-Identifier: Apache-2.0
"""What lies below the pool: the daemon's file, and its remote servers."""

from __future__ import annotations

import os
import select
from array import array
from ctypes import byref, c_int

from ._handle import Handle
from ._native import check, lib, number, ticks


class Fetch:
    """What the daemon brings up for a prompt; false if there is nothing to wait for. Made by Space.fetch().

    Nobody need wait for it: forgotten or closed, what is on its way comes all the same. With asyncio:

        import asyncio
        import kvd

        async def ended(fetch):
            if fetch:
                loop, event = asyncio.get_running_loop(), asyncio.Event()
                loop.add_reader(fetch.fileno(), event.set)
                try:
                    await event.wait()
                finally:
                    loop.remove_reader(fetch.fileno())
                    fetch.close()

        async def main(tokens):
            geometry = kvd.Geometry(layers=2, kv_heads=4, head_dim=64, vocab=50000, dtype="float32")
            with kvd.connect() as daemon, daemon.space("example", geometry) as space:
                await ended(space.fetch(tokens))
                with space.lookup(tokens) as pin:
                    return pin.tokens

        asyncio.run(main(list(range(1000, 1064))))
    """

    def __init__(self, handle: Handle, group: int, salt: int, row: array[int]):
        fd = c_int(-1)
        self.tokens = check(lib.kvd_fetch(handle, number("group", group), number("salt", salt, 64), *row.buffer_info(),
                                          byref(fd)))
        """How many tokens of the prompt are in the pool, or will be; servers are only being asked yet."""
        self._fd: Handle | None = Handle(fd.value, os.close) if fd.value >= 0 else None

    def __bool__(self) -> bool:
        """Whether something was under way when it was last looked at."""
        return self._fd is not None

    def fileno(self) -> int:
        """For select, asyncio and the like: readable when it has ended. ValueError: it has."""
        fd = self._fd
        if fd is None:
            raise ValueError("this fetch has ended")
        return int(fd._as_parameter_)

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it has ended, well or not, after at most so many seconds (None: however long it takes)."""
        fd = self._fd       # not closed while it is waited for, also if another thread calls close()
        if fd is None:
            return True
        poll = select.poll()
        poll.register(fd._as_parameter_, select.POLLIN)
        if not poll.poll(None if timeout is None else ticks(timeout, 1000, 31)):
            return False
        self.close()
        return True

    def close(self) -> None:
        """Again does nothing."""
        self._fd = None

    def __enter__(self) -> Fetch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<kvd.Fetch of {self.tokens} tokens{', under way' if self else ''}>"
