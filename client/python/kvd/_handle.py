# SPDX-License-Identifier: Apache-2.0
"""What keeps libkvd's objects open."""

from __future__ import annotations

import weakref
from ctypes import c_void_p
from typing import Any, Callable


class Handle:
    """A pointer of libkvd's, closed when nothing refers to it any more.

    Python's own reference counts are the count of users: a pin and a block refer to the handle of their space, that to
    the handle of its daemon, and a call refers to what it works on as long as it runs. So close() is to let go of a
    reference, fails never, and takes nothing from under anybody. Tensors are counted by libkvd itself.
    """

    __slots__ = ("pointer", "__weakref__")

    def __init__(self, pointer: c_void_p, close: Callable[[c_void_p], Any], parent: Handle | None = None):
        self.pointer = pointer
        weakref.finalize(self, _close, pointer, close, parent)


def _close(pointer: c_void_p, close: Callable[[c_void_p], Any], _parent: Handle | None) -> None:
    close(pointer)
    pointer.value = None
