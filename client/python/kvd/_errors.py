# SPDX-License-Identifier: Apache-2.0
"""Exceptions. Each is an OSError with libkvd's message, and the corresponding builtin exception, if there is one."""

from __future__ import annotations

import errno
from typing import Any


class Error(OSError):
    """A call of libkvd failed. errno and strerror are set. Error(errno, message) makes an instance of the subclass for
    errno."""

    def __new__(cls, *arguments: Any) -> Error:
        if cls is Error and arguments:
            cls = _CLASSES.get(arguments[0], Error)
        made: Error = OSError.__new__(cls, *arguments)
        return made


class NotFound(Error, FileNotFoundError):
    """ENOENT: the daemon has no such space, sequence, chain or setting; the message names it."""


class DaemonNotFound(NotFound):
    """ENOENT of connect(): there is no socket at that path, so no daemon."""


class ConnectionRefused(Error, ConnectionRefusedError):
    """ECONNREFUSED: the socket exists, but no daemon listens on it. Later calls reconnect by themselves."""


class ConnectionLost(Error, ConnectionResetError):
    """ECONNRESET: the daemon ended during the call. Later calls reconnect by themselves."""


class NotAllowed(Error, PermissionError):
    """EACCES, EPERM: this user has no permission, or the daemon runs as an unexpected user."""


class NotKvd(Error):
    """EPROTO, ENOTSOCK: the path is not a socket, or the server is not kvd or speaks another protocol version."""


class TimedOut(Error, TimeoutError):
    """ETIMEDOUT: the daemon did not answer in time."""


class Mismatch(Error, FileExistsError):
    """EEXIST: the space exists with another geometry, kind, keys or policy; the message names the first field that
    differs."""


class PoolFull(Error):
    """ENOBUFS: all blocks are pinned or being filled, or the memory for copies of blocks is used up. Release some, or
    compute without storing."""


class QuotaExceeded(Error):
    """EDQUOT: the quota of this client or of its domain is used up."""


class TooMany(Error):
    """EUSERS: the maximum number of sequences, clients or connections is reached; the message says which."""


class Stale(Error):
    """ESTALE: these blocks belong to a previous daemon, or not to the caller. Free them and allocate others."""


class DataLost(Error):
    """EIO: the process that computed these blocks on a GPU died before writing them. Discard all results from them."""


class NotYet(Error, BlockingIOError):
    """EAGAIN: a block is not written yet."""


class Busy(Error):
    """EBUSY: another process is computing this prefix, too many requests wait, or a stream is being captured."""


class Refused(Error):
    """ECANCELED: posted blocks were not published. They remain the caller's."""


class NoData(Error):
    """ENODATA: the sketch cannot restore these blocks, or there is no sharing configuration."""


class Invalid(Error, ValueError):
    """EINVAL, ERANGE: an invalid argument."""


class Closed(Error, ValueError):
    """EBADF: the space, the connection or another object is closed."""


class Forked(Error, ChildProcessError):
    """ECHILD: this process was forked from the one that connected; it must make its own connection."""


class NotSupported(Error):
    """ENOTSUP: not supported in this space or on this GPU."""


class OutOfMemory(Error, MemoryError):
    """ENOMEM: out of memory."""


_CLASSES: dict[int, type[Error]] = {
    errno.ENOENT: NotFound, errno.ECONNREFUSED: ConnectionRefused, errno.ECONNRESET: ConnectionLost,
    errno.EPIPE: ConnectionLost, errno.EACCES: NotAllowed, errno.EPERM: NotAllowed, errno.EPROTO: NotKvd,
    errno.ENOTSOCK: NotKvd, errno.ETIMEDOUT: TimedOut, errno.EEXIST: Mismatch, errno.ENOBUFS: PoolFull,
    errno.EDQUOT: QuotaExceeded,
    errno.EUSERS: TooMany, errno.ESTALE: Stale, errno.EIO: DataLost, errno.EAGAIN: NotYet, errno.EBUSY: Busy,
    errno.ECANCELED: Refused,
    errno.ENODATA: NoData, errno.EINVAL: Invalid, errno.ERANGE: Invalid, errno.EBADF: Closed, errno.ECHILD: Forked,
    errno.ENOTSUP: NotSupported, errno.ENOMEM: OutOfMemory,
}

_NAMED: set[type[Error]] = {DaemonNotFound, *_CLASSES.values()}

__all__ = ["Error", *sorted(it.__name__ for it in _NAMED)]
for _it in {Error, *_NAMED}:
    _it.__module__ = "kvd"
