# SPDX-License-Identifier: Apache-2.0
"""What keeps libkvd's objects open."""

from __future__ import annotations

import weakref
from ctypes import c_void_p, pythonapi
from typing import Any, Callable

pythonapi.PyInterpreterState_Get.restype = pythonapi.PyInterpreterState_Main.restype = c_void_p

# When the main interpreter ends, daemon threads may be in the middle of a call of libkvd. Nothing is closed under them:
# the kernel releases everything soon. A sub-interpreter ends without threads, and its process goes on.
_CLOSES_AT_EXIT = pythonapi.PyInterpreterState_Get() != pythonapi.PyInterpreterState_Main()


def when_forgotten(owner: object, function: Callable[..., Any], *arguments: Any) -> weakref.finalize[Any, Any]:
    """Calls function(*arguments) when owner is garbage, or when the result is called, but not when the process ends."""
    finalizer = weakref.finalize(owner, function, *arguments)
    finalizer.atexit = _CLOSES_AT_EXIT
    return finalizer


class Handle:
    """Something to close: a pointer of libkvd's, or a descriptor. It is closed when nothing refers to it any more.

    Python's own reference counts are the count of users. A pin and a block refer to the handle of their space, that to
    the handle of its daemon. Functions of libkvd take the handle itself as an argument, so a call in progress refers to
    it, too: close() only drops a reference, never fails, and unmaps nothing that another thread's call uses. libkvd
    counts tensors itself.
    """

    __slots__ = ("_as_parameter_", "_finalizer", "__weakref__")

    def __init__(self, it: Any, close: Callable[[Any], Any], *parents: object):
        self._as_parameter_ = it
        self._finalizer = when_forgotten(self, _close, it, close, parents)

    def __bool__(self) -> bool:
        """Whether it is open. Only the end of a sub-interpreter closes a handle that is still in use."""
        return self._finalizer.alive


def _close(it: Any, close: Callable[[Any], Any], _parents: tuple[object, ...]) -> None:
    close(it)
