# SPDX-License-Identifier: Apache-2.0
"""Pins, which hold stored prefixes."""

from __future__ import annotations

import builtins
import ctypes
from ctypes import byref, c_uint32, c_void_p
from typing import TYPE_CHECKING, Iterator, Sequence

from ._block import Block, structs_of
from ._buffer import bytes_at
from ._handle import Handle, when_forgotten
from ._native import BlockStruct, PinStruct, check, closed, error, lib, number
from ._tensor import View, stream_of
from ._tokens import Tokens, words

if TYPE_CHECKING:
    from ._space import Space


WRITTEN = 16    # bytes of struct kvd_written

_SEAL = {(False, False): lib.kvd_seal, (False, True): lib.kvd_seal_on,
         (True, False): lib.kvd_seal_keep, (True, True): lib.kvd_seal_keep_on}


def _unpin(handle: Handle, struct: PinStruct) -> None:
    lib.kvd_unpin(handle, byref(struct))


class Pin:
    """Holds a chain of blocks. Made by Space.lookup(), or empty by kvd.Pin(space), to begin a new chain.

    True if it holds blocks. len() and iteration apply to its blocks. Released by release(), by the end of a with block,
    or by the garbage collector; the addresses of its blocks must not be read afterwards, but tensors of blocks have
    pins of their own. For one thread at a time. salt is an extra key of the chain, see Space.lookup().
    """

    def __init__(self, space: Space, group: int = 0, salt: int = 0):
        self._struct = PinStruct(group=number("group", group), salt=number("salt", salt, 64))
        self.space = space
        self.blocks: list[int] = []
        """Ids of the chain's blocks, first to last. The bytes of the block with id i are at address(i) and in
        view(i)."""
        self._handle: Handle | None = space._open()
        self._forget = when_forgotten(self, _unpin, self._handle, self._struct)

    @property
    def tokens(self) -> int:
        """Number of valid tokens in the chain; 0 if the pin is empty."""
        return int(self._struct.n_tokens) if self._struct.view else 0

    @property
    def below(self) -> int:
        """After Space.lookup(): number of further tokens in the daemon's file, which Space.fetch() can load; -1 if only
        fetch() can tell. A hint, see libkvd(3)."""
        n = int(self._struct.n_below)
        return -1 if n == 2**32 - 1 else n

    def _took(self, struct: PinStruct, blocks: list[int]) -> None:
        """Take over a pin that libkvd filled."""
        ctypes.pointer(self._struct)[0] = struct
        self.blocks = blocks

    def __bool__(self) -> bool:
        return bool(self._struct.view)

    def __len__(self) -> int:
        return len(self.blocks)

    def __iter__(self) -> Iterator[int]:
        return iter(self.blocks)

    # ---- reading -----------------------------------------------------------------------------------------------------

    def address(self, block: int) -> int:
        """Return the address of a block, in host memory or on the space's device. Read-only, and valid only while this
        pin holds the block."""
        return (self._struct.base or 0) + block * int(self._struct.block_bytes)

    def view(self, block: int) -> View:
        """Return a block of the chain for from_dlpack: [layers, 2 (K, V), heads, tokens, dim] in order "hnd" or
        [layers, 2, tokens, heads, dim] in order "nhd", of the space's dtype; uint8 [block_bytes] if it is opaque, and on
        several GPUs [bytes of the shard].
        With dtype q8 and q4, uint8 [..., bytes of a row] (kvd.ops.Quantised; its expand() needs keys=True for keys). numpy
        takes no e4m3 and e5m2; memoryview() has their bytes.

        Read-only. Its tensors hold the block even after this pin is released. On a GPU the consumer's stream waits
        until the block is written, and a deleted tensor releases the block when that stream has passed. from_dlpack
        raises kvd.Invalid if the block is not in this chain.
        """
        def make(stream: int | None) -> c_void_p:
            tensor = self._tensor(block)
            if stream != -1:            # -1: the consumer synchronizes
                lib.kvd_dlpack_release_on(tensor, stream_of(stream))
                self.wait(stream)
            return tensor
        return View(self.space.device, make, f"block {block}", read_only=True)

    def _tensor(self, block: int) -> c_void_p:
        tensor = c_void_p()
        check(lib.kvd_dlpack_block(self._open(), byref(self._struct), number("block", block), byref(tensor)))
        return tensor

    def memoryview(self, block: int) -> builtins.memoryview:
        """Return the bytes of a block of the chain, read-only. The memoryview holds the block. Raises BufferError if it
        is on a GPU."""
        if self.space.device[0] != 1:
            raise BufferError("the block is in a GPU's memory")
        hold = self.view(block).__dlpack__()
        return bytes_at(self.address(block), self.space.block_bytes, hold).toreadonly()

    # ---- writing -----------------------------------------------------------------------------------------------------

    def seal(self, blocks: Sequence[Block], tokens: Tokens, stream: int | None = None, *,
             keep: bool = False, written: Sequence[bytes] | None = None) -> list[int]:
        """Publish filled blocks, which contain these tokens, as the continuation of the chain. The pin then holds them.

        blocks and tokens may both be empty. All blocks but the last must be full; a partial last block ends its chain
        for good. Returns the ids of the blocks that now hold the content. If another process had sealed the content
        first, these are its blocks, and the caller's copies are freed. With keep=True the copies remain the caller's
        instead, unpublished (block.sealed is false), until Space.free(), for engines that cannot replace blocks in a
        table that is in use. stream is a GPU stream that is still writing the blocks; only readers wait for it. written, with
        keep=True: what Space.write_on() has returned for each stream that is still writing a shard of the blocks, in the
        processes of a pool on several GPUs.

        Raises kvd.Stale if the blocks' daemon is gone, and kvd.Invalid for counts that do not match, a token beyond the
        vocabulary, or a chain that has ended. Pin and blocks are then unchanged. After kvd.ConnectionLost, kvd.TimedOut
        and kvd.NotKvd it is unknown whether the blocks were sealed, and they can only be freed. If a very long call is
        sealed in part, the ids are those of the sealed blocks, and the other blocks remain the caller's.
        """
        row, room = words(tokens), structs_of(list(blocks))
        handle, (address, n) = self._open(), row.buffer_info()
        if not room and not row:
            return []
        arguments = [handle, byref(self._struct), len(room), room, address, n]
        ids = (c_uint32 * len(room))()
        if keep:
            arguments.append(ids)
        if stream is not None:
            arguments.append(stream_of(stream))
        function = _SEAL[keep, stream is not None]
        if written is not None:
            if not keep or stream is not None or any(len(it) != WRITTEN for it in written):
                raise ValueError(f"written goes with keep=True and without a stream, and each has {WRITTEN} bytes")
            function = lib.kvd_seal_written
            arguments += [b"".join(written), len(written)]
        return self._took_blocks(blocks, room, function(*arguments), ids if keep else None)

    def post(self, blocks: Sequence[Block], tokens: Tokens) -> None:
        """Publish full blocks without waiting for a reply, in a causal space, for blocks that fill one by one.

        Other processes find them within microseconds, or 2 ms if many clients post; usually no system call is made. The
        caller may read the blocks (block.posted is true) until Space.free(), even if another process had sealed the
        content first. The pin keeps its chain. post() and seal() continue behind the posted blocks, unless the last one
        was freed.

        Errors are raised once, by the next post(), which then posts nothing, or by Space.flush(): kvd.Refused if some
        posted blocks of the space are not published, kvd.ConnectionLost if the daemon ended before it had processed all
        of them. Errors of this call are those of seal(); some of its blocks may be posted then.
        """
        row, room = words(tokens), structs_of(list(blocks))
        address, n = row.buffer_info()
        if not room and not row:
            return
        size, done = self.space.geometry.block_tokens, 0
        while done < len(room):         # if the ring is full, the next call waits for the daemon
            rest = (BlockStruct * (len(room) - done)).from_buffer(room, done * ctypes.sizeof(BlockStruct))
            more = check(lib.kvd_post(self._open(), byref(self._struct), len(rest), rest,
                                      address + 4 * size * done, n - size * done))
            for block, struct in zip(blocks[done:done + more], rest):
                block._was_posted(struct)
            done += more

    def _seal_key(self, key: bytes, blocks: Sequence[Block]) -> None:
        room = structs_of(list(blocks))
        result = lib.kvd_seal_key(self._open(), key, len(room), room, byref(self._struct))
        self._took_blocks(blocks, room, result)

    def _took_blocks(self, blocks: Sequence[Block], room: ctypes.Array[BlockStruct], result: int,
                     kept: ctypes.Array[c_uint32] | None = None) -> list[int]:
        """Update blocks and pin after a seal: the first `result` blocks are in the chain, except kept duplicates."""
        failure = error(result) if result < 0 else None
        for i, block in enumerate(blocks):
            block._became(room[i], sealed=i < result and not (kept and room[i].view))
        if failure:
            raise failure
        ids = kept[:result] if kept else [it.id for it in room[:result]]
        self.blocks += ids
        return ids

    # ---- streams of a GPU --------------------------------------------------------------------------------------------

    def wait(self, stream: int | None = None) -> None:
        """Make a GPU stream wait until the chain's blocks are written. Does nothing in host memory."""
        check(lib.kvd_wait_on(self._open(), byref(self._struct), stream_of(stream)))

    def check(self) -> None:
        """Check the blocks' data, after the stream has passed. Raises kvd.DataLost if a producer died before writing a
        block, kvd.NotYet if a block is not written yet."""
        check(lib.kvd_check_pin(self._open(), byref(self._struct)))

    def release(self, stream: int | None = None) -> None:
        """Release the blocks, with a GPU stream when that has passed. The pin cannot be used afterwards. Does nothing
        if already released. Raises kvd.Error (EBUSY), and keeps the pin, if the stream is being captured into a
        graph."""
        if self._handle is None:
            return
        if stream is not None:
            check(lib.kvd_unpin_on(self._handle, byref(self._struct), stream_of(stream)))
        self._forget()
        self._struct.view = self._handle = None
        self.blocks = []

    def _open(self) -> Handle:
        if self._handle is None:
            raise closed("this pin")
        return self._handle

    def __enter__(self) -> Pin:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        state = "released" if self._handle is None else f"{self.tokens} tokens in {len(self)} blocks"
        return f"<kvd.Pin in {self.space.name!r}: {state}>"
