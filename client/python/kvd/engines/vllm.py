# SPDX-License-Identifier: Apache-2.0
"""vLLM (0.31 or later; tested with 0.32) whose KV cache is kvd's pool. Nothing is copied, and nothing is sent.

    python -m vllm.entrypoints.openai.api_server --model MODEL --kv-transfer-config '{"kv_connector": "KvdConnector",
        "kv_connector_module_path": "kvd.engines.vllm", "kv_role": "kv_both",
        "kv_connector_extra_config": {"socket": "/run/kvd-0.sock"}}' --block-size 32 --kv-cache-memory-bytes 1G

(The last two are for CPUs: vLLM wants to know its cache's size, and blocks of 128 tokens share less.)

All vLLMs of one model, in as many processes as there are, serve out of one pool: a prefix that one of them computed is
read by the attention kernels of the others, where it lies. kvd must be installed where vLLM is; the pool must hold one
sequence of --max-model-len, and its size is the size of the cache, whatever vLLM is told about its own.

Extra configuration: socket (default: $KVD_SOCKET or /run/kvd-0.sock); space (a name of one's own: then other weights,
versions or kernels under this name are refused, not kept apart); fingerprint (a name for the weights, instead of
reading them at start, which takes a second for some gigabytes: it must change when they change); fetch_wait (seconds
that a new request waits for what the daemon's file or servers have of its prompt, while others run; default 1, 0: what
is not in the pool is computed).

How: three hooks of the connector API. get_mem_pool_context answers the worker's one allocation with the pool's
addresses; get_required_kvcache_layout has a block's layers side by side, which is a block of kvd; bind_kv_cache_manager
gives the scheduler a block pool whose ids are kvd's (see _vllm_ledger.py, also for what happens when the daemon dies).
cache_salt and LoRA adapters are part of all keys of a request, images of the keys from their first block on: the text
before an image is shared, whatever the image is. Requests with prompt embeddings share nothing. Refused at start, by
name: pipeline and context parallelism, tensor parallelism on GPUs (see kvd.engines.vllm_copy; on CPUs the workers have
their shares of a block side by side in it), speculative decoding, MLA, sliding window, hybrid models, quantised KV
caches, sleep mode, KV cache events. What resets vLLM's prefix cache (new weights) makes this vLLM share with nobody
until it is started again. Not run on a GPU.
"""

from ._common import missing

__all__ = ["KvdConnector"]

try:
    from ._vllm_connector import KvdConnector
except ImportError as error:     # this page can be read all the same
    __getattr__ = missing(error)
