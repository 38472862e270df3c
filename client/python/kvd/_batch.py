# SPDX-License-Identifier: Apache-2.0
"""Attention of many requests in place, on a GPU (kvd_attend.h)."""

from __future__ import annotations

from ctypes import byref, c_void_p
from typing import TYPE_CHECKING, Any, NamedTuple
from typing import Sequence as List

from ._attend import Table
from ._geometry import choice, dtype_name
from ._handle import Handle
from ._native import BatchOptionsStruct, RequestStruct, TableStruct, check, closed, lib, number
from ._reader import Reader
from ._sequence import Sequence
from ._tensor import stream_of

if TYPE_CHECKING:
    from ._space import Space


class Request(NamedTuple):
    """n new tokens of a request, from position first of its table on. after: what they see before the table, as in
    Table.attend(): a sequence, or a reader of it, or nothing. mass: address of a float per entry of the sequence to which its
    attention is added when the step ends; 0: none. A reader has its own."""

    table: Table
    first: int
    n: int
    after: Sequence | Reader | None = None
    mass: int = 0


class Batch:
    """Attention in place in a space on a GPU, for the requests of a step together; what Table.attend() is in host memory.

    For each step: Reader.begin() of each reader, then begin(), then in each layer attend(), then end(), then Reader.end().
    For one thread at a time. heads, scale and frequencies are those of kvd.Reader; frequencies are needed if an entry has a
    delta. dtype is that of queries and results: "f32", "f16" or "bf16". stream is a GPU stream, as in Pin.wait(): kernels run
    in its order, and calls do not wait for them, but for the queries if a reader looks at them. Sliding windows, soft caps and
    sinks are not supported. Blocks and sequences that a step uses must stay as they are until end() has returned and the
    stream has passed it.

    Needs a libkvd with kernels: from a build with nvcc (Meson's option cuda), or pip install client/python -C cuda=enabled.
    Raises kvd.Invalid if the space is not on a GPU, kvd.Busy if the stream is being captured, and what Table.attend() raises.
    """

    def __init__(self, space: Space, heads: int, scale: float, *, dtype: Any = "f32", frequencies: int = 0):
        self._dim, self._heads, handle, pointer = space.geometry.head_dim, number("heads", heads), space._open(), c_void_p()
        options = BatchOptionsStruct(self._heads, choice("dtype", dtype_name(dtype)), scale, frequencies or None)
        check(lib.kvd_batch_new(handle, byref(options), byref(pointer)))
        self._handle: Handle | None = Handle(pointer, lib.kvd_batch_free, handle)
        self._requests: List[Request] = ()

    def begin(self, requests: List[Request], stream: int | None = None) -> None:
        """Begin a step. Requests of one token are faster if they come first."""
        structs = (RequestStruct * len(requests))()
        for struct, (table, first, n, after, mass) in zip(structs, requests):
            struct.mass = mass or None
            it = table._struct
            struct.table = TableStruct(it.view, it.blocks, it.n_blocks, number("first", first), number("n", n))
            reader, sequence = (after, after.sequence) if isinstance(after, Reader) else (None, after)
            struct.sequence = None if sequence is None else sequence._open()._as_parameter_
            struct.reader = None if reader is None else reader._open()._as_parameter_
        check(lib.kvd_batch_begin(self._open(), len(requests), structs, stream_of(stream)))
        self._requests = tuple(requests)        # whose blocks, sequences and readers are in use

    def attend(self, layer: int, q: int, ldq: int, out: int, ldo: int, stream: int | None = None) -> None:
        """Attend from all new tokens, those of the first request first. q and out are device addresses of [tokens, heads,
        head_dim] numbers, with ldq and ldo numbers from one token to the next."""
        if min(ldq, ldo) < self._heads * self._dim:
            raise ValueError(f"a row of {self._heads * self._dim} numbers does not fit into {min(ldq, ldo)}")
        result = lib.kvd_batch_attention(self._open(), number("layer", layer), q, ldq, out, ldo, stream_of(stream))
        if result:
            check(result)

    def end(self, stream: int | None = None) -> None:
        """End the step. Waits for the stream if there are masses to add."""
        try:
            check(lib.kvd_batch_end(self._open(), stream_of(stream)))
        finally:
            self._requests = ()

    def close(self) -> None:
        """Free the batch, once its kernels have run. Does nothing if already closed."""
        self._handle = None

    def _open(self) -> Handle:
        if not self._handle:
            raise closed("this batch")
        return self._handle
