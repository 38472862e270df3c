# SPDX-License-Identifier: Apache-2.0
"""Add kvd to SGLang as a second cache behind its radix cache, shared by all processes of the machine, by copy.

    sglang serve --model-path MODEL --page-size 16 --enable-unified-cache-external-linker \\
        --unified-cache-external-linker-backend dynamic --unified-cache-external-linker-config '{
            "linker": "Linker", "linker_module_path": "kvd.engines.sglang",
            "linker_extra_config": {"socket": "/run/kvd-0.sock"}}'

or the same names, with underscores, as arguments of sglang.Engine. linker_extra_config may contain: socket (default:
$KVD_SOCKET, or /run/kvd-0.sock), space (a name; default: one space per model), max_blocks (of each space), fingerprint
(a name for the weights, if they are neither in a directory nor on the hub).

A page of SGLang is a block of kvd. SGLang offloads pages as soon as they are computed, and looks up pages that its own
cache lacks by its hashes: the SHA-256 of all tokens up to the end of the page, with the LoRA adapter and the cache salt
of the request. kvd compares these 32 bytes, since SGLang passes no tokens. Pages are copied: SGLang's cache could be
placed in kvd's memory, but its allocator cannot use pages of other processes.

A model with sliding windows has a second space, for the pages of the layers with windows ("NAME-swa"); one with states
(Mamba, GDN, KDA, short convolutions) has one for the states ("NAME-mamba"), with a block for each. To go on from a
length, SGLang needs all pages of the first space, of a window the last pages, and the state at that very length. It
keeps states at the ends of answers, at the ends of a prompt's chunks, or every --mamba-track-interval tokens.

Servers with the same weights, model configuration, overrides, types, page size, SGLang and backends share. Others use
another space, or are refused (kvd.Mismatch) if `space` is given. A server whose weights are updated (update_weights_from_*)
shares nothing from then on, until it is restarted.

Tested with SGLang 0.5.23: torch_native on CPUs with Llama, Laguna and LFM2 (with the repairs of tests/engines/standins.py:
its windows read other slots than they write), and without a model the pools of MLA, DeepSeek
V3.2 (its indexer) and V4, Qwen3-Next and Kimi Linear; not run on a GPU. The linker's interface is new: other versions
cause a warning. Refused are KV caches with scales per token, fp4, and other layouts; a file of scales; speculative
decoding; and tensor, pipeline and context parallelism. If the daemon fails, there is a warning, and prompts are computed
as without kvd.
"""

from ._common import missing

__all__ = ["Linker"]

try:
    from ._sglang import Linker
except ImportError as error:     # the documentation can be read without the engine
    __getattr__ = missing(error)
