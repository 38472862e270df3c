# SPDX-License-Identifier: Apache-2.0
"""What other libraries make tensors of, in place, by DLPack."""

from __future__ import annotations

import ctypes
from ctypes import c_void_p
from typing import Any, Callable, Optional

from ._native import lib

# Python's own functions are called with the interpreter's lock held. The name must live as long as any capsule.
_NAME = ctypes.create_string_buffer(b"dltensor")
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, c_void_p, c_void_p, c_void_p)(("PyCapsule_New", ctypes.pythonapi))
_FREE = ctypes.cast(lib.kvd_dlpack_capsule_free, c_void_p).value

Make = Callable[[Optional[int]], c_void_p]
"""Makes a struct DLManagedTensor for a consumer on a stream (DLPack's number of it)."""


def _capsule(tensor: c_void_p) -> Any:
    """Owns the tensor until somebody takes it out; frees it if nobody does, in C, whatever is left of Python then."""
    return _new_capsule(tensor, ctypes.addressof(_NAME), _FREE)


def stream_of(stream: int | None) -> int | None:
    """DLPack's number of a consumer's stream as a CUstream: None is the legacy default stream, which CUDA calls 0."""
    return None if stream in (None, 0, 1) else stream


class View:
    """Memory of the pool as other libraries take it: torch.from_dlpack(view), numpy.from_dlpack(view) and the like.

    Every from_dlpack makes a tensor of its own, without a copy. It may live as long as it likes: the space is closed
    when its last tensor is gone.
    """

    def __init__(self, device: tuple[int, int], make: Make, what: str):
        self._device, self._make, self._what = device, make, what

    def __dlpack_device__(self) -> tuple[int, int]:
        """(1, 0): host memory; (2, n): GPU n of this process."""
        return self._device

    def __dlpack__(self, *, stream: int | None = None, max_version: tuple[int, int] | None = None,
                   dl_device: tuple[int, int] | None = None, copy: bool | None = None) -> Any:
        if copy:
            raise BufferError("kvd gives out memory in place; copy the tensor")
        if dl_device is not None and tuple(map(int, dl_device)) != self._device:
            raise BufferError(f"the memory is on device {self._device}")
        return _capsule(self._make(stream))

    def __repr__(self) -> str:
        return f"<kvd.View of {self._what}>"
