# SPDX-License-Identifier: Apache-2.0
"""What can go wrong, as classes: each is an OSError with libkvd's words, and the builtin that says the same, if any."""

from __future__ import annotations

import errno
from typing import Any


class Error(OSError):
    """A call of libkvd failed. errno and strerror are set; Error(errno, words) makes an instance of the subclass."""

    def __new__(cls, *arguments: Any) -> Error:
        if cls is Error and arguments:
            cls = _CLASSES.get(arguments[0], Error)
        made: Error = OSError.__new__(cls, *arguments)
        return made


class NotFound(Error, FileNotFoundError):
    """ENOENT: the daemon has no such space, sequence, chain or setting; the words name it."""


class DaemonNotFound(NotFound):
    """ENOENT of connect(): there is no socket at that path, so no daemon."""


class ConnectionRefused(Error, ConnectionRefusedError):
    """ECONNREFUSED: there is a socket, and no daemon listens at it. The library connects anew by itself later."""


class ConnectionLost(Error, ConnectionResetError):
    """ECONNRESET: the daemon went away in the middle of the call. The library connects anew by itself."""


class NotAllowed(Error, PermissionError):
    """EACCES, EPERM: this user may not do that here."""


class NotKvd(Error):
    """EPROTO, ENOTSOCK: what is there is not a kvd, or one with another protocol."""


class TimedOut(Error, TimeoutError):
    """ETIMEDOUT: the daemon did not answer in time."""


class Mismatch(Error, FileExistsError):
    """EEXIST: the space is there already with another geometry, kind, keys or policy; the words name the first
    field."""


class PoolFull(Error):
    """ENOBUFS: all blocks are pinned or being filled. Let go of something, or compute without storing."""


class QuotaExceeded(Error):
    """EDQUOT: the quota of this client or of its domain is used up."""


class TooMany(Error):
    """EUSERS: the space has as many sequences as it can have."""


class Stale(Error):
    """ESTALE: these blocks belong to a daemon that is gone, or to somebody else. Free them and allocate others."""


class DataLost(Error):
    """EIO: who computed these blocks on a GPU died before he had written them. Drop what was computed from them."""


class NotYet(Error, BlockingIOError):
    """EAGAIN: not written yet, but it may still be."""


class Busy(Error):
    """EBUSY: another process computes this at the moment."""


class Refused(Error):
    """ECANCELED: blocks that were posted are not published. They stay their caller's."""


class NoData(Error):
    """ENODATA: the sketch cannot bring these blocks back, or there is no sharing configuration."""


class Invalid(Error, ValueError):
    """EINVAL, ERANGE: an argument that cannot be."""


class Closed(Error, ValueError):
    """EBADF: the space or the daemon was closed."""


class Forked(Error, ChildProcessError):
    """ECHILD: this process was forked from the one that connected; it must connect for itself."""


class NotSupported(Error):
    """ENOTSUP: not in a space like this, or not on this GPU."""


class OutOfMemory(Error, MemoryError):
    """ENOMEM."""


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
