# SPDX-License-Identifier: Apache-2.0
"""The KV cache of a kvd daemon, used in place.

libkvd (man 3 libkvd, libkvd_cuda, libkvd_methods) for Python: the same calls, and tensors that lie where the blocks
lie.

    import numpy as np
    import kvd

    tokens = list(range(1000, 1064))                    # 64 token ids, in a list or in any array of integers
    geometry = kvd.Geometry(layers=2, kv_heads=4, head_dim=64, vocab=50000, dtype="float32")
    with kvd.connect() as daemon, daemon.space("example", geometry) as space:
        with space.lookup(tokens) as pin:               # pin.tokens of them need not be computed
            for block in pin.blocks:
                stored = np.from_dlpack(pin.view(block))    # [layers, 2 (K, V), heads, tokens, dim]; no copy, read-only
            rest = tokens[pin.tokens:]
            fresh = space.alloc(len(rest) // geometry.block_tokens)
            for block in fresh:
                np.frombuffer(block.memoryview(), np.float32)[:] = 1.0      # compute into it
            pin.seal(fresh, rest)                       # and everybody has it
        print(f"{len(tokens) - len(rest)} tokens found, {len(rest)} computed")

Run twice, it computes 64 tokens and then none. A block to fill is a tensor, too: by torch.from_dlpack, and by
numpy.from_dlpack from numpy 2.1 on (older ones take everything as read-only).

Who owns what: a Pin holds its chain of blocks until it is released, a Block is the caller's until it is sealed or
freed, and a tensor of a pinned block holds a pin of its own: it stays valid, read-only, as long as the tensor lives. A
tensor of a Block must not be written any more when it is sealed.
Everything that is forgotten is given back by the garbage collector. close() and the end of a with never fail and take
nothing away: memory is let go of with the last pin, block and tensor.

A call that sends the daemon a request waits for at most 5 seconds in all, and then raises kvd.TimedOut: the daemon is
stopped, or very busy. Lookups send none. Calls with a time limit of their own (Space.find(), Space.lease(),
Sequence.wait()) may take that much longer.

Errors of libkvd are kvd.Error, an OSError, in subclasses that say what happened; each is also the builtin that says the
same (a missing daemon is a FileNotFoundError or a ConnectionRefusedError), if there is one. Needs nothing but the
standard library, and libkvd: $KVD_LIBRARY, or the one inside this package, or libkvd.so.0 where the system finds it.
"""

from ._attend import Table
from ._block import Block
from ._daemon import Daemon, connect
from ._errors import (Busy, Closed, ConnectionLost, ConnectionRefused, DaemonNotFound, DataLost, Error, Forked,
                      Invalid, Mismatch, NoData, NotAllowed, NotFound, NotKvd, NotSupported, NotYet, OutOfMemory,
                      PoolFull, QuotaExceeded, Refused, Stale, TimedOut, TooMany)
from ._fetch import Fetch
from ._fingerprint import fingerprint
from ._geometry import Geometry
from ._lease import Lease
from ._native import VERSION as __version__
from ._pin import Pin
from ._sequence import Entry, EntryFlags, Labels, Sequence, Sharing, Stats
from ._space import Counters, Space
from ._tensor import Memory, View
from ._tokens import Tokens

__all__ = ["Block", "Busy", "Closed", "ConnectionLost", "ConnectionRefused", "Counters", "Daemon", "DaemonNotFound",
           "DataLost", "Entry", "EntryFlags", "Error", "Fetch", "Forked", "Geometry", "Invalid", "Labels", "Lease", "Memory",
           "Mismatch", "NoData", "NotAllowed", "NotFound", "NotKvd", "NotSupported", "NotYet", "OutOfMemory", "Pin",
           "PoolFull", "QuotaExceeded", "Refused", "Sequence", "Sharing", "Space", "Stale", "Stats", "Table", "TimedOut",
           "Tokens", "TooMany", "View", "__version__", "connect", "fingerprint"]

for _it in (Block, Counters, Daemon, Entry, EntryFlags, Fetch, Geometry, Labels, Lease, Memory, Pin, Sequence, Sharing,
            Space, Stats, Table, View):
    _it.__module__ = "kvd"
