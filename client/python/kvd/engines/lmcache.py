# SPDX-License-Identifier: Apache-2.0
"""LMCache on kvd: the level behind LMCache's own memory, for those who run LMCache already.

    lmcache server ... --l2-adapter '{"type": "plugin", "module_path": "kvd.engines.lmcache", "class_name": "Adapter",
        "adapter_params": {"socket": "/run/kvd-0.sock", "model": "/models/llama-8b"}}'

All of adapter_params may be left out: socket (default: $KVD_SOCKET, or /run/kvd-0.sock), space (a prefix of the
spaces' names, default "lmcache"), model (a folder, whose weights then are a part of what is compared) or fingerprint
(a name of one's own for them), object_bytes (of an object, where LMCache does not say it before the first is stored),
max_blocks (of each space), max_locks (4096).

An object of LMCache is a block of kvd, in a space for each size of objects. Its key is the SHA-256 of all that
LMCache's key has: the chunk's hash, the model's name, rank, object group, cache salt. LMCache tells no tokens and no
weights, so two models of one name share unless model or fingerprint say otherwise. Objects are copied into the pool
and out of it, by a thread for each direction; locks are pins, at most max_locks of them: the oldest goes first, and
its object may then be evicted. kvd evicts by itself: LMCache's eviction of this level finds nothing to delete.

An engine that can use kvd itself (kvd.engines.vllm) saves the copy into LMCache's memory and the one out of it.

Tested with LMCache 0.5.6: `lmcache bench l2`, its conformance test; not with an engine behind it, which LMCache does
not run on a processor. With other versions there is a warning. Trouble with the daemon is a warning, a miss, a failed
store.
"""

from ._common import missing

__all__ = ["Adapter"]

try:
    from ._lmcache import Adapter
except ImportError as error:     # this page can be read all the same
    __getattr__ = missing(error)
