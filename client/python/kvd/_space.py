# SPDX-License-Identifier: Apache-2.0
"""One model's cache."""

from __future__ import annotations

import errno
import time
from ctypes import byref, c_double, c_uint32, c_void_p
from typing import TYPE_CHECKING, Any, Iterable, NamedTuple, Sequence

from ._block import PIECE, Block, structs_of, take
from ._buffer import memory
from ._errors import Error
from ._fetch import Fetch
from ._geometry import Geometry
from ._handle import Handle
from ._lease import Lease
from ._native import (CountersStruct, MemoryStruct, PinStruct, PlaceStruct, c_string, check, closed, lib, number)
from ._pin import Pin
from ._sequence import Sequence as TokenSequence
from ._tensor import CPU, CUDA, Memory, View, stream_of
from ._tokens import Tokens, words

if TYPE_CHECKING:
    from ._daemon import Daemon


class Counters(NamedTuple):
    """Of this process in a space, since it was opened."""

    lookups: int
    lookup_hits: int
    tokens_asked: int
    tokens_found: int
    blocks_allocated: int
    blocks_sealed: int
    blocks_duplicate: int
    """Sealed by another before us."""
    refused: int
    """Allocations that quota or a full pool refused."""
    retries: int
    """Lookups that met an eviction in progress."""
    reconnects: int


class Space:
    """One model's cache. Made by Daemon.space(). May be used by many threads at once.

    close(), or the end of a with, ends it: no call begins anew. What was handed out stays valid, and the memory is let
    go of with the last pin, block and tensor.
    """

    def __init__(self, daemon: Daemon, handle: Handle, name: str, geometry: Geometry):
        self.daemon, self.name, self.geometry = daemon, name, geometry
        self.block_bytes = geometry.block_bytes
        """Bytes of a block."""
        place = PlaceStruct()
        check(lib.kvd_space_place(handle, byref(place)))
        self.device = (CUDA, int(place.device)) if place.memory else (CPU, 0)
        """Where its blocks are, as DLPack says it: (1, 0) is host memory, (2, n) is GPU n of this process."""
        self.stream_order = bool(place.stream_order)
        """Streams of the GPU order seals and reads; if False, those calls wait instead."""
        self._handle: Handle | None = handle

    # ---- finding -----------------------------------------------------------------------------------------------------

    def lookup(self, tokens: Tokens, group: int = 0, *, salt: int = 0) -> Pin:
        """The longest stored prefix of the tokens, pinned; false if there is none. pin.tokens of them are valid.

        tokens are integers in one row: a list, or an array of numpy, torch, array.array and so on. In a bidirectional
        space the whole of them is found, or nothing. group is the layer group. salt is an extra key of 64 bits (LoRA,
        images, a tenant): chains with different salts are strangers, whatever their tokens. Makes no system call, and
        so misses what lies in memory by which the pool has grown, until alloc(), Pin.seal() or catch_up() has asked
        the daemon for it.
        kvd.Invalid: there is no such group; ValueError, TypeError: these are not token ids.
        """
        row = words(tokens)
        pin = Pin(self, group, salt)
        address, n = row.buffer_info()
        room = n // (self.geometry.block_tokens or 16) + 1
        ids = (c_uint32 * room)()
        check(lib.kvd_lookup(pin._open(), group, address, n, ids, room, byref(pin._struct)))
        if pin:
            pin.blocks = ids[:pin._struct.n_blocks]
        return pin

    def catch_up(self) -> bool:
        """Maps what the pool has grown by, and attaches to a daemon that took the place of one that ended, so that
        lookups find what is there now. For who looks up and seldom calls anything that asks the daemon. Returns whether
        that is done; if not, the daemon is away or did not answer, and lookups find what they found before."""
        return int(lib.kvd_catch_up(self._open())) == 0

    def fetch(self, tokens: Tokens, group: int = 0, *, salt: int = 0) -> Fetch:
        """Has the daemon bring up what its file or its servers have behind what is in the pool of a prompt. Returns at
        once; a lookup finds what has come. One message to the daemon. kvd.Busy: too many fetches of the domain
        wait already."""
        return Fetch(self._open(), group, salt, words(tokens))

    def find(self, tokens: Tokens, group: int = 0, *, salt: int = 0, wait: float = 1.0) -> Pin:
        """catch_up() and lookup(); what is not in the pool is fetched, and waited for, if there is a tier below that
        has it: at most so many seconds in all, after which it is quicker to compute."""
        row, until = words(tokens), time.monotonic() + wait
        self.catch_up()
        pin = self.lookup(row, group, salt=salt)
        while pin.below and time.monotonic() < until and self._brings(row, group, salt, until):
            before = pin.tokens
            pin.release()
            self.catch_up()
            pin = self.lookup(row, group, salt=salt)
            if pin.tokens <= before:
                break
        return pin

    def _brings(self, row: Tokens, group: int, salt: int, until: float) -> bool:
        """Whether something came up; not having been able to ask is nobody's failure."""
        try:
            with self.fetch(row, group, salt=salt) as fetch:
                return bool(fetch) and fetch.wait(until - time.monotonic())
        except OSError:
            return False

    def match(self, tokens: Tokens, group: int = 0, *, salt: int = 0) -> int:
        """How many tokens a lookup would find now. A hint: holds nothing, and is true at no particular time."""
        row = words(tokens)
        return check(lib.kvd_match_salted(self._open(), number("group", group), number("salt", salt, 64),
                                          *row.buffer_info()))

    def lookup_keys(self, keys: bytes | Sequence[bytes], blocks: int = 1) -> list[Pin]:
        """Finds objects of so many blocks by their keys: a pin each, false where there is none. Whole or not at all.

        For spaces that are causal, of opaque blocks, with vocab=0 and block_tokens from 4 to 8: a key is any
        4 * block_tokens bytes. keys are a list of them, or all of them in one bytes. kvd.Invalid: not such a space.
        """
        (joined, n), size = self._keys(keys), 4 * self.geometry.block_tokens
        pins = [Pin(self) for _ in range(n)]
        if number("blocks", blocks) > PIECE:
            raise Error(errno.EINVAL, f"no object has {blocks} blocks")
        each = max(1, PIECE // max(1, blocks))
        for first in range(0, n, each):
            self._lookup_keys(joined[first * size:(first + each) * size], blocks, pins[first:first + each])
        return pins

    def _lookup_keys(self, keys: bytes, blocks: int, pins: list[Pin]) -> None:
        rows, found = (c_uint32 * (len(pins) * blocks))(), (PinStruct * len(pins))()
        check(lib.kvd_lookup_keys(self._open(), keys, len(pins), blocks, rows, found))
        for i, pin in enumerate(pins):
            if found[i].view:
                pin._took(found[i], rows[i * blocks:(i + 1) * blocks])

    def seal_key(self, key: bytes, blocks: Sequence[Block]) -> Pin:
        """Publishes filled blocks as the object of that name, see lookup_keys(); always as many for one key. Returns a
        pin of it, whose blocks are others if somebody was first. Errors as of Pin.seal()."""
        joined, _ = self._keys([key])
        pin = Pin(self)
        pin._seal_key(joined, blocks)
        return pin

    def _keys(self, keys: bytes | Sequence[bytes]) -> tuple[bytes, int]:
        size = 4 * self.geometry.block_tokens
        joined = keys if isinstance(keys, bytes) else b"".join(keys)
        n = len(joined) // size if isinstance(keys, bytes) else len(keys)
        if len(joined) != n * size or not isinstance(keys, bytes) and any(len(key) != size for key in keys):
            raise ValueError(f"a key of space {self.name!r} has {size} bytes")
        return joined, n

    # ---- filling -----------------------------------------------------------------------------------------------------

    def alloc(self, n: int) -> list[Block]:
        """n blocks to fill, or none at all: kvd.PoolFull or kvd.QuotaExceeded, at once. Evicts what nobody holds."""
        handle = self._open()
        if number("n", n) > 2 * PIECE and n > 2 * self.available() + PIECE:     # available() is an estimate
            raise Error(errno.ENOBUFS, f"space {self.name!r} can have about {self.available()} blocks more, not {n}")
        return [Block(self, handle, struct) for struct in take(handle, n)]

    def free(self, blocks: Iterable[Block], stream: int | None = None) -> None:
        """Gives back blocks that were not sealed, with their contents; others are left alone.

        stream: a GPU's that may still be writing them. One that is being captured into a graph is refused (kvd.Error,
        EBUSY), and what was not freed stays; nothing else can fail.
        """
        given = [block for block in blocks if block._struct.view]
        if not given:
            return
        handle, room = given[0]._handle, structs_of(given)
        assert handle is not None
        result = 0
        if stream is None:
            lib.kvd_free(handle, len(room), room)
        else:
            result = lib.kvd_free_on(handle, len(room), room, stream_of(stream))
        for block, left in zip(given, room):
            if not left.view:
                block._gone()
        check(result)

    def flush(self) -> None:
        """Waits until the daemon has seen all that was posted in the space. Errors of what was: see Pin.post()."""
        check(lib.kvd_flush(self._open()))

    def reserve(self, n: int) -> int:
        """The library's magazine holds at least n blocks from now on, if the pool has them, until the next reserve():
        alloc() of up to n cannot fail then. Counts as blocks being filled. Returns how many it holds now."""
        return check(lib.kvd_reserve(self._open(), number("n", n)))

    def available(self) -> int:
        """About how many blocks alloc() could give now, for schedulers: an estimate from shared memory, of what is
        free, may still grow, or is held by nobody."""
        return check(lib.kvd_available(self._open()))

    # ---- memory ------------------------------------------------------------------------------------------------------

    def memory(self) -> Memory:
        """Where all blocks lie, for engines with block tables of their own; for from_dlpack, too. Also maps what the
        pool has grown by: call it again when an id is not below its `mapped`, which another process of the engine
        told."""
        struct = MemoryStruct()
        check(lib.kvd_space_memory(self._open(), byref(struct)))

        def make(_stream: int | None) -> c_void_p:
            tensor = c_void_p()
            check(lib.kvd_dlpack_memory(self._open(), byref(tensor)))
            return tensor
        return Memory(self.device, make, struct)

    def layer(self, layer: int, values: bool = False) -> View:
        """The K (or V) plane of a layer of the model, for from_dlpack: [blocks, heads, tokens, dim] in order "hnd",
        [blocks, tokens, heads, dim] in "nhd", strided, over all blocks that there can be, so it is never stale. Index
        it with block ids.

        Pins nothing: read only blocks that a pin holds, write only those that are being filled. kvd.Invalid, from
        from_dlpack: there is no such layer, or blocks are opaque.
        """
        def make(_stream: int | None) -> c_void_p:
            tensor = c_void_p()
            check(lib.kvd_dlpack_layer(self._open(), number("layer", layer), int(values), byref(tensor)))
            return tensor
        return View(self.device, make, f"{'values' if values else 'keys'} of layer {layer}")

    def read(self, pin: Pin, out: Any) -> None:
        """Copies the blocks of a pin into an array, one after the other: a contiguous, writable one of exactly
        len(pin) * block_bytes bytes (numpy, torch, bytearray, ...). BufferError: it is none; ValueError: another size.
        """
        self._check_copy(pin._open())
        size = self.block_bytes
        with memory(out, writable=True) as (to, room):
            _check_size(room, len(pin) * size)
            for first, block, n in _runs(pin.blocks):
                lib.kvd_copy(to + first * size, pin.address(block), n * size)

    def write(self, blocks: Sequence[Block], source: Any) -> None:
        """Fills blocks from an array, one after the other: a contiguous one of exactly len(blocks) * block_bytes bytes.
        BufferError: it is not contiguous; ValueError: it has another size; kvd.Closed: a block is not being filled.
        """
        size = self.block_bytes
        with memory(source) as (at, given):
            _check_size(given, len(blocks) * size)
            for block in blocks:
                self._check_copy(block._open())
            for i, block in enumerate(blocks):
                lib.kvd_copy(block.data, at + i * size, size)

    def _check_copy(self, handle: Handle) -> None:
        """kvd.Forked: this process has not mapped the blocks."""
        if self.device[0] != CPU:
            raise BufferError("the blocks are in a GPU's memory: copy tensors of them")
        check(lib.kvd_available(handle))

    # ---- methods and numbers -----------------------------------------------------------------------------------------

    def lease(self, tokens: Tokens, timeout: float = 0.0) -> Lease:
        """Asks for the right to compute a prefix that lookup() did not find, in a bidirectional space.

        True: compute it, seal it, and end the lease (a with does). False: another process finished it meanwhile; look
        up again. kvd.Busy: another process still computes it after timeout seconds: compute it without storing.
        """
        return Lease(self._open(), words(tokens), timeout)

    def sequence(self, max_blocks: int) -> TokenSequence:
        """A request's own table of at most so many blocks, for the methods. kvd.TooMany: the space has no more."""
        return TokenSequence(self, self._open(), max_blocks)

    def setting(self, name: str) -> float:
        """A setting of the space by its name, as kvctl(1) lists them: "keydiff" (0 or 1), "keydiff.budget", ..."""
        value = c_double()
        check(lib.kvd_space_setting(self._open(), c_string("name", name), byref(value)))
        return value.value

    def set(self, name: str, value: float) -> None:
        """Changes a setting for all users of the space. kvd.Invalid: no such setting, or not a value of it."""
        check(lib.kvd_space_set(self._open(), c_string("name", name), value))

    def counters(self) -> Counters:
        """Of this process in the space, since it was opened."""
        struct = CountersStruct()
        lib.kvd_counters(self._open(), byref(struct))
        return Counters(*(getattr(struct, name) for name in Counters._fields))

    def prefix_depth(self, prefix: int, prompt: int, generated: int) -> int:
        """BiCache: how many layers of a shared prefix to use as they are, for these numbers of tokens; 0: the space has
        no table yet."""
        return check(lib.kvd_prefix_depth(self._open(), number("prefix", prefix), number("prompt", prompt),
                                          number("generated", generated)))

    def prefix_refresh(self, step: int) -> bool:
        """BiCache: whether the deep layers are computed anew at this step, from 1."""
        return bool(check(lib.kvd_prefix_refresh(self._open(), number("step", step))))

    def prefix_sample(self, ratio: int, blocks: Sequence[Block], tokens: int) -> None:
        """BiCache: one sample of the profile at a prefix of `ratio` percent and so many tokens. For each layer group
        the blocks with the prefix alone, then as many with the whole input. They stay the caller's. Waits for the
        worker."""
        room = structs_of(list(blocks))
        each = len(room) // (2 * max(1, self.geometry.layer_groups))
        check(lib.kvd_prefix_sample(self._open(), number("ratio", ratio), each, room, number("tokens", tokens)))

    def settle(self) -> int:
        """Lets go of what streams of the GPU have passed; how many pins and blocks still wait for one."""
        return check(lib.kvd_settle(self._open()))

    def close(self) -> None:
        """No call begins anew. Never fails; again does nothing."""
        self._handle = None

    def _open(self) -> Handle:
        handle = self._handle
        if not handle:
            raise closed(f"space {self.name!r}")
        return handle

    def __enter__(self) -> Space:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<kvd.Space {self.name!r}{'' if self._handle else ', closed'}>"


def _runs(ids: list[int]) -> Iterable[tuple[int, int, int]]:
    """Consecutive ids as (where, the first one, how many)."""
    first = 0
    for i in range(1, len(ids) + 1):
        if i == len(ids) or ids[i] != ids[i - 1] + 1:
            yield first, ids[first], i - first
            first = i


def _check_size(given: int, expected: int) -> None:
    if given != expected:
        raise ValueError(f"these blocks have {expected} bytes, and the array {given}")
