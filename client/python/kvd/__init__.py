# SPDX-License-Identifier: Apache-2.0
"""The KV cache of a kvd daemon, used in place.

libkvd (man 3 libkvd, kvd.h, kvd_cuda.h) for Python: the same calls, and tensors that lie where the blocks lie.

    with kvd.connect() as daemon:
        space = daemon.space("llama-8b", kvd.Geometry(layers=32, kv_heads=8, head_dim=128, dtype="bf16", vocab=128256))
        with space.lookup(tokens) as pin:                      # pin.tokens of them need not be computed
            keys = torch.from_dlpack(pin.view(pin.blocks[0]))  # [layers, 2, heads, tokens, dim]; no copy
            fresh = space.alloc(4)
            for block in fresh:
                torch.from_dlpack(block)[:] = ...              # compute into it
            pin.seal(fresh, tokens[pin.tokens:])               # and everybody has it

Whatever has a method __dlpack__ here can be given to torch.from_dlpack, numpy.from_dlpack and the like. A tensor of a
pinned block holds a pin of its own: it stays valid after the Pin was released, until the tensor is gone. A tensor of a
block to be filled does not: keep the block.

Errors of libkvd are kvd.Error, an OSError with libkvd's words. What is closed is refused while tensors use it; what is
forgotten instead of closed is closed by the garbage collector, and where tensors still use it then, when the process
ends. Needs nothing but the standard library; the library is $KVD_LIBRARY, or libkvd.so.0 where the system finds it.
"""

from ._native import Error
from ._space import Block, Daemon, Geometry, Pin, Space, View, connect

__all__ = ["Block", "Daemon", "Error", "Geometry", "Pin", "Space", "View", "connect"]
