# SPDX-License-Identifier: Apache-2.0
"""vLLM (0.31 or later; tested with 0.32) that copies blocks between its own KV cache and kvd's pool: for tensor
parallelism, and for memory that cannot be moved. Where kvd.engines.vllm works it is better: it shares what this copies.

    python -m vllm.entrypoints.openai.api_server --model MODEL --kv-transfer-config '{
        "kv_connector": "KvdCopyConnector", "kv_connector_module_path": "kvd.engines.vllm_copy", "kv_role": "kv_both",
        "kv_connector_extra_config": {"socket": "/run/kvd-0.sock"}, "kv_load_failure_policy": "recompute"}'

Extra configuration as in kvd.engines.vllm. Every worker has a space of its own, named after its rank, and stores and
loads its part of each block there. The scheduler looks a request up in all of them, takes what all of them have, and
holds it until the step that loads it is over; a worker compares tokens once more. vLLM's own prefix cache stays in
front. If the pool is full or the daemon is away, nothing is stored or found, and vLLM goes on alone; if it dies between
lookup and load, vLLM's kv_load_failure_policy decides ("recompute" is what one wants). Refused at start: what
kvd.engines.vllm refuses, but for tensor parallelism, sleep mode, events, layouts, prefix caching disabled. Not run on a
GPU.
"""

from ._common import missing

__all__ = ["KvdCopyConnector"]

try:
    from ._vllm_copier import KvdCopyConnector
except ImportError as error:     # this page can be read all the same
    __getattr__ = missing(error)
