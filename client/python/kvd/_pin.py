# SPDX-License-Identifier: Apache-2.0
"""What holds a stored prefix."""

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


_SEAL = {(False, False): lib.kvd_seal, (False, True): lib.kvd_seal_on,
         (True, False): lib.kvd_seal_keep, (True, True): lib.kvd_seal_keep_on}


def _unpin(handle: Handle, struct: PinStruct) -> None:
    lib.kvd_unpin(handle, byref(struct))


class Pin:
    """Holds a chain of blocks: made by Space.lookup(), or empty, as kvd.Pin(space), where a new chain begins.

    True if it holds something. len() and iteration are of its blocks. Let go of by release(), at the end of a with, or
    when forgotten; nothing of its blocks may be read at their addresses then, while tensors of them hold them
    themselves. One thread's at a time. salt is an extra key of the chain, see Space.lookup().
    """

    def __init__(self, space: Space, group: int = 0, salt: int = 0):
        self._struct = PinStruct(group=number("group", group), salt=number("salt", salt, 64))
        self.space = space
        self.blocks: list[int] = []
        """Ids of the chain's blocks, first to last. The bytes of block i are at address(i), and in view(i)."""
        self._handle: Handle | None = space._open()
        self._forget = when_forgotten(self, _unpin, self._handle, self._struct)

    @property
    def tokens(self) -> int:
        """How many tokens of the chain are valid; 0: it holds nothing."""
        return int(self._struct.n_tokens) if self._struct.view else 0

    @property
    def below(self) -> int:
        """After Space.lookup(): how many more of its tokens lie in the daemon's file, from where Space.fetch() brings
        them; 0: none; -1: only fetch() finds out. A hint, see libkvd(3)."""
        n = int(self._struct.n_below)
        return -1 if n == 2**32 - 1 else n

    def _took(self, struct: PinStruct, blocks: list[int]) -> None:
        """What libkvd pinned is this pin's now."""
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
        """Where a block lies, of the host or the space's device. To be read only, and only while this pin holds it."""
        return (self._struct.base or 0) + block * int(self._struct.block_bytes)

    def view(self, block: int) -> View:
        """A block of the chain, for from_dlpack: [layers, 2 (K, V), heads, tokens, dim] in order "hnd", or [layers, 2,
        tokens, heads, dim] in "nhd", of the space's dtype; uint8 [block_bytes] if it is opaque.

        Read-only. Its tensors hold the block, whatever becomes of this pin. On a GPU the consumer's stream waits until
        the block is written, and the hold ends when it has passed the tensor's end. kvd.Invalid, from from_dlpack: the
        block is not in this chain.
        """
        def make(stream: int | None) -> c_void_p:
            tensor = self._tensor(block)
            if stream != -1:            # -1: the consumer sees to it
                lib.kvd_dlpack_release_on(tensor, stream_of(stream))
                self.wait(stream)
            return tensor
        return View(self.space.device, make, f"block {block}", read_only=True)

    def _tensor(self, block: int) -> c_void_p:
        tensor = c_void_p()
        check(lib.kvd_dlpack_block(self._open(), byref(self._struct), number("block", block), byref(tensor)))
        return tensor

    def memoryview(self, block: int) -> builtins.memoryview:
        """The bytes of a block of the chain, read-only; they hold it. BufferError: they are on a GPU."""
        if self.space.device[0] != 1:
            raise BufferError("the block is in a GPU's memory")
        hold = self.view(block).__dlpack__()
        return bytes_at(self.address(block), self.space.block_bytes, hold).toreadonly()

    # ---- writing -----------------------------------------------------------------------------------------------------

    def seal(self, blocks: Sequence[Block], tokens: Tokens, stream: int | None = None, *,
             keep: bool = False) -> list[int]:
        """Publishes filled blocks, which hold these tokens, as what follows the chain; the pin then holds them, too.

        No blocks and no tokens are fine. All blocks but the last are full; a last one that is not ends its chain for
        good. Returns the ids of the blocks that hold this content now: where it was stored before, others than the ones
        given, which are given back, or, if keep is true, stay the caller's, unpublished (block.sealed is false), until
        Space.free(): for engines that cannot put other blocks into a running table. stream is a GPU's that still writes
        the blocks: nobody waits for it but who reads them.

        kvd.Stale: the blocks' daemon is gone; kvd.Invalid: counts that do not fit, a token beyond the vocabulary, or a
        chain that has ended. Pin and blocks are as before then. kvd.ConnectionLost, kvd.TimedOut, kvd.NotKvd: nobody
        knows whether they were sealed; the blocks can only be given back. If a very long call is sealed in part, the
        ids are of what was, and the other blocks are still the caller's.
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
        return self._took_blocks(blocks, room, function(*arguments), ids if keep else None)

    def post(self, blocks: Sequence[Block], tokens: Tokens) -> None:
        """seal() without an answer, for blocks that fill one by one: full ones, in a causal space.

        Others find them within microseconds, or 2 ms where many post, and mostly no system call is made. The blocks stay
        the caller's to read (block.posted is true) until Space.free(), also where somebody else was first with their
        content; the pin holds what it held. What follows goes behind them, by post() or seal(), as long as the last one
        was not freed.

        What is wrong is told once, by the next post(), which then posts nothing, or by Space.flush(): kvd.Refused, some
        blocks that were posted in the space are not published; kvd.ConnectionLost, the daemon ended before it had seen
        all of them. Errors of this call as of seal(); some of its blocks may be posted then.
        """
        row, room = words(tokens), structs_of(list(blocks))
        address, n = row.buffer_info()
        if not room and not row:
            return
        size, done = self.space.geometry.block_tokens, 0
        while done < len(room):         # the ring of a daemon that does not look may be full: then the next call waits
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
        """After a seal of them: the first `result` are the chain's, but for duplicates that are kept."""
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
        """A GPU's stream waits until the chain's blocks are written. Nothing to do in host memory."""
        check(lib.kvd_wait_on(self._open(), byref(self._struct), stream_of(stream)))

    def check(self) -> None:
        """After the stream has passed. kvd.DataLost: a producer died before it wrote; kvd.NotYet: it still may."""
        check(lib.kvd_check_pin(self._open(), byref(self._struct)))

    def release(self, stream: int | None = None) -> None:
        """Lets go; stream: when that has passed. The pin is of no use afterwards. Again does nothing. A stream that is
        being captured into a graph is refused (kvd.Error, EBUSY), and the pin stays."""
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
