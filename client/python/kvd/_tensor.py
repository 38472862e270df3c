# SPDX-License-Identifier: Apache-2.0
"""Memory that other libraries turn into tensors in place, by DLPack."""

from __future__ import annotations

import ctypes
import importlib
from ctypes import byref, c_void_p
from typing import Any, Callable, Optional

from ._native import MemoryStruct, check, lib

# Python's own functions need the interpreter lock, hence PYFUNCTYPE. The names must live as long as any capsule.
_NAME, _VERSIONED = ctypes.create_string_buffer(b"dltensor"), ctypes.create_string_buffer(b"dltensor_versioned")
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, c_void_p, c_void_p, c_void_p)(("PyCapsule_New", ctypes.pythonapi))
_FREE = ctypes.cast(lib.kvd_dlpack_capsule_free, c_void_p).value

CPU, CUDA = 1, 2    # DLPack's kinds of devices

Make = Callable[[Optional[int]], c_void_p]
"""Makes a struct DLManagedTensor for a consumer on a stream (DLPack's stream number)."""


def _capsule(tensor: c_void_p, versioned: bool) -> Any:
    """Make a capsule that owns the tensor until a consumer takes it. Otherwise a C function frees it, even during
    interpreter shutdown."""
    if versioned:
        check(lib.kvd_dlpack_versioned(tensor, byref(tensor)))
    return _new_capsule(tensor, ctypes.addressof(_VERSIONED if versioned else _NAME), _FREE)


def stream_of(stream: int | None) -> int | None:
    """Convert DLPack's stream number to a CUstream; None is the legacy default stream, NULL in CUDA."""
    return None if stream in (None, 0, 1) else stream


class View:
    """Memory of the pool for other libraries: torch.from_dlpack(view), numpy.from_dlpack(view) and the like.
    numpy.asarray(view) is numpy.from_dlpack(view).

    Every from_dlpack makes a new tensor, without a copy. It may live as long as necessary: the space stays open until
    its last tensor is gone.

    Consumers that support DLPack 1.0 (numpy from 2.1, torch from 2.9) learn which memory is read-only. numpy then makes
    a read-only array; torch has no read-only tensors, and in host memory a write raises SIGSEGV because the memory is
    mapped read-only. Older consumers are refused read-only memory on a GPU. """

    def __init__(self, device: tuple[int, int], make: Make, what: str, read_only: bool = False):
        self._device, self._make, self._what, self._read_only = device, make, what, read_only

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return (1, 0) for host memory, (2, n) for GPU n of this process."""
        return self._device

    def __dlpack__(self, *, stream: int | None = None, max_version: tuple[int, int] | None = None,
                   dl_device: tuple[int, int] | None = None, copy: bool | None = None) -> Any:
        if copy:
            raise BufferError("kvd exports memory without a copy; copy the tensor instead")
        if dl_device is not None and tuple(map(int, dl_device)) != self._device:
            raise BufferError(f"the memory is on device {self._device}")
        versioned = max_version is not None and max_version[0] >= 1
        if self._read_only and not versioned and self._device[0] != CPU:
            raise BufferError("the memory is read-only, which only DLPack 1.0 can express: use max_version=(1, 0)")
        return _capsule(self._make(stream), versioned)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Return an array for numpy.asarray(). Raises BufferError if the memory is on a GPU or numpy does not have the
        dtype (bf16)."""
        if self._device[0] != CPU:
            raise BufferError("the memory is on a GPU, which numpy cannot read")
        try:
            array = importlib.import_module("numpy").from_dlpack(self)
        except RuntimeError as error:       # bf16
            raise BufferError(f"numpy cannot read {self._what}: {error}") from None
        if copy is False and dtype not in (None, array.dtype):
            raise ValueError(f"{self._what} has dtype {array.dtype}: converting it needs a copy")
        return array.astype(dtype or array.dtype, copy=bool(copy))

    def __repr__(self) -> str:
        return f"<kvd.View of {self._what}>"


class Memory(View):
    """Addresses of a space's blocks in this process. Made by Space.memory().

    As a tensor, it is int8 [blocks, block_bytes] over the whole range of addresses. Write only blocks being filled, and
    read only blocks that this process or another process of the engine holds.
    """

    def __init__(self, device: tuple[int, int], make: Make, struct: MemoryStruct):
        super().__init__(device, make, "all blocks")
        self.base = int(struct.base)
        """Address of block 0: block b is at base + b * block_bytes, writable if the caller may write it."""
        self.sealed = int(struct.sealed)
        """Address of block 0 in the same memory mapped read-only, as in pins. On a GPU: base."""
        self.block_bytes = int(struct.block_bytes)
        self.blocks = int(struct.blocks)
        """Number of blocks in the reserved range: all ids are below this."""
        self.mapped = int(struct.mapped)
        """Ids below this are mapped now; from here on, only blocks that the caller holds."""
        self._view = struct.view

    def __repr__(self) -> str:
        return f"<kvd.Memory: {self.blocks} blocks of {self.block_bytes} bytes at {self.base:#x}, {self.mapped} mapped>"
