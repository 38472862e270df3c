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
    """A connection to a kvd daemon, made by connect(). Thread-safe, but not usable after fork().

    close(), or the end of a with block, also closes its spaces; see Space for the effect on pins, blocks and tensors.
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
        """Path of the daemon's socket."""
        self._handle: Handle | None = Handle(pointer, lib.kvd_close)
        self._spaces: weakref.WeakSet[Space] = weakref.WeakSet()
        self._lock = threading.Lock()       # serializes close() and space()

    def space(self, name: str, geometry: Geometry, *, kind: str = "causal", keys: str = "serve", policy: str = "lru",
              max_blocks: int = 0, fixed: bool = False, shard: int | None = None, index_only: bool = False) -> Space:
        """Attach to a space of the caller's domain, and create it if it does not exist.

        kind is "causal" (lookups find the longest stored prefix) or "bidirectional" (whole prefixes only). keys is
        "serve" or "paper". policy is the order in which unused blocks are evicted: "lru", "fifo" or "priority".
        max_blocks is the maximum size of the space; 0: as much as the domain's quota allows. fixed: addresses never
        change, even when the daemon is replaced; until every pin and block of the old daemon has been released, alloc()
        and seal() then raise kvd.Stale and lookups find nothing. shard: of a pool on several GPUs, the number of the one
        that this process uses, from 0 on, in the order of the daemon's setting device; each has an equal part of every
        block. Host memory has no shards. index_only: map no memory and use no GPU, for a scheduler that finds,
        allocates and seals opaque blocks which other processes write and read; what uses memory raises
        kvd.NotSupported.

        Raises kvd.Mismatch if the space exists with other properties (the message names the first), and kvd.Invalid if
        the properties are invalid. """
        options = OptionsStruct(kind=choice("kind", kind), keys=choice("keys", keys), policy=choice("policy", policy),
                                flags=fixed + 2 * index_only, max_blocks=number("max_blocks", max_blocks),
                                shard=0 if shard is None else number("shard", shard) + 1)
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
        """Make several processes one client, for an engine whose scheduler allocates, pins and seals blocks that its
        workers read and write. Pins and blocks of each process are kept until none of the processes is left. All pass
        the same 16 random bytes, before they open a space. Raises kvd.Invalid if all bytes are zero, and kvd.Busy if
        this connection is in another team."""
        if len(team) != 16:
            raise ValueError(f"a team is named by 16 bytes, not {len(team)}")
        check(lib.kvd_join(self._open(), team))

    def close(self) -> None:
        """Close all spaces, and the connection once their last pin, block and tensor is gone. Never fails."""
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
    """Connect to the daemon at a socket path; None: $KVD_SOCKET, or /run/kvd-0.sock.

    The daemon must run as root, as this user, or as the owner of a socket directory that only root can replace (see
    libkvd(3)). server_user, a name or a number, names another user; None: $KVD_SERVER_USER, if that is set.

    Raises kvd.DaemonNotFound or kvd.ConnectionRefused if there is no daemon, kvd.NotAllowed if this user may not use it
    or it runs as an unexpected user, and kvd.NotKvd if another program answers.
    """
    return Daemon(path, server_user=server_user)
