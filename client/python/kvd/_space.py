# SPDX-License-Identifier: Apache-2.0
"""Daemons, spaces, pins and blocks as objects that close themselves."""

from __future__ import annotations

import ctypes
import errno
import threading
import weakref
from ctypes import byref, c_uint32, c_void_p
from dataclasses import dataclass

from ._native import (BlockStruct, Error, GeometryStruct, OptionsStruct, PinStruct, PlaceStruct, capsule, check, lib,
                      tokens_of)

CPU, CUDA = 1, 2    # DLPack's kinds of devices

_CHOICES = {
    "dtype": {"f32": 1, "f16": 2, "bf16": 3, "i8": 4},
    "order": {"hnd": 1, "nhd": 2},
    "rope": {"post": 1, "pre": 2, "none": 3},
    "kind": {"causal": 1, "bidirectional": 2},
    "keys": {"serve": 1, "paper": 2},
    "policy": {"lru": 1, "fifo": 2, "priority": 3},
}


def _choice(field: str, name: str) -> int:
    try:
        return _CHOICES[field][name]
    except KeyError:
        raise ValueError(f"{field} is one of {', '.join(_CHOICES[field])}, not {name!r}") from None


@dataclass(frozen=True)
class Geometry:
    """What a block is: every field that changes bytes (struct kvd_geometry)."""

    layers: int
    kv_heads: int
    head_dim: int
    vocab: int
    dtype: str = "f16"
    block_tokens: int = 16
    layer_groups: int = 1
    order: str = "hnd"
    rope: str = "post"
    state_width: int = 0
    fingerprint: tuple[int, int] = (0, 0)

    def _struct(self) -> GeometryStruct:
        return GeometryStruct(layers=self.layers, kv_heads=self.kv_heads, head_dim=self.head_dim,
                              block_tokens=self.block_tokens, layer_groups=self.layer_groups,
                              dtype=_choice("dtype", self.dtype), order=_choice("order", self.order),
                              rope=_choice("rope", self.rope), state_width=self.state_width, vocab=self.vocab,
                              fingerprint=self.fingerprint)

    @property
    def block_bytes(self) -> int:
        """0 if there is no such block."""
        return lib.kvd_block_bytes(byref(self._struct()))


# ---- what is left when an object is forgotten -----------------------------------------------------------------------


class _Held:
    """A C handle, and how many things that were made from it are still there. Closed when it is 0, or never."""

    def __init__(self, pointer: c_void_p, close, parent: _Held | None = None):
        self.pointer, self.parent, self._close = pointer, parent, close
        self._lock = threading.Lock()
        self._users = 0
        self.closed = False
        if parent:
            parent.use(1)

    def use(self, n: int) -> None:
        with self._lock:
            if self.closed:
                raise Error(errno.EBADF, "it is closed")
            self._users += n

    def users(self) -> int:
        return self._users

    def close(self) -> bool:
        """False: something uses it."""
        with self._lock:
            if self.closed:
                return True
            if self.users():
                return False
            self.closed = True
        self._close(self.pointer)
        if self.parent:
            self.parent.use(-1)
        return True


class _HeldSpace(_Held):
    def users(self) -> int:
        return self._users + lib.kvd_dlpack_live(self.pointer)


class Daemon:
    """A connection. Made by connect()."""

    def __init__(self, path: str | None = None):
        pointer = c_void_p()
        check(lib.kvd_open(path.encode() if path is not None else None, byref(pointer)))
        self._held = _Held(pointer, lib.kvd_close)
        weakref.finalize(self, self._held.close)

    def space(self, name: str, geometry: Geometry, *, kind: str = "causal", keys: str = "serve", policy: str = "lru",
              max_blocks: int = 0) -> Space:
        """Attaches to a space, making it if it is missing (kvd_space_open)."""
        options = OptionsStruct(kind=_choice("kind", kind), keys=_choice("keys", keys),
                                policy=_choice("policy", policy), max_blocks=max_blocks)
        return Space(self, name, geometry, options)

    def close(self) -> None:
        if not self._held.close():
            raise Error(errno.EBUSY, "a space of this connection is open")

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def connect(path: str | None = None) -> Daemon:
    """To the daemon at a socket; None: $KVD_SOCKET, or /run/kvd-0.sock."""
    return Daemon(path)


# ---- spaces --------------------------------------------------------------------------------------------------------


class Space:
    """One model's cache. Made by Daemon.space()."""

    def __init__(self, daemon: Daemon, name: str, geometry: Geometry, options: OptionsStruct):
        pointer = c_void_p()
        check(lib.kvd_space_open(daemon._held.pointer, name.encode(), byref(geometry._struct()), byref(options),
                                 byref(pointer)))
        self._held = _HeldSpace(pointer, lib.kvd_space_close, daemon._held)
        weakref.finalize(self, self._held.close)
        self.daemon, self.name, self.geometry = daemon, name, geometry

    @property
    def pointer(self) -> c_void_p:
        if self._held.closed:
            raise Error(errno.EBADF, f"space {self.name} is closed")
        return self._held.pointer

    @property
    def device(self) -> tuple[int, int]:
        """Where its blocks are, as DLPack says it: (1, 0) is host memory, (2, n) is GPU n of this process."""
        place = PlaceStruct()
        check(lib.kvd_space_place(self.pointer, byref(place)))
        return (CUDA, place.device) if place.memory else (CPU, 0)

    def lookup(self, tokens, group: int = 0) -> Pin:
        """The longest stored prefix, pinned; pin.tokens is 0 if there is none (kvd_lookup)."""
        array, n = tokens_of(tokens)
        pin = Pin(self, group)
        room = max(1, -(-n // self.geometry.block_tokens))
        ids = (c_uint32 * room)()
        check(lib.kvd_lookup(self.pointer, group, array, n, ids, room, byref(pin._struct)))
        pin.blocks = list(ids[:pin._struct.n_blocks])
        return pin

    def match(self, tokens, group: int = 0) -> int:
        """How many tokens a lookup would find now; holds nothing."""
        array, n = tokens_of(tokens)
        return check(lib.kvd_match(self.pointer, group, array, n))

    def alloc(self, n: int) -> list[Block]:
        """n blocks to fill, or none at all: kvd.Error with ENOBUFS or EDQUOT."""
        blocks: list[Block] = []
        while len(blocks) < n:
            room = (BlockStruct * (n - len(blocks)))()
            got = lib.kvd_alloc(self.pointer, len(room), room)
            if got < 0:
                error = Error(-got, lib.kvd_error().decode())
                self.free(blocks)
                raise error
            blocks += [Block(self, BlockStruct.from_buffer_copy(it)) for it in room[:got]]
        return blocks

    def free(self, blocks: list[Block], stream: int | None = None) -> None:
        """Gives back blocks that were not sealed; stream: what may still be writing them."""
        for block in blocks:
            block._free(stream)

    def layer(self, layer: int, values: bool = False) -> View:
        """The K (or V) plane of a layer over all blocks, by block ids; pins nothing (kvd_dlpack_layer)."""
        def make(stream):
            tensor = c_void_p()
            check(lib.kvd_dlpack_layer(self.pointer, layer, int(values), byref(tensor)))
            return tensor
        return View(self, make)

    def settle(self) -> int:
        """Lets go of what streams have passed; how much still waits."""
        return lib.kvd_settle(self.pointer)

    def close(self) -> None:
        if not self._held.close():
            raise Error(errno.EBUSY, f"{lib.kvd_dlpack_live(self._held.pointer)} tensors, or pins and blocks, of space "
                        f"{self.name} are in use")

    def __enter__(self) -> Space:
        return self

    def __exit__(self, *_) -> None:
        self.close()


# ---- tensors -------------------------------------------------------------------------------------------------------


def _stream_of(stream: int | None) -> int | None:
    """DLPack's number for a consumer's stream as a CUstream: None is the legacy default stream, which CUDA calls 0."""
    return None if stream in (None, 0, 1) else stream


class View:
    """Something that other libraries make a tensor of, where it is. Every from_dlpack makes a tensor of its own."""

    def __init__(self, space: Space, make):
        self._space, self._make = space, make

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._space.device

    def __dlpack__(self, *, stream: int | None = None, max_version=None, dl_device=None, copy: bool | None = None):
        if copy:
            raise BufferError("kvd gives out memory in place; copy the tensor")
        if dl_device is not None and tuple(map(int, dl_device)) != self.__dlpack_device__():
            raise BufferError(f"the memory is on device {self.__dlpack_device__()}")
        return capsule(self._make(stream))


# ---- blocks and pins -----------------------------------------------------------------------------------------------


def _free_block(held: _HeldSpace, struct: BlockStruct) -> None:
    if struct.view:
        lib.kvd_free(held.pointer, 1, byref(struct))
        struct.view = None
        held.use(-1)


class Block(View):
    """A block to fill; from_dlpack makes a tensor that writes into it. Made by Space.alloc()."""

    def __init__(self, space: Space, struct: BlockStruct):
        super().__init__(space, self._tensor)
        self._struct = struct
        space._held.use(1)
        self._forget = weakref.finalize(self, _free_block, space._held, struct)

    @property
    def id(self) -> int:
        return self._struct.id

    @property
    def data(self) -> int:
        """Its address: of the host, or of the space's device."""
        return self._struct.data or 0

    def _tensor(self, _stream) -> c_void_p:
        tensor = c_void_p()
        check(lib.kvd_dlpack_filling(self._space.pointer, byref(self._struct), byref(tensor)))
        return tensor

    def _free(self, stream: int | None) -> None:
        if stream is not None and self._struct.view:
            lib.kvd_free_on(self._space.pointer, 1, byref(self._struct), _stream_of(stream))
            self._struct.view = None
            self._space._held.use(-1)
        self._forget()


def _unpin(held: _HeldSpace, struct: PinStruct) -> None:
    lib.kvd_unpin(held.pointer, byref(struct))
    held.use(-1)


class Pin:
    """What holds a chain of blocks. Made by Space.lookup(); also where a new chain begins (it then holds nothing)."""

    def __init__(self, space: Space, group: int = 0):
        self._space, self._struct = space, PinStruct(group=group)
        self.blocks: list[int] = []     # ids, first to last
        space._held.use(1)
        self._forget = weakref.finalize(self, _unpin, space._held, self._struct)

    @property
    def tokens(self) -> int:
        """Of the chain, that are valid."""
        return self._struct.n_tokens if self._struct.view else 0

    def address(self, block: int) -> int:
        return (self._struct.base or 0) + block * self._struct.block_bytes

    def view(self, block: int) -> View:
        """A block of the chain. Its tensors hold it, whatever becomes of this pin."""
        def make(stream):
            tensor = c_void_p()
            check(lib.kvd_dlpack_block(self._space.pointer, byref(self._struct), block, byref(tensor)))
            if stream != -1:            # -1: the consumer sees to it
                lib.kvd_dlpack_release_on(tensor, _stream_of(stream))
                self.wait(stream)
            return tensor
        return View(self._space, make)

    def seal(self, blocks: list[Block], tokens, stream: int | None = None) -> list[int]:
        """Publishes filled blocks as what follows, and returns their ids, which are others' where the same content was
        there already (kvd_seal). stream: a GPU's, that still writes them (kvd_seal_on)."""
        array, n = tokens_of(tokens)
        room = (BlockStruct * len(blocks))(*(block._struct for block in blocks))
        if stream is None:
            sealed = lib.kvd_seal(self._space.pointer, byref(self._struct), len(room), room, array, n)
        else:
            sealed = lib.kvd_seal_on(self._space.pointer, byref(self._struct), len(room), room, array, n,
                                     _stream_of(stream))
        error = Error(-sealed, lib.kvd_error().decode()) if sealed < 0 else None
        for i, block in enumerate(blocks):
            if i < sealed:
                block._struct.view = None       # the pool's, from now on
                block._forget.detach()
                self._space._held.use(-1)
            else:
                ctypes.pointer(block._struct)[0] = room[i]
        if error:
            raise error
        ids = [it.id for it in room[:sealed]]
        self.blocks += ids
        return ids

    def wait(self, stream: int | None = None) -> None:
        """A GPU's stream waits until the chain's blocks are written."""
        check(lib.kvd_wait_on(self._space.pointer, byref(self._struct), _stream_of(stream)))

    def check(self) -> None:
        """After the stream has passed: kvd.Error with EIO if a producer died before it wrote."""
        check(lib.kvd_check_pin(self._space.pointer, byref(self._struct)))

    def release(self, stream: int | None = None) -> None:
        """Lets go; stream: when that has passed."""
        if stream is not None and self._struct.view and self._forget.alive:
            lib.kvd_unpin_on(self._space.pointer, byref(self._struct), _stream_of(stream))
        self._forget()
        self.blocks = []

    def __enter__(self) -> Pin:
        return self

    def __exit__(self, *_) -> None:
        self.release()
