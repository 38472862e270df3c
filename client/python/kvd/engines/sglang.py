# SPDX-License-Identifier: Apache-2.0
"""SGLang on kvd, by copy: behind SGLang's radix cache is one that all processes of the machine share.

    sglang serve --model-path MODEL --page-size 16 --enable-unified-cache-external-linker \\
        --unified-cache-external-linker-backend dynamic --unified-cache-external-linker-config '{
            "linker": "Linker", "linker_module_path": "kvd.engines.sglang",
            "linker_extra_config": {"socket": "/run/kvd-0.sock"}}'

or the same names, with underscores, as arguments of sglang.Engine. linker_extra_config may have: socket (default:
$KVD_SOCKET, or /run/kvd-0.sock), space (a name; default: one for each model), max_blocks (of the space), fingerprint
(a name for the weights, for those that lie neither in a folder nor on the hub).

A page of SGLang is a block of kvd. What SGLang computes it offloads at once, and pages that its own cache lacks are
looked up by what SGLang calls them, the SHA-256 of all tokens up to the page's end, with the LoRA adapter and the
cache salt of the request. kvd compares those 32 bytes; SGLang tells it no tokens. Pages are copied: SGLang's cache
can be placed in kvd's memory, but its allocator takes nobody else's pages.

Who shares: servers with the same weights, model configuration, overrides, types and page size. Any other has another
space, or is refused (kvd.Mismatch) if `space` names one.

Tested with SGLang 0.5.23 (torch_native on CPUs; on a GPU it was not run). The linker's interface is young: with
another version there is a warning, and whatever does not look as it should is refused: KV caches other than one plain
K and V of 16 or 32 bits per layer and token (MLA, fp8, fp4, sliding window, Mamba, other layouts), speculative
decoding, tensor, pipeline and context parallelism. Trouble with the daemon is a warning and a prompt computed as if
kvd were not there.
"""

from ._common import missing

__all__ = ["Linker"]

try:
    from ._sglang import Linker
except ImportError as error:     # this page can be read all the same
    __getattr__ = missing(error)
