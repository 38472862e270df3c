# SPDX-License-Identifier: Apache-2.0
"""Addresses of other libraries' arrays, and buffers of kvd's memory."""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_ssize_t, c_uint8, c_void_p, py_object, pythonapi
from typing import Any, Iterator


class _PyBuffer(Structure):
    _fields_ = [("address", c_void_p), ("owner", py_object), ("size", c_ssize_t), ("itemsize", c_ssize_t),
                ("readonly", c_int), ("ndim", c_int), ("format", c_char_p), ("shape", c_void_p), ("strides", c_void_p),
                ("suboffsets", c_void_p), ("internal", c_void_p)]


_WRITABLE = 1
_get = ctypes.PYFUNCTYPE(c_int, py_object, POINTER(_PyBuffer), c_int)(("PyObject_GetBuffer", pythonapi))
_release = ctypes.PYFUNCTYPE(None, POINTER(_PyBuffer))(("PyBuffer_Release", pythonapi))


@contextmanager
def memory(array: Any, writable: bool = False) -> Iterator[tuple[int, int]]:
    """Yield the address and size in bytes of a contiguous array: anything with a buffer, or a CPU tensor of torch."""
    if hasattr(array, "data_ptr"):
        if not array.is_contiguous() or array.device.type != "cpu":
            raise BufferError("the tensor must be contiguous, in the processor's memory")
        if array.is_conj() or array.is_neg():       # its memory contains other values
            raise BufferError("the tensor is a view that negates or conjugates: resolve_neg(), resolve_conj()")
        yield array.data_ptr(), array.numel() * array.element_size()
        return
    buffer = _PyBuffer()
    _get(array, byref(buffer), _WRITABLE if writable else 0)
    try:
        yield buffer.address or 0, buffer.size
    finally:
        _release(byref(buffer))


def bytes_at(address: int, size: int, owner: object) -> memoryview:
    """Return kvd's memory as a writable buffer that keeps its owner alive."""
    array = (c_uint8 * size).from_address(address)
    array.owner = owner  # type: ignore[attr-defined]
    return memoryview(array).cast("B")
