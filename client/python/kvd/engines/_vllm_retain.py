# SPDX-License-Identifier: Apache-2.0
"""Prefixes that a vLLM keeps after their requests have ended, because the requests asked for it.

An agent knows that it will go on with a prompt when its tool has answered; the order of eviction does not. Its requests
have, in kv_transfer_params:

    kvd_retain_s    keep the prompt and the answer for so many seconds after the request has ended; 0: no longer
    kvd_priority    those with a lower number are given up first; default 0

The session is vLLM's session_id, and its newest request replaces what is kept of it. A request without one is a session of
its own. Kept blocks are pinned, but never at the cost of other work: when this vLLM finds no block, or the pool has few
left, sessions are given up, and their blocks are evicted as if they had just been used. If this process ends, so does that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from vllm.logger import init_logger
from vllm.v1.request import Request

import kvd

logger = init_logger("vllm." + __name__)

INTERVAL = 1.0      # seconds between looks at the clock and the pool
LONGEST = 86400.0   # seconds for which anything is kept
FEW = 16            # the pool has few blocks left if it has less than one in so many


@dataclass(frozen=True)
class Hint:
    session: str
    seconds: float
    priority: float

    @classmethod
    def of(cls, request: Request) -> Hint | None:
        """Return what a request asks for; None if nothing. Wrong values are logged, and mean nothing."""
        given = request.kv_transfer_params or {}
        if "kvd_retain_s" not in given:
            return None
        try:
            seconds, priority = float(given["kvd_retain_s"]), float(given.get("kvd_priority", 0))
            if not seconds >= 0 or priority != priority:
                raise ValueError
        except (TypeError, ValueError):
            logger.warning("kvd: request %s: kvd_retain_s and kvd_priority must be numbers, and not %r and %r",
                           request.request_id, given["kvd_retain_s"], given.get("kvd_priority"))
            return None
        return cls(getattr(request, "session_id", None) or request.request_id, min(seconds, LONGEST), priority)


@dataclass
class Kept:
    pins: list[kvd.Pin]
    until: float
    priority: float

    def release(self) -> None:
        for pin in self.pins:
            pin.release()


class Retained:
    """What is kept, by session: at most this share of the space's blocks. A thread ends it in time, because an idle vLLM
    makes no steps."""

    def __init__(self, space: kvd.Space, share: float, clock: Callable[[], float] = time.monotonic):
        self.space, self.clock = space, clock
        self.few, self.most = space.memory().blocks // FEW, int(share * space.memory().blocks)
        self.sessions: dict[str, Kept] = {}
        self.lock = threading.Lock()        # of sessions
        self.thread: threading.Thread | None = None
        self.closed = threading.Event()

    @property
    def blocks(self) -> int:
        """How many different blocks are kept."""
        with self.lock:
            return len({block for kept in self.sessions.values() for pin in kept.pins for block in pin.blocks})

    def keep(self, hint: Hint, pins: list[kvd.Pin]) -> None:
        """Keep these pins, which are ours now, instead of what was kept of that session."""
        self.end(hint.session)
        with self.lock:
            self.sessions[hint.session] = Kept(pins, self.clock() + hint.seconds, hint.priority)
            if not self.thread:
                self.thread = threading.Thread(target=self._watch, daemon=True, name="kvd-retain")
                self.thread.start()
        while self.blocks > self.most:
            self.give_up()

    def end(self, session: str) -> None:
        with self.lock:
            kept = self.sessions.pop(session, None)
        if kept:
            kept.release()

    def give_up(self) -> bool:
        """End the least important session, and of those the one that would end first. Returns whether there was one."""
        with self.lock:
            order = sorted(self.sessions, key=lambda it: (self.sessions[it].priority, self.sessions[it].until))
        if order:
            self.end(order[0])
        return bool(order)

    def clear(self) -> None:
        while self.give_up():
            pass

    def look(self) -> None:
        """End what has lasted long enough, and more if the pool has few blocks left for anyone."""
        now = self.clock()
        with self.lock:
            over = [session for session, kept in self.sessions.items() if kept.until <= now]
        for session in over:
            self.end(session)
        while self.space.available() < self.few and self.give_up():
            pass

    def _watch(self) -> None:
        while not self.closed.wait(INTERVAL):
            try:
                self.look()
            except kvd.Error as error:
                logger.warning("kvd: %s", error)
            with self.lock:
                if not self.sessions:
                    self.thread = None
                    return

    def close(self) -> None:
        self.closed.set()
        self.clear()
