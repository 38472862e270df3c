# SPDX-License-Identifier: Apache-2.0
"""One model's cache."""

from __future__ import annotations

import errno
import time
from ctypes import byref, c_double, c_int, c_uint8, c_uint32, c_void_p
from typing import TYPE_CHECKING, Any, Iterable, NamedTuple, Sequence

from ._block import PIECE, Block, structs_of, take
from ._buffer import memory
from ._errors import Error
from ._fetch import Fetch
from ._follow import Follow
from ._geometry import Geometry, choice
from ._handle import Handle
from ._lease import Lease
from ._native import (CountersStruct, MemoryStruct, PinStruct, PlaceStruct, c_string, check, closed, lib, number)
from ._pin import WRITTEN, Pin
from ._sequence import Sequence as TokenSequence
from ._tensor import CPU, CUDA, Memory, View, stream_of
from ._tokens import Tokens, words

if TYPE_CHECKING:
    from ._daemon import Daemon


class Counters(NamedTuple):
    """Counts of this process in a space, since the space was opened."""

    lookups: int
    lookup_hits: int
    tokens_asked: int
    tokens_found: int
    blocks_allocated: int
    blocks_sealed: int
    blocks_duplicate: int
    """Blocks whose content another process had sealed first."""
    refused: int
    """Allocations refused by quota or a full pool."""
    retries: int
    """Searches repeated because of an eviction in progress."""
    reconnects: int


class Space:
    """One model's cache, made by Daemon.space(). Thread-safe.

    After close(), or the end of a with block, new calls raise kvd.Closed. Pins, blocks and tensors stay valid, and
    memory is unmapped with the last of them.
    """

    def __init__(self, daemon: Daemon, handle: Handle, name: str, geometry: Geometry):
        self.daemon, self.name, self.geometry = daemon, name, geometry
        self.block_bytes = geometry.block_bytes
        """Size of a block in bytes."""
        place = PlaceStruct()
        check(lib.kvd_space_place(handle, byref(place)))
        self.device = (CUDA, int(place.device)) if place.memory else (CPU, 0)
        """DLPack device of its blocks: (1, 0) is host memory, (2, n) is GPU n of this process, (2, -1) no memory (index_only).
        """
        self.stream_order = bool(place.stream_order)
        """Whether GPU streams order seals and reads; if False, those calls wait instead."""
        self.shard, self.shards = int(place.shard), int(place.shards)
        """Number of the GPU that this process uses among those of the pool, and their number; 0 in host memory. Each has
        block_bytes / shards bytes of every block, which Memory.block_bytes is."""
        self._handle: Handle | None = handle

    @property
    def cache(self) -> int:
        """Random number of the space's cache, the same in all processes that use it. Block ids mean the same where it is
        equal: another daemon's space of this name has another one."""
        place = PlaceStruct()
        check(lib.kvd_space_place(self._open(), byref(place)))
        return int(place.cache)

    # ---- finding -----------------------------------------------------------------------------------------------------

    def lookup(self, tokens: Tokens, group: int = 0, *, salt: int = 0) -> Pin:
        """Find and pin the longest stored prefix of the tokens. Its first pin.tokens tokens are valid; the pin is false
        if nothing was found.

        tokens is one row of integers: a list, or an array of numpy, torch, array.array and so on. In a bidirectional
        space all of them are found, or nothing. group is the layer group. salt is an extra key of 64 bits (LoRA,
        images, a tenant): chains with different salts never share a block. Makes no system call. Therefore it misses
        blocks in memory by which the pool has grown, until alloc(), Pin.seal() or catch_up() has sent the daemon a
        request.

        Raises kvd.Invalid if the group is invalid, ValueError or TypeError if these are not token ids.
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

    def catch_up(self, *, strict: bool = False) -> bool:
        """Map memory by which the pool has grown, and attach to the new daemon if the old one was replaced, so that
        lookups see the current cache. For processes that look up and rarely make other calls. Returns False if there is
        no daemon or it did not answer; lookups then see the previous state. strict: raise kvd.Error instead, which says why."""
        answer = int(lib.kvd_catch_up(self._open()))
        return (check(answer) if strict else answer) == 0

    def fetch(self, tokens: Tokens, group: int = 0, *, salt: int = 0) -> Fetch:
        """Start to load the part of a prompt that follows its blocks in the pool from the daemon's file or its servers.
        Returns at once; later lookups find the loaded blocks. Sends one request, which loads at most 512 blocks and
        15,360 tokens: call it again for more. Raises kvd.Busy if too many fetches
        of the domain are queued."""
        row, fd = words(tokens), c_int(-1)
        n = check(lib.kvd_fetch(self._open(), number("group", group), number("salt", salt, 64), *row.buffer_info(),
                                byref(fd)))
        return Fetch(n, fd.value)

    def find(self, tokens: Tokens, group: int = 0, *, salt: int = 0, wait: float = 1.0) -> Pin:
        """Do catch_up() and lookup(), and fetch missing blocks if a tier below the pool has them. Waits for at most
        `wait` seconds in total, after which computing is faster."""
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
        """Return whether a fetch was made and ended in time. Errors count as no."""
        try:
            with self.fetch(row, group, salt=salt) as fetch:
                return bool(fetch) and fetch.wait(until - time.monotonic())
        except OSError:
            return False

    def match(self, tokens: Tokens, group: int = 0, *, salt: int = 0) -> int:
        """Return how many tokens a lookup would find now, without pinning. The result may already be out of date."""
        row = words(tokens)
        return check(lib.kvd_match_salted(self._open(), number("group", group), number("salt", salt, 64),
                                          *row.buffer_info()))

    # ---- objects by key ----------------------------------------------------------------------------------------------

    def lookup_keys(self, keys: bytes | Sequence[bytes], blocks: int = 1, *, salt: int = 0) -> list[Pin]:
        """Find objects of `blocks` blocks by their keys, each completely or not at all. Returns a pin per key, which is
        false if the object was not found; its `below` is then not 0 if fetch_key() could load the object.

        For causal spaces of opaque blocks with block_tokens of 4 or more, beside the chains of tokens there. A key is
        any 32 bytes, such as a SHA-256 (4 * block_tokens bytes if block_tokens is 4 to 7). keys is a list of keys, or
        their concatenation in one bytes object. salt is a part of the name: an engine with several groups of blocks
        (sliding windows, Mamba states) passes the group's number. Lookups of tokens never find objects, and lookups of
        keys never find chains. Raises kvd.Invalid for other spaces.
        """
        (joined, n), size = self._keys(keys), self._key_size
        pins = [Pin(self, salt=salt) for _ in range(n)]
        if number("blocks", blocks) > PIECE:
            raise Error(errno.EINVAL, f"no object has {blocks} blocks")
        each = max(1, PIECE // max(1, blocks))
        for first in range(0, n, each):
            self._lookup_keys(joined[first * size:(first + each) * size], blocks, pins[first:first + each])
        return pins

    def _lookup_keys(self, keys: bytes, blocks: int, pins: list[Pin]) -> None:
        rows, found = (c_uint32 * (len(pins) * blocks))(), (PinStruct * len(pins))(*(pin._struct for pin in pins))
        check(lib.kvd_lookup_keys(self._open(), keys, len(pins), blocks, rows, found))
        for i, pin in enumerate(pins):
            pin._took(found[i], rows[i * blocks:(i + 1) * blocks] if found[i].view else [])

    def seal_key(self, key: bytes, blocks: Sequence[Block], *, salt: int = 0) -> Pin:
        """Publish filled blocks as the object with this key and salt, see lookup_keys(). A key must always have the same
        number of blocks. Returns a pin of the object; its blocks differ from those given if another process was first.
        Raises the same errors as Pin.seal()."""
        joined, _ = self._keys([key])
        pin = Pin(self, salt=salt)
        pin._seal_key(joined, blocks)
        return pin

    def post_key(self, key: bytes, blocks: Sequence[Block], *, salt: int = 0) -> None:
        """Publish filled blocks as the object with this key and salt, without waiting for a reply, as Pin.post() does.
        The caller may read them under their own ids (block.posted is true) until free(), even if another process was
        first. Raises the errors of Pin.post()."""
        (joined, _), room = self._keys([key]), structs_of(list(blocks))
        done = check(lib.kvd_post_key(self._open(), number("salt", salt, 64), joined, len(room), room))
        for block, struct in zip(blocks[:done], room):
            block._was_posted(struct)
        if done < len(room):
            raise Error(errno.ECANCELED, f"only {done} of an object's {len(room)} blocks were posted")

    def fetch_key(self, key: bytes, blocks: int = 1, *, salt: int = 0) -> Fetch:
        """Start to load the object of `blocks` blocks with this key and salt from the daemon's file or its servers, as
        fetch() does for a prompt. One call loads at most 512 blocks."""
        (joined, _), fd = self._keys([key]), c_int(-1)
        n = check(lib.kvd_fetch_key(self._open(), number("salt", salt, 64), joined, number("blocks", blocks), byref(fd)))
        return Fetch(n, fd.value)

    @property
    def _key_size(self) -> int:
        return 4 * min(self.geometry.block_tokens or 16, 8)

    def _keys(self, keys: bytes | Sequence[bytes]) -> tuple[bytes, int]:
        size = self._key_size
        joined = keys if isinstance(keys, bytes) else b"".join(keys)
        n = len(joined) // size if isinstance(keys, bytes) else len(keys)
        if len(joined) != n * size or not isinstance(keys, bytes) and any(len(key) != size for key in keys):
            raise ValueError(f"a key of space {self.name!r} has {size} bytes")
        return joined, n

    # ---- filling -----------------------------------------------------------------------------------------------------

    def alloc(self, n: int) -> list[Block]:
        """Allocate n blocks to fill. Evicts unused blocks if necessary. Raises kvd.PoolFull or kvd.QuotaExceeded if it
        cannot return all n; it then allocates none, and does not wait for blocks to become free."""
        handle = self._open()
        if number("n", n) > 2 * PIECE and n > 2 * self.available() + PIECE:     # available() is an estimate
            raise Error(errno.ENOBUFS, f"space {self.name!r} can have about {self.available()} blocks more, not {n}")
        return [Block(self, handle, struct) for struct in take(handle, n)]

    def free(self, blocks: Iterable[Block], stream: int | None = None) -> None:
        """Free blocks that were not sealed; others are ignored.

        stream: a GPU stream that may still be writing them. Raises kvd.Error (EBUSY) if it is being captured into a
        graph; the blocks that were not freed then remain the caller's. There are no other errors.
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
        """Wait until the daemon has processed all posts in the space. Raises the errors of posts, see Pin.post()."""
        check(lib.kvd_flush(self._open()))

    def reserve(self, n: int) -> int:
        """Keep at least n blocks in the library's magazine from now on, if the pool has them, so that alloc() of up to
        n blocks cannot fail. n replaces the previous reserve. Reserved blocks count as blocks being filled. Returns the
        number of blocks in the magazine."""
        return check(lib.kvd_reserve(self._open(), number("n", n)))

    def available(self) -> int:
        """Estimate how many blocks alloc() could return now, for schedulers: free blocks, growth, and unpinned sealed
        blocks. Reads shared memory only."""
        return check(lib.kvd_available(self._open()))

    # ---- memory ------------------------------------------------------------------------------------------------------

    def memory(self) -> Memory:
        """Return where all blocks are, for engines with block tables of their own and for from_dlpack. Also maps memory
        by which the pool has grown: call it again when another process of the engine passes an id that is not below
        `mapped`."""
        struct = MemoryStruct()
        check(lib.kvd_space_memory(self._open(), byref(struct)))

        def make(_stream: int | None) -> c_void_p:
            tensor = c_void_p()
            check(lib.kvd_dlpack_memory(self._open(), byref(tensor)))
            return tensor
        return Memory(self.device, make, struct)

    def layer(self, layer: int, values: bool = False) -> View:
        """Return the K (or V) plane of a layer of the model, for from_dlpack: [blocks, heads, tokens, dim] in order
        "hnd" or [blocks, tokens, heads, dim] in order "nhd", strided, over all possible blocks. Index it with block
        ids.

        It pins no blocks: read only blocks that a pin holds, write only blocks being filled. from_dlpack raises
        kvd.Invalid if there is no such layer or blocks are opaque.
        """
        def make(_stream: int | None) -> c_void_p:
            tensor = c_void_p()
            check(lib.kvd_dlpack_layer(self._open(), number("layer", layer), int(values), byref(tensor)))
            return tensor
        return View(self.device, make, f"{'values' if values else 'keys'} of layer {layer}")

    def read(self, pin: Pin, out: Any) -> None:
        """Copy the blocks of a pin, one after the other, into a contiguous, writable array of exactly len(pin) *
        block_bytes bytes (numpy, torch, bytearray, ...). Raises BufferError if it is not contiguous and writable or the
        blocks are on a GPU, ValueError if it has another size.
        """
        self._check_copy(pin._open())
        size = self.block_bytes
        with memory(out, writable=True) as (to, room):
            _check_size(room, len(pin) * size)
            for first, block, n in _runs(pin.blocks):
                lib.kvd_copy(to + first * size, pin.address(block), n * size)

    def write(self, blocks: Sequence[Block], source: Any) -> None:
        """Fill blocks, one after the other, from a contiguous array of exactly len(blocks) * block_bytes bytes. Raises
        BufferError if it is not contiguous or the blocks are on a GPU, ValueError if it has another size, kvd.Closed if
        a block is not being filled.
        """
        size = self.block_bytes
        with memory(source) as (at, given):
            _check_size(given, len(blocks) * size)
            for block in blocks:
                self._check_copy(block._open())
            for i, block in enumerate(blocks):
                lib.kvd_copy(block.data, at + i * size, size)

    def _check_copy(self, handle: Handle) -> None:
        """Raise BufferError if the blocks are on a GPU, kvd.Forked if this process has not mapped them."""
        if self.device[0] != CPU:
            raise BufferError("the blocks are in a GPU's memory: copy tensors of them")
        check(lib.kvd_available(handle))

    # ---- methods and numbers -----------------------------------------------------------------------------------------

    def follow(self) -> Follow:
        """Follow which blocks of chains of tokens come into the space, and leave it."""
        return Follow(self._open())

    def lease(self, tokens: Tokens, timeout: float = 0.0) -> Lease:
        """Request the right to compute a prefix that lookup() did not find, in a bidirectional space.

        The lease is true if the caller has the right: compute the prefix, seal it, and end the lease (a with block
        does). It is false if another process finished the prefix meanwhile: look up again. Raises kvd.Busy if another
        process is still computing it after timeout seconds: compute it without storing.
        """
        return Lease(self._open(), words(tokens), timeout)

    def session(self, name: str, what: Tokens | Pin | Sequence[Pin], *, keep: str = "high", ttl: int = 300,
                salt: int = 0) -> bool:
        """Say of a conversation that pauses what it will continue: tokens, in all layer groups, as far as they are
        stored, or the chains and objects of pins, which are then released.

        Until ttl seconds have passed (at most a week), end_session() or the end of the daemon, their blocks are evicted
        after all others of the space (keep="high"), or not at all ("pinned"). The session belongs to this user, not to this
        process. A call with the same name replaces it. Returns False, and changes nothing, if nothing of it is stored.
        Raises kvd.QuotaExceeded if sessions would pin more than the space or the domain may, or the domain may have no
        more sessions, kvd.PoolFull if there are too many sessions; pins then stay.
        """
        how, pins = choice("keep", keep), self._pins_of(what, salt)
        if not any(pins):
            return False
        structs = (PinStruct * len(pins))(*(pin._struct for pin in pins))
        check(lib.kvd_session(self._open(), c_string("name", name), how, number("ttl", ttl), structs, len(pins)))
        for pin, struct in zip(pins, structs):
            pin._took(struct, [])
            pin.release()
        return True

    def _pins_of(self, what: Tokens | Pin | Sequence[Pin], salt: int) -> list[Pin]:
        if isinstance(what, Pin):
            return [what]
        if isinstance(what, (list, tuple)) and what and all(isinstance(it, Pin) for it in what):
            return list(dict.fromkeys(what))    # libkvd would unpin copies of a struct, too
        row = words(what)
        return [self.lookup(row, group, salt=salt) for group in range(self.geometry.layer_groups or 1)]

    def end_session(self, name: str) -> None:
        """End a session. Raises kvd.NotFound if this user has none of that name in the space."""
        check(lib.kvd_session_end(self._open(), c_string("name", name)))

    def sequence(self, max_blocks: int) -> TokenSequence:
        """Open a request's block table of at most max_blocks blocks, for the methods. Raises kvd.TooMany if the space
        has too many of them."""
        return TokenSequence(self, self._open(), max_blocks)

    def setting(self, name: str) -> float:
        """Return a setting of the space by its name in kvctl(1): "pressure" (0 or 1), "pressure.high", ..."""
        value = c_double()
        check(lib.kvd_space_setting(self._open(), c_string("name", name), byref(value)))
        return value.value

    def set(self, name: str, value: float) -> None:
        """Change a setting for all users of the space. Raises kvd.Invalid for an unknown setting or invalid value."""
        check(lib.kvd_space_set(self._open(), c_string("name", name), value))

    def counters(self) -> Counters:
        """Return counts of this process since the space was opened."""
        struct = CountersStruct()
        lib.kvd_counters(self._open(), byref(struct))
        return Counters(*(getattr(struct, name) for name in Counters._fields))

    def prefix_depth(self, prefix: int, prompt: int, generated: int) -> int:
        """Return how many layers of a shared prefix to reuse unchanged, for these numbers of tokens; 0 if the
        space has no table."""
        return check(lib.kvd_prefix_depth(self._open(), number("prefix", prefix), number("prompt", prompt),
                                          number("generated", generated)))

    def prefix_refresh(self, step: int) -> bool:
        """Return whether the deep layers are to be recomputed at this step (counted from 1)."""
        return bool(check(lib.kvd_prefix_refresh(self._open(), number("step", step))))

    def prefix_sample(self, ratio: int, blocks: Sequence[Block], tokens: int) -> None:
        """Submit one profile sample for a prefix of `tokens` tokens that is `ratio` percent of its request.

        blocks contains, for each layer group, the prefix's blocks computed alone, then as many computed with the whole
        input. They remain the caller's. Waits up to a minute for the worker."""
        room = structs_of(list(blocks))
        each = len(room) // (2 * max(1, self.geometry.layer_groups))
        check(lib.kvd_prefix_sample(self._open(), number("ratio", ratio), each, room, number("tokens", tokens)))

    def write_on(self, stream: int | None = None) -> bytes:
        """Say when a GPU stream has done all work that is in it now, in 16 bytes for Pin.seal(written=) in another process
        of the engine, or in this one."""
        written = (c_uint8 * WRITTEN)()
        check(lib.kvd_write_on(self._open(), stream_of(stream), written))
        return bytes(written)

    def settle(self) -> int:
        """Release pins and blocks that GPU streams have passed. Returns how many still wait for a stream."""
        return check(lib.kvd_settle(self._open()))

    def close(self) -> None:
        """Close the space: new calls raise kvd.Closed. Never fails; does nothing if already closed."""
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
    """Yield runs of consecutive ids as (index of the first, first id, number of ids)."""
    first = 0
    for i in range(1, len(ids) + 1):
        if i == len(ids) or ids[i] != ids[i - 1] + 1:
            yield first, ids[first], i - first
            first = i


def _check_size(given: int, expected: int) -> None:
    if given != expected:
        raise ValueError(f"these blocks have {expected} bytes, and the array {given}")
