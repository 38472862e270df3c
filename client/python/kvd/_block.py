# SPDX-License-Identifier: Apache-2.0
"""Blocks to fill."""

from __future__ import annotations

import builtins
import ctypes
import importlib
from ctypes import byref, c_void_p
from typing import TYPE_CHECKING, Any

from ._buffer import bytes_at
from ._errors import Closed
from ._handle import Handle, when_forgotten
from ._native import BlockStruct, check, error, lib
from ._tensor import View

if TYPE_CHECKING:
    from ._space import Space

PIECE = 4096    # blocks in one call of libkvd


def _free(handle: Handle, struct: BlockStruct) -> None:
    lib.kvd_free(handle, 1, byref(struct))
    struct.view = None


class Block(View):
    """A block to fill. Made by Space.alloc(); published by Pin.seal(), or freed by Space.free() or the garbage
    collector.

    Its contents are undefined at first. Fill it through a tensor (torch.from_dlpack(block), numpy.from_dlpack(block),
    of the space's dtype and the shape given at Pin.view()), through its buffer (block.memoryview(), from Python 3.12 on
    the block itself; numpy.asarray(block) is an array of these bytes), by Space.write(), or at its address. Finish
    writing before it is sealed; tensors and buffers must not outlive the block.
    """

    def __init__(self, space: Space, handle: Handle, struct: BlockStruct):
        super().__init__(space.device, self._tensor, f"block {struct.id}")
        self._handle: Handle | None = handle
        self._size = space.block_bytes
        self._struct = struct
        self._sealed = self._posted = False
        self._forget = when_forgotten(self, _free, handle, struct)

    @property
    def id(self) -> int:
        """Its number in the pool. After Pin.seal(): that of the block that holds this content in the chain."""
        return int(self._struct.id)

    @property
    def data(self) -> int:
        """Its address, in host memory or on the space's device; 0 if the block is no longer the caller's."""
        return (self._struct.data or 0) if self._struct.view else 0

    @property
    def sealed(self) -> bool:
        """Whether its content was published: in this block, or, without keep=True, in another block with the same
        content."""
        return self._sealed

    @property
    def posted(self) -> bool:
        """Whether it was passed to Pin.post(), and is read-only."""
        return self._posted

    def memoryview(self) -> builtins.memoryview:
        """Return its bytes, writable. Raises BufferError if they are on a GPU, kvd.Closed if the block is sealed or
        freed."""
        if self._device[0] != 1:
            raise BufferError("the block is in a GPU's memory")
        handle = self._open()
        check(lib.kvd_available(handle))        # raises kvd.Forked if this process has not mapped the block
        return bytes_at(self.data, self._size, (self, handle))

    def __buffer__(self, flags: int) -> builtins.memoryview:
        return self.memoryview()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Return an array for numpy.asarray(). From Python 3.12 on, numpy uses the buffer and does not call this."""
        return importlib.import_module("numpy").array(self.memoryview(), dtype=dtype, copy=copy)

    def _tensor(self, _stream: int | None) -> c_void_p:
        tensor = c_void_p()
        check(lib.kvd_dlpack_filling(self._open(), byref(self._struct), byref(tensor)))
        return tensor

    def _open(self) -> Handle:
        handle = self._handle
        if not handle or not self.data or self._posted:
            raise Closed(9, f"block {self.id} is not being filled")
        return handle

    def _became(self, struct: BlockStruct, sealed: bool) -> None:
        """Update the block after a call: struct is another block with the same content, empty (this block was sealed),
        or unchanged."""
        if struct.view or not sealed:
            ctypes.pointer(self._struct)[0] = struct
        if sealed:
            self._sealed = True
            self._gone()

    def _was_posted(self, struct: BlockStruct) -> None:
        ctypes.pointer(self._struct)[0] = struct
        self._posted = True

    def _gone(self) -> None:
        self._struct.view = None
        self._forget.detach()
        self._handle = None

    def __repr__(self) -> str:
        mine = "posted" if self._posted else "to fill"
        state = "sealed" if self._sealed else mine if self._struct.view else "given back"
        return f"<kvd.Block {self.id}, {state}>"


def take(handle: Handle, n: int) -> list[BlockStruct]:
    """Allocate n blocks, or none if there is an error, in pieces, so that a huge n does not use memory. All are of one daemon:
    if it was replaced meanwhile, those of the old one could only be freed."""
    taken: list[BlockStruct] = []
    while len(taken) < n:
        room = (BlockStruct * min(n - len(taken), PIECE))()
        got = lib.kvd_alloc(handle, len(room), room)
        if got < 0:
            failure = error(got)
            lib.kvd_free(handle, len(taken), (BlockStruct * len(taken))(*taken))
            raise failure
        if taken and room[0].view != taken[0].view:
            lib.kvd_free(handle, len(taken), (BlockStruct * len(taken))(*taken))
            taken = []
        taken += [BlockStruct.from_buffer_copy(it) for it in room[:got]]
    return taken


def structs_of(blocks: list[Block]) -> ctypes.Array[BlockStruct]:
    return (BlockStruct * len(blocks))(*(block._struct for block in blocks))
