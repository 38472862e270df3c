# SPDX-License-Identifier: Apache-2.0
"""Loading from the tiers below the pool: the daemon's file and its remote servers."""

from __future__ import annotations

import os
import select

from ._handle import Handle
from ._native import ticks


class Fetch:
    """Loading of a prompt's blocks by the daemon; false if there is nothing to wait for. Made by Space.fetch() and
    Space.fetch_key().

    Waiting is optional: loading continues if the Fetch is closed or garbage-collected. With asyncio:

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

    def __init__(self, tokens: int, fd: int):
        self.tokens = tokens
        """Number of tokens of the prompt that are in the pool or on their way; servers may have more. After
        Space.fetch_key(): number of blocks."""
        self._fd: Handle | None = Handle(fd, os.close) if fd >= 0 else None

    def __bool__(self) -> bool:
        """Return whether loading was in progress when last checked."""
        return self._fd is not None

    def fileno(self) -> int:
        """Return a descriptor for select, asyncio and the like, which becomes readable when loading has ended. Raises
        ValueError if it has ended already."""
        fd = self._fd
        if fd is None:
            raise ValueError("this fetch has ended")
        return int(fd._as_parameter_)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for at most timeout seconds (None: no limit). Returns whether loading has ended, successfully or not."""
        fd = self._fd       # keeps the descriptor open even if another thread calls close()
        if fd is None:
            return True
        poll = select.poll()
        poll.register(fd._as_parameter_, select.POLLIN)
        if not poll.poll(None if timeout is None else ticks(timeout, 1000, 31)):
            return False
        self.close()
        return True

    def close(self) -> None:
        """Close the descriptor; loading continues. Does nothing if already closed."""
        self._fd = None

    def __enter__(self) -> Fetch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<kvd.Fetch of {self.tokens}{', under way' if self else ''}>"
