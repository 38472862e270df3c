# SPDX-License-Identifier: Apache-2.0
"""Add kvd to SGLang as a second cache behind its radix cache, shared by all processes of the machine, by copy.

    sglang serve --model-path MODEL --page-size 16 --enable-unified-cache-external-linker \\
        --unified-cache-external-linker-backend dynamic --unified-cache-external-linker-config '{
            "linker": "Linker", "linker_module_path": "kvd.engines.sglang",
            "linker_extra_config": {"socket": "/run/kvd-0.sock"}}'

or the same names, with underscores, as arguments of sglang.Engine. linker_extra_config may contain: socket (default:
$KVD_SOCKET, or /run/kvd-0.sock), space (a name; default: one space per model), max_blocks (of the space), fingerprint
(a name for the weights, if they are neither in a directory nor on the hub).

A page of SGLang is a block of kvd. SGLang offloads pages as soon as they are computed, and looks up pages that its own
cache lacks by its hashes: the SHA-256 of all tokens up to the end of the page, with the LoRA adapter and the cache salt
of the request. kvd compares these 32 bytes, since SGLang passes no tokens. Pages are copied: SGLang's cache could be
placed in kvd's memory, but its allocator cannot use pages of other processes.

Servers with the same weights, model configuration, overrides, types and page size share. Others use another space, or
are refused (kvd.Mismatch) if `space` is given.

Tested with SGLang 0.5.23 (torch_native on CPUs; not run on a GPU). The linker's interface is new: other versions cause
a warning. Refused are KV caches other than one plain K and V of 16 or 32 bits per layer and token (MLA, fp8, fp4,
sliding window, Mamba, other layouts), speculative decoding, and tensor, pipeline and context parallelism. If the daemon
fails, there is a warning, and prompts are computed as without kvd.
"""

from ._common import missing

__all__ = ["Linker"]

try:
    from ._sglang import Linker
except ImportError as error:     # the documentation can be read without the engine
    __getattr__ = missing(error)
