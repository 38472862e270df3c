# SPDX-License-Identifier: Apache-2.0
"""Add kvd to LMCache as the level behind its own memory, for users who already run LMCache.

    lmcache server ... --l2-adapter '{"type": "plugin", "module_path": "kvd.engines.lmcache", "class_name": "Adapter",
        "adapter_params": {"socket": "/run/kvd-0.sock", "model": "/models/llama-8b"}}'

All adapter_params are optional: socket (default: $KVD_SOCKET, or /run/kvd-0.sock), space (prefix of the spaces' names,
default "lmcache"), model (a directory, whose weights become part of the fingerprint) or fingerprint (a name for the
weights), object_bytes (size of an object, if LMCache does not tell it before the first store), max_blocks (of each
space), max_locks (default 4096).

An object of LMCache is a block of kvd, with a space for each size of objects. Its key is the SHA-256 of all fields of
LMCache's key: the chunk's hash, the model's name, rank, object group, cache salt. LMCache passes neither tokens nor
weights, so two models with the same name share unless model or fingerprint differ. One thread per direction copies
objects into and out of the pool. Locks are pins, at most max_locks of them: beyond that, the oldest is released, and
its object may be evicted. kvd evicts by itself; LMCache's eviction of this level finds nothing to delete.

An engine that can use kvd directly (kvd.engines.vllm) avoids the copies into and out of LMCache's memory.

Tested with LMCache 0.5.6 by `lmcache bench l2`, its conformance test, but not with an engine, because LMCache does not
run with one on CPUs. Other versions cause a warning. If the daemon fails, there is a warning, and lookups miss and
stores fail.
"""

from ._common import missing

__all__ = ["Adapter"]

try:
    from ._lmcache import Adapter
except ImportError as error:     # the documentation can be read without the engine
    __getattr__ = missing(error)
