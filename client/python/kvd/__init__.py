# SPDX-License-Identifier: Apache-2.0
"""The KV cache of a kvd daemon, used in place.

libkvd (man 3 libkvd, libkvd_cuda, libkvd_methods) for Python: the same calls, and tensors of blocks without a copy.

    import numpy as np
    import kvd

    tokens = list(range(1000, 1064))                    # 64 token ids, in a list or in any array of integers
    geometry = kvd.Geometry(layers=2, kv_heads=4, head_dim=64, vocab=50000, dtype="float32")
    with kvd.connect() as daemon, daemon.space("example", geometry) as space:
        with space.lookup(tokens) as pin:               # the first pin.tokens of them need not be computed
            for block in pin.blocks:
                stored = np.from_dlpack(pin.view(block))    # [layers, 2 (K, V), heads, tokens, dim]; no copy, read-only
            rest = tokens[pin.tokens:]
            fresh = space.alloc(len(rest) // geometry.block_tokens)
            for block in fresh:
                np.frombuffer(block.memoryview(), np.float32)[:] = 1.0      # compute into it
            pin.seal(fresh, rest)                       # now every process finds it
        print(f"{len(tokens) - len(rest)} tokens found, {len(rest)} computed")

Run twice, it computes 64 tokens and then none. A block being filled is also a tensor: for torch.from_dlpack, and for
numpy.from_dlpack of numpy 2.1 or later (older versions treat all tensors as read-only).

Ownership: a Pin holds its chain of blocks until it is released. A Block belongs to the caller until it is sealed or
freed. A tensor of a pinned block has its own pin, and stays valid and read-only as long as the tensor lives. A tensor
of a Block must not be written any more once the Block is sealed.
The garbage collector releases pins and blocks that are no longer referenced. close() and the end of a with block never
fail and invalidate nothing: memory is unmapped with the last pin, block and tensor.

A call that sends the daemon a request waits for at most 5 seconds in total, and then raises kvd.TimedOut: the daemon is
stopped or very busy. Lookups send no request. Calls with a time limit of their own (Space.find(), Space.lease(),
Sequence.wait()) may take that much longer.

Errors of libkvd raise kvd.Error, an OSError, or a subclass. Each subclass also derives from the corresponding builtin
exception, if there is one (a missing daemon raises a FileNotFoundError or a ConnectionRefusedError). The package needs
only the standard library and libkvd: $KVD_LIBRARY, or the one inside this package, or the system's libkvd.so.0.
"""

from ._attend import Exact, Table
from ._batch import Batch, Request
from ._block import Block
from ._daemon import Daemon, connect
from ._errors import (Busy, Closed, ConnectionLost, ConnectionRefused, DaemonNotFound, DataLost, Error, Forked,
                      Invalid, Mismatch, NoData, NotAllowed, NotFound, NotKvd, NotSupported, NotYet, OutOfMemory,
                      PoolFull, QuotaExceeded, Refused, Stale, TimedOut, TooMany)
from ._fetch import Fetch
from ._fingerprint import fingerprint
from ._follow import Cleared, Follow, Removed, Stored
from ._geometry import Geometry
from ._lease import Lease
from ._native import VERSION as __version__
from ._pin import Pin
from ._reader import Reader, ReaderStats
from ._sequence import Entry, EntryFlags, Labels, Sequence, Sharing, Stats
from ._space import Counters, Space
from ._tensor import Memory, View
from ._tokens import Tokens

__all__ = ["Batch", "Block", "Busy", "Cleared", "Closed", "ConnectionLost", "ConnectionRefused", "Counters", "Daemon",
           "DaemonNotFound", "DataLost", "Entry", "EntryFlags", "Error", "Exact", "Fetch", "Follow", "Forked", "Geometry",
           "Invalid", "Labels", "Lease", "Memory", "Mismatch", "NoData", "NotAllowed", "NotFound", "NotKvd", "NotSupported",
           "NotYet", "OutOfMemory", "Pin", "PoolFull", "QuotaExceeded", "Reader", "ReaderStats", "Refused", "Removed",
           "Request", "Sequence", "Sharing", "Space", "Stale", "Stats", "Stored", "Table", "TimedOut", "Tokens", "TooMany",
           "View", "__version__", "connect", "fingerprint"]

for _it in (Batch, Block, Cleared, Counters, Daemon, Entry, EntryFlags, Exact, Fetch, Follow, Geometry, Labels, Lease,
            Memory, Pin, Reader, ReaderStats, Removed, Request, Sequence, Sharing, Space, Stats, Stored, Table, View):
    _it.__module__ = "kvd"
