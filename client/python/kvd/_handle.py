# SPDX-License-Identifier: Apache-2.0
"""Handles, which keep libkvd's objects open."""

from __future__ import annotations

import weakref
from ctypes import c_void_p, pythonapi
from typing import Any, Callable

pythonapi.PyInterpreterState_Get.restype = pythonapi.PyInterpreterState_Main.restype = c_void_p

# When the main interpreter exits, daemon threads may still be in a call of libkvd. Close nothing then: the kernel is
# about to release everything. A sub-interpreter ends without threads, and its process continues.
_CLOSES_AT_EXIT = pythonapi.PyInterpreterState_Get() != pythonapi.PyInterpreterState_Main()


def when_forgotten(owner: object, function: Callable[..., Any], *arguments: Any) -> weakref.finalize[Any, Any]:
    """Call function(*arguments) when owner is garbage-collected or the result is called, but not at process exit."""
    finalizer = weakref.finalize(owner, function, *arguments)
    finalizer.atexit = _CLOSES_AT_EXIT
    return finalizer


class Handle:
    """A pointer of libkvd or a file descriptor, which is closed when nothing references the handle any more.

    Python's reference counts are the count of users. A pin or a block references the handle of its space, which
    references the handle of its daemon. Functions of libkvd take the handle itself as an argument, so a call in
    progress references it as well: close() only drops a reference, never fails, and unmaps nothing that another
    thread's call uses. libkvd counts tensors itself.
    """

    __slots__ = ("_as_parameter_", "_finalizer", "__weakref__")

    def __init__(self, it: Any, close: Callable[[Any], Any], *parents: object):
        self._as_parameter_ = it
        self._finalizer = when_forgotten(self, _close, it, close, parents)

    def __bool__(self) -> bool:
        """Return whether it is open. Only the end of a sub-interpreter closes a handle that is still in use."""
        return self._finalizer.alive


def _close(it: Any, close: Callable[[Any], Any], _parents: tuple[object, ...]) -> None:
    close(it)
