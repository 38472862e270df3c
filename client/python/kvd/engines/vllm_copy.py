# SPDX-License-Identifier: Apache-2.0
"""Copy blocks between the KV cache of vLLM (0.31 or later; tested with 0.32) and kvd's pool: for parallelism on
GPUs, and if the cache cannot be placed in the pool. Prefer kvd.engines.vllm if it works: it shares blocks without a copy.

    python -m vllm.entrypoints.openai.api_server --model MODEL --kv-transfer-config '{
        "kv_connector": "KvdCopyConnector", "kv_connector_module_path": "kvd.engines.vllm_copy", "kv_role": "kv_both",
        "kv_connector_extra_config": {"socket": "/run/kvd-0.sock"}, "kv_load_failure_policy": "recompute"}'

Extra configuration is as in kvd.engines.vllm. Each worker has its own space, named after its rank (with a pipeline: stage
times ranks plus rank), and stores and loads its part of each block there; with MLA, where all workers of a stage have the
same blocks, they share one space, and the first one stores. The scheduler looks up a request in all spaces, uses the
prefix that all of them have, and pins it until the step that loads it has ended; workers compare the tokens again. vLLM's
own prefix cache is used first. If the pool is full or there is no daemon, nothing is stored or found, and vLLM continues
alone. If the daemon dies between lookup and load, vLLM's kv_load_failure_policy applies (use "recompute"), and nothing of
that request is stored.

Refused at start: everything that kvd.engines.vllm refuses, except tensor, pipeline and data parallelism and draft models on
GPUs, MLA on CPUs, events, other layouts and disabled prefix caching; in addition, draft heads, layers in several groups,
as in hybrid models, and layers whose blocks differ. Not run on a GPU.
"""

from ._common import missing

__all__ = ["KvdCopyConnector"]

try:
    from ._vllm_copier import KvdCopyConnector
except ImportError as error:     # the documentation can be read without the engine
    __getattr__ = missing(error)
