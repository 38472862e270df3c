# SPDX-License-Identifier: Apache-2.0
"""Connections."""

from __future__ import annotations

import errno
import os
import threading
import weakref
from ctypes import byref, c_void_p
from typing import Union

from ._errors import DaemonNotFound
from ._geometry import Geometry, choice
from ._handle import Handle
from ._native import OptionsStruct, c_string, check, closed, error, lib, number
from ._space import Space

Path = Union[str, "os.PathLike[str]"]
DEFAULT = "/run/kvd-0.sock"


class Daemon:
    """A connection to a kvd. Made by connect(). May be used by many threads at once, and not across fork().

    close(), or the end of a with, closes its spaces as well; see Space for what that means to what was handed out.
    """

    def __init__(self, path: Path | None = None, *, server_user: str | int | None = None):
        pointer = c_void_p()
        opened = lib.kvd_open_expecting(c_string("path", os.fsencode(path)) if path is not None else None,
                                        c_string("server_user", str(server_user)) if server_user is not None else None,
                                        byref(pointer))
        if opened == -errno.ENOENT:
            raise DaemonNotFound(*error(opened).args)
        check(opened)
        self.path = os.fspath(path) if path is not None else os.environ.get("KVD_SOCKET") or DEFAULT
        """Of the daemon's socket."""
        self._handle: Handle | None = Handle(pointer, lib.kvd_close)
        self._spaces: weakref.WeakSet[Space] = weakref.WeakSet()
        self._lock = threading.Lock()       # of close() against space()

    def space(self, name: str, geometry: Geometry, *, kind: str = "causal", keys: str = "serve", policy: str = "lru",
              max_blocks: int = 0, fixed: bool = False) -> Space:
        """Attaches to a space, which it makes if there is none of that name in the caller's domain.

        kind is "causal" (the longest stored prefix is found) or "bidirectional" (whole prefixes); keys are "serve" or
        "paper"; policy, by which blocks that nobody holds are evicted, is "lru", "fifo" or "priority". max_blocks
        bounds the space; 0: what the domain's quota allows. fixed: its addresses never change, also when the daemon is
        replaced by another one; until every pin and block of the old one was let go, alloc() and seal() raise kvd.Stale
        then, and lookups find nothing. kvd.Mismatch: there is such a space, and something of this is different; the
        words say what. kvd.Invalid: there can be no such space. """
        options = OptionsStruct(kind=choice("kind", kind), keys=choice("keys", keys), policy=choice("policy", policy),
                                flags=int(fixed), max_blocks=number("max_blocks", max_blocks))
        daemon = self._open()
        pointer = c_void_p()
        check(lib.kvd_space_open(daemon, c_string("name", name), byref(geometry._struct()), byref(options),
                                 byref(pointer)))
        space = Space(self, Handle(pointer, lib.kvd_space_close, daemon), name, geometry)
        with self._lock:
            self._open()
            self._spaces.add(space)
        return space

    def join(self, team: bytes) -> None:
        """Makes several processes one client: an engine whose scheduler allocates, pins and seals blocks that its
        workers write and read. What one of them holds is kept until none is left. All name the team by the same 16
        random bytes, before they open a space. kvd.Invalid: all are zero; kvd.Busy: this connection is in another
        team."""
        if len(team) != 16:
            raise ValueError(f"a team is named by 16 bytes, not {len(team)}")
        check(lib.kvd_join(self._open(), team))

    def close(self) -> None:
        """Closes its spaces and, when the last of what they handed out is gone, the connection. Never fails."""
        with self._lock:
            spaces = list(self._spaces)
            self._handle = None
        for space in spaces:
            space.close()

    def _open(self) -> Handle:
        handle = self._handle
        if not handle:
            raise closed("the connection")
        return handle

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<kvd.Daemon at {self.path}{'' if self._handle else ', closed'}>"


def connect(path: Path | None = None, *, server_user: str | int | None = None) -> Daemon:
    """Connects to the daemon at a socket; None: $KVD_SOCKET, or /run/kvd-0.sock.

    The daemon must be root's or this user's own, or lie in a folder that root gave to its user; server_user, a name or
    a number, states another one; None: $KVD_SERVER_USER, if that is set.

    kvd.DaemonNotFound, kvd.ConnectionRefused: there is none; kvd.NotAllowed: not for this user, or the daemon is not of
    a user who is expected; kvd.NotKvd: what answers is something else.
    """
    return Daemon(path, server_user=server_user)
